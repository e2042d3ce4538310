"""The choices that make a kernel. Each combination is compiled alone."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeAlias

from .kernel_choice import STORE_KINDS


# Not named tuples: a KernelKey and a MomentsKey of equal fields would be equal.
@dataclasses.dataclass(frozen=True)
class KernelKey:
    """The kernel of a sample. The fields of a key are in the order of the arguments of the C++ template."""

    kind: ClassVar[str] = "sample"
    dtype: str
    shared_noise: bool
    antithetic: bool
    fast_math: bool
    store_kind: int
    origin_in_memory: bool
    batched: bool
    device: int


@dataclasses.dataclass(frozen=True)
class MomentsKey:
    """The kernel of weighted moments."""

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
    """Whether it is the kernel that adds up the segments; it depends on `dtype` alone."""
    device: int


@dataclasses.dataclass(frozen=True)
class PerturbKey:
    """The kernel of perturb."""

    kind: ClassVar[str] = "perturb"
    dtype: str
    fast_math: bool
    one_member: bool
    strided: bool
    """Whether it is for spans that are no runs."""
    origin: int
    """The index of a name in `ORIGINS`."""
    device: int


Key: TypeAlias = "KernelKey | MomentsKey | PerturbKey"


def choices_of(key: Key) -> dict[str, Any]:
    """The fields of a key, without the device."""
    return {name: value for name, value in dataclasses.asdict(key).items() if name != "device"}


def name_of(key: KernelKey) -> str:
    """The name of a kernel in Python, which profilers show."""
    values = choices_of(key) | {"store_kind": STORE_KINDS[key.store_kind]}
    return "_".join(["sample_kernel", *(name if x is True else str(x) for name, x in values.items() if x is not False)])
