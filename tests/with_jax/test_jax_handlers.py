"""Handlers called as XLA does, by structs with the layouts of ``xla/ffi/api/c_api.h``, and a device that records."""

from __future__ import annotations

import ctypes
import itertools
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from multisample._routes.jax import handlers, native, python_entry
from multisample._routes.jax.static import Parameter, Static, decoded
from multisample.backends import registry
from multisample.backends.contract import BackendStatus
from multisample.backends.driver import CONFIGURATION_SIZE, DriverBackend, _at, _sample_steps
from multisample.backends.kernels.cuda.keys import KernelKey
from multisample.backends.launch import HEAD, PACKED_LAUNCH, UNIT_FACTOR, Launch, Operation, pack
from multisample.backends.system import cuda_driver, xla_ffi

P = ctypes.c_void_p
CALL = ctypes.CFUNCTYPE(P, P)


def structure(name: str, *fields: tuple[str, Any], heads: int = 2) -> Any:
    """A struct of the interface, which begins with its size and its extensions."""
    head = [("size", ctypes.c_size_t), ("extension", P)][:heads]
    return type(name, (ctypes.Structure,), {"_fields_": [*head, *fields]})


INT, INT64, POINTER = ctypes.c_int, ctypes.c_int64, ctypes.POINTER
FUNCTIONS = (
    "error_create", "error_get_message", "error_destroy", "handler_register", "stream_get", "type_register",
    "context_get", "state_set", "state_get", "allocate", "free", "schedule", "threads", "future_create", "future_set",
    "future_error", "run_id", "ordinal",
)  # fmt: skip
Version = structure("Version", ("major", INT), ("minor", INT))
Api = structure("Api", ("version", Version), ("internal", P), *((name, P) for name in FUNCTIONS))
Request = structure("Request", ("context", P), ("stream", P))
Ordinal = structure("Ordinal", ("context", P), ("ordinal", ctypes.c_int32))
Error = structure("Error", ("message", ctypes.c_char_p), ("code", INT))
Buffer = structure("Buffer", ("dtype", INT), ("data", P), ("rank", INT64), ("dims", POINTER(INT64)))
List = structure("List", ("count", INT64), ("types", POINTER(INT)), ("items", POINTER(P)))
Span = structure("Span", ("pointer", ctypes.c_char_p), ("length", ctypes.c_size_t), heads=0)
Attributes = structure("Attributes", ("count", INT64), ("types", POINTER(INT)), ("names", P), ("items", POINTER(P)))
BUFFERS = ("arguments", List), ("results", List), ("attributes", Attributes)
CallFrame = structure("CallFrame", ("api", POINTER(Api)), ("context", P), ("stage", INT), *BUFFERS, ("future", P))
Metadata = structure("Metadata", ("version", Version), ("traits", ctypes.c_uint32), ("state", INT64), heads=1)
Extension = structure("Extension", ("kind", INT), ("next", P), ("metadata", POINTER(Metadata)), heads=1)
State = structure("State", ("context", P), ("stage", INT), ("type_id", POINTER(INT64)), ("state", P))
Type = structure("Type", ("name", Span), ("type_id", POINTER(INT64)), ("information", POINTER(ctypes.c_size_t)))

CONTEXT, STREAM, DEVICE = 0x1234, 0x5678, 3


def metadata_request(xla: Xla) -> tuple[Any, Any]:
    """A call frame whose second extension asks for metadata, and the struct to be filled."""
    metadata = Metadata(48, Version(24))
    inner = Extension(32, 1, None, ctypes.pointer(metadata))
    outer = Extension(24, 77, ctypes.addressof(inner), None)
    xla.kept += [metadata, inner, outer]
    return CallFrame(168, ctypes.addressof(outer), ctypes.pointer(xla.api)), metadata


