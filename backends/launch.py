"""Launchers: through the CUDA driver, for the cupy and numba backends, and through `Backend.launch` alone."""

from __future__ import annotations

import abc
import collections
import ctypes
import dataclasses
import functools
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .contract import Backend, Launcher, MomentsLauncher
from .draw import (
    PACKED_DRAW,
    SIZES,
    Draw,
    ElementType,
    Vector,
    Word,
    batch_steps,
    memory_packer,
    pack,
    packer,
    parts_of_batch,
)  # fmt: skip
from .element_types import MATRIX_TYPES
from .kernels.cuda.geometry import PACKED_GEOMETRY, Geometry, geometry
from .kernels.cuda.moments_geometry import MOMENT_THREADS, PACKED_MOMENT_GEOMETRY, MomentGeometry, moment_geometry
from .memory.host import vectors_at
from .moments import PACKED_MOMENTS, Moments, moments_packer, pack_moments
from .system import cuda_driver

__all__ = [
    "CONFIGURATION_SIZE", "DriverBackend", "KernelKey", "MemoryLauncher", "MomentsKey", "generic_launcher",
    "kernel_key",
]  # fmt: skip


# No tuples: a KernelKey and a MomentsKey of equal fields are different kernels.
@dataclasses.dataclass(frozen=True)
class KernelKey:
    """The kernel of a draw. Each is compiled alone."""

    dtype: str
    common_noise: bool
    antithetic: bool
    fast_math: bool
    stores: int
    origin_in_memory: bool
    batched: bool
    device: int


@dataclasses.dataclass(frozen=True)
class MomentsKey:
    """The kernel of weighted moments. Each is compiled alone."""

    real: str
    """The computing type."""
    antithetic: bool
    fast_math: bool
    rows: int
    """`MomentGeometry.rows`."""
    with_second: bool
    origin_in_memory: bool
    finishing: bool
    """Whether it is the kernel that adds up the segments; it depends on `real` alone."""
    device: int


def kernel_key(draw: Draw, stores: int) -> KernelKey:
    """The kernel for `draw`, with the stores of its geometry."""
    dtype = ElementType(draw.type).name
    in_memory = _has_origin_in_memory(draw)
    fast_math = draw.fast_math and dtype != "float64"
    return KernelKey(
        dtype, draw.common_noise, draw.antithetic, fast_math, stores, in_memory, draw.batch > 1, draw.device
    )


# The struct CUlaunchConfig of cuda.h: the grid, the block, shared memory, stream, no attributes.
_CONFIGURATION = struct.Struct("7I4xPP I4x")
_pack_configuration = _CONFIGURATION.pack
CONFIGURATION_SIZE = _CONFIGURATION.size
_ARGUMENTS = PACKED_DRAW + PACKED_GEOMETRY
_MOMENTS_ARGUMENTS = PACKED_MOMENTS + PACKED_MOMENT_GEOMETRY
_MOST_BATCH = 65535  # The longest y axis of a grid.


def pack_configuration(blocks: int, threads: int, stream: int, batch: int = 1) -> bytes:
    """The configuration of a launch; the grid's y axis counts the matrices of a batch."""
    return _pack_configuration(blocks, batch, 1, threads, 1, 1, 0, stream, 0, 0)


