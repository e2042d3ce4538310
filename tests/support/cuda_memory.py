"""CUDA arrays of each library, and operations on them for the tests of CUDA backends.

Libraries that need a device are imported only after a test has found a device: see skip_rules.py.
"""

import contextlib
import dataclasses
import gc
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from places import DATA
from skip_rules import reasons_against, require
from tables import DTYPES

import multisample
from multisample.backends.system.cuda_driver import device_of, on_device

Array = np.ndarray[Any, Any]
ToArray = Callable[[Any], Array]

SECONDS = 300
# Clock cycles of a kernel that only waits: about 0.2 s.
CYCLES = 4 * 10**8


class ArrayMemory:
    """Operations whose code is the same for arrays of PyTorch and of CuPy."""

    def copy(self, source: Any, target: Any) -> None:
        """Copy one matrix of integers to another."""
        target[...] = source

    def same(self, a: Any, b: Any) -> bool:
        return bool((a == b).all())

    def count(self, vector: Any, value: int) -> int:
        """The number of elements equal to `value`."""
        return int((vector == value).sum())

    def add_count(self, found: Any, matrix: Any, value: float) -> None:
        """Add the number of elements equal to `value` to the integer `found`, on the current stream."""
        found += (matrix == value).sum()

    def on_stream(self, array: Any) -> Any:
        """The same array, for calls that are ordered on the current stream."""
        return array


class TorchMemory(ArrayMemory):
    """Operations of the tests on the arrays of a library: here PyTorch's."""

    name = "torch"

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")
        if not self.torch.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA device")

    def put(self, array: Any, device: int = 0) -> Any:
        """A copy of a NumPy array on the device."""
        array = np.array(array)
        if array.dtype.name != "bfloat16":
            return self.torch.from_numpy(array).to(f"cuda:{device}")
        return self.torch.from_numpy(array.view(np.int16)).to(f"cuda:{device}").view(self.torch.bfloat16)

    def repeated(self, value: float, dtype: str, length: int) -> Any:
        """A vector of `length` equal elements with stride 0."""
        return self.torch.tensor([value], dtype=getattr(self.torch, dtype), device="cuda").expand(length)

    def poisoned(self, size: int) -> Any:
        """Bytes with all bits set: NaN in every type, and different from every result."""
        return self.torch.full((size,), 0xFF, dtype=self.torch.uint8, device="cuda")

    def view(self, buffer: Any, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], first: int) -> Any:
        """A view of bytes as elements; strides and the index of the first element count elements."""
        return buffer.view(getattr(self.torch, dtype)).as_strided(shape, strides, first)

    def packed(self, array: Any) -> Any:
        """A contiguous copy of a matrix, so that only its elements are copied to the host."""
        return array.contiguous()

    def fill(self, vector: Any, value: float) -> None:
        vector.fill_(value)

    def full(self, length: int, value: float) -> Any:
        """A new vector, made on the current stream."""
        return self.torch.full((length,), value, device="cuda")

    def pointer(self, array: Any) -> int:
        return int(array.data_ptr())

    def stream(self) -> Any:
        """A context in which a new stream is current."""
        return self.torch.cuda.stream(self.torch.cuda.Stream())

    def keep_busy(self, cycles: int) -> None:
        self.torch.cuda._sleep(cycles)

    def marker(self) -> Callable[[], bool]:
        """A function that tells whether the work queued on the current stream so far is done."""
        event = self.torch.cuda.Event()
        event.record()
        return lambda: bool(event.query())

    def finish(self) -> None:
        """Wait for the current stream."""
        self.torch.cuda.current_stream().synchronize()

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def device(self, device: int) -> Any:
        """A context in which `device` is current."""
        return self.torch.cuda.device(device)

    def current_device(self) -> int:
        return int(self.torch.cuda.current_device())

    def device_of(self, array: Any) -> int:
        return int(array.get_device())

    def free_bytes(self) -> int:
        return int(self.torch.cuda.mem_get_info()[0])

    def release(self) -> None:
        """Release the memory that the library caches."""
        self.torch.cuda.empty_cache()


