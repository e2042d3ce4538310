"""The handlers of the custom calls: Python functions that run a backend on the memory that XLA passes.

One string attribute holds the static options of a call, so that a saved program runs in every process. `Options` is
that string; `RUNNERS` has a function for each string and shape.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxlib.xla_client import CustomCallTargetTraits

from multisample.backends import generic, registry
from multisample.backends.contract import HostArray, MemoryLauncher
from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.launch import (
    HOST,
    OFFSETS_BYTES,
    SEED_BYTES,
    Batched,
    ElementType,
    Launch,
    Operation,
    batch_steps,
    pack,
    words_in_memory,
)
from multisample.backends.memory.host import advise_huge_pages, array_at, quiet
from multisample.backends.system import xla_ffi
from multisample.backends.system.threads import run_all, thread_count

from ..._call import COLUMNS, check_rows
from ..._plan import PlanCache
from . import gate, native

__all__ = [
    "GRADIENT",
    "RUNNERS",
    "SAMPLE",
    "Options",
    "Road",
    "can_take_gradients",
    "prepare_on_host",
    "register",
    "register_target",
    "scratch_size",
]

SAMPLE, GRADIENT = "multisample_sample", "multisample_gradient"
"""The names of the targets.

SAMPLE : (mu, sigma, seed, offsets) -> x, shapes (b, d), (b, d), (b, 2), (b, 6) and (b, d, n).
GRADIENT : (g, seed, offsets) -> (sum of g, sum of g times noise), and on CUDA scratch memory.

Seed and offsets are those of `keys.operands`; calls without offsets have one operand less. The `b` of an operand may be
1.
"""


class Options(NamedTuple):
    """The static part of a custom call."""

    backend: str
    dtype: str
    layout: str
    common_noise: bool
    antithetic: bool
    fast_math: bool
    aligned: bool
    """Whether the first column is known to be a multiple of 8."""
    has_offsets: bool
    """Whether offset, first row and first column are an operand; if not, they are 0."""
    mu_batched: bool
    sigma_batched: bool
    seed_batched: bool
    offsets_batched: bool
    """Whether each element of the batch has an operand of its own."""

    def encoded(self) -> str:
        """The string from which `decoded` makes the options again."""
        return ",".join(str(int(x)) if isinstance(x, bool) else x for x in self)


def decoded(string: bytes) -> Options:
    """The options of a string that `Options.encoded` made."""
    backend, dtype, layout, *flags = string.decode().rsplit(",", len(Options._fields) - 1)
    return Options(backend, dtype, layout, *(flag == "1" for flag in flags))


# --- Launches -------------------------------------------------------------------------------------


def _launch(options: Options, d: int, n: int, operation: Operation, device: int, batch: int = 0) -> Launch:
    """The launch of a batch, or of one of its matrices, without addresses."""
    batched = Batched.mu * options.mu_batched | Batched.sigma * options.sigma_batched
    batched |= Batched.seed * options.seed_batched | Batched.offsets * options.offsets_batched
    row = MATRIX_TYPES[options.dtype]
    size, kind = MATRIX_TYPES[row.computing].size, ElementType[row.computing]
    row_stride, column_stride = (n * row.size, row.size) if options.layout == "dn" else (row.size, d * row.size)
    return Launch(
        mu_stride=size, sigma_stride=size, mu_type=kind, sigma_type=kind, row_stride=row_stride,
        column_stride=column_stride, rows=d, columns=n, type=ElementType[options.dtype], operation=operation,
        common_noise=options.common_noise, antithetic=options.antithetic, fast_math=options.fast_math, device=device,
        batch=batch, batched=batched, column_phase=int(options.aligned),
    )  # fmt: skip


def _matrix_shape(options: Options, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The batch size, d and n of a matrix operand or result."""
    batch, first, second = shape
    return (batch, first, second) if options.layout == "dn" else (batch, second, first)


# --- Host memory ----------------------------------------------------------------------------------


