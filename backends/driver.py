"""Backends that launch kernels through the CUDA driver: cupy and numba."""

import collections
import ctypes
import functools
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from .contract import PROTOCOL, DeviceKind, Launcher
from .errors import BackendUnavailableError
from .kernels.cuda.conversion import CONVERSION_THREADS, conversion_blocks, convert_vectors, pack_conversions
from .kernels.cuda.geometry import geometry, is_small
from .kernels.cuda.keys import CppKey, KernelKey, Key, instance, moments_key, perturb_key
from .kernels.cuda.moments_geometry import MOMENT_THREADS, moment_geometry
from .kernels.cuda.perturb_geometry import PERTURB_THREADS, KeyOrigin, origin_of, span_lists, spans_at
from .kernels.cuda.round_keys import round_keys_of
from .launch import (
    FIELD_AT,
    HEAD,
    PACKED_LAUNCH,
    SAMPLE_CALL,
    SPAN,
    STEPS,
    Launch,
    Operation,
    Span,
    computing_name,
    packer,
    type_name,
)
from .system import cuda_driver

# The struct CUlaunchConfig of cuda.h: the grid, the block, shared memory, stream, no attributes.
_CONFIGURATION = struct.Struct("7I4xPP I4x")
_pack_configuration = _CONFIGURATION.pack
CONFIGURATION_SIZE = _CONFIGURATION.size


def _parts(launch: Launch) -> list[tuple[int, list[int]]]:
    """The parts of a batch that are launched one by one: their lengths, and how far they move the fields `STEPS`."""
    most = 65535  # The length of a grid's y axis.
    if launch.operation == Operation.moments:  # Its kernels take no batches.
        most = 1
    elif launch.operation == Operation.sample and is_small(launch):
        most = 2**31 - 1  # The length of the x axis.
    steps = [getattr(launch, step) for step in STEPS.values()]
    return [(min(most, launch.batch - b), [b * step for step in steps]) for b in range(0, max(launch.batch, 1), most)]


def _moved(addresses: Sequence[Any], moves: list[int]) -> list[Any]:
    """The addresses of a part. A number does not move: -0.0 plus 0 would be 0.0."""
    return [x + move if move else x for x, move in zip(addresses, moves, strict=True)]


def _places(*fields: str) -> tuple[tuple[int, int], ...]:
    return tuple((CONFIGURATION_SIZE + FIELD_AT[field], 8 * k) for k, field in enumerate(fields))


PLACES: dict[str, tuple[tuple[int, int], ...]] = {
    **{name: _places(name) for name in ("mu", "sigma", "weights", "matrix", "first", "second")},
    "seed": _places("seed_at"),
    "offsets": _places("offset_at", "first_row_at", "first_column_at"),
    "stream": ((struct.calcsize("7I4x"), 0), *_places("stream")),
    "scratch": _places("scratch"),
}
"""The places of each address in the parameter bytes of `DriverBackend.parameters`, of kernels that take a launch.

A place is a pair: a displacement from the first parameter byte, and an addend for the address. The addresses of seed
and offsets are included.
"""


def pack_configuration(blocks: int, threads: int, stream: int, batch: int = 1) -> bytes:
    """The configuration of a launch; the grid's y axis counts the matrices of a batch."""
    return _pack_configuration(blocks, batch, 1, threads, 1, 1, 0, stream, 0, 0)


_Ready: TypeAlias = tuple[Callable[[int, bytes], None], int, bytes]
"""``launch(kernel, parameters)``, with its arguments."""


def _launch_all(kernels: Iterable[_Ready]) -> None:
    for launch_kernel, kernel, parameters in kernels:
        launch_kernel(kernel, parameters)


class Step(NamedTuple):
    """One kernel of a launch, with the arguments that are the same for all calls of a plan."""

    launch: Callable[[int, bytes], None]
    kernel: int
    blocks: int
    batch: int
    threads: int
    omitted: int
    """How many bytes at the begin of the head the kernel does not take."""
    rest: bytes
    """What follows the head: fields of the tail of `Launch`, and the geometry."""
    keys: Callable[[int], bytes] | None
    """The round keys for a seed, if the kernel takes them as arguments."""