class DriverBackend(abc.ABC):
    """Base of backends that compile a kernel for each `KernelKey` and launch it through the CUDA driver."""

    name: str

    def __init__(self) -> None:
        self._handles: dict[KernelKey | MomentsKey | tuple[str, int], int] = {}
        self.compiled: dict[KernelKey | MomentsKey | tuple[str, int], Any] = {}
        """The compiler's own objects, by kernel. A handle is valid as long as its object is alive."""
        self._launch = functools.cache(self._launch_function)

    @abc.abstractmethod
    def compile(self, key: KernelKey | MomentsKey | None) -> tuple[int, Any]:
        """The driver's handle of a kernel, and the object that keeps it alive; of `advance` if `key` is None.

        The caller makes the device current.
        """

    def kernel(self, key: KernelKey | MomentsKey) -> int:
        """The driver's handle of a kernel, compiled on first use."""
        return self._handles.get(key) or self._compiled(key, key, key.device)

    def _compiled(
        self, place: KernelKey | MomentsKey | tuple[str, int], key: KernelKey | MomentsKey | None, device: int
    ) -> int:
        with cuda_driver.on_device(device):
            handle, self.compiled[place] = self.compile(key)
        self._handles[place] = handle
        return handle

    def _launch_function(self, size: int, device: int) -> Callable[[int, bytes], None]:
        """``launch(kernel, parameters)`` launches with the bytes of a configuration and `size` bytes of arguments.

        Concurrent launches, from threads, signal handlers or destructors, use different buffers.
        """
        free: collections.deque[_Buffer] = collections.deque()
        launch_kernel, get_device = cuda_driver.launch_function(), cuda_driver.device_function()

        def launch(kernel: int, parameters: bytes) -> None:
            try:
                buffer = free.pop()
            except IndexError:
                buffer = _buffer(size)
            try:
                memory, configuration, extra, ordinal_at, ordinal, _ = buffer
                memory[:] = parameters
                if get_device(ordinal_at) == 0 and ordinal.value == device:
                    error = launch_kernel(configuration, kernel, None, extra)
                else:
                    with cuda_driver.on_device(device):
                        error = launch_kernel(configuration, kernel, None, extra)
            finally:
                free.append(buffer)
            if error:
                name = cuda_driver.error_name(error)
                raise RuntimeError(f"backend: {self.name!r} could not launch its kernel: {name}")

        return launch

    def launch(self, draw: Draw) -> None:
        column = draw.first_column
        cut, packed_cut = _cut(draw, draw.matrix % 32, draw.column_phase - 1 if column.at else column.value % 8)
        kernel, launch = self.kernel(kernel_key(draw, cut.stores)), self._launch(_ARGUMENTS, draw.device)
        for part in parts_of_batch(draw, _MOST_BATCH):
            configuration = pack_configuration(cut.blocks, cut.threads, draw.stream, max(part.batch, 1))
            launch(kernel, configuration + pack(part) + packed_cut)

    def launcher(self, draw: Draw) -> Launcher:
        packed, launch = packer(draw), self._launch(_ARGUMENTS, draw.device)
        cached: dict[tuple[int, int], tuple[int, int, int, bytes]] = {}

        def ready(matrix: int, first_column: int) -> tuple[int, int, int, bytes]:
            """Geometry and kernel for an alignment of the matrix, cached."""
            key = matrix & 31, first_column & 7
            if key not in cached:
                cut, packed_cut = _cut(draw, *key)
                cached[key] = self.kernel(kernel_key(draw, cut.stores)), cut.blocks, cut.threads, packed_cut
            return cached[key]

        def run(
            ready: tuple[int, int, int, bytes], mu: Any, sigma: Any, matrix: int, seed: int, offset: int,
            offset_at: int, first_row: int, first_column: int, stream: int,
        ) -> None:  # fmt: skip
            kernel, blocks, threads, cut = ready
            arguments = packed(mu, sigma, matrix, seed, offset, offset_at, first_row, first_column, stream)
            launch(kernel, _pack_configuration(blocks, 1, 1, threads, 1, 1, 0, stream, 0, 0) + arguments + cut)

        return Launcher(run, ready=ready)

    def memory_launcher(self, draw: Draw) -> MemoryLauncher:
        return MemoryLauncher(self, draw)

    def moments_launcher(self, moments: Moments) -> MomentsLauncher:
        draw, packed = moments.draw, moments_packer(moments)
        cached: dict[int, tuple[Callable[[bytes, int, int], None], int]] = {}

        def cut_of(first_column: int) -> tuple[Callable[[bytes, int, int], None], int]:
            """``launch(arguments, seed, stream)`` and the size of the scratch memory, cached."""
            phase = first_column & 7
            if phase not in cached:
                geometry = _moment_geometry(draw, phase)
                size = geometry.scratch_size(draw.rows, draw.common_noise, 2 if moments.second else 1)
                cached[phase] = self._moments_launch(moments, geometry), size
            return cached[phase]

        def run(
            weights: int, mu: Any, sigma: Any, first: int, second: int, seed: int, offset: int, first_row: int,
            first_column: int, stream: int, scratch: int,
        ) -> None:  # fmt: skip
            launch, _ = cut_of(first_column)
            arguments = packed(
                weights, mu, sigma, first, second, seed, offset, first_row, first_column, stream, scratch
            )
            launch(arguments, seed, stream)

        return MomentsLauncher(run, scratch_size=lambda first_column: cut_of(first_column)[1])

    def launch_moments(self, moments: Moments) -> None:
        draw = moments.draw
        geometry = _moment_geometry(draw, -1 if draw.first_column.at else draw.first_column.value & 7)
        self._moments_launch(moments, geometry)(pack_moments(moments), draw.seed.value, draw.stream)

    def moments_scratch_size(self, moments: Moments) -> int:
        draw = moments.draw
        geometry = _moment_geometry(draw, -1 if draw.first_column.at else draw.first_column.value & 7)
        return geometry.scratch_size(draw.rows, draw.common_noise, 2 if moments.second else 1)

    def moment_keys(self, real: str, seed: int) -> bytes:
        """Further arguments of the kernel of weighted moments: the round keys of a seed, if it takes them."""
        return b""

    def _moments_launch(self, moments: Moments, geometry: MomentGeometry) -> Callable[[bytes, int, int], None]:
        """``launch(arguments, seed, stream)`` launches the one or two kernels."""
        draw, real, keys_of = moments.draw, _real(moments.draw), self.moment_keys
        key = MomentsKey(
            real, draw.antithetic, draw.fast_math and real != "float64", geometry.rows, moments.second != 0,
            _has_origin_in_memory(draw), False, draw.device,
        )  # fmt: skip
        kernel, launch_sums = self.kernel(key), self._launch(_MOMENTS_ARGUMENTS + len(keys_of(real, 0)), draw.device)
        cut, blocks, finishing_blocks = geometry.packed(), geometry.blocks, geometry.finishing_blocks
        if not finishing_blocks:
            return lambda arguments, seed, stream: launch_sums(
                kernel, pack_configuration(blocks, MOMENT_THREADS, stream) + arguments + cut + keys_of(real, seed)
            )
        finishing = self.kernel(MomentsKey(real, False, False, 1, False, False, True, draw.device))
        launch_finishing = self._launch(_MOMENTS_ARGUMENTS, draw.device)

        def launch(arguments: bytes, seed: int, stream: int) -> None:
            arguments += cut
            launch_sums(kernel, pack_configuration(blocks, MOMENT_THREADS, stream) + arguments + keys_of(real, seed))
            launch_finishing(finishing, pack_configuration(finishing_blocks, MOMENT_THREADS, stream) + arguments)

        return launch

    def advancer(self, device: int) -> Callable[[int, int], None]:
        place = ("advance", device)
        kernel, launch = self._handles.get(place) or self._compiled(place, None, device), self._launch(8, device)

        def advance(address: int, stream: int) -> None:
            launch(kernel, pack_configuration(1, 1, stream) + address.to_bytes(8, sys.byteorder))

        return advance


