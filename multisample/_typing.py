"""Types of the public functions, for type checkers.

To a type checker, a class of a missing package is Any, and an overload with Any accepts every argument. So this module
imports no array library: protocols describe the arrays of PyTorch, JAX, CuPy and Numba.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsFloat, SupportsIndex, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from multisample.backends.element_types import DTypeName

if TYPE_CHECKING:
    from typing import Generic

    # Type checkers include typing_extensions. Python has no generic TypedDict before 3.11.
    from typing_extensions import Required, TypedDict
    from typing_extensions import TypeVar as _TypeVar

    from ._randomness.generator import Generator, Key

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
if TYPE_CHECKING:
    # With a default, CEM and Result can be annotations without a parameter.
    ArrayT = _TypeVar("ArrayT", default=Any)
else:
    ArrayT = TypeVar("ArrayT")

# --- Scalars and choices --------------------------------------------------------------------------

Noise: TypeAlias = Literal["independent", "shared"]
Layout: TypeAlias = Literal["dn", "nd"]
HostBackend: TypeAlias = Literal["auto", "cpu"]
"""Backends that return NumPy arrays for NumPy arrays and lists; the others return arrays of their own library."""


class _TorchDType(Protocol):
    """torch.dtype."""

    def to_complex(self) -> Any: ...


class _HasDType(Protocol):
    """JAX's scalar types, such as jax.numpy.float32."""

    @property
    def dtype(self) -> np.dtype[Any]: ...


DType: TypeAlias = DTypeName | np.dtype[Any] | type[np.generic] | type[float] | _TorchDType | _HasDType


class TorchGenerator(Protocol):
    """torch.Generator."""

    def manual_seed(self, seed: int, /) -> Any: ...


Count: TypeAlias = SupportsIndex | tuple[SupportsIndex, ...]
"""A number of samples, or their shape."""
Generators: TypeAlias = "Generator | TorchGenerator | Sequence[Generator | TorchGenerator]"
"""One generator, or a list of one for each element of a batch."""


class Bounds(Protocol):
    """scipy.optimize.Bounds."""

    lb: Any
    ub: Any


# --- Arrays ---------------------------------------------------------------------------------------

HostArray: TypeAlias = npt.NDArray[Any]
Number: TypeAlias = float | np.floating[Any] | np.integer[Any]
HostVector: TypeAlias = HostArray | Sequence[Number] | Sequence[Sequence[Number]]


class Tensor(Protocol[T_co]):
    """torch.Tensor and its subclasses, such as torch.nn.Parameter, for which T is torch.Tensor."""

    @property
    def is_cuda(self) -> bool: ...
    def cpu(self) -> T_co: ...


class Module(Protocol[T_co]):
    """torch.nn.Module, for which T is torch.Tensor."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor[T_co]]]: ...


NamedTensors: TypeAlias = (
    Module[T] | Mapping[str, Tensor[T]] | Iterator[tuple[str, Tensor[T]]] | Sequence[tuple[str, Tensor[T]]]
)


class _DTensor(Protocol):
    @property
    def device_mesh(self) -> Any: ...
    @property
    def placements(self) -> tuple[Any, ...]: ...


class _JaxArray(Protocol):
    def addressable_data(self, index: int, /) -> Any: ...


class _SupportsCuda(Protocol):
    @property
    def __cuda_array_interface__(self) -> Any: ...


class _CupyArray(_SupportsCuda, Protocol):
    def get(self) -> Any: ...


class _NumbaArray(_SupportsCuda, Protocol):
    def copy_to_host(self) -> Any: ...


OwnArray = TypeVar("OwnArray", bound="_DTensor | _JaxArray | _CupyArray | _NumbaArray")
"""The type of arrays for which `sample` returns an array of the same type."""


class _SupportsDLPack(Protocol):
    def __dlpack__(self, *arguments: Any, **options: Any) -> Any: ...
    def __dlpack_device__(self) -> Any: ...


class _SupportsNumpy(Protocol):
    def __array__(self, *arguments: Any, **options: Any) -> Any: ...


AnyArray: TypeAlias = HostVector | _SupportsDLPack | _SupportsCuda | _SupportsNumpy
Seed: TypeAlias = "SupportsIndex | Key | Sequence[SupportsIndex | Key] | _SupportsDLPack | _SupportsCuda"
"""One seed or Key, or a vector of them."""
Members: TypeAlias = "SupportsIndex | Sequence[SupportsIndex] | _SupportsDLPack | _SupportsCuda | HostArray"
"""One member of a population, or a vector of them."""
Decay: TypeAlias = "SupportsFloat | Mapping[str, SupportsFloat]"
"""One decay, or decays by the names of parameters."""

# --- Keyword arguments of `sample`, `weighted_moments` and `perturb` -------------------------------

if TYPE_CHECKING:

    class _Drawing(TypedDict, total=False):
        noise: Noise
        dtype: DType | None
        fast_math: bool
        dim_offset: SupportsIndex
        sample_offset: SupportsIndex
        antithetic: bool

    class _Options(_Drawing, total=False):
        seed: Seed | None
        validate: bool
        layout: Layout

    class HostOptions(_Options, total=False):
        """Options of a call that returns a NumPy array."""

        backend: HostBackend
        out: HostArray | None
        generator: Generator | Sequence[Generator] | None

    class Options(_Options, Generic[T], total=False):
        """Options of other calls; `T` is the type of the result."""

        backend: str
        out: T | None
        generator: Generators | None

    class _MomentsOptions(_Drawing, total=False):
        order: Literal[1, 2]
        seed: Required[Seed]

    class HostMomentsOptions(_MomentsOptions, total=False):
        backend: HostBackend

    class MomentsOptions(_MomentsOptions, total=False):
        backend: str

    class PerturbOutOptions(TypedDict, total=False):
        """Options of `perturb` with `out`."""

        seed: Required[Seed]
        member: Members
        decay: Decay
        fast_math: bool
        ids: Mapping[str, SupportsIndex] | Sequence[SupportsIndex] | None
        backend: str

    class PerturbOptions(PerturbOutOptions, total=False):
        out: None
