"""Handlers, called as XLA calls them: with call frames made here, and a device that writes down what is launched.

The layouts are those of the structs of ``xla/ffi/api/c_api.h``, written again as ctypes structures.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multisample
from multisample.backends import registry
from multisample.backends.contract import BackendStatus
from multisample.backends.driver import CONFIGURATION_SIZE, DriverBackend, KernelKey
from multisample.backends.launch import Batched, Launch, Operation, pack, words_in_memory
from multisample.backends.memory.host import advise_huge_pages
from multisample.backends.system import cuda_driver, xla_ffi

jax = pytest.importorskip("jax")

from multisample._routes.jax import handlers, native_launches  # noqa: E402

P = ctypes.c_void_p
CALL = ctypes.CFUNCTYPE(P, P)


class Version(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extension", P), ("major", ctypes.c_int), ("minor", ctypes.c_int))


class Api(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t), ("extension", P), ("version", Version), ("internal", P),
        *((name, P) for name in (
            "error_create", "error_get_message", "error_destroy", "handler_register", "stream_get", "type_register",
            "context_get", "state_set", "state_get", "allocate", "free", "schedule", "threads", "future_create",
            "future_set", "future_error", "run_id", "ordinal",
        )),
    )  # fmt: skip


class Request(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extension", P), ("context", P), ("stream", P))


class Ordinal(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extension", P), ("context", P), ("ordinal", ctypes.c_int32))


class Error(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extension", P), ("message", ctypes.c_char_p), ("code", ctypes.c_int))


class Buffer(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t), ("extension", P), ("dtype", ctypes.c_int), ("data", P), ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )  # fmt: skip


class List(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t), ("extension", P), ("count", ctypes.c_int64), ("types", ctypes.POINTER(ctypes.c_int)),
        ("items", ctypes.POINTER(P)),
    )  # fmt: skip


class Span(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_char_p), ("length", ctypes.c_size_t))


class Attributes(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t), ("extension", P), ("count", ctypes.c_int64), ("types", ctypes.POINTER(ctypes.c_int)),
        ("names", P), ("items", ctypes.POINTER(P)),
    )  # fmt: skip


class CallFrame(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t), ("extension", P), ("api", ctypes.POINTER(Api)), ("context", P),
        ("stage", ctypes.c_int), ("arguments", List), ("results", List), ("attributes", Attributes), ("future", P),
    )  # fmt: skip


class Metadata(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t), ("version", Version), ("traits", ctypes.c_uint32), ("state", ctypes.c_int64),
    )  # fmt: skip


class Extension(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t), ("kind", ctypes.c_int), ("next", P), ("metadata", ctypes.POINTER(Metadata)),
    )  # fmt: skip


CONTEXT, STREAM, DEVICE = 0x1234, 0x5678, 3


class Xla:
    """A runtime of XLA's interface: it answers requests, and keeps the errors that it makes."""

    def __init__(self, version: tuple[int, int] = (0, 3)) -> None:
        self.device = DEVICE
        self.errors: list[tuple[int, str]] = []
        self.kept: list[Any] = []
        self.api = Api(version=Version(24, None, *version))
        for name, function in (("error_create", self.error), ("stream_get", self.stream), ("ordinal", self.ordinal)):
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
        return CallFrame(
            168, None, ctypes.pointer(self.api), CONTEXT, stage, buffers(operands), buffers(results),
            Attributes(48, None, 1, types, None, pointers), None,
        )  # fmt: skip


def run(handler: Any, frame: CallFrame) -> int:
    return handler(ctypes.addressof(frame)) or 0


# --- The interface --------------------------------------------------------------------------------


def test_the_layouts_are_those_of_the_header() -> None:
    """The order of the functions, which decides where they are."""
    header = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text(encoding="utf-8")
    body = header[header.index("struct XLA_FFI_Api {") :]
    names = [line.split("(")[1].split(")")[0] for line in body.splitlines() if "_XLA_FFI_API_STRUCT_FIELD(" in line]
    for name, offset in (
        ("XLA_FFI_Error_Create", xla_ffi._ERROR_CREATE),
        ("XLA_FFI_Stream_Get", xla_ffi.STREAM_GET),
        ("XLA_FFI_DeviceOrdinal_Get", xla_ffi.ORDINAL_GET),
    ):
        assert 48 + 8 * names.index(name) == offset
    assert (Api.error_create.offset, Api.ordinal.offset, CallFrame.attributes.offset) == (48, 184, 120)