class Xla:
    """A fake XLA runtime with one executable of one call, whose state it keeps, and the errors that handlers create."""

    def __init__(self, version: tuple[int, int] = (0, 3)) -> None:
        self.device = DEVICE
        self.errors: list[tuple[int, str]] = []
        self.kept: list[Any] = []
        self.types: list[bytes] = []
        self.state: int | None = None
        self.api = Api(version=Version(24, None, *version))
        for name, function in (
            ("error_create", self.error), ("stream_get", self.stream), ("ordinal", self.ordinal),
            ("type_register", self.register), ("state_set", self.set_state), ("state_get", self.get_state),
        ):  # fmt: skip
            held = CALL(function)
            self.kept.append(held)
            setattr(self.api, name, ctypes.cast(held, P))

    def error(self, address: int) -> int:
        request = Error.from_address(address)
        self.errors.append((request.code, request.message.decode()))
        return len(self.errors)

    def stream(self, address: int) -> None:
        request = Request.from_address(address)
        assert (request.context, request.size) == (CONTEXT, 32)
        request.stream = STREAM

    def ordinal(self, address: int) -> None:
        request = Ordinal.from_address(address)
        assert (request.context, request.size) == (CONTEXT, 28)
        request.ordinal = self.device

    def register(self, address: int) -> None:
        request = Type.from_address(address)
        assert (request.type_id[0], request.information[0]) == (0, 24)
        self.types.append(request.name.pointer[: request.name.length])
        request.type_id[0] = 77

    def set_state(self, address: int) -> None:
        request = State.from_address(address)
        assert (request.context, request.size, request.stage) == (CONTEXT, 48, 0)
        self.state = request.state

    def get_state(self, address: int) -> int | None:
        request = State.from_address(address)
        assert (request.context, request.size, request.stage) == (CONTEXT, 48, 0)
        request.state = self.state
        return 1 if self.state is None else None

    def _list(self, kind: int, items: list[Any]) -> tuple[Any, Any]:
        types, pointers = (ctypes.c_int * 8)(*[kind] * 8), (P * 8)(*map(ctypes.addressof, items))
        self.kept += [types, pointers, items]
        return types, pointers

    def frame(self, string: str, operands: list[Any], results: list[Any], stage: int = 3) -> CallFrame:
        def buffers(arrays: list[Any]) -> List:
            made = []
            for array in arrays:
                dims = (ctypes.c_int64 * array.ndim)(*array.shape)
                self.kept += [dims, array]
                made.append(Buffer(48, None, 11, array.ctypes.data, array.ndim, dims))
            return List(40, None, len(made), *self._list(1, made))

        types, pointers = self._list(4, [Span(string.encode(), len(string))])
        head = 168, None, ctypes.pointer(self.api), CONTEXT, stage
        attributes = Attributes(48, None, 1, types, None, pointers)
        return CallFrame(*head, buffers(operands), buffers(results), attributes, None)


def run(handler: Callable[[int], int | None], frame: CallFrame) -> int:
    return handler(ctypes.addressof(frame)) or 0


def in_python(execute: Callable[[xla_ffi.Frame], None]) -> Callable[[int], int]:
    """A handler that takes the address of a frame, as `enter_python` calls it."""
    type_id = INT64()
    target = xla_ffi.Target(lambda frame, launch: execute(frame), "test", ctypes.addressof(type_id), 1, False)
    return lambda address, held=type_id: xla_ffi.handle(address, 0, target)


def execute_on_device(operation: Operation, xla: Xla, frame: CallFrame, function: int = 0) -> None:
    """Run the handler of `operation`. Python runs the backend, unless there is a C function, at address `function`."""
    number = native.number(operation, on_device=True)
    python_entry.targets[number] = handlers._target(operation, on_device=True)
    if xla.state is None:
        _, template = handlers._state(decoded(frame_string(frame), operation), 0)
        xla.state = native.new_state(function, template)
    assert run(CALL(native.handler(operation, True, number)), frame) == 0, xla.errors


def test_the_layouts_are_those_of_the_header() -> None:
    """The order of the functions determines their offsets."""
    header = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text(encoding="utf-8")
    body = header[header.index("struct XLA_FFI_Api {") :]
    names = [line.split("(")[1].split(")")[0] for line in body.splitlines() if "_XLA_FFI_API_STRUCT_FIELD(" in line]
    for name, offset in (
        ("XLA_FFI_Error_Create", xla_ffi.ERROR_CREATE),
        ("XLA_FFI_Type_Register", xla_ffi._TYPE_REGISTER),
        ("XLA_FFI_State_Set", xla_ffi._STATE_SET),
        ("XLA_FFI_State_Get", xla_ffi.STATE_GET),
        ("XLA_FFI_Stream_Get", xla_ffi.STREAM_GET),
        ("XLA_FFI_DeviceOrdinal_Get", xla_ffi.ORDINAL_GET),
    ):
        assert 48 + 8 * names.index(name) == offset
    assert (Api.error_create.offset, Api.ordinal.offset, CallFrame.attributes.offset) == (48, 184, 120)