Steps: TypeAlias = tuple[Step, ...]

_Kernels: TypeAlias = Callable[[Sequence[Any], tuple[int, int, int, int], int, int], Iterator[_Ready]]
"""``kernels(addresses, words, stream, scratch)``: the kernels of a launch, each with its arguments.

`addresses` has the values of the fields `STEPS`. `words` are the seed, the offset, the first row and the first column.
Kernels ignore a word whose address is not null.
"""

_Converter: TypeAlias = Callable[[Sequence[Any], int, int], tuple[_Ready, list[Any], int]]
"""``convert(addresses, stream, scratch)`` returns three things: the launch of the kernel that converts vectors; the
addresses that later kernels read, in which a copy in scratch memory replaces each converted vector; and the address
where unused scratch memory begins. `addresses` begins with the addresses of mu, sigma and weights.
"""

_WHOLE_LAUNCH = slice(0, PACKED_LAUNCH)


class DriverBackend:
    """Base of backends that compile a kernel for each key and launch it through the CUDA driver."""

    name: str
    device_kinds: tuple[DeviceKind, ...] = ("cuda",)
    protocol = PROTOCOL
    operations: Collection[int] = (Operation.sample, Operation.moments, Operation.perturb)
    compile: Callable[[Key], cuda_driver.MachineCode]
    """``compile(key)``: the kernel `key`, for the current device, which is that of the key."""
    remedy: str
    """The advice for a kernel that cannot be compiled or loaded."""

    def __init__(self) -> None:
        self._handles: dict[Key, int] = {}
        self._launch_of_size = functools.cache(self._launch_function)
        self._kernels_of_tail = functools.lru_cache(4096)(
            lambda tail, phase: self._kernels(Launch(*[0] * len(HEAD), *tail), phase)
        )

    def kernel(self, key: Key) -> int:
        """The driver's handle of a kernel, compiled on first use."""
        if key not in self._handles:
            try:
                with cuda_driver.on_device(key.device):
                    self._handles[key] = cuda_driver.load_kernel(self.compile(key))
            except BackendUnavailableError:
                raise
            except Exception as error:
                lines = str(error).strip("\0\n ").splitlines() or [type(error).__name__]
                reason = "\n".join((*lines[-20:], self.remedy))
                raise BackendUnavailableError(
                    f"backend: {self.name!r} could not compile or load its kernel: {reason}"
                ) from error
        return self._handles[key]

    def _launch_function(self, size: int, device: int) -> Callable[[int, bytes], None]:
        """``launch(kernel, parameters)`` launches with the bytes of a configuration and `size` bytes of arguments.

        Concurrent launches, from threads, signal handlers or destructors, use different buffers.
        """
        free: collections.deque[_Buffer] = collections.deque()
        launch_kernel, get_device = cuda_driver.launch_function(), cuda_driver.driver().cuCtxGetDevice

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

    def step(
        self, launch: Launch, key: Key, blocks: int, threads: int, geometry: bytes,
        keys: Callable[[int], bytes] | None = None, batch: int = 1, taken: slice = _WHOLE_LAUNCH,
    ) -> Step:  # fmt: skip
        """The kernel `key` on a grid of (`blocks`, `batch`).

        The kernel takes the bytes `taken` of a launch, `geometry` and `keys`.
        """
        size = taken.stop - taken.start + len(geometry) + (len(keys(0)) if keys else 0)
        launch_kernel, (_, tail) = self._launch_of_size(size, launch.device), packer(launch)
        rest = tail[: taken.stop - 8 * len(HEAD)] + geometry
        return Step(launch_kernel, self.kernel(key), blocks, batch, threads, taken.start, rest, keys)

    def launch(self, launch: Launch) -> None:
        _launch_all(self._ready(launch))

    def parameters(self, launch: Launch) -> list[tuple[int, bytes]]:
        """See `Backend`."""
        return [ready[1:] for ready in self._ready(launch)]

    def _ready(self, launch: Launch) -> Iterator[_Ready]:
        phase = launch.column_phase - 1 if launch.first_column_at else None
        addresses = [getattr(launch, name) for name in STEPS]
        if launch.operation == Operation.perturb:
            addresses[3] = ctypes.string_at(launch.matrix, launch.spans * SPAN.size)
        words = launch.seed, launch.offset, launch.first_row, launch.first_column
        return self._kernels_of_tail(launch[len(HEAD) :], phase)(addresses, words, launch.stream, launch.scratch)

    def launcher(self, launch: Launch) -> Launcher:
        readable, convert, taken = self._converter(launch)
        scratch_size = None
        if convert or launch.operation == Operation.moments:
            size = functools.cache(lambda phase: taken + _scratch_size(readable, phase))
            scratch_size = lambda first_column: size(first_column & 7)  # noqa: E731
        if launch.batch or launch.operation == Operation.perturb:
            kernels = self._kernels(launch, None)

            def run_all(
                geometry: None, mu: Any, sigma: Any, weights: Any, matrix: Any, first: int, second: int, seed: int,
                offset: int, seed_at: int, offset_at: int, first_row: int, first_column: int, stream: int, scratch: int,
            ) -> None:  # fmt: skip
                row_at = first_row if launch.origin_step else 0
                addresses = mu, sigma, weights, matrix, first, second, seed_at, offset_at, row_at, row_at
                _launch_all(kernels(addresses, (seed, offset, first_row, first_column), stream, scratch))

            return Launcher(run_all, scratch_size=scratch_size)
        (pack_head, _), steps_of = packer(readable), _STEPS[launch.operation]
        # The kernels for each alignment of the matrix and first column.
        steps = functools.cache(lambda misalignment, phase: steps_of(self, _at(readable, misalignment, phase)))

        def run(
            geometry: Steps, mu: Any, sigma: Any, weights: Any, matrix: int, first: int, second: int, seed: int,
            offset: int, seed_at: int, offset_at: int, first_row: int, first_column: int, stream: int, scratch: int,
        ) -> None:  # fmt: skip
            if convert is not None:
                conversion, (mu, sigma, weights), scratch = convert((mu, sigma, weights), stream, scratch)
                _launch_all((conversion,))
            head = pack_head(
                weights, first, second, seed_at, 0, 0, scratch, stream, 0, offset_at, mu, sigma, matrix, seed, offset,
                first_row, first_column,
            )  # fmt: skip
            for launch_kernel, kernel, blocks, batch, threads, omitted, rest, keys in geometry:
                configuration = _pack_configuration(blocks, batch, 1, threads, 1, 1, 0, stream, 0, 0)
                parameters = configuration + head[omitted:] + rest
                launch_kernel(kernel, parameters if keys is None else parameters + keys(seed))

        return Launcher(
            run, geometry=lambda matrix, first_column: steps(matrix & 31, first_column & 7), scratch_size=scratch_size
        )

    def _kernels(self, launch: Launch, phase: int | None) -> _Kernels:
        """The kernels of launches like `launch`, which may be a batch.

        `phase` is the first column modulo 8; if it is None, the words give it.
        """
        if launch.operation == Operation.perturb:
            return self._perturbing(launch)
        launch, convert, _ = self._converter(launch)
        (pack_head, _), steps_of, parts = packer(launch), _STEPS[launch.operation], _parts(launch)

        @functools.cache
        def steps_of_part(length: int, misalignment: int, phase: int) -> Steps:
            with cuda_driver.relaxed_capture():  # A kernel can be loaded while the stream is being captured.
                return steps_of(self, _at(launch._replace(batch=length), misalignment, phase))

        def kernels(
            addresses: Sequence[Any], words: tuple[int, int, int, int], stream: int, scratch: int
        ) -> Iterator[_Ready]:
            if convert is not None:
                conversion, addresses, scratch = convert(addresses, stream, scratch)
                yield conversion
            for length, moves in parts:
                (
                    mu, sigma, weights, matrix, first, second, seed_at, offset_at, row_at, column_at,
                ) = _moved(addresses, moves)  # fmt: skip
                steps = steps_of_part(length, matrix & 31, words[3] & 7 if phase is None else phase)
                head = pack_head(
                    weights, first, second, seed_at, row_at, column_at, scratch, stream, 0, offset_at, mu, sigma,
                    matrix, *words,
                )  # fmt: skip
                for step in steps:
                    configuration = pack_configuration(step.blocks, step.threads, stream, step.batch)
                    keys = b"" if step.keys is None else step.keys(words[0])
                    yield step.launch, step.kernel, configuration + head[step.omitted :] + step.rest + keys

        return kernels

    def _converter(self, launch: Launch) -> tuple[Launch, _Converter | None, int]:
        """The launch with converted vectors, their conversion, and its size in scratch memory, in float64 numbers.

        Compiles the kernel that converts. The conversion is None if kernels can read all vectors as they are.
        """
        readable, conversions, taken = convert_vectors(launch)
        if not conversions:
            return launch, None, 0
        with cuda_driver.relaxed_capture():  # A kernel can be loaded while the stream is being captured.
            name = instance("conversion_kernel", computing_name(launch))
            kernel = self.kernel(CppKey("conversion_kernel", name, launch.device))
        launch_kernel = self._launch_of_size(len(pack_conversions((), (), 0)), launch.device)
        blocks = conversion_blocks(conversions)

        def convert(addresses: Sequence[Any], stream: int, scratch: int) -> tuple[_Ready, list[Any], int]:
            configuration = pack_configuration(blocks, CONVERSION_THREADS, stream, len(conversions))
            parameters, copies = pack_conversions(conversions, addresses, scratch), list(addresses)
            for conversion in conversions:
                copies[conversion.input] = scratch + conversion.place
            return (launch_kernel, kernel, configuration + parameters), copies, scratch + 8 * taken

        return readable, convert, taken

    def _perturbing(self, launch: Launch) -> _Kernels:
        """The kernels of `perturb`. They get the packed spans in place of the address of a matrix.

        Spans that differ from the previous ones only in addresses keep their cut into kernels.
        """
        launch, convert, _ = self._converter(launch)
        dtype, (pack_head, tail) = type_name(launch), packer(launch)
        last: tuple[bytes, Any, list[tuple[Callable[[int, bytes], None], int, int]]] = b"", None, []
        keys, rows = round_keys_of(computing_name(launch)), launch.rows
        parts = _parts(launch._replace(matrix_step=0))  # `addresses` have spans in the place of the matrix.
        source_step, target_step = Span._fields.index("source_step"), Span._fields.index("target_step")

        def prepared(strided: bool, blocks: int, place: slice, origin: KeyOrigin) -> Any:
            fast_math = bool(launch.fast_math) and dtype != "float64"
            one_member = rows == 1 and origin != KeyOrigin.kOfRows
            key = perturb_key(dtype, fast_math, one_member, strided, origin, launch.device)
            size = PACKED_LAUNCH + 8 * (place.stop - place.start) + len(keys(0))
            return self._launch_of_size(size, launch.device), self.kernel(key), blocks

        def kernels(
            addresses: Sequence[Any], words: tuple[int, int, int, int], stream: int, scratch: int
        ) -> Iterator[_Ready]:
            nonlocal last
            if convert is not None:
                conversion, addresses, _ = convert(addresses, stream, scratch)
                yield conversion
            spans = spans_at(addresses[3])
            origin = origin_of(launch, spans)
            shapes = bytes((origin,)) + spans[:, 2:-1].tobytes()
            known, lists, ready = last
            if shapes != known:
                lists = span_lists(launch, spans, origin)
                with cuda_driver.relaxed_capture():  # A kernel can be loaded while the stream is being captured.
                    ready = [prepared(*kernel, origin) for kernel in lists.kernels]
                last = shapes, lists, ready
            of_seed = keys(words[0])
            first = 0
            for batch, moves in parts:
                _, sigma, weights, *_, seed_at, offset_at, row_at, column_at = _moved(addresses, moves)
                head = pack_head(
                    weights, 0, 0, seed_at, row_at, column_at, 0, stream, 0, offset_at, 0, sigma, 0, *words
                )
                own = spans
                if first:
                    own = spans.copy()
                    own[:, :2] += first * spans[:, (source_step, target_step)]
                for (launch_kernel, kernel, blocks), packed in zip(ready, lists.packed(own), strict=True):
                    configuration = pack_configuration(blocks, PERTURB_THREADS, stream, max(batch, 1))
                    yield launch_kernel, kernel, configuration + head + tail + packed + of_seed
                first += batch

        return kernels

    def advancer(self, device: int) -> Callable[[int, int], None]:
        kernel = self.kernel(CppKey("advance_kernel", "multisample::advance_kernel", device))
        launch = self._launch_of_size(8, device)

        def advance(address: int, stream: int) -> None:
            launch(kernel, pack_configuration(1, 1, stream) + address.to_bytes(8, sys.byteorder))

        return advance