@pytest.mark.parametrize("records", [True, False])
def test_a_query_for_metadata_is_answered(records: bool) -> None:
    for version in ((0, 3), (0, 9)):
        xla = Xla(version)
        metadata = Metadata(48, Version(24))
        inner = Extension(32, 1, None, ctypes.pointer(metadata))
        outer = Extension(24, 77, ctypes.addressof(inner), None)
        frame = CallFrame(168, ctypes.addressof(outer), ctypes.pointer(xla.api))
        calls: list[Any] = []
        assert run(xla_ffi.handler(calls.append, records), frame) == 0
        assert (metadata.version.major, metadata.version.minor) == version
        assert metadata.traits == records
        assert calls == []
        assert xla.errors == []


@pytest.mark.parametrize("version", [(1, 0), (0, 2)])
def test_another_version_of_the_interface_is_refused(version: tuple[int, int]) -> None:
    xla = Xla(version)
    metadata = Metadata(48, Version(24))
    extension = Extension(32, 1, None, ctypes.pointer(metadata))
    frame = CallFrame(168, ctypes.addressof(extension), ctypes.pointer(xla.api))
    assert run(xla_ffi.handler(lambda frame: None, True), frame) == 1
    ((_, message),) = xla.errors
    assert f"got {version[0]}.{version[1]}" in message
    assert metadata.version.minor == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3, 4])
def test_only_the_execution_executes(stage: int) -> None:
    calls: list[Any] = []
    xla = Xla()
    assert run(xla_ffi.handler(calls.append, False), xla.frame("x", [], [], stage)) == 0
    assert len(calls) == (stage == 3)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("dim_offset: é"), 3),
        (TypeError("x"), 3),
        (MemoryError(), 8),
        (RuntimeError("y"), 13),
        (KeyError(), 13),
    ],
)
def test_exceptions_become_errors(error: Exception, code: int) -> None:
    def fail(frame: xla_ffi.Frame) -> None:
        raise error

    xla = Xla()
    assert run(xla_ffi.handler(fail, False), xla.frame("x", [], [])) == 1
    ((found, message),) = xla.errors
    assert found == code
    assert message == (str(error) or {8: "out of memory", 13: "KeyError"}[code])


# --- Calls ----------------------------------------------------------------------------------------


def words(seed: int, *offsets: int) -> tuple[Any, Any]:
    """The operands seed and offsets."""
    return np.array([[seed >> 32, seed & 0xFFFF_FFFF]], np.uint32), np.array([offsets], np.uint64).view(np.uint32)


def test_a_call_in_host_memory_draws() -> None:
    options = handlers.Options("cpu", "float32", "dn", *[False] * 4, True, *[False] * 4)
    mu, sigma = np.zeros((1, 5), np.float32), np.ones((1, 5), np.float32)
    x = np.empty((1, 5, 7), np.float32)
    xla = Xla()
    frame = xla.frame(options.encoded(), [mu, sigma, *words(2**40 + 1, 2**50, 3, 2**33)], [x])
    assert run(xla_ffi.handler(handlers._sample_on_host, False), frame) == 0
    expected = multisample.sample(
        mu[0], sigma[0], 7, seed=multisample.Key(2**40 + 1, 2**50), dim_offset=3, sample_offset=2**33
    )
    np.testing.assert_array_equal(x[0], expected)


def test_options_survive_their_string() -> None:
    for i in range(512):
        flags = [bool(i >> bit & 1) for bit in range(9)]
        options = handlers.Options("a,b", "bfloat16", "nd", *flags)
        assert handlers.decoded(options.encoded().encode()) == options