@pytest.mark.parametrize("version", [(0, 3), (0, 9), (1, 3), (0, 2)])
def test_a_query_for_metadata_is_answered_or_the_version_refused(version: tuple[int, int]) -> None:
    xla = Xla(version)
    frame, metadata = metadata_request(xla)
    calls: list[Any] = []
    error = run(in_python(calls.append), frame)
    assert (metadata.traits, calls) == (0, [])
    if version in ((0, 3), (0, 9)):
        assert (error, metadata.state, xla.types) == (0, 77, [b"multisample_test"])
        assert (metadata.version.major, metadata.version.minor) == version
        return
    ((_, message),) = xla.errors
    assert f"got {version[0]}.{version[1]}" in message
    assert (error, metadata.version.minor) == (1, 0)


@pytest.mark.parametrize(("error", "code"), [
    (ValueError("dim_offset: é"), 3), (TypeError("x"), 3), (MemoryError(), 8), (RuntimeError("y"), 13),
    (KeyError(), 13), (RuntimeError("surrogate \udcff, null \0"), 13),
])  # fmt: skip
def test_exceptions_become_errors(error: Exception, code: int) -> None:
    def fail(frame: xla_ffi.Frame) -> None:
        raise error

    xla = Xla()
    assert run(in_python(fail), xla.frame("x", [], [])) == 1
    ((found, message),) = xla.errors
    assert found == code
    text = str(error).replace("\udcff", r"\udcff").replace("\0", r"\0")
    assert message == (text or {8: "out of memory", 13: "KeyError"}[code])


def words_in_memory(seed: int, offsets: int) -> dict[str, int]:
    """Address fields of a launch. `offsets` is the address of offset and window, or 0 if only the seed is in memory."""
    places = {name: 8 * k for k, name in enumerate(("offset_at", "first_row_at", "first_column_at"))}
    return {"seed_at": seed, **{name: offsets and offsets + place for name, place in places.items()}}


def words(seed: int, *offsets: int) -> tuple[Any, Any]:
    """The operands seed and offsets."""
    return np.array([[seed >> 32, seed & 0xFFFF_FFFF]], np.uint32), np.array([offsets], np.uint64).view(np.uint32)


def test_strings_of_saved_programs_are_read() -> None:
    parameters = Parameter(7, (5, 4), (8, 1)), Parameter(9, (), ())
    sample = Static('a,"b', "float32", "nd", False, True, aligned=True, batched=("mu", "seed"))
    perturb = Static("cpu", "float64", shared_noise=True, parameters=parameters, operation=Operation.perturb)
    for static in (sample, perturb):
        assert decoded(static.encoded().encode(), static.operation) == static


class Recording(DriverBackend):
    """A GPU backend without a driver: it records the bytes of each launch."""

    device_kinds = ("cuda",)
    host_library = "cupy"

    def __init__(self, name: str = "recording") -> None:
        super().__init__()
        self.name = name
        self.launched: list[tuple[int, bytes, int]] = []
        self.kernels: list[KernelKey] = []

    def status(self) -> BackendStatus:
        return BackendStatus(True)

    def prepare(self, device_kind: str) -> None:
        pass

    def adopt(self, array: Any) -> Any:
        return array

    def kernel(self, key: KernelKey) -> int:
        if key not in self.kernels:
            self.kernels.append(key)
        return self.kernels.index(key)

    def compile(self, key: KernelKey) -> cuda_driver.MachineCode:
        raise AssertionError(key)

    def _launch_function(self, size: int, device: int) -> Callable[[int, bytes], None]:
        return lambda kernel, parameters: self.launched.append((kernel, parameters, device))


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    backend = Recording()
    registry.register(backend)
    yield backend


