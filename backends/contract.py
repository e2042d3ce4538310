"""The contract of a backend. `sample` drives any of them, and third parties can add others.

`sample` does the work that all backends share: it checks the arguments, reduces arrays to addresses and strides,
allocates the output, and takes seed and offset. A backend runs one launch, described by a `Draw`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy.typing as npt

from .draw import Draw

__all__ = [
    "Backend", "BackendStatus", "DeviceArray", "DeviceKind", "HostArray", "Launcher", "Layout", "MomentsLauncher",
]  # fmt: skip

Layout: TypeAlias = Literal["dn", "nd"]
DeviceKind: TypeAlias = Literal["cpu", "cuda"]

HostArray: TypeAlias = npt.NDArray[Any]
"""Host memory, allocated by any library."""


class DeviceArray(NamedTuple):
    """CUDA device memory, allocated by any library."""

    pointer: int
    """Address of the first element; 0 for an empty array."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    dtype: str
    """The element type, by its name in `ElementType`."""


@dataclasses.dataclass(frozen=True)
class BackendStatus:
    """Whether a backend can run here, and the reasons if it cannot.

    Attributes
    ----------
    available : bool
    reasons : tuple of str
        Everything that prevents the backend from running, each with the command that fixes it; empty when available.
    version : str
        Versions of the packages that the backend runs on.
    device : str
        The device that the backend would use.

    Examples
    --------
    >>> import multisample
    >>> multisample.backends()["cpu"].reasons
    ()
    """

    available: bool
    reasons: tuple[str, ...] = ()
    version: str = ""
    device: str = ""


@dataclasses.dataclass(frozen=True)
class Launcher:
    """Functions for draws that differ only in addresses, numbers, seed, offset, window and stream.

    They share no memory between calls: several threads may call them at once, and one call may interrupt another.

    Attributes
    ----------
    run : callable
        ``run(ready, mu, sigma, matrix, seed, offset, offset_at, first_row, first_column, stream)`` launches. `mu`,
        `sigma` and `matrix` are addresses; `mu` or `sigma` is a float if the draw has a number in its place. If
        `offset_at` is not 0, the offset is read from this address in device memory, and `offset` is ignored.
    is_valid : callable or None
        ``is_valid(mu, sigma)``, for host memory: whether all of `mu` is finite, and all of `sigma` finite and not
        negative. `sample` has checked numbers.
    ready : callable or None
        ``ready(matrix, first_column)`` does everything that can fail before the launch, such as compiling. `run` gets
        its result.
    takes_arrays : bool
        Whether `mu`, `sigma` and `matrix` are NumPy arrays in place of addresses. `mu` and `sigma` then have the
        computing type, and `matrix` is the (d, n) view, of type `MatrixType.stored`.
    """

    run: Callable[..., None]
    is_valid: Callable[[Any, Any], Any] | None = None
    ready: Callable[[Any, int], Any] | None = None
    takes_arrays: bool = False


@dataclasses.dataclass(frozen=True)
class MomentsLauncher:
    """Functions for weighted moments that differ only in addresses, numbers, seed, offset, window and stream.

    Attributes
    ----------
    run : callable
        ``run(weights, mu, sigma, first, second, seed, offset, first_row, first_column, stream, scratch)`` launches. All
        arrays are addresses; `mu` or `sigma` is a float if the draw has a number in its place. `second` is 0 if only
        the first moment is asked for.
    is_valid : callable or None
        ``is_valid(weights, mu, sigma)``, for host memory: whether all of `weights` and `mu` is finite, and all of
        `sigma` finite and not negative.
    scratch_size : callable or None
        ``scratch_size(first_column)``: how many float64 numbers of device memory `scratch` must have room for. None if
        it needs none.
    takes_arrays : bool
        Whether `weights`, `mu`, `sigma`, `first` and `second` are NumPy arrays in place of addresses, or None for no
        `second`. All have the computing type, but `first` and `second`, which have the type `MatrixType.stored` of the
        result.
    """

    run: Callable[..., None]
    is_valid: Callable[[Any, Any, Any], Any] | None = None
    scratch_size: Callable[[int], int] | None = None
    takes_arrays: bool = False


class Backend(Protocol):
    """A way to run the kernel.

    A backend may also have ``launcher(draw) -> Launcher``, for repeated calls. Without it, `sample` makes a `Draw` for
    each call and calls `launch`. For programs of JAX on CUDA it may have ``memory_launcher(draw)``, which returns
    ``launch(mu, sigma, seed, offsets, matrix, stream)``. All arguments but the stream are addresses in device memory;
    at `offsets` are the offset, the first row and the first column, and 0 means that these are 0.

    Programs of JAX run on threads that should not wait for the interpreter. For them it may have ``c_function(draw)``,
    the address of a C function ``int run(const Draw*)`` for draws like `draw`. The function needs no interpreter and
    returns 0, or another number after an error. Seed and offsets are in memory of the draw's device; mu and sigma are
    vectors of the computing type. ``moments_c_function(moments)`` is the address of ``int run(Moments*)``, where mu and
    sigma are numbers. Without these functions, each call of a program enters Python.

    For `multisample.weighted_moments` it may have ``moments_launcher(moments) -> MomentsLauncher``. For programs of JAX
    on CUDA it then also has ``launch_moments(moments)``, whose words may be in device memory, and
    ``moments_scratch_size(moments)``: how many float64 numbers of scratch memory that needs.
    """

    @property
    def name(self) -> str:
        """The name for `sample(backend=...)`."""
        ...

    @property
    def device_kinds(self) -> tuple[DeviceKind, ...]:
        """The kinds of memory that the backend can address."""
        ...

    @property
    def host_library(self) -> str:
        """The library of results for host inputs: torch, cupy, numba, or numpy for host memory."""
        ...

    def status(self) -> BackendStatus:
        """Whether the backend can run. It is cheap, since the table of all backends calls it, and never raises."""
        ...

    def prepare(self, device_kind: DeviceKind) -> None:
        """Do the slow work that may fail, such as building and loading, before the first launch on such a device.

        Raises
        ------
        multisample.BackendUnavailableError
            With every reason, if it cannot run there.
        """
        ...

    def adopt(self, array: Any) -> Any:
        """`array` as an array of `host_library`.

        A NumPy array (contiguous, shape (d,), float32 or float64) is copied to the backend's current device. An array
        on a device, with ``__dlpack__`` or ``__cuda_array_interface__``, is shared, not copied. DLPack gets the stream
        of the later `launch`. `sample` waits for a stream that the CUDA array interface names.
        """
        ...

    def launch(self, draw: Draw) -> None:
        """Launch `draw` on its device and its stream, without waiting for it.

        Words may be in device memory: see `multisample.backends.draw.Word`. Only torch_ext supports the operation
        `gradient`.

        Raises
        ------
        MemoryError, RuntimeError
            If the launch fails; nothing has been written then.
        """
        ...

    def advancer(self, device: int) -> Callable[[int, int], None]:
        """``advance(address, stream)``, compiled: adds 1 to an unsigned 64-bit number in memory of `device`.

        The addition is ordered on the stream, after the launches that read the number.
        """
        ...
