"""The contract of a backend: one `sample` drives any of them, and a third party can add another.

Everything that all backends have in common is done above them: arguments are checked, arrays reduced to addresses and
strides, the output is allocated, seed and offset are taken. A backend runs one launch, described by a `Draw`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy.typing as npt

from .draw import Draw

__all__ = ["Backend", "BackendStatus", "DeviceArray", "DeviceKind", "HostArray", "Launcher", "Layout"]

Layout: TypeAlias = Literal["dn", "nd"]
DeviceKind: TypeAlias = Literal["cpu", "cuda"]

HostArray: TypeAlias = npt.NDArray[Any]
"""Host memory, allocated by any library."""


class DeviceArray(NamedTuple):
    """CUDA device memory, allocated by any library."""

    pointer: int
    """Address of the first element; 0 where there are none."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    dtype: str
    """NumPy's name of the element type, or ``"bfloat16"``."""


@dataclasses.dataclass(frozen=True)
class BackendStatus:
    """Whether a backend can run here, and if not, why not.

    Attributes
    ----------
    available : bool
    reasons : tuple of str
        Everything that stands in the way, each with the command that mends it; empty when available.
    version : str
        Versions of the packages that the backend runs on.
    device : str
        The device that it would run on.

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
    """Functions for draws that differ in addresses, numbers, seed, offset, window and stream only.

    They hold no memory that two calls could share: calls may come from several threads at once, and from within one
    another.

    Attributes
    ----------
    run : callable
        ``run(ready, mu, sigma, matrix, seed, offset, offset_at, first_row, first_column, stream)`` launches. `mu`,
        `sigma` and `matrix` are addresses; `mu` or `sigma` is a float where the draw has a number. `offset_at` is an
        address in memory of the device, in place of `offset` if it is not 0.
    is_valid : callable or None
        ``is_valid(mu, sigma)``, for host memory: whether all of `mu` is finite, and all of `sigma` finite and not
        negative. Numbers have been checked.
    ready : callable or None
        ``ready(matrix, first_column)`` does everything that can fail before the launch, such as to compile; the result
        goes to `run`.
    takes_arrays : bool
        Whether `mu`, `sigma` and `matrix` come as NumPy arrays, and not as addresses. `mu` and `sigma` then have the
        computing type, and `matrix` is the (d, n) view, float16 and bfloat16 as the uint16 of their bits.
    """

    run: Callable[..., None]
    is_valid: Callable[[Any, Any], Any] | None = None
    ready: Callable[[Any, int], Any] | None = None
    takes_arrays: bool = False


class Backend(Protocol):
    """A way to run the kernel.

    A backend may also have ``launcher(draw) -> Launcher``, for calls that come again and again: without it, `sample`
    makes a `Draw` for each call and calls `launch`. For programs of JAX on CUDA it may have ``memory_launcher(draw)``,
    which returns ``launch(mu, sigma, matrix, words, stream)``: all but the stream are addresses in device memory, and
    `words` is that of seed, offset, first row and first column.
    """

    @property
    def name(self) -> str:
        """The name by which `sample` finds it."""
        ...

    @property
    def device_kinds(self) -> tuple[DeviceKind, ...]:
        """The memory that it can address."""
        ...

    @property
    def host_library(self) -> str:
        """The library of results for host inputs: torch, cupy, numba, or numpy for host memory."""
        ...

    def status(self) -> BackendStatus:
        """Whether it can run. Cheap, since a table of all backends calls it; never raises."""
        ...

    def prepare(self, device_kind: DeviceKind) -> None:
        """Do what takes long and may fail, such as to build and load, before the first launch on such a device.

        Raises
        ------
        multisample.BackendUnavailableError
            With every reason, if it cannot run there.
        """
        ...

    def adopt(self, array: Any) -> Any:
        """`array` as one of `host_library`.

        A NumPy array, contiguous, shape (d,), float32 or float64, goes to the backend's current device. An object with
        ``__dlpack__`` or ``__cuda_array_interface__`` on a device is shared, not copied. DLPack is asked for the stream
        that `launch` will use; a stream that the interface names need not be waited for, `sample` sees to it.
        """
        ...

    def launch(self, draw: Draw) -> None:
        """Launch `draw` on its device and its stream, without waiting for it.

        Words may be in device memory: see `multisample.backends.draw.Word`. Only torch_ext needs to know the operation
        `gradient`.

        Raises
        ------
        MemoryError, RuntimeError
            If the launch fails; then nothing has been written.
        """
        ...

    def advancer(self, device: int) -> Callable[[int, int], None]:
        """``advance(address, stream)``, compiled: adds 1 to an unsigned 64-bit number in memory of `device`.

        It does so in the order of the stream, after the launches that read the number.
        """
        ...