class CupyMemory(ArrayMemory):
    """The operations of `TorchMemory` for CuPy."""

    name = "cupy"

    def __init__(self) -> None:
        self.cupy = pytest.importorskip("cupy")
        if not self.cupy.cuda.is_available():
            pytest.skip("this CuPy has no CUDA device")
        code = """
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""
        self.spin = self.cupy.RawKernel(code, "spin")

    def put(self, array: Any, device: int = 0) -> Any:
        with self.cupy.cuda.Device(device):
            if array.dtype.name != "bfloat16":
                return self.cupy.asarray(array)
            return self.cupy.asarray(array.view(np.uint16)).view(array.dtype)

    def repeated(self, value: float, dtype: str, length: int) -> Any:
        return self.cupy.broadcast_to(self.cupy.asarray(np.array([value], dtype)), (length,))

    def poisoned(self, size: int) -> Any:
        buffer = self.cupy.empty(size, np.uint8)
        buffer.data.memset_async(0xFF, size)
        return buffer

    def view(self, buffer: Any, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], first: int) -> Any:
        element = numpy_dtype(dtype)
        size = element.itemsize
        return self.cupy.ndarray(
            shape, element, memptr=buffer.data + first * size, strides=tuple(size * stride for stride in strides)
        )

    def packed(self, array: Any) -> Any:
        return self.cupy.ascontiguousarray(array)

    def fill(self, vector: Any, value: float) -> None:
        vector.fill(value)

    def full(self, length: int, value: float) -> Any:
        return self.cupy.full(length, value, np.float32)

    def pointer(self, array: Any) -> int:
        return int(array.data.ptr)

    def stream(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    def keep_busy(self, cycles: int) -> None:
        self.spin((1,), (1,), (np.int64(cycles),))

    def marker(self) -> Callable[[], bool]:
        event = self.cupy.cuda.Event()
        event.record(self.cupy.cuda.get_current_stream())
        return lambda: bool(event.done)

    def finish(self) -> None:
        self.cupy.cuda.get_current_stream().synchronize()

    def synchronize(self) -> None:
        self.cupy.cuda.runtime.deviceSynchronize()

    def device(self, device: int) -> Any:
        return self.cupy.cuda.Device(device)

    def current_device(self) -> int:
        return int(self.cupy.cuda.runtime.getDevice())

    def device_of(self, array: Any) -> int:
        return int(array.device.id)

    def free_bytes(self) -> int:
        return int(self.cupy.cuda.runtime.memGetInfo()[0])

    def release(self) -> None:
        self.cupy.get_default_memory_pool().free_all_blocks()


def numba_kernels() -> Any:
    """Kernels for operations that only CuPy and PyTorch provide. The grids are large: Numba warns of small ones."""
    from llvmlite import ir
    from numba import cuda, types
    from numba.extending import intrinsic

    @intrinsic
    def clock(typingctx):
        def codegen(context, builder, signature, args):
            # Declared with a side effect, so that the compiler moves no read of the clock.
            return builder.asm(ir.FunctionType(ir.IntType(64), []), "mov.u64 $0, %clock64;", "=l", [], True)

        return types.int64(), codegen

    @cuda.jit(lto=False)
    def spin(cycles):
        start = clock()
        while clock() - start < cycles:
            pass

    @cuda.jit(lto=False)
    def fill(vector, value):
        for k in range(cuda.grid(1), vector.size, cuda.gridsize(1)):
            vector[k] = value

    @cuda.jit(lto=False)
    def count(vector, value, found):
        mine = 0
        for k in range(cuda.grid(1), vector.size, cuda.gridsize(1)):
            if vector[k] == value:
                mine += 1
        cuda.atomic.add(found, 0, mine)

    @cuda.jit(lto=False)
    def copy(source, target):
        rows, columns = source.shape
        for k in range(cuda.grid(1), rows * columns, cuda.gridsize(1)):
            target[k // columns, k % columns] = source[k // columns, k % columns]

    return SimpleNamespace(spin=spin, fill=fill, count=count, copy=copy)


class NumbaMemory:
    """The operations of `TorchMemory` for Numba, which has no current stream: arrays name the stream of their work."""

    name = "numba"
    grid = (512, 128)

    def __init__(self) -> None:
        reasons = reasons_against("numba")
        if reasons:
            pytest.skip(f"Numba cannot use CUDA: {'; '.join(reasons)}")
        from numba import cuda
        from numba.cuda.cudadrv import devicearray, driver

        self.cuda, self.driver = cuda, driver
        self.array = devicearray.DeviceNDArray
        self.kernels = numba_kernels()
        self.current: Any = 0
        for gpu in cuda.gpus:  # See on_device.
            with on_device(gpu.id):
                gpu.get_primary_context()

    def put(self, array: Any, device: int = 0) -> Any:
        array = np.ascontiguousarray(array)
        with self.cuda.gpus[device]:
            if array.dtype.name != "bfloat16":
                return self.cuda.to_device(array)
            return self.cuda.to_device(array.view(np.uint16)).view(array.dtype)

    def repeated(self, value: float, dtype: str, length: int) -> Any:
        one = self.put(np.array([value], dtype))
        return self.array((length,), (0,), one.dtype, gpu_data=one.gpu_data)

    def poisoned(self, size: int) -> Any:
        buffer = self.cuda.device_array(size, np.uint8)
        self.driver.device_memset(buffer, 0xFF, size)
        return buffer

    def view(self, buffer: Any, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], first: int) -> Any:
        element = numpy_dtype(dtype)
        size = element.itemsize
        return self.at(buffer, first * size, shape, tuple(size * stride for stride in strides), dtype)

    def at(self, buffer: Any, start: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Any:
        """`view` with the start and the strides in bytes, aligned or not."""
        return self.array(shape, strides, numpy_dtype(dtype), gpu_data=buffer.gpu_data.view(start))

    def packed(self, array: Any) -> Any:
        integer = f"int{8 * array.dtype.itemsize}"
        target = self.cuda.device_array(array.shape, integer)
        self.copy(array.view(integer), target)
        return target.view(array.dtype)

    def copy(self, source: Any, target: Any) -> None:
        self.kernels.copy[(*self.grid, self.current)](source, target)

    def same(self, a: Any, b: Any) -> bool:
        return bool(np.array_equal(a.copy_to_host(), b.copy_to_host()))

    def count(self, vector: Any, value: int) -> int:
        found = self.cuda.to_device(np.zeros(1, np.int64))
        self.kernels.count[self.grid](vector, value, found)
        return int(found.copy_to_host()[0])

    def fill(self, vector: Any, value: float) -> None:
        self.kernels.fill[(*self.grid, self.current)](vector, value)

    def full(self, length: int, value: float) -> Any:
        vector = self.cuda.device_array(length, np.float32, stream=self.current)
        self.fill(vector, value)
        return vector

    def add_count(self, found: Any, matrix: Any, value: float) -> None:
        self.kernels.count[(*self.grid, self.current)](matrix.ravel(), value, found)

    def pointer(self, array: Any) -> int:
        return int(array.__cuda_array_interface__["data"][0])

    @contextlib.contextmanager
    def stream(self) -> Iterator[Any]:
        """A non-blocking stream. Numba's own streams synchronize with the default stream, which would hide a mistake.

        The stream is never destroyed, because arrays still name it.
        """
        flag = self.driver.binding.CUstream_flags.CU_STREAM_NON_BLOCKING
        handle = self.driver.driver.cuStreamCreate(flag.value)
        # Freeing memory waits for the device.
        with self.cuda.defer_cleanup():
            self.current = self.cuda.external_stream(int(handle))
            try:
                yield self.current
            finally:
                self.current.synchronize()
                self.current = 0

    def on_stream(self, array: Any) -> Any:
        return array.bind(self.current)

    def keep_busy(self, cycles: int) -> None:
        self.kernels.spin[128, 1, self.current](cycles)

    def marker(self) -> Callable[[], bool]:
        event = self.cuda.event(timing=False)
        event.record(self.current)
        return lambda: bool(event.query())

    def finish(self) -> None:
        (self.current or self.cuda.default_stream()).synchronize()

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def device(self, device: int) -> Any:
        return self.cuda.gpus[device]

    def current_device(self) -> int:
        return int(self.cuda.current_context().device.id)

    def device_of(self, array: Any) -> int:
        if array.size == 0:
            return int(array.gpu_data.context.device.id)
        # From the driver. Numba uses cuda-bindings, which always returns 0 (13.1, cuda-python's issue 2928).
        return device_of(array.__cuda_array_interface__["data"][0])

    def free_bytes(self) -> int:
        return int(self.cuda.current_context().get_memory_info().free)

    def release(self) -> None:
        context = self.cuda.current_context()
        context.memory_manager.deallocations.clear()
        context.deallocations.clear()


class JaxMemory:
    """The operations that JAX supports: its arrays are immutable, and its streams are private."""

    name = "jax"

    def __init__(self) -> None:
        self.jax = pytest.importorskip("jax")
        try:
            self.devices = self.jax.devices("cuda")
        except RuntimeError:
            pytest.skip("this JAX has no CUDA device")

    def put(self, array: Any, device: int = 0) -> Any:
        return self.jax.device_put(np.array(array), self.devices[device])

    def pointer(self, array: Any) -> int:
        return int(array.unsafe_buffer_pointer())

    def device_of(self, array: Any) -> int:
        (device,) = array.devices()
        return int(device.local_hardware_id)

    def release(self) -> None:
        pass


_MEMORIES = {"torch": TorchMemory, "cupy": CupyMemory, "numba": NumbaMemory, "jax": JaxMemory}
_used: dict[str, Any] = {}


def memory_of(library: str) -> Any:
    if library not in _used:
        _used[library] = _MEMORIES[library]()
    return _used[library]


def release() -> None:
    """Release the memory that the libraries cache."""
    gc.collect()
    for memory in _used.values():
        memory.release()


class Exported:
    """A Numba array's memory with the CUDA array interface only; `more` adds fields to the interface."""

    def __init__(self, array: Any, **more: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "data": array.__cuda_array_interface__["data"], "shape": array.shape, "strides": array.strides,
            "typestr": array.dtype.str, "version": 3, **more,
        }  # fmt: skip


