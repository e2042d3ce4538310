"""What a backend promises, so that one `sample` can drive any of them and a third party can add another.

Everything that is common to all backends is done before one is called: arguments are checked, arrays reduced to
addresses and strides, the output allocated, seed and offset drawn. What is left is to launch a kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy.typing as npt

__all__ = [
    "Backend", "BackendStatus", "DeviceArray", "DeviceKind", "HostArray", "Layout", "RawArray", "RawVector",
]  # fmt: skip

Layout: TypeAlias = Literal["dn", "nd"]
DeviceKind: TypeAlias = Literal["cpu", "cuda"]

HostArray: TypeAlias = npt.NDArray[Any]
"""Host memory, whoever allocated it. float16 and bfloat16 outputs come as the uint16 of their bits."""


class DeviceArray(NamedTuple):
    """CUDA device memory, whoever allocated it."""

    pointer: int
    """Address of the first element; 0 where there are none."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    dtype: str
    """NumPy's name of the element type, or ``"bfloat16"``."""


RawArray: TypeAlias = HostArray | DeviceArray
RawVector: TypeAlias = RawArray | float
"""A number, in place of device memory, stands for as many equal elements as are needed."""


@dataclasses.dataclass(frozen=True)
class BackendStatus:
    """Whether a backend can run here, and if not, why not.

    Attributes
    ----------
    available : bool
    reasons : tuple of str
        Everything that stands in the way, each with the command that mends it; empty when available.
    version : str
        Versions of what the backend runs on.
    device : str
        What it would run on.

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


class Backend(Protocol):
    """A way to run the kernel."""

    @property
    def name(self) -> str:
        """What `sample` calls it."""
        ...

    @property
    def device_kinds(self) -> tuple[DeviceKind, ...]:
        """The memory it can address."""
        ...

    @property
    def host_library(self) -> str:
        """The library that results for host inputs belong to: torch, cupy, numba, or numpy for host memory."""
        ...

    def status(self) -> BackendStatus:
        """Whether it can run; cheap enough to ask for a table of all backends, and never raises."""
        ...

    def prepare(self, device_kind: DeviceKind) -> None:
        """Do what takes long and may fail, building and loading, before the first launch on such a device.

        Raises
        ------
        multisample.exceptions.BackendUnavailableError
            With every reason, if it cannot run there.
        """
        ...

    def adopt(self, array: Any) -> Any:
        """`array` as one of `host_library`.

        A NumPy array, contiguous, shape (d,), float32 or float64, goes to the backend's current device. An object with
        ``__dlpack__`` or ``__cuda_array_interface__`` on a device is shared, not copied. DLPack is asked for the stream
        that `launch` will be given; a stream that the interface names need not be waited for, `sample` sees to it.
        """
        ...

    def small_kernel(self, dtype: str, layout: Layout) -> Callable[..., bool] | None:
        """A shortcut for small calls on host memory, or None if the backend has none for `dtype` and `layout`.

        ``kernel(mu, sigma, out, seed, offset)``, for NumPy arrays of one dtype, float32 or float64, and a C-contiguous
        `out` of shape (d, n), or (n, d) with layout "nd", draws independent noise from the first row and column on. If
        a mean is not finite, or a standard deviation not finite or negative, it writes nothing and returns False. A
        seed that does not fit 64 bits is an OverflowError.
        """
        ...

    def plain_launch(self) -> Callable[..., None] | None:
        """A shortcut for plain calls on a CUDA device, or None if the backend has none.

        ``launch(mu, sigma, out, d, n, dtype, seed, offset, shared, fast_math, device, stream)``, in which `dtype` is
        float32 or float64, does what `launch` does, from addresses of contiguous memory of that type, and draws from
        the first row and column on.
        """
        ...

    def launch(
        self,
        mu: RawVector,
        sigma: RawVector,
        out: RawArray,
        dtype: str,
        seed: int,
        offset: int,
        counter: int,
        dim_offset: int,
        sample_offset: int,
        shared: bool,
        antithetic: bool,
        fast_math: bool,
        device: int,
        stream: int,
    ) -> None:
        """Write ``out[i, j] = mu[i] + sigma[i] * z[dim_offset + i, sample_offset + j]``.

        Parameters
        ----------
        mu, sigma : shape (d,)
            Any strides, 0 included. Host memory: already of the computing type, float64 for float64 and float32
            otherwise. Device memory: float16, bfloat16, float32, float64 or an integer type, for the kernel to
            round to the computing type; a number given by the caller comes as a float.
        out : shape (d, n), both at least 1
            Any strides with which no two elements overlap; it overlaps neither `mu` nor `sigma`. With layout "nd" it is
            the transposed view of what the caller gets, with strides to match.
        dtype : {"float16", "bfloat16", "float32", "float64"}
            The element type of `out`.
        seed, offset : int
            In [0, 2**64).
        counter : int
            Address of an unsigned 64-bit number in device memory that is to be taken, when the kernel runs, in place
            of `offset`; 0 if there is none, as on the CPU.
        dim_offset, sample_offset : int
            ``dim_offset + d <= 2**32`` and ``sample_offset + n <= 2**34``.
        shared : bool
            Every row takes the noise of row 0, whatever `dim_offset`.
        antithetic : bool
            Columns of `z` come in pairs: ``z[i, 2 * k + 1]`` is ``-z[i, 2 * k]``, and that is column k of the noise.
        fast_math : bool
            Without effect on the CPU and on float64.
        device, stream : int
            CUDA device ordinal and stream handle to launch on, without waiting for it; 0 and 0 for host memory.

        Raises
        ------
        MemoryError, RuntimeError
            If the launch fails; nothing has been written then.
        """
        ...

    def advance(self, counter: int, device: int, stream: int) -> None:
        """Add 1 to the unsigned 64-bit number at address `counter` of `device`, in the order of `stream`."""
        ...
