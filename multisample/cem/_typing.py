"""Option types of `CEM`, for type checkers. Those of `minimize` name `CEM`, so `_method.py` defines them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

if TYPE_CHECKING:
    # Type checkers know typing_extensions, installed or not.
    from typing_extensions import Required, TypedDict

    from .._typing import AnyArray, HostBackend, Noise, Number

    Seed: TypeAlias = SupportsIndex | Sequence[SupportsIndex] | AnyArray

    class _CEMOptions(TypedDict, total=False):
        elite_frac: Number
        smoothing: Number
        noise_floor: Number | AnyArray | Callable[[int], Any]
        bounds: tuple[AnyArray | Number, AnyArray | Number] | None
        tol: Number | None
        seed: Seed | None
        noise: Noise
        antithetic: bool
        fast_math: bool

    class HostCEMOptions(_CEMOptions, total=False):
        """Options of a run with NumPy arrays."""

        backend: HostBackend

    class CEMOptions(_CEMOptions, total=False):
        """Options of a run with arrays of another library."""

        backend: str

    class AdoptedCEMOptions(_CEMOptions, total=False):
        """Options of a run that begins with NumPy arrays and continues with arrays of the backend's library."""

        backend: Required[str]
