"""The contract of a backend. `sample` drives any of them, and third parties can add others.

`sample` does the work that all backends share: it checks the arguments, reduces arrays to addresses and strides,
allocates the output, and takes seed and offset. A backend runs one launch, described by a `Launch`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Literal, Protocol, TypeAlias

import numpy.typing as npt

from .launch import Launch

__all__ = ["PROTOCOL", "Backend", "BackendStatus", "DeviceKind", "HostArray", "Launcher"]

DeviceKind: TypeAlias = Literal["cpu", "cuda"]

HostArray: TypeAlias = npt.NDArray[Any]
"""Host memory, allocated by any library."""


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
    >>> multisample.list_backends()["cpu"].reasons
    ()
    """

    available: bool
    reasons: tuple[str, ...] = ()
    version: str = ""
    device: str = ""


@dataclasses.dataclass(frozen=True)
class Launcher:
    """Functions for launches that differ only in the head of `Launch`: in values, addresses and stream.

    They share no memory between calls: several threads may call them at once, and one call may interrupt another.

    Attributes
    ----------
    run : callable
        ``run(geometry, mu, sigma, weights, matrix, first, second, seed, offset, seed_at, offset_at, first_row,
        first_column, stream, scratch)`` launches. `mu` to `second` are addresses; an input is a float if the launch has
        a number in its place. An argument that the operation lacks is 0 or None. If `seed_at` or `offset_at` is not 0,
        `run` reads the word there and ignores `seed` or `offset`. A batch always has its seeds in memory. `scratch` has
        room for `scratch_size` numbers. For perturb, `matrix` is the packed spans, of type bytes. If `origin_step` of
        the launch is not 0, `first_row` is the address of the first rows, which are uint64.
    is_valid : callable or None
        ``is_valid(mu, sigma, weights)``, for host memory: whether all of `mu` and `weights` is finite, and all of
        `sigma` finite and not negative. `weights` is None if the operation lacks them. `sample` checks those inputs
        that are one number. With `takes_arrays`, the caller has converted the inputs with the floating-point settings
        of the thread, so `is_valid` is also False if these are not IEEE 754's default settings. Without it, `sample`
        checks the values by NumPy.
    geometry : callable or None
        ``geometry(matrix, first_column)`` does everything that can fail before the launch, such as compiling. `run`
        gets its result: the launch geometry, on a CPU the number of threads. Without it, `run` gets None.
    scratch_size : callable or None
        ``scratch_size(first_column)``: how many float64 numbers of device memory `run` needs. None if it never needs
        any.
    takes_arrays : bool
        Whether operands and results are NumPy arrays in place of addresses. `mu`, `sigma` and `weights` then have the
        computing type. `matrix` is the (d, n) view, and `first` and `second` have shape (d,), all of the type
        `MatrixType.stored`. In a batch, each result has one more axis in front, and so may each operand.
    """

    run: Callable[..., None]
    is_valid: Callable[[Any, Any, Any], Any] | None = None
    geometry: Callable[[Any, int], Any] | None = None
    scratch_size: Callable[[int], int] | None = None
    takes_arrays: bool = False


PROTOCOL = 2
"""The version of `Backend`. Version 1 took a `Draw` in place of a `Launch`."""


class Backend(Protocol):
    """A way to run the kernel.

    A backend may also have ``launcher(launch) -> Launcher``, for repeated calls. `backends.generic` makes one
    from `launch` for a backend without a `launcher`.

    A backend may also have ``parameters(launch)``. It returns the kernels of the launch with their parameter bytes. A
    program of JAX launches these kernels again; see `multisample.backends.driver`.

    A backend may also have ``c_function(launch)``, because threads of XLA should not wait for the interpreter. It
    returns the address of a C function ``int run(const Launch*)`` for launches like `launch`, or 0 if there is none.
    The C function may also run gradients, even if `operations` does not list them. It needs no interpreter. It returns
    0, or another number after an error. Seed and offsets are in memory of the launch's device. mu, sigma and weights
    are vectors of the computing type; for moments mu and sigma are numbers. Without a C function, each call of a
    program of JAX enters Python.
    """

    @property
    def protocol(self) -> int:
        """The version of this protocol that the backend follows: `PROTOCOL`."""

    @property
    def operations(self) -> Collection[int]:
        """The operations that the backend runs, of `multisample.backends.launch.Operation`; at least samples."""

    @property
    def name(self) -> str:
        """The name for `sample(backend=...)`."""

    @property
    def device_kinds(self) -> tuple[DeviceKind, ...]:
        """The kinds of memory that the backend can address."""

    @property
    def host_library(self) -> str:
        """The library of results for host inputs: torch, cupy, numba, or numpy for host memory."""

    def status(self) -> BackendStatus:
        """Whether the backend can run. It is cheap, since the table of all backends calls it, and never raises."""

    def prepare(self, device_kind: DeviceKind) -> None:
        """Do the slow work that may fail, such as building and loading, before the first launch on such a device.

        Raises
        ------
        multisample.BackendUnavailableError
            With every reason, if it cannot run there.
        """

    def adopt(self, array: Any) -> Any:
        """`array` as an array of `host_library`.

        A NumPy array (contiguous, shape (d,), float32 or float64) is copied to the backend's current device. An array
        on a device, with ``__dlpack__`` or ``__cuda_array_interface__``, is shared, not copied. DLPack makes it
        ready on the stream of the later `launch`. `sample` waits for a stream that the CUDA array interface names.
        """

    def launch(self, launch: Launch) -> None:
        """Run `launch` on its device and its stream, without waiting for it.

        Seed, offset, first row and first column may be in memory of the device. The launch may be a batch.

        Raises
        ------
        MemoryError, RuntimeError
            If the launch fails; nothing has been written then.
        """

    def advancer(self, device: int) -> Callable[[int, int], None]:
        """``advance(address, stream)``, compiled: adds 1 to an unsigned 64-bit number in memory of `device`.

        The addition is ordered on the stream, after the launches that read the number.
        """