def _array_maker(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Callable[[int], HostArray]:
    """``array(address)``: contiguous memory as an array."""
    memory: Callable[[int], Any] = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address
    ndarray = np.ndarray
    return lambda address: ndarray(shape, dtype, memory(address))


_unpack_seed, _seed_at = struct.Struct("=2I").unpack, (ctypes.c_char * SEED_BYTES).from_address
_unpack_offsets, _offsets_at = struct.Struct("3Q").unpack, (ctypes.c_char * OFFSETS_BYTES).from_address


def _read_words(seed: int, offsets: int, d: int, n: int) -> tuple[int, int, int, int]:
    """Seed, offset, first row and first column."""
    high, low = _unpack_seed(_seed_at(seed).raw)
    if not offsets:
        return high << 32 | low, 0, 0, 0
    offset, row, column = _unpack_offsets(_offsets_at(offsets).raw)
    _check_window(row, column, d, n)
    return high << 32 | low, offset, row, column


def _check_window(row: int, column: int, d: int, n: int) -> None:
    check_rows(row, d)
    if column + n > COLUMNS:
        raise ValueError(f"sample_offset: expected sample_offset + n <= 2**34, got {column} + {n}")


def _check_windows(launch: Launch, offsets: int) -> None:
    """Check the windows of a batch in host memory."""
    if not offsets:
        return
    count = launch.batch if launch.batched & Batched.offsets else 1
    _, row, column = array_at(offsets, (count, 3), (OFFSETS_BYTES, 8), "uint64").max(0).tolist()
    _check_window(row, column, launch.rows, launch.columns)


def _host_sampler(options: Options, shape: tuple[int, ...]) -> Callable[..., None]:
    """``run(mu, sigma, seed, offsets, matrix)``, all addresses in host memory."""
    batch, d, n = _matrix_shape(options, shape)
    backend = registry.find(options.backend)
    launcher = generic.launcher(backend, _launch(options, d, n, Operation.sample, HOST))
    launch, geometry, row = launcher.run, launcher.geometry, MATRIX_TYPES[options.dtype]
    vector, is_transposed = _array_maker((d,), np.dtype(row.computing)), options.layout == "nd"
    matrix_of = _array_maker((n, d) if is_transposed else (d, n), np.dtype(row.stored))

    def run_on_arrays(mu: int, sigma: int, seed: int, offsets: int, matrix: int) -> None:
        seed, offset, first_row, first_column = _read_words(seed, offsets, d, n)
        target = matrix_of(matrix).T if is_transposed else matrix_of(matrix)
        prepared = None if geometry is None else geometry(target, first_column)
        launch(
            prepared, vector(mu), vector(sigma), 0, target, 0, 0, seed, offset, 0, first_row, first_column, 0, 0
        )  # fmt: skip

    def run_on_addresses(mu: int, sigma: int, seed: int, offsets: int, matrix: int) -> None:
        seed, offset, first_row, first_column = _read_words(seed, offsets, d, n)
        prepared = None if geometry is None else geometry(matrix, first_column)
        launch(prepared, mu, sigma, 0, matrix, 0, 0, seed, offset, 0, first_row, first_column, 0, 0)

    run_one = run_on_arrays if launcher.takes_arrays else run_on_addresses
    batched, size = _launch(options, d, n, Operation.sample, HOST, batch), batch * d * n * row.size

    def run(mu: int, sigma: int, seed: int, offsets: int, matrix: int) -> None:
        if size >= _LARGE:
            advise_huge_pages(matrix, size)
        if batch == 1:
            run_one(mu, sigma, seed, offsets, matrix)
            return
        _check_windows(batched, offsets)
        words = words_in_memory(seed, offsets)
        backend.launch(batched._replace(mu=mu, sigma=sigma, matrix=matrix, **words))

    return run_one if batch == 1 and size < _LARGE else run


# Bytes from which on XLA's memory comes fresh from the system: the least size that NumPy asks for huge pages for.
_LARGE = 1 << 22
# Elements of the noise that a gradient draws at a time, so that it stays in a core's cache.
_TILE, _TILE_ROWS = 1 << 15, 64
# Elements for each thread at the least.
_SHARE = 1 << 18


def _host_gradient(options: Options, shape: tuple[int, ...]) -> Callable[..., None]:
    """``run(matrix, seed, offsets, mu, sigma)``: writes the sums of a matrix, and of its products with the noise."""
    batch, d, n = _matrix_shape(options, shape)
    backend, launch = registry.find(options.backend), _launch(options, d, n, Operation.gradient, HOST, batch)
    if can_take_gradients(options.backend):

        def run_fused(matrix: int, seed: int, offsets: int, mu: int, sigma: int) -> None:
            _check_windows(launch, offsets)
            words = words_in_memory(seed, offsets)
            backend.launch(launch._replace(matrix=matrix, first=mu, second=sigma, **words))

        return run_fused
    steps = batch_steps(launch)
    run_one = _tiled_gradient(options, d, n)

    def run(matrix: int, seed: int, offsets: int, mu: int, sigma: int) -> None:
        for b in range(batch):
            words = _read_words(seed + b * steps["seed_at"], offsets + b * steps["offset_at"], d, n)
            run_one(matrix + b * steps["matrix"], words, mu + b * steps["first"], sigma + b * steps["second"])

    return run


def _tiled_gradient(options: Options, d: int, n: int) -> Callable[..., None]:
    """By any backend: the noise of a tile at a time, which is then multiplied and summed."""
    row = MATRIX_TYPES[options.dtype]
    real, stored = np.dtype(row.computing), np.dtype(row.stored)
    if options.layout == "dn":
        columns = min(n, _TILE)
        rows = max(1, min(d, _TILE // columns))
    else:  # Dimensions are contiguous in memory.
        rows = min(d, max(_TILE_ROWS, _TILE // n))
        columns = min(n, _TILE // rows)
    tiles: dict[tuple[int, int], Callable[..., None]] = {}
    noise_options = options._replace(
        dtype=row.computing,
        layout="dn",
        aligned=False,
        has_offsets=True,
        mu_batched=False,
        sigma_batched=False,
        seed_batched=False,
        offsets_batched=False,
    )
    vector, is_transposed = _array_maker((d,), real), options.layout == "nd"
    matrix_of = _array_maker((n, d) if is_transposed else (d, n), stored)
    zeros, ones = np.zeros(rows, real), np.ones(rows, real)
    zeros_at, ones_at = zeros.ctypes.data, ones.ctypes.data

    def sampler(height: int, width: int) -> Callable[..., None]:
        if (height, width) not in tiles:
            tiles[height, width] = _host_sampler(noise_options, (1, height, width))
        return tiles[height, width]

    def run(
        matrix: int, words: tuple[int, int, int, int], mu: int, sigma: int, keep: tuple[HostArray, ...] = (zeros, ones)
    ) -> None:
        g = matrix_of(matrix).T if is_transposed else matrix_of(matrix)
        sums, products = vector(mu), vector(sigma)
        seed, offset, first_row, first_column = words
        halves = seed >> 32, seed & 0xFFFF_FFFF

        def add_up(top: int) -> None:
            with quiet():
                add_up_tiles(top)

        def add_up_tiles(top: int) -> None:
            height = min(rows, d - top)
            noise, totals = np.empty(height * columns, real), np.zeros((2, height))
            for left in range(0, n, columns):
                width = min(columns, n - left)
                z = noise[: height * width].reshape(height, width)
                place = struct.pack("=2I3Q", *halves, offset, first_row + top, first_column + left)
                held = ctypes.create_string_buffer(place, len(place))
                at = ctypes.addressof(held)
                sampler(height, width)(zeros_at, ones_at, at, at + SEED_BYTES, z.ctypes.data)
                # NumPy adds neighbours in pairs, which is as exact as to add in float64.
                tile = np.ascontiguousarray(g[top : top + height, left : left + width])
                if row.widen is not None:
                    tile = row.widen(tile).astype(real, copy=False)
                totals[0] += tile.sum(1)
                totals[1] += np.multiply(tile, z, out=z).sum(1)
            sums[top : top + height], products[top : top + height] = totals

        threads = min(thread_count(), d * n // _SHARE)
        run_all(add_up, list(range(0, d, rows)), max(threads, 1))

    return run


# --- Memory of a CUDA device ----------------------------------------------------------------------


class _DeviceSampler:
    """``run(mu, sigma, seed, offsets, matrix, stream)``, all addresses in memory of the device."""

    def __init__(self, launcher: MemoryLauncher) -> None:
        self.launcher = launcher

    def __call__(self, mu: int, sigma: int, seed: int, offsets: int, matrix: int, stream: int) -> None:
        self.launcher.run(mu, sigma, 0, matrix, 0, 0, seed, offsets, stream, 0)

    def parameters(
        self, mu: int, sigma: int, seed: int, offsets: int, matrix: int, stream: int
    ) -> list[tuple[int, bytes]]:
        """`MemoryLauncher.parameters`; an empty list without."""
        parameters = self.launcher.parameters
        return parameters(mu, sigma, 0, matrix, 0, 0, seed, offsets, stream, 0) if parameters else []


def _device_sampler(options: Options, shape: tuple[int, ...], device: int) -> _DeviceSampler:
    batch, d, n = _matrix_shape(options, shape)
    launch = _launch(options, d, n, Operation.sample, device, batch)
    return _DeviceSampler(generic.memory_launcher(registry.find(options.backend), launch, options.has_offsets))


def _device_gradient(options: Options, shape: tuple[int, ...], device: int) -> Callable[..., None]:
    """``run(matrix, seed, offsets, mu, sigma, scratch, stream)``, all addresses in memory of the device."""
    launch = _gradient_launcher(options, shape, device).run

    def run(matrix: int, seed: int, offsets: int, mu: int, sigma: int, scratch: int, stream: int) -> None:
        launch(0, 0, 0, matrix, mu, sigma, seed, offsets, stream, scratch)

    return run


def _gradient_launcher(options: Options, shape: tuple[int, ...], device: int) -> MemoryLauncher:
    batch, d, n = _matrix_shape(options, shape)
    launch = _launch(options, d, n, Operation.gradient, device, batch)
    return generic.memory_launcher(registry.find(options.backend), launch, options.has_offsets)


def can_take_gradients(backend: str) -> bool:
    """Whether a backend has the operation `gradient`."""
    return Operation.gradient in registry.find(backend).operations


def scratch_size(options: Options, shape: tuple[int, ...]) -> int:
    """How many float64 numbers of scratch memory a gradient on CUDA needs."""
    return max(1, _gradient_launcher(options, shape, 0).scratch_size)


# --- Handlers -------------------------------------------------------------------------------------

RUNNERS: PlanCache[Callable[..., None]] = PlanCache(4096)
"""Functions that run calls on addresses, by how they are made, options, shape of the matrix and device."""


def _runner(make: Callable[..., Callable[..., None]], string: bytes, shape: bytes, *device: int) -> Callable[..., None]:
    run = make(decoded(string), xla_ffi.unpacked_shape(shape), *device)
    RUNNERS.put((make, string, shape, *device), run)
    return run


def _addresses(operands: tuple[int, ...], results: tuple[int, ...], count: int) -> list[int]:
    """Addresses of `count` operands and of the results, with 0 for offsets that are no operand."""
    addresses = [xla_ffi.address_of(buffer) for buffer in operands]
    addresses += [0] * (count - len(operands))
    return addresses + [xla_ffi.address_of(buffer) for buffer in results]


def _sample_on_host(frame: xla_ffi.Frame) -> None:
    operands, results = frame.operands(), frame.results()
    string, shape = frame.string(), xla_ffi.packed_shape_of(results[0], 3)
    run = RUNNERS.get((_host_sampler, string, shape)) or _runner(_host_sampler, string, shape)
    run(*_addresses(operands, results, 4))


def _gradient_on_host(frame: xla_ffi.Frame) -> None:
    operands = frame.operands()
    string, shape = frame.string(), xla_ffi.packed_shape_of(operands[0], 3)
    run = RUNNERS.get((_host_gradient, string, shape)) or _runner(_host_gradient, string, shape)
    run(*_addresses(operands, frame.results(), 3))


def _sample_on_device(frame: xla_ffi.Frame) -> None:
    operands, results = frame.operands(), frame.results()
    key = frame.string(), xla_ffi.packed_shape_of(results[0], 3), frame.device()
    run = RUNNERS.get((_device_sampler, *key)) or _runner(_device_sampler, *key)
    addresses = _addresses(operands, results, 4)
    run(*addresses, frame.stream())
    if isinstance(run, _DeviceSampler) and run.launcher.parameters:
        native.add_record(frame.state(native.type_id("CUDA")), key[2], addresses, run.parameters)


def _gradient_on_device(frame: xla_ffi.Frame) -> None:
    operands = frame.operands()
    key = frame.string(), xla_ffi.packed_shape_of(operands[0], 3), frame.device()
    run = RUNNERS.get((_device_gradient, *key)) or _runner(_device_gradient, *key)
    run(*_addresses(operands, frame.results(), 3), frame.stream())


# --- States ---------------------------------------------------------------------------------------


def _state(string: bytes, operation: Operation, device: int) -> native.State:
    """The state of calls with these options: everything that can be resolved before XLA calls."""
    options = decoded(string)
    c_function = getattr(registry.find(options.backend), "c_function", None)
    if c_function is None:
        return native.State()
    launch = _launch(options, 1, 1, operation, device, 1)
    return native.State(c_function(launch), options.layout == "nd", MATRIX_TYPES[options.dtype].size, pack(launch))


def prepare_on_host(options: Options) -> None:
    """Compile what a sample in host memory needs, so that its errors come before the program runs."""
    if not _state(options.encoded().encode(), Operation.sample, HOST).run:
        registry.find(options.backend).prepare("cpu")


class Road(NamedTuple):
    """How the calls of a target run on a platform."""

    state: Callable[[bytes], native.State]
    """The state of calls with an option string."""
    execute: Callable[[xla_ffi.Frame], None]
    """Runs a call in Python."""


_registered: set[str] = set()
_LOCK = threading.Lock()


def register_target(name: str, operation: Operation, roads: dict[str, Road]) -> None:
    """Register a target with XLA, on each of the platforms, once in a process."""
    with _LOCK:
        if name in _registered:
            return
        for platform, road in roads.items():
            target = _target(platform, road)
            gate.handle(native.number(operation, platform), functools.partial(xla_ffi.handle, target=target))
            addresses = native.handlers(operation, platform)
            # Said here and in the metadata of the handler, as one of the two may be all that a plugin asks for.
            records = platform == "CUDA"
            traits = {"traits": CustomCallTargetTraits.COMMAND_BUFFER_COMPATIBLE} if records else {}
            capsules = {stage: jax.ffi.pycapsule(address) for stage, address in addresses.items()}
            jax.ffi.register_ffi_target(name, capsules, platform=platform, **traits)
        _registered.add(name)


def _target(platform: str, road: Road) -> xla_ffi.Target:
    type_id = native.type_id(platform)

    def instantiate(frame: xla_ffi.Frame) -> None:
        frame.set_state(type_id, road.state(frame.string()).allocated())

    type_name = f"multisample_{platform}"
    return xla_ffi.Target(instantiate, road.execute, type_id, type_name, native.deleter(), platform == "CUDA")


def register() -> None:
    """Register the handlers of samples and of their gradients."""
    for name, operation, on_host, on_device in (
        (SAMPLE, Operation.sample, _sample_on_host, _sample_on_device),
        (GRADIENT, Operation.gradient, _gradient_on_host, _gradient_on_device),
    ):
        states = (functools.partial(_state, operation=operation, device=device) for device in (HOST, 0))
        roads = map(Road, states, (on_host, on_device))
        register_target(name, operation, dict(zip(native.PLATFORMS, roads, strict=True)))