@pytest.mark.parametrize("of_blocks", [False, True])
def test_parameters_on_a_device_are_one_launch(recording: Recording, monkeypatch: Any, of_blocks: bool) -> None:
    parameters = Parameter(7, (5, 4), (8, 1)), Parameter(9, (6,), (1,))
    options = Static("recording", "float32", parameters=parameters, operation=Operation.perturb)
    assert decoded(options.encoded().encode(), Operation.perturb) == options
    p, x = ([np.zeros(one.shape, np.float32) for one in parameters] for _ in range(2))
    weights, (seed, offsets), begins = np.zeros(3, np.float32), words(5, 6, 7, 0), np.array([4, 2**33 + 2])
    reads: list[int] = []
    read = lambda address, size, stream, device: reads.append(stream) or ctypes.string_at(address, size)  # noqa: E731
    monkeypatch.setattr(cuda_driver, "read", read)
    xla = Xla()
    frame = xla.frame(options.encoded(), [*p, weights, seed[0], offsets[0], *[begins.view(np.uint32)] * of_blocks], x)
    # Python reads `begins` in device memory, even if the backend has a C function.
    function = ctypes.CFUNCTYPE(ctypes.c_int, P)(lambda launch: 0)
    execute_on_device(Operation.perturb, xla, frame, of_blocks * (ctypes.cast(function, P).value or 0))
    launched, recording.launched = recording.launched, []
    execute_on_device(Operation.perturb, xla, frame)
    assert (reads, recording.launched) == ([STREAM] * of_blocks, launched)
    CALL(native.deleter(on_device=True))(xla.state)
    recording.launched = []
    rows = (5, 4, 8, 16, 4, 16, 4, 7), (1, 6, 0, 0, 4, 0, 4, 9)
    spans = np.array([
        (source.ctypes.data, target.ctypes.data, begin * of_blocks, *row, 0, 0, UNIT_FACTOR)
        for source, target, begin, row in zip(p, x, begins, rows, strict=True)
    ])  # fmt: skip
    launch: Launch = handlers._launch(options._replace(d=1, n=1), DEVICE)._replace(
        weights=weights.ctypes.data, matrix=spans.ctypes.data, spans=2, rows=3, columns=26, stream=STREAM,
        **words_in_memory(seed.ctypes.data, offsets.ctypes.data),
    )  # fmt: skip
    recording.launch(launch)
    assert len(launched) == 2  # A contiguous span and a strided one have kernels of their own.
    for (kernel, found, device), (own, expected, _) in zip(launched, recording.launched, strict=True):
        assert (kernel, device) == (own, DEVICE)
        assert struct.pack("P", launch.weights) in found
        assert found[CONFIGURATION_SIZE + 8 * len(HEAD) :] == expected[CONFIGURATION_SIZE + 8 * len(HEAD) :]