class Recording(DriverBackend):
    """A driver's backend without a driver: it writes down the bytes of what it would launch."""

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

    def compile(self, key: KernelKey | None) -> tuple[int, Any]:
        raise AssertionError(key)

    def _launch_function(self, size: int, device: int) -> Callable[[int, bytes], None]:
        return lambda kernel, parameters: self.launched.append((kernel, parameters, device))


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    backend = Recording()
    registry.register(backend)
    handlers.RUNNERS.clear()
    yield backend
    handlers.RUNNERS.clear()


@pytest.mark.parametrize("layout", ["dn", "nd"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(
    "batched",
    [(False, False, False, False), (True, False, True, False), (False, True, False, False), (True, True, True, True)],
)
def test_a_call_on_a_device_is_one_launch(
    recording: Recording, layout: str, dtype: str, aligned: bool, batched: tuple[bool, bool, bool, bool]
) -> None:
    """A batch is one launch too."""
    batch, d, n = 3 if any(batched) else 1, 5, 7
    real = np.float64 if dtype == "float64" else np.float32
    options = handlers.Options("recording", dtype, layout, False, True, True, aligned, True, *batched)
    mu, sigma = (np.zeros((batch if own else 1, d), real) for own in batched[:2])
    seed, offsets = (
        np.zeros((batch if own else 1, size), np.uint32) for own, size in zip(batched[2:], (2, 6), strict=True)
    )
    x = np.empty((batch, d, n) if layout == "dn" else (batch, n, d), dtype)
    xla = Xla()
    frame = xla.frame(options.encoded(), [mu, sigma, seed, offsets], [x])
    handler = xla_ffi.handler(handlers._sample_on_device, True)
    assert run(handler, frame) == 0, xla.errors
    launched, recording.launched = recording.launched, []
    draw: Launch = handlers._launch(options, d, n, Operation.sample, DEVICE, batch)
    assert (draw.batch, draw.column_phase) == (batch, int(aligned))
    assert draw.batched == sum(flag for flag, own in zip(Batched, batched, strict=True) if own)
    mu_at, sigma_at, seed_at, offsets_at, x_at = (array.ctypes.data for array in (mu, sigma, seed, offsets, x))
    words_at = words_in_memory(seed_at, offsets_at)
    draw = draw._replace(mu=mu_at, sigma=sigma_at, matrix=x_at, stream=STREAM, **words_at)
    recording.launch(draw)
    assert len(launched) == 1 and pack(draw) in launched[0][1]
    assert launched == recording.launched
    assert all(key.origin_in_memory and key.device == DEVICE for key in recording.kernels)


class Native:
    """The compiled handler in front of the one in Python, on a driver that writes down its launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.in_python = 0
        self.launched: list[tuple[int, bytes]] = []
        self.error, self.device = 0, DEVICE
        self._driver = ctypes.CFUNCTYPE(ctypes.c_int, P, P, P, P)(self._launch)
        self._python = xla_ffi.handler(self._execute, True)
        self._get_device = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))(self._current)
        monkeypatch.setattr(cuda_driver, "launch_function", lambda: self._driver)
        monkeypatch.setattr(cuda_driver, "device_function", lambda: self._get_device)
        address = ctypes.cast(self._python, P).value
        assert address
        self.launches = native_launches.NativeLaunches(address, CONFIGURATION_SIZE)
        monkeypatch.setattr(handlers, "_native", [self.launches])
        self._handler = CALL(self.launches.address)

    def _execute(self, frame: xla_ffi.Frame) -> None:
        self.in_python += 1
        handlers._sample_on_device(frame)

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

    def __call__(self, frame: CallFrame) -> int:
        return run(self._handler, frame)


def a_call(
    xla: Xla, n: int = 8, misalignment: int = 0, batch: int = 1, has_offsets: bool = True, backend: str = "recording"
) -> tuple[CallFrame, list[Any]]:
    """A frame, and its operands and result, in memory of its own."""
    options = handlers.Options(
        backend, "float32", "dn", False, False, False, True, has_offsets, *[batch > 1] * 3, has_offsets and batch > 1
    )
    memory = np.zeros(batch * 5 * n * 4 + 64, np.uint8)
    first = -memory.ctypes.data % 32 + misalignment
    x = memory[first : first + batch * 5 * n * 4].view(np.float32).reshape(batch, 5, n)
    operands = [np.zeros((batch, 5), np.float32) for _ in range(2)]
    operands += [np.zeros((batch, size), np.uint32) for size in (2, 6)[: 1 + has_offsets]]
    xla.kept.append(memory)
    return xla.frame(options.encoded(), operands, [x]), [*operands, x]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("misalignment", [0, 4, 16])
@pytest.mark.parametrize("has_offsets", [True, False])
def test_a_call_seen_before_is_launched_without_python(
    monkeypatch: pytest.MonkeyPatch, recording: Recording, has_offsets: bool, misalignment: int, batch: int
) -> None:
    native, xla = Native(monkeypatch), Xla()
    first, _ = a_call(xla, misalignment=misalignment, batch=batch, has_offsets=has_offsets)
    assert native(first) == 0
    assert (native.in_python, len(recording.launched), native.launched) == (1, 1, [])
    second, arrays = a_call(xla, misalignment=misalignment, batch=batch, has_offsets=has_offsets)
    assert native(second) == 0
    assert (native.in_python, len(recording.launched)) == (1, 1)
    assert run(native._python, second) == 0
    assert native.launched == [recording.launched[1][:2]]
    assert recording.launched[0] != recording.launched[1]
    for array in arrays:
        assert struct.pack("P", array.ctypes.data) in native.launched[0][1]


def test_calls_that_differ_have_launches_of_their_own(monkeypatch: pytest.MonkeyPatch, recording: Recording) -> None:
    native, xla, other = Native(monkeypatch), Xla(), Xla()
    other.device = DEVICE + 1
    registry.register(Recording("recordinh"))  # A name of the same length.
    calls = [
        *itertools.product([xla, other], [8, 12], [0, 4], [1, 2], [True, False], ["recording"]),
        (xla, 8, 0, 1, True, "recordinh"),
    ]  # fmt: skip
    for call in calls:
        native.device = call[0].device
        assert native(a_call(*call)[0]) == 0
    assert (native.in_python, native.launched) == (len(calls), [])
    expected, recording.launched = recording.launched, []
    for call in calls:
        native.device = call[0].device
        frame, _ = a_call(*call)
        launched = len(native.launched)
        assert native(frame) == 0
        assert len(native.launched) == launched + 1
        assert run(native._python, frame) == 0
    assert len(expected) == len(calls) - 1
    assert native.launched[:-1] == [launch[:2] for launch in recording.launched]
    assert native.in_python == 2 * len(calls)


def test_python_answers_all_but_executions_and_reports_errors_of_a_launch(
    monkeypatch: pytest.MonkeyPatch, recording: Recording
) -> None:
    native, xla = Native(monkeypatch), Xla()
    metadata = Metadata(48, Version(24))
    extension = Extension(32, 1, None, ctypes.pointer(metadata))
    assert native(CallFrame(168, ctypes.addressof(extension), ctypes.pointer(xla.api))) == 0
    assert (metadata.version.minor, metadata.traits) == (3, 1)
    frame, _ = a_call(xla)
    frame.stage = 1
    assert native(frame) == 0
    assert (native.in_python, recording.launched) == (0, [])
    for error, in_python in ((0, 1), (0, 1), (700, 2)):
        native.error = error
        assert native(a_call(xla)[0]) == 0
        assert native.in_python == in_python
    assert len(native.launched) == 2
    native.error, native.device = 0, DEVICE + 1
    assert native(a_call(xla)[0]) == 0
    assert (native.in_python, len(native.launched)) == (3, 2)
    assert len(native.launches._kept) == np.count_nonzero(native.launches._table) == 1


def test_the_records_have_a_limit(monkeypatch: pytest.MonkeyPatch, recording: Recording) -> None:
    native, xla = Native(monkeypatch), Xla()
    options = handlers.Options("recording", "float32", "dn", *[False] * 4, True, *[False] * 4)
    launcher = handlers._device_sampler(options, (1, 5, 8), DEVICE)
    string, most = options.encoded().encode(), native_launches._SLOTS // 2
    for n in range(8, 8 + most + 100):
        native.launches.record(string, struct.pack("3q", 1, 5, n), DEVICE, [64] * 5, launcher.parameters)
    assert len(native.launches._kept) == np.count_nonzero(native.launches._table) == most
    for n, in_python in ((8, 0), (most + 7, 0), (most + 8, 1)):
        x = np.lib.stride_tricks.as_strided(np.zeros(64, np.float32)[:1], (1, 5, n), (0, 0, 0))
        frame = xla.frame(string.decode(), [np.zeros((1, 8), np.uint32)] * 4, [x])
        frame.results.items[0]  # The lengths are all that the handler reads of a result, and its address.
        x_at = Buffer.from_address(frame.results.items[0])
        x_at.data = 1 << 20
        assert native(frame) == 0
        assert native.in_python == in_python


def test_a_gradient_on_a_device_has_scratch_memory(monkeypatch: pytest.MonkeyPatch, recording: Recording) -> None:
    draws: list[Launch] = []
    monkeypatch.setattr(recording, "launch", draws.append)
    monkeypatch.setattr(Recording, "memory_launcher", None)
    monkeypatch.setattr(Recording, "operations", tuple(Operation))
    options = handlers.Options("recording", "float32", "nd", False, False, False, False, *[True] * 5)
    g, seed, offsets = np.zeros((2, 7, 5), np.float32), np.zeros((2, 2), np.uint32), np.zeros((2, 6), np.uint32)
    sums, scratch = [np.empty((2, 5), np.float32) for _ in range(2)], np.empty(64, np.uint8)
    xla = Xla()
    frame = xla.frame(options.encoded(), [g, seed, offsets], [*sums, scratch])
    assert run(xla_ffi.handler(handlers._gradient_on_device, True), frame) == 0
    (draw,) = draws
    assert (draw.operation, draw.batch) == (Operation.gradient, 2)
    assert draw.batched == sum(Batched)
    assert (draw.rows, draw.columns, draw.row_stride, draw.column_stride) == (5, 7, 4, 20)
    assert [draw.first, draw.second] == [x.ctypes.data for x in sums]
    assert draw.matrix == g.ctypes.data
    assert draw.seed_at == seed.ctypes.data
    words_at = draw.offset_at, draw.first_row_at, draw.first_column_at
    assert words_at == tuple(offsets.ctypes.data + 8 * i for i in range(3))
    assert (draw.scratch, draw.stream, draw.device) == (scratch.ctypes.data, STREAM, DEVICE)


@pytest.mark.parametrize(("columns", "advised"), [((1 << 20) - 4, False), (1 << 20, True)])
def test_large_results_may_have_huge_pages(monkeypatch: pytest.MonkeyPatch, columns: int, advised: bool) -> None:
    asked: list[tuple[int, int]] = []

    def advise(address: int, size: int) -> None:
        asked.append((address, size))
        advise_huge_pages(address, size)

    monkeypatch.setattr(handlers, "advise_huge_pages", advise)
    handlers.RUNNERS.clear()
    options = handlers.Options("cpu", "float32", "dn", *[False] * 4, True, *[False] * 4)
    mu, sigma, x = np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32), np.empty((1, 1, columns), np.float32)
    xla = Xla()
    frame = xla.frame(options.encoded(), [mu, sigma, *words(7, 0, 0, 0)], [x])
    assert run(xla_ffi.handler(handlers._sample_on_host, False), frame) == 0
    assert asked == ([(x.ctypes.data, x.nbytes)] if advised else [])
    np.testing.assert_array_equal(x[0], multisample.sample(mu[0], sigma[0], columns, seed=7))
    handlers.RUNNERS.clear()


@pytest.mark.parametrize(("start", "size"), [(0, 0), (1, 5), (100, 4096), (4095, 1 << 16)])
def test_huge_page_advice_preserves_the_contents(start: int, size: int) -> None:
    memory = np.arange(1 << 17).astype(np.uint8)
    advise_huge_pages(memory.ctypes.data + start, size)
    np.testing.assert_array_equal(memory, np.arange(1 << 17).astype(np.uint8))