class MemoryLauncher:
    """``launch(mu, sigma, seed, offsets, matrix, stream)`` launches draws like `draw`, words in memory.

    The arguments are those of `multisample.backends.draw.memory_packer`. `draw` may be a batch. The stream may be one
    that is being captured: a kernel that is not loaded yet is loaded all the same.
    """

    def __init__(self, backend: DriverBackend, draw: Draw) -> None:
        self._backend, self._draw, self._steps = backend, draw, batch_steps(draw)
        self._launch = backend._launch(_ARGUMENTS, draw.device)
        self._ready: dict[tuple[int, bool], tuple[int, int, int, bytes]] = {}
        # More matrices than a grid has room for are launched in parts.
        batch = max(draw.batch, 1)
        self._parts = [
            (b, count, memory_packer(draw._replace(batch=count)))
            for b in range(0, batch, _MOST_BATCH)
            for count in [min(batch - b, _MOST_BATCH)]
        ]

    def __call__(self, mu: int, sigma: int, seed: int, offsets: int, matrix: int, stream: int) -> None:
        for kernel, parameters in self.parameters(mu, sigma, seed, offsets, matrix, stream):
            self._launch(kernel, parameters)

    def parameters(
        self, mu: int, sigma: int, seed: int, offsets: int, matrix: int, stream: int
    ) -> list[tuple[int, bytes]]:
        """For each launch of a call, the kernel and the bytes of the configuration and of the arguments."""
        key = matrix & 31, offsets != 0
        kernel, blocks, threads, cut = self._ready.get(key) or self._prepare(*key)
        of_mu, of_sigma, of_matrix, of_seed, of_offsets = self._steps
        launches = []
        for b, count, packed in self._parts:
            arguments = packed(
                mu + b * of_mu, sigma + b * of_sigma, seed + b * of_seed, offsets + b * of_offsets,
                matrix + b * of_matrix, stream,
            )  # fmt: skip
            launches.append((kernel, pack_configuration(blocks, threads, stream, count) + arguments + cut))
        return launches

    def _prepare(self, misalignment: int, with_offsets: bool) -> tuple[int, int, int, bytes]:
        cut, packed_cut = _cut(self._draw, misalignment, self._draw.column_phase - 1 if with_offsets else 0)
        with cuda_driver.relaxed_capture():
            kernel = self._backend.kernel(kernel_key(self._draw._replace(seed=Word(0, 1)), cut.stores))
        ready = self._ready[misalignment, with_offsets] = kernel, cut.blocks, cut.threads, packed_cut
        return ready