class Native:
    """The compiled handlers of samples on CUDA, with a fake driver that records launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.in_python = 0
        self.launched: list[tuple[int, bytes]] = []
        self.modes: list[int] = []
        self.error, self.device = 0, DEVICE
        driver = ctypes.CFUNCTYPE(ctypes.c_int, P, P, P, P)(self._launch)
        get_device = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))(self._current)
        exchange = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))(self._exchange)
        cuda = SimpleNamespace(
            cuLaunchKernelEx=driver, cuCtxGetDevice=get_device, cuThreadExchangeStreamCaptureMode=exchange
        )
        monkeypatch.setattr(cuda_driver, "driver", lambda: cuda)
        before = native._process.copy()
        monkeypatch.setattr(python_entry, "targets", dict(python_entry.targets))
        target, number = handlers._target(Operation.sample, True), native.number(Operation.sample, True)
        self._call_in_python = target.call
        python_entry.targets[number] = target._replace(call=self._call)
        self._handler = CALL(native.handler(Operation.sample, True, number))
        self._restore = lambda: native._process.__setitem__(slice(None), before)
        native._process[native._TYPES + 1] = 77

    def _call(self, frame: xla_ffi.Frame, launch: int) -> None:
        self.in_python += launch != 0
        self._call_in_python(frame, launch)

    def _launch(self, configuration: int, kernel: int | None, parameters: None, extra: int) -> int:
        begin, arguments, size_of, size_at, end = (ctypes.c_uint64 * 5).from_address(extra)
        assert (begin, size_of, end, parameters) == (1, 2, 0, None)
        size = ctypes.c_uint64.from_address(size_at).value
        data = ctypes.string_at(configuration, CONFIGURATION_SIZE) + ctypes.string_at(arguments, size)
        self.launched.append((kernel or 0, data))
        return self.error

    def _current(self, at: Any) -> int:
        at[0] = self.device
        return 0

    def _exchange(self, at: Any) -> int:
        self.modes.append(at[0])
        at[0] = 1
        return 0

    def instantiate(self, xla: Xla, frame: CallFrame) -> None:
        stage, frame.stage = frame.stage, 0
        assert run(self._handler, frame) == 0
        frame.stage = stage
        assert xla.state

    def python(self, xla: Xla, frame: CallFrame) -> int:
        """Run the call as the first of its instruction; first calls enter Python."""
        state = xla.state
        self.instantiate(xla, frame)
        error = self(frame)
        xla.state = state
        return error

    def __call__(self, frame: CallFrame) -> int:
        return run(self._handler, frame)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Native]:
    native_calls = Native(monkeypatch)
    yield native_calls
    native_calls._restore()


def a_call(
    xla: Xla, n: int = 8, misalignment: int = 0, batched: Sequence[bool] = (False,) * 4, has_offsets: bool = True,
    **options: Any,
) -> tuple[CallFrame, list[Any]]:  # fmt: skip
    """A frame, and its operands and result, in memory of its own."""
    named = zip(("mu", "sigma", "seed", "offsets")[: 3 + has_offsets], batched, strict=False)
    own = tuple(name for name, is_own in named if is_own)
    static = Static(**{"backend": "recording", "dtype": "float32", **options}, batched=own)
    batch, size = 3 if any(batched) else 1, np.dtype(static.dtype).itemsize
    memory = np.zeros(batch * 5 * n * size + 64, np.uint8)
    first = -memory.ctypes.data % 32 + misalignment
    shape = (batch, n, 5) if static.layout == "nd" else (batch, 5, n)
    x = memory[first : first + batch * 5 * n * size].view(static.dtype).reshape(shape)
    kinds = (5, static.computing_type), (5, static.computing_type), (2, np.uint32), (6, np.uint32)
    shapes = [(batch if own else 1, length) for own, (length, _) in zip(batched, kinds, strict=True)]
    operands = [np.zeros(shape, kind) for shape, (_, kind) in zip(shapes, kinds, strict=True)]
    operands = operands[: 3 + has_offsets]
    xla.kept.append(memory)
    return xla.frame(static.encoded(), operands, [x]), [*operands, x]


def test_calls_seen_before_are_launched_without_python(emulated: Native, recording: Recording) -> None:
    """Calls of an instruction differ by device and alignment; its options and shapes are fixed."""
    instructions = [*itertools.product([8, 12], [(False,) * 4, (True,) * 4], [True, False])]
    states = []
    for n, batched, has_offsets in instructions:
        xla = Xla()
        frame, _ = a_call(xla, n, 0, batched, has_offsets)
        emulated.instantiate(xla, frame)
        states.append(xla)
    calls = [*itertools.product(zip(states, instructions, strict=True), [DEVICE, DEVICE + 1], [0, 4, 16])]

    def frames() -> Iterator[tuple[Xla, CallFrame]]:
        for (xla, (n, batched, has_offsets)), device, misalignment in calls:
            emulated.device = xla.device = device
            yield xla, a_call(xla, n, misalignment, batched, has_offsets)[0]

    for _, frame in frames():
        assert emulated(frame) == 0
    assert (emulated.in_python, emulated.launched) == (len(calls), [])
    recording.launched = []
    for xla, frame in frames():
        assert emulated(frame) == 0
        assert emulated.python(xla, frame) == 0
    assert emulated.launched == [launch[:2] for launch in recording.launched]
    assert emulated.in_python == 2 * len(calls)
    deleter = CALL(native.deleter(on_device=True))
    for xla in states:
        deleter(xla.state)


def test_python_reports_errors_of_a_launch(emulated: Native, recording: Recording) -> None:
    xla = Xla()
    query, metadata = metadata_request(xla)
    assert emulated(query) == 0
    assert (metadata.version.minor, metadata.traits, metadata.state) == (3, 1, 77)
    frame, _ = a_call(xla)
    assert emulated(frame) == 1  # XLA's error: there is no state.
    emulated.instantiate(xla, frame)
    frame.stage = 1
    assert emulated(frame) == 0
    assert (emulated.in_python, recording.launched) == (0, [])
    for error, in_python_so_far in ((0, 1), (0, 1), (700, 2)):
        emulated.error = error
        assert emulated(a_call(xla)[0]) == 0
        assert emulated.in_python == in_python_so_far
    assert len(emulated.launched) == 2
    emulated.error, emulated.device = 0, DEVICE + 1
    assert emulated(a_call(xla)[0]) == 0
    assert (emulated.in_python, len(emulated.launched)) == (3, 2)
    assert xla.state
    assert len(list(native.records(xla.state))) == 1


def test_an_exception_that_ends_a_callback_is_an_error(emulated: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a signal handler may raise before the callback's first line."""

    del python_entry.targets[native.number(Operation.sample, on_device=True)]
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: None)
    xla = Xla()
    assert emulated(metadata_request(xla)[0]) == 1
    assert xla.errors == [(13, "multisample: an exception, which Python printed, ended a call")]


