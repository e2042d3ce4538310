"""The handlers of the custom calls: Python functions that run a backend on the memory that XLA passes.

One string attribute holds the static options of a call, so that a saved program runs in every process. `Options` is
that string.
"""

from __future__ import annotations

import functools
import threading
from typing import NamedTuple

import jax
import numpy as np
from jaxlib.xla_client import CustomCallTargetTraits

from multisample.backends import generic, registry
from multisample.backends.contract import Backend, MemoryLauncher
from multisample.backends.element_types import MATRIX_TYPES, ElementType
from multisample.backends.launch import (
    HEAD,
    HOST,
    OPERANDS,
    Launch,
    Operation,
    WordFormat,
    matrix_of_batch,
    pack,
    type_name,
    words_in_memory,
)
from multisample.backends.memory.host import advise_huge_pages, array_at, quiet, words_at
from multisample.backends.system import xla_ffi
from multisample.backends.system.threads import run_all, thread_count

from ..._call import COLUMNS, check_rows
from ..._plan import PlanCache
from . import gate, native

__all__ = ["LAUNCHERS", "TARGETS", "Options", "can_take_gradients", "prepare_on_host", "register", "scratch_size"]

TARGETS = {operation: f"multisample_{operation.name}" for operation in Operation}
"""The names of the targets.

sample : (mu, sigma, seed, offsets) -> x, shapes (b, d), (b, d), (b, 2), (b, 6) and (b, d, n).
gradient : (g, seed, offsets) -> (sum of g, sum of g times noise), shapes (b, d).
moments : (weights, seed, offsets) -> the sums of w z, or of w z and of w z^2, shapes (n,) and (d,).

On CUDA, the last result of all but a sample is scratch memory. Seed and offsets are those of `keys.operands`; calls
without offsets have one operand less. The `b` of an operand may be 1.
"""


class Options(NamedTuple):
    """The static part of a custom call."""

    backend: str
    dtype: str
    layout: str
    shared_noise: bool
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

    def encoded(self, *moments: int) -> str:
        """The string from which `decoded` makes the options again.

        Saved programs have these strings, so their form stays. Weighted moments pass their order, d and n.
        """
        options = [getattr(self, name) for name in (_OF_MOMENTS if moments else self._fields)]
        return ",".join(x if isinstance(x, str) else str(int(x)) for x in (*options, *moments))


_OF_MOMENTS = "backend", "dtype", "shared_noise", "antithetic", "fast_math", "has_offsets"


@functools.lru_cache(1024)
def decoded(string: bytes, operation: Operation = Operation.sample) -> Options:
    """The options of a string that `Options.encoded` made."""
    names = (*_OF_MOMENTS, "order", "d", "n") if operation == Operation.moments else Options._fields
    values = dict(zip(names, string.decode().rsplit(",", len(names) - 1), strict=True))
    flags = (values.get(name) == "1" for name in Options._fields[3:])
    return Options(values["backend"], values["dtype"], values.get("layout", "dn"), *flags)


# --- Launches -------------------------------------------------------------------------------------


_SEED_BYTES, _OFFSETS_BYTES = 8, 24  # Of the seed, and of offset, first row and first column, of a matrix.


def _launch(
    options: Options, d: int, n: int, operation: Operation, device: int, batch: int = 0, results: int = 0
) -> Launch:
    """A launch without addresses."""
    row = MATRIX_TYPES[options.dtype]
    size, kind = MATRIX_TYPES[row.computing].size, ElementType[row.computing]
    launch = Launch(
        rows=d, columns=n, type=ElementType[options.dtype], operation=operation, shared_noise=options.shared_noise,
        antithetic=options.antithetic, fast_math=options.fast_math, device=device, column_phase=int(options.aligned),
        origin_in_memory=True, word_formats=WordFormat.high_first,
    )  # fmt: skip
    if operation == Operation.moments:  # Of mean 0 and standard deviation 1, which are numbers.
        return launch._replace(sigma=1.0, weights_stride=size, weights_type=kind, results=results)
    of_offsets = _OFFSETS_BYTES * options.offsets_batched
    row_stride, column_stride = (n * row.size, row.size) if options.layout == "dn" else (row.size, d * row.size)
    return launch._replace(
        mu_stride=size, sigma_stride=size, mu_type=kind, sigma_type=kind, row_stride=row_stride,
        column_stride=column_stride, batch=batch, mu_step=d * size * options.mu_batched,
        sigma_step=d * size * options.sigma_batched, matrix_step=d * n * row.size, result_step=d * size,
        seed_step=_SEED_BYTES * options.seed_batched, offset_step=of_offsets, origin_step=of_offsets,
    )  # fmt: skip