_Buffer = tuple[memoryview, Any, Any, Any, ctypes.c_int, ctypes.c_size_t]


def _buffer(size: int) -> _Buffer:
    """Memory for the configuration of a launch, followed by `size` bytes of arguments.

    Returns a view to write to, the first and the last argument of cuLaunchKernelEx, the argument of cuCtxGetDevice and
    the number that this writes, and the size, which `extra` points to.
    """
    memory = ctypes.create_string_buffer(CONFIGURATION_SIZE + size)
    arguments, count = ctypes.addressof(memory) + CONFIGURATION_SIZE, ctypes.c_size_t(size)
    # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE and CU_LAUNCH_PARAM_END of cuda.h.
    extra = (ctypes.c_void_p * 5)(1, arguments, 2, ctypes.addressof(count), 0)
    ordinal = ctypes.c_int()
    return memoryview(memory).cast("B"), ctypes.byref(memory), extra, ctypes.byref(ordinal), ordinal, count


def _has_origin_in_memory(draw: Draw) -> bool:
    return bool(draw.seed.at or draw.first_row.at or draw.first_column.at)


def _real(draw: Draw) -> str:
    return MATRIX_TYPES[ElementType(draw.type).name].computing


def _moment_geometry(draw: Draw, phase: int) -> MomentGeometry:
    return moment_geometry(
        draw.rows, draw.columns, _real(draw), phase, draw.common_noise, draw.antithetic, _has_origin_in_memory(draw)
    )


def _cut(draw: Draw, misalignment: int, first_column: int) -> tuple[Geometry, bytes]:
    dtype = ElementType(draw.type).name
    # One geometry for all matrices of a batch, whose addresses may be aligned differently.
    strided = draw.batch > 1 and draw.rows * draw.columns * SIZES[dtype] % 32 != 0
    return geometry(
        draw.rows, draw.columns, dtype, (draw.row_stride, draw.column_stride), misalignment, first_column,
        draw.common_noise, draw.antithetic, draw.fast_math, strided,
    )  # fmt: skip


def generic_launcher(backend: Backend, draw: Draw) -> Launcher:
    """The `Launcher` of a backend that has no `launcher`."""

    def draw_at(mu: Any, sigma: Any) -> Draw:
        return draw._replace(mu=_at(draw.mu, mu), sigma=_at(draw.sigma, sigma))

    def is_valid(mu: Any, sigma: Any) -> bool:
        means, deviations = vectors_at(draw_at(mu, sigma))
        return bool(np.isfinite(means).all() and np.isfinite(deviations).all() and (deviations >= 0).all())

    def run(
        ready: None, mu: Any, sigma: Any, matrix: int, seed: int, offset: int, offset_at: int, first_row: int,
        first_column: int, stream: int,
    ) -> None:  # fmt: skip
        backend.launch(
            draw_at(mu, sigma)._replace(
                matrix=matrix, seed=Word(seed), offset=Word(offset, offset_at), first_row=Word(first_row),
                first_column=Word(first_column), stream=stream,
            )
        )  # fmt: skip

    return Launcher(run, is_valid)


def _at(vector: Vector, value: Any) -> Vector:
    """`vector` at another address or, if it is a number, with another number."""
    return vector._replace(**{"number" if vector.type == ElementType.number else "data": value})