class WithFunction(Recording):
    """A backend with a C function."""

    def __init__(self) -> None:
        super().__init__("with_function")
        self.packed: list[bytes] = []
        self.error = 0
        self._function = ctypes.CFUNCTYPE(ctypes.c_int, P)(self._run)

    def _run(self, address: int) -> int:
        self.packed.append(ctypes.string_at(address, PACKED_LAUNCH))
        return self.error

    def c_function(self, launch: Launch) -> int:
        return ctypes.cast(self._function, P).value or 0


FORMS = [("dn", "float32", True), ("nd", "float16", False), ("nd", "float64", True)]
BATCHED = [tuple(map(bool, row)) for row in ((0, 0, 0, 0), (1, 0, 1, 0), (0, 1, 0, 0), (1, 1, 1, 1))]


@pytest.mark.parametrize(("layout", "dtype", "aligned"), FORMS)
@pytest.mark.parametrize("batched", BATCHED)
@pytest.mark.parametrize("has_offsets", [True, False])
def test_a_c_function_and_python_get_the_launch_of_a_call(
    emulated: Native, recording: Recording, has_offsets: bool, batched: Sequence[bool], layout: str, dtype: str,
    aligned: bool,
) -> None:  # fmt: skip
    """A batch takes one launch too."""
    backend, xla = WithFunction(), Xla()
    registry.register(backend)
    flags = {"antithetic": True, "fast_math": True, "aligned": aligned}
    frame, arrays = a_call(xla, 12, 0, batched, has_offsets, backend=backend.name, dtype=dtype, layout=layout, **flags)
    emulated.instantiate(xla, frame)
    assert emulated(frame) == 0
    options = decoded(frame_string(frame), Operation.sample)
    launch: Launch = handlers._launch(options._replace(d=5, n=12), DEVICE, len(arrays[-1]))
    sizes = (5 * options.computing_type.itemsize,) * 2 + (8, 24 * has_offsets)
    steps = launch.mu_step, launch.sigma_step, launch.seed_step, launch.offset_step
    assert steps == tuple(own * size for own, size in zip(batched, sizes, strict=True))
    assert (launch.batch, launch.column_phase) == (len(arrays[-1]), int(aligned))
    mu, sigma, seed, *offsets, matrix = (array.ctypes.data for array in arrays)
    words = words_in_memory(seed, offsets[0] if offsets else 0)
    launch = launch._replace(mu=mu, sigma=sigma, matrix=matrix, stream=STREAM, **words)
    assert backend.packed == [pack(launch)]
    assert (emulated.in_python, emulated.modes) == (0, [2, 1])
    backend.error = 700
    assert emulated(frame) == 0
    in_python, backend.launched = backend.launched, []
    backend.launch(launch)
    assert (emulated.in_python, in_python) == (1, backend.launched)
    assert len(in_python) == 1 and pack(launch) in in_python[0][1]
    (step,) = _sample_steps(backend, _at(launch, matrix & 31, 0 if aligned or not has_offsets else -1))
    assert in_python[0][1].endswith(step.rest)
    assert all(key.origin_in_memory and key.device == DEVICE for key in backend.kernels)