class ExportedByDlpack:
    """An array's memory with DLPack only."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A backend, and the library of its input arrays."""

    memory: Any
    backend: str

    def sample(self, *arguments: Any, **options: Any) -> Any:
        return multisample.sample(*arguments, backend=self.backend, **options)


OWN = (("torch", "torch_ext"), ("cupy", "cupy"), ("numba", "numba"))
CROSSED = tuple(
    (library, backend) for library, own in OWN for _, backend in OWN if backend != own
)  # fmt: skip


def gpu_of(pair: tuple[str, str]) -> Gpu:
    library, backend = pair
    require(backend)
    return Gpu(memory_of(library), backend)


def names(pair: tuple[str, str]) -> str:
    return pair[1] if pair in OWN else f"{pair[1]} on {pair[0]}"


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(DTYPES.get(name, name))


def computing(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def vectors(d: int, dtype: str = "float32", seed: int = 0) -> tuple[Array, Array]:
    """Means, which are numbers of float32, and standard deviations of all magnitudes of float16, including zeros."""
    draw = np.random.default_rng(seed)
    mu = draw.normal(size=d) * 10.0 ** draw.integers(-6, 4, d)
    sigma = np.abs(draw.normal(size=d)) * 10.0 ** draw.integers(-6, 4, d)
    mu[draw.random(d) < 0.1] = 0
    sigma[draw.random(d) < 0.05] = 0
    return mu.astype(np.float32).astype(computing(dtype)), sigma.astype(computing(dtype))


def on_cpu(mu: Any, sigma: Any, n: int, dtype: str = "float32", **options: Any) -> Array:
    return np.asarray(multisample.sample(mu, sigma, n, backend="cpu", dtype=dtype, **options))


def known_sums() -> list[int]:
    """Sums of the transform's bit patterns over all words: radii, half cosines, half sines."""
    data = DATA / "transform_f32.json"
    known = json.loads(data.read_text())["sums_over_all_words"]
    return [int(known[name], 16) for name in ("R", "fma_minus_s_s_half", "s_times_c")]