_Buffer = tuple[memoryview, Any, Any, Any, ctypes.c_int, ctypes.c_size_t]


def _buffer(size: int) -> _Buffer:
    """Memory for the configuration of a launch, followed by `size` bytes of arguments.

    Returns a view to write to; the configuration and `extra` of cuLaunchKernelEx; the pointer for cuCtxGetDevice, and
    the device number at that pointer; and the size, which must live as long as `extra`.
    """
    memory = ctypes.create_string_buffer(CONFIGURATION_SIZE + size)
    arguments, count = ctypes.addressof(memory) + CONFIGURATION_SIZE, ctypes.c_size_t(size)
    # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE and CU_LAUNCH_PARAM_END of cuda.h.
    extra = (ctypes.c_void_p * 5)(1, arguments, 2, ctypes.addressof(count), 0)
    ordinal = ctypes.c_int()
    return memoryview(memory).cast("B"), ctypes.byref(memory), extra, ctypes.byref(ordinal), ordinal, count


# --- The kernels of each operation: steps(backend, launch), of a launch by `_at` ------------------------------------


def _at(launch: Launch, misalignment: int, phase: int) -> Launch:
    """The launch with a matrix at the address `misalignment`, modulo 32, and a first column `phase`, modulo 8.

    `phase` is -1 if the first column is unknown. The geometry depends on no other field of the head.
    """
    return launch._replace(matrix=misalignment, first_column=phase, first_column_at=int(phase < 0))