def _launch_of(frame: xla_ffi.Frame, options: Options, operation: Operation, device: int) -> Launch:
    """The launch of a call, without its stream. Compiled handlers have `native.State` and fill in the rest."""
    operands, results, scratch = frame.operands(), frame.results(), 0
    if device != HOST and operation != Operation.sample:
        results, scratch = results[:-1], xla_ffi.address_of(results[-1])
    if operation == Operation.moments:
        (n,), (d,) = xla_ffi.shape_of(operands[0], 1), xla_ffi.shape_of(results[0], 1)
        batch = 0
    else:
        matrix = results[0] if operation == Operation.sample else operands[0]
        batch, d, n = _matrix_shape(options, xla_ffi.shape_of(matrix, 3))
    launch = _launch(options, d, n, operation, device, batch, len(results))
    reads, writes = OPERANDS[operation]
    inputs, outputs = [xla_ffi.address_of(x) for x in operands], [xla_ffi.address_of(x) for x in results]
    count = len(inputs) - 1 - options.has_offsets
    addresses = dict(zip((*reads[:count], *writes), (*inputs[:count], *outputs), strict=False))
    seed, *offsets = inputs[count:]
    return launch._replace(scratch=scratch, **addresses, **words_in_memory(seed, *offsets or [0]))


def _matrix_shape(options: Options, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The batch size, d and n of a matrix operand or result."""
    batch, first, second = shape
    return (batch, first, second) if options.layout == "dn" else (batch, second, first)


# --- Host memory ----------------------------------------------------------------------------------

# Bytes from which on XLA's memory comes fresh from the system: the least size that NumPy asks for huge pages for.
_LARGE = 1 << 22
# Elements of the noise that a gradient draws at a time, so that it stays in a core's cache.
_TILE, _TILE_ROWS = 1 << 15, 64
# Elements for each thread at the least.
_SHARE = 1 << 18


def _run_on_host(backend: Backend, launch: Launch) -> None:
    if launch.offset_at:
        _check_windows(launch)
    if launch.operation == Operation.sample:
        size = launch.batch * launch.rows * launch.columns * MATRIX_TYPES[type_name(launch)].size
        if size >= _LARGE:
            advise_huge_pages(launch.matrix, size)
    if launch.operation == Operation.gradient and launch.operation not in backend.operations:
        for b in range(launch.batch):
            _sum_tiles(backend, matrix_of_batch(launch, b))
    else:
        backend.launch(launch)


def _check_windows(launch: Launch) -> None:
    count = launch.batch if launch.origin_step else 1
    _, row, column = array_at(launch.offset_at, (count, 3), (_OFFSETS_BYTES, 8), "uint64").max(0).tolist()
    check_rows(row, launch.rows)
    if column + launch.columns > COLUMNS:
        raise ValueError(f"sample_offset: expected sample_offset + n <= 2**34, got {column} + {launch.columns}")


def _sum_tiles(backend: Backend, launch: Launch) -> None:
    """A gradient by a backend without: the noise of a tile at a time, which is then multiplied and summed."""
    row, d, n = MATRIX_TYPES[type_name(launch)], launch.rows, launch.columns
    real = np.dtype(row.computing)
    if launch.column_stride <= launch.row_stride:
        columns = min(n, _TILE)
        rows = max(1, min(d, _TILE // columns))
    else:  # Dimensions are contiguous in memory.
        rows = min(d, max(_TILE_ROWS, _TILE // n))
        columns = min(n, _TILE // rows)
    g = array_at(launch.matrix, (d, n), (launch.row_stride, launch.column_stride), row.stored)
    sums, products = (array_at(at, (d,), (real.itemsize,), row.computing) for at in (launch.first, launch.second))
    seed, offset, first_row, first_column = words_at(launch)
    noise = Launch(
        sigma=1.0, seed=seed, offset=offset, column_stride=real.itemsize, type=ElementType[row.computing],
        shared_noise=launch.shared_noise, antithetic=launch.antithetic, fast_math=launch.fast_math,
    )  # fmt: skip

    def add_up(top: int) -> None:
        with quiet():
            add_up_tiles(top)

    def add_up_tiles(top: int) -> None:
        height = min(rows, d - top)
        memory, totals = np.empty(height * columns, real), np.zeros((2, height))
        for left in range(0, n, columns):
            width = min(columns, n - left)
            z = memory[: height * width].reshape(height, width)
            backend.launch(
                noise._replace(
                    matrix=z.ctypes.data, rows=height, columns=width, row_stride=width * real.itemsize,
                    first_row=first_row + top, first_column=first_column + left,
                )
            )  # fmt: skip
            # NumPy adds neighbours in pairs, which is as exact as to add in float64.
            tile = np.ascontiguousarray(g[top : top + height, left : left + width])
            if row.widen is not None:
                tile = row.widen(tile).astype(real, copy=False)
            totals[0] += tile.sum(1)
            totals[1] += np.multiply(tile, z, out=z).sum(1)
        sums[top : top + height], products[top : top + height] = totals

    threads = min(thread_count(), d * n // _SHARE)
    run_all(add_up, list(range(0, d, rows)), max(threads, 1))


# --- Memory of a CUDA device ----------------------------------------------------------------------

LAUNCHERS: PlanCache[MemoryLauncher] = PlanCache(4096)
"""The launchers of calls on devices, by backend, whether there are offsets, and the tail of `Launch`."""


def _run_on_device(options: Options, launch: Launch, frame: xla_ffi.Frame) -> None:
    key = options.backend, options.has_offsets, launch[len(HEAD) :]
    launcher = LAUNCHERS.get(key)
    if launcher is None:
        launcher = generic.memory_launcher(registry.find(options.backend), launch, options.has_offsets)
        LAUNCHERS.put(key, launcher)
    arguments = (
        launch.mu, launch.sigma, launch.weights, launch.matrix, launch.first, launch.second, launch.seed_at,
        launch.offset_at, frame.stream(), launch.scratch,
    )  # fmt: skip
    launcher.run(*arguments)
    if launch.operation == Operation.sample and launcher.parameters is not None:
        native.add_record(frame.state(native.type_id("CUDA")), launch, launcher.parameters(*arguments))


def can_take_gradients(backend: str) -> bool:
    """Whether a backend has the operation `gradient`."""
    return Operation.gradient in registry.find(backend).operations


def scratch_size(options: Options, operation: Operation, batch: int, d: int, n: int, results: int) -> int:
    """How many float64 numbers of scratch memory a call on CUDA needs."""
    launch = _launch(options, d, n, operation, 0, batch, results)
    return max(1, generic.memory_launcher(registry.find(options.backend), launch, options.has_offsets).scratch_size)


# --- Targets --------------------------------------------------------------------------------------


def _state(options: Options, operation: Operation, device: int) -> native.State:
    """The state of calls with these options: everything that can be resolved before XLA calls."""
    c_function = getattr(registry.find(options.backend), "c_function", None)
    launch = _launch(options, 1, 1, operation, device, 1, 1)
    run = 0 if c_function is None else c_function(launch)
    return native.State(run, options.layout == "nd", MATRIX_TYPES[options.dtype].size, pack(launch))


def prepare_on_host(options: Options, operation: Operation) -> None:
    """Compile what a call in host memory needs, so that its errors come before the program runs."""
    backend = registry.find(options.backend)
    generic.check_operation(backend, operation)
    if not _state(options, operation, HOST).run:
        backend.prepare("cpu")


def _target(operation: Operation, platform: str) -> xla_ffi.Target:
    type_id, on_device = native.type_id(platform), platform == "CUDA"

    def instantiate(frame: xla_ffi.Frame) -> None:
        state = _state(decoded(frame.string(), operation), operation, 0 if on_device else HOST)
        frame.set_state(type_id, state.allocated())

    def execute(frame: xla_ffi.Frame) -> None:
        options, device = decoded(frame.string(), operation), frame.device() if on_device else HOST
        launch = _launch_of(frame, options, operation, device)
        if on_device:
            _run_on_device(options, launch, frame)
        else:
            _run_on_host(registry.find(options.backend), launch)

    return xla_ffi.Target(instantiate, execute, type_id, f"multisample_{platform}", native.deleter(), on_device)


_registered: set[Operation] = set()
_LOCK = threading.Lock()


def register() -> None:
    """Register the targets with XLA, on each of the platforms, once in a process."""
    with _LOCK:
        for operation, name in TARGETS.items():
            if operation in _registered:
                continue
            for platform in native.PLATFORMS:
                target = _target(operation, platform)
                gate.handle(native.number(operation, platform), functools.partial(xla_ffi.handle, target=target))
                addresses = native.handlers(operation, platform)
                # Said here and in the metadata of the handler, as one of the two may be all that a plugin asks for.
                traits = {"traits": CustomCallTargetTraits.COMMAND_BUFFER_COMPATIBLE} if target.records else {}
                capsules = {stage: jax.ffi.pycapsule(address) for stage, address in addresses.items()}
                jax.ffi.register_ffi_target(name, capsules, platform=platform, **traits)
            _registered.add(operation)