@pytest.mark.parametrize(("rows", "columns", "name"), [(2**32 + 1, 1, "dim"), (1, 2**34 + 1, "sample")])
def test_a_length_that_exceeds_the_stream_is_an_error(
    emulated: Native, recording: Recording, rows: int, columns: int, name: str
) -> None:  # fmt: skip
    """The lengths of an exported program may be unknown until it runs."""
    backend, xla = WithFunction(), Xla()
    registry.register(backend)
    frame, (*operands, x) = a_call(xla, has_offsets=False, backend=backend.name)
    frame = xla.frame(frame_string(frame).decode(), operands, [np.broadcast_to(x[0, 0, 0], (1, rows, columns))])
    emulated.instantiate(xla, frame)
    assert emulated(frame) == 1
    ((_, message),) = xla.errors
    assert f"{name}_offset: expected {name}_offset + {'d' if name == 'dim' else 'n'} <= 2**" in message
    assert backend.packed == backend.launched == []


def frame_string(frame: CallFrame) -> bytes:
    span = Span.from_address(frame.attributes.items[0])
    found: bytes = span.pointer[: span.length]
    return found


@pytest.fixture
def launch_of(monkeypatch: pytest.MonkeyPatch, recording: Recording) -> Callable[..., Launch]:
    """``launch_of(operation, options, operands, results)``: the one launch of a call with scratch memory on CUDA."""

    def launch_of(operation: Operation, options: Static, operands: list[Any], results: list[Any]) -> Launch:
        launches: list[Launch] = []
        monkeypatch.setattr(recording, "launch", launches.append)
        monkeypatch.setattr(Recording, "operations", tuple(Operation))
        xla, scratch = Xla(), np.empty(64, np.uint8)
        execute_on_device(operation, xla, xla.frame(options.encoded(), operands, [*results, scratch]))
        (launch,) = launches
        assert (launch.scratch, launch.stream, launch.device) == (scratch.ctypes.data, STREAM, DEVICE)
        assert launch.operation == operation
        return launch

    return launch_of


def test_a_gradient_on_a_device_has_scratch_memory(launch_of: Callable[..., Launch]) -> None:
    options = Static("recording", "float32", "nd", batched=("matrix", "seed", "offsets"))
    g, seed, offsets = np.zeros((2, 7, 5), np.float32), np.zeros((2, 2), np.uint32), np.zeros((2, 6), np.uint32)
    sums = [np.empty((2, 5), np.float32) for _ in range(2)]
    launch = launch_of(Operation.gradient, options, [g, seed, offsets], sums)
    assert (launch.batch, launch.rows, launch.columns, launch.row_stride, launch.column_stride) == (2, 5, 7, 4, 20)
    assert (launch.seed_step, launch.offset_step, launch.matrix_step, launch.result_step) == (8, 24, 140, 20)
    assert [launch.first, launch.second, launch.matrix] == [x.ctypes.data for x in (*sums, g)]
    words_at = words_in_memory(seed.ctypes.data, offsets.ctypes.data)
    assert {name: getattr(launch, name) for name in words_at} == words_at


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("has_offsets", [True, False])
def test_moments_on_a_device_get_weights_results_and_scratch_memory(
    launch_of: Callable[..., Launch], has_offsets: bool, order: int
) -> None:
    options = Static("recording", "float64", antithetic=True)
    mu, sigma, weights = np.zeros(5), np.ones(5), np.zeros(7)
    operands = [np.zeros((1, size), np.uint32) for size in (2, 6)[: 1 + has_offsets]]
    sums = [np.empty(5) for _ in range(order)]
    launch = launch_of(Operation.moments, options, [weights, mu, sigma, *operands], sums)
    assert (launch.rows, launch.columns, launch.results, launch.antithetic) == (5, 7, order, True)
    assert (launch.mu, launch.sigma, launch.mu_stride, launch.sigma_stride) == (mu.ctypes.data, sigma.ctypes.data, 8, 8)
    assert (launch.weights, launch.weights_stride) == (weights.ctypes.data, 8)
    assert [launch.first, launch.second] == [*(x.ctypes.data for x in sums), 0][:2]
    seed, *offsets = (x.ctypes.data for x in operands)
    assert (launch.seed_at, launch.offset_at) == (seed, *(offsets or [0]))
