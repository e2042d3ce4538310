"""Keys of kernels: the choices that a kernel is compiled for.

The fields have the order of the C++ template's arguments.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeAlias

from .geometry import StoreKind


# Not named tuples: a KernelKey and a MomentsKey of equal fields would be equal.
@dataclasses.dataclass(frozen=True)
class KernelKey:
    """A kernel of `sample`."""

    kind: ClassVar[str] = "sample"
    dtype: str
    shared_noise: bool
    antithetic: bool
    fast_math: bool
    store_kind: int
    origin_in_memory: bool
    batched: bool
    device: int
    turns: int = 0
    usual: bool = False
    """`Geometry.version`; `turns` is 0 for kernels that are not plain."""


def usual_key(device: int) -> KernelKey:
    """The kernel of usual samples."""
    return KernelKey("float32", False, False, False, StoreKind.kPlain, False, False, device, 1, True)


@dataclasses.dataclass(frozen=True)
class MomentsKey:
    """A kernel of `weighted_moments`."""

    kind: ClassVar[str] = "moments"
    dtype: str
    """The computing type."""
    antithetic: bool
    fast_math: bool
    rows: int
    """`MomentGeometry.rows`."""
    with_second: bool
    origin_in_memory: bool
    finishing: bool
    """Whether this is the kernel that adds up the segments. Of its fields, only `dtype` matters."""
    device: int


@dataclasses.dataclass(frozen=True)
class PerturbKey:
    """A kernel of `perturb`."""

    kind: ClassVar[str] = "perturb"
    dtype: str
    fast_math: bool
    one_member: bool
    strided: bool
    """Whether the kernel takes spans that are not runs."""
    origin: int
    """A `KeyOrigin`."""
    device: int


@dataclasses.dataclass(frozen=True)
class ConversionKey:
    """The kernel that converts vectors."""

    kind: ClassVar[str] = "conversion"
    dtype: str
    """The computing type."""
    device: int


Key: TypeAlias = KernelKey | MomentsKey | PerturbKey | ConversionKey


def choices_of(key: Key) -> dict[str, Any]:
    """The fields of a key, without the device."""
    return {name: value for name, value in dataclasses.asdict(key).items() if name != "device"}


def name_of(key: KernelKey) -> str:
    """The name of a kernel that Numba compiles. Profilers show it."""
    values = choices_of(key) | {"store_kind": StoreKind(key.store_kind).name}
    return "_".join(["sample_kernel", *(name if x is True else str(x) for name, x in values.items() if x is not False)])
