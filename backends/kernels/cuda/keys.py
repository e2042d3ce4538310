"""Keys of kernels: a key names the kernel that a launch needs, and the device for which it is compiled."""

import dataclasses
from typing import ClassVar, NamedTuple, TypeAlias

from multisample.backends.element_types import MATRIX_TYPES

from .geometry import StoreKind
from .perturb_geometry import KeyOrigin


@dataclasses.dataclass(frozen=True)
class KernelKey:
    """A kernel of `sample`: the arguments of the C++ template, in their order, and the device."""

    header: ClassVar[str] = "kernel"
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

    @property
    def name(self) -> str:
        """As `CppKey.name`."""
        return instance(
            "sample_kernel", self.dtype, self.shared_noise, self.antithetic, self.fast_math,
            f"multisample::{StoreKind(self.store_kind).name}", self.origin_in_memory, self.batched, self.turns,
            self.usual,
        )  # fmt: skip


class CppKey(NamedTuple):
    """Any other kernel. Numba has none of these: they are in CUDA C++ only."""

    header: str
    """The header that defines it, in ``csrc/cuda``."""
    name: str
    """Its C++ name."""
    device: int


Key: TypeAlias = KernelKey | CppKey


def instance(template: str, dtype: str, *arguments: bool | int | str) -> str:
    """The C++ name of an instance of a template. The arguments that are texts are C++ names too."""
    texts = (str(x).lower() if isinstance(x, bool) else str(x) for x in arguments)
    return f"multisample::{template}<{', '.join((MATRIX_TYPES[dtype].cpp, *texts))}>"


def usual_key(device: int) -> KernelKey:
    """The kernel of usual samples."""
    return KernelKey("float32", False, False, False, StoreKind.kPlain, False, False, device, 1, True)


def moments_key(
    real: str, antithetic: bool, fast_math: bool, rows: int, with_second: bool, origin_in_memory: bool, device: int
) -> CppKey:
    """The kernel of `weighted_moments` for a computing type. `rows` is `MomentGeometry.rows`."""
    choices = antithetic, fast_math, rows, with_second, origin_in_memory
    return CppKey("moments_kernel", instance("moments_kernel", real, *choices), device)


def perturb_key(dtype: str, fast_math: bool, one_member: bool, strided: bool, origin: KeyOrigin, device: int) -> CppKey:
    """The kernel of `perturb`. With `strided`, it takes spans that are not runs."""
    kinds = "StridedSpan" if strided else "Run", origin.name
    name = instance("perturb_kernel", dtype, fast_math, one_member, *(f"multisample::{kind}" for kind in kinds))
    return CppKey("perturb_kernel", name, device)


def name_of(key: KernelKey) -> str:
    """The name of a kernel that Numba compiles. Profilers show it."""
    values = dataclasses.asdict(key) | {"store_kind": StoreKind(key.store_kind).name}
    del values["device"]
    return "_".join(["sample_kernel", *(name if x is True else str(x) for name, x in values.items() if x is not False)])