def _sample_steps(backend: DriverBackend, launch: Launch) -> Steps:
    dtype = type_name(launch)
    # All matrices of a batch have one geometry. kStrided and kFewRows support matrices whose addresses are aligned
    # differently.
    strided = launch.batch > 1 and launch.matrix_step % 32 != 0
    g = geometry(launch, strided)
    key = KernelKey(
        dtype, bool(launch.shared_noise), bool(launch.antithetic), bool(launch.fast_math) and dtype != "float64",
        g.store_kind, bool(launch.origin_in_memory), launch.batch > 1, launch.device, *g.version,
    )  # fmt: skip
    taken = SAMPLE_CALL if key.turns else _WHOLE_LAUNCH  # Plain kernels take a part.
    batch = 1 if g.matrices else max(launch.batch, 1)
    return (backend.step(launch, key, g.blocks, g.threads, g.packed(), None, batch, taken),)


def _moments_steps(backend: DriverBackend, launch: Launch) -> Steps:
    real, g = computing_name(launch), moment_geometry(launch)
    key = moments_key(
        real, bool(launch.antithetic), bool(launch.fast_math) and real != "float64", g.rows, launch.results > 1,
        bool(launch.origin_in_memory), launch.device,
    )  # fmt: skip
    packed = g.packed()
    sums = backend.step(launch, key, g.blocks, MOMENT_THREADS, packed, round_keys_of(real))
    if not g.finishing_blocks:
        return (sums,)
    finishing = CppKey("moments_kernel", instance("finish_moments_kernel", real), launch.device)
    return sums, backend.step(launch, finishing, g.finishing_blocks, MOMENT_THREADS, packed)


def _scratch_size(launch: Launch, phase: int) -> int:
    """How many float64 numbers of scratch memory the sums need."""
    return moment_geometry(_at(launch, 0, phase)).scratch_size(launch) if launch.operation == Operation.moments else 0


_STEPS: dict[int, Callable[[DriverBackend, Launch], Steps]] = {
    Operation.sample: _sample_steps,
    Operation.moments: _moments_steps,
}
