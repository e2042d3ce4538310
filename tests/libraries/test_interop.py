"""Interoperation: every array library with every backend that serves it.

Results have the bits of the cpu backend, and the addresses that reach the kernel show that no array was copied.
"""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import gc
import importlib
import importlib.util
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cuda_memory import Array, Exported, ExportedByDlpack, ToArray, memory_of, numpy_dtype, on_cpu
from skip_rules import require
from tables import DTYPES

import multisample
from multisample._libraries import foreign, library_called
from multisample._plan import PLANS
from multisample.backends import registry
from multisample.backends.contract import Launcher
from multisample.backends.launch import Launch
from multisample.backends.memory import dlpack
from multisample.backends.system import cuda_driver

BACKENDS = ("torch_ext", "cupy", "numba", "cpu")
D, N = 5, 4099


class Memory(NamedTuple):
    """A library of results, a copy of a NumPy array, and a (D, N) matrix with strides in elements."""

    result: str
    put: Callable[[Array], Any]
    out: Callable[[str, tuple[int, int], int, int], Any]


def host_matrix(dtype: str, strides: tuple[int, int], first: int, length: int) -> Any:
    memory = np.full(length * numpy_dtype(dtype).itemsize, 0xFF, np.uint8).view(numpy_dtype(dtype))
    return np.lib.stride_tricks.as_strided(memory[first:], (D, N), [memory.itemsize * stride for stride in strides])


def torch_on_host() -> Memory:

    def put(array: Array) -> Any:
        if array.dtype.name != "bfloat16":
            return torch.tensor(array)
        return torch.tensor(array.view(np.int16)).view(torch.bfloat16)

    def out(dtype: str, strides: tuple[int, int], first: int, length: int) -> Any:
        memory = torch.full((length * numpy_dtype(dtype).itemsize,), 0xFF, dtype=torch.uint8)
        return memory.view(getattr(torch, dtype)).as_strided((D, N), strides, first)

    return Memory("torch", put, out)


def jax_on_host() -> Memory:
    jax = pytest.importorskip("jax")
    return Memory("jax", lambda array: jax.device_put(array, jax.devices("cpu")[0]), host_matrix)


def on_device(library: str) -> Memory:
    """Arrays of PyTorch, CuPy, Numba or JAX on the first CUDA device."""
    memory = memory_of(library)

    def out(dtype: str, strides: tuple[int, int], first: int, length: int) -> Any:
        buffer = memory.poisoned(length * numpy_dtype(dtype).itemsize)
        return memory.view(buffer, dtype, (D, N), strides, first)

    return Memory(library, memory.put, out)


def wrapped(memory: Memory, wrap: Callable[[Any], Any], result: str = "") -> Memory:
    """Objects with one protocol only; by default, results are arrays of the backend's library."""
    return Memory(result, lambda array: wrap(memory.put(array)), lambda *place: wrap(memory.out(*place)))


LIBRARIES: dict[str, tuple[str, Callable[[], Memory]]] = {
    "list": ("host", lambda: Memory("numpy", np.ndarray.tolist, host_matrix)),
    "NumPy": ("host", lambda: Memory("numpy", np.ndarray.copy, host_matrix)),
    "PyTorch, CPU": ("cpu", torch_on_host),
    "PyTorch, CUDA": ("cuda", lambda: on_device("torch")),
    "CuPy": ("cuda", lambda: on_device("cupy")),
    "Numba": ("cuda", lambda: on_device("numba")),
    "JAX, CPU": ("cpu", jax_on_host),
    "JAX, CUDA": ("cuda", lambda: on_device("jax")),
    # These wrap tensors, because NumPy and some versions of CuPy cannot export bfloat16.
    "`__dlpack__`, CPU": ("cpu", lambda: wrapped(torch_on_host(), ExportedByDlpack, "numpy")),
    "`__dlpack__`, CUDA": ("cuda", lambda: wrapped(on_device("torch"), ExportedByDlpack)),
    "`__cuda_array_interface__`": ("cuda", lambda: wrapped(on_device("numba"), lambda x: Exported(x, stream=1))),
}
"""For each library: its kind of memory (a key of `SERVES`), and a function that returns its `Memory`."""
SERVES = {"host": BACKENDS, "cpu": ("torch_ext", "cpu"), "cuda": ("torch_ext", "cupy", "numba")}
PAIRS = [(library, backend) for library in LIBRARIES for backend in BACKENDS]


@dataclasses.dataclass
class Case:
    """A library and a backend, with the addresses that reached the kernel in the last call."""

    name: str
    where: str
    library: Any
    backend: str
    reached: tuple[int, int, int] = (0, 0, 0)

    def sample(self, *arguments: Any, **options: Any) -> Any:
        return multisample.sample(*arguments, backend=self.backend, **options)

    @property
    def result(self) -> str:
        """The expected library of the result."""
        if self.where == "host" or not self.library.result:
            return str(registry.find(self.backend).host_library)
        return str(self.library.result)

    @property
    def device(self) -> str:
        """The expected device of the result."""
        elsewhere = self.backend in ("cupy", "numba") or (self.backend == "torch_ext" and _has_cuda("torch_ext"))
        return "cuda:0" if self.where == "cuda" or (self.where == "host" and elsewhere) else "cpu"


def _has_cuda(backend: str) -> bool:
    try:
        require(backend)
    except pytest.skip.Exception:
        return False
    return True


def address(raw: Any) -> int:
    return int(raw.ctypes.data) if isinstance(raw, np.ndarray) else int(raw)


def watched(launcher: Launcher, case: Case) -> Launcher:
    """A launcher that records the addresses of its calls in `case`."""

    def run(geometry: Any, mu: Any, sigma: Any, weights: Any, matrix: Any, *rest: Any) -> None:
        case.reached = (address(mu), address(sigma), address(matrix))
        launcher.run(geometry, mu, sigma, weights, matrix, *rest)

    return dataclasses.replace(launcher, run=run)


def forget() -> None:
    PLANS.clear()
    programs = sys.modules.get("multisample._routes.jax.programs")
    if programs is not None:
        programs.PROGRAMS.clear()  # Cached programs hold C functions, which bypass the recording.


@pytest.fixture
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """The case of the test, with recording launchers."""
    name, backend = request.param
    where, make = LIBRARIES[name]
    if where == "cuda" or backend in ("cupy", "numba"):
        require(backend)
    status = registry.find(backend).status()
    if not status.available:
        pytest.skip("; ".join(status.reasons))
    case = Case(name, where, make(), backend)
    chosen: Any = registry.find(backend)

    launcher, launch = chosen.launcher, chosen.launch
    monkeypatch.setattr(chosen, "launcher", lambda draw: watched(launcher(draw), case))
    monkeypatch.setattr(chosen, "c_function", lambda launch: 0, raising=False)
    # Compiled plans bypass the launcher.
    monkeypatch.setattr(chosen, "compiled_plan", lambda *arguments: None, raising=False)
    # Compiled code would replay packed launches, which the recorder does not see.
    monkeypatch.setattr(chosen, "parameters", lambda launch: [], raising=False)

    def launch_watched(launch_: Launch) -> None:
        case.reached = (address(launch_.mu), address(launch_.sigma), launch_.matrix)
        launch(launch_)

    monkeypatch.setattr(chosen, "launch", launch_watched)
    forget()  # Launchers of existing plans do not record.
    yield case
    forget()


def pairs(serves: bool) -> Any:
    chosen = [(name, backend) for name, backend in PAIRS if (backend in SERVES[LIBRARIES[name][0]]) is serves]
    return pytest.mark.parametrize("case", chosen, indirect=True, ids=lambda pair: f"{pair[0]} with {pair[1]}")


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each element type; for float64, JAX's 64-bit types are enabled."""
    name: str = request.param
    jax = sys.modules.get("jax")
    if jax is None or name != "float64":
        yield name
        return
    jax.config.update("jax_enable_x64", True)
    yield name
    jax.config.update("jax_enable_x64", False)


def host_vectors(dtype: str) -> tuple[Array, Array]:
    draw = np.random.default_rng(5)
    return draw.normal(size=D).astype(numpy_dtype(dtype)), np.abs(draw.normal(size=D)).astype(numpy_dtype(dtype))


def library_name(array: Any) -> str:
    package = type(array).__module__.partition(".")[0]
    return {"jaxlib": "jax"}.get(package, package)


def settled(array: Any) -> Any:
    """`array`, synchronized and without a named stream: Numba's copies on a named stream do not wait."""
    if library_name(array) != "numba":
        return array
    memory_of("numba").synchronize()
    return array.bind(0)


def pointer_of(array: Any) -> int:
    """The address of an array, or of the array that it wraps."""
    array = getattr(array, "array", array)
    library = library_name(array)
    if library == "numpy":
        return int(array.ctypes.data)
    if library == "jax":
        return int(array.unsafe_buffer_pointer())
    if library == "torch":
        return int(array.data_ptr())
    return int(memory_of(library).pointer(array))


def device_of(array: Any) -> str:
    library = library_name(array)
    if library == "numpy":
        return "cpu"
    if library == "torch":
        return str(array.device)
    if library == "jax":
        (device,) = array.devices()
        return "cpu" if device.platform == "cpu" else f"cuda:{device.local_hardware_id}"
    return f"cuda:{memory_of(library).device_of(array)}"


@pairs(serves=True)
def test_the_result_has_the_library_of_the_inputs_without_a_copy(case: Case, bits: ToArray, dtype: str) -> None:
    # The CUDA array interface cannot express bfloat16, and lists have lost the dtype of their numbers.
    nameless = dtype == "bfloat16" and case.name == "`__cuda_array_interface__`"
    host = host_vectors("float32" if nameless else dtype)
    source = [vector.tolist() for vector in host] if case.name == "list" else host
    expected = bits(on_cpu(*source, N, dtype, seed=4))
    computing = dtype in ("float32", "float64")
    calls: list[dict[str, Any]] = [{"dtype": dtype}]
    calls += [{}] * (case.name != "list" and not nameless) + [{"dtype": dtype, "layout": "nd"}] * (dtype == "float32")
    for options in calls:
        mu, sigma = map(case.library.put, host)
        x = case.sample(mu, sigma, N, seed=4, **options)
        is_transposed = "layout" in options
        assert np.array_equal(bits(settled(x)), expected.T if is_transposed else expected)
        assert x.shape == ((N, D) if is_transposed else (D, N))
        assert (library_name(x), device_of(x)) == (case.result, case.device)
        # Device arrays of all types are read in place, except that JAX widens narrow types. Host backends read host
        # arrays of the computing type in place.
        on_host = computing and case.name != "list" and "cpu" in (case.where, case.backend)
        if on_host or (case.where == "cuda" and (computing or case.result != "jax")):
            assert case.reached[:2] == tuple(map(pointer_of, (mu, sigma)))
        assert pointer_of(x) == case.reached[2]


@pairs(serves=True)
def test_out_is_written_in_place(case: Case, bits: ToArray, dtype: str) -> None:
    host = host_vectors(dtype)
    mu, sigma = map(case.library.put, host)
    if case.library.result == "jax":
        with pytest.raises(TypeError, match=r"^out: expected None with JAX, whose arrays are immutable"):
            case.sample(mu, sigma, N, seed=4, out=case.sample(mu, sigma, N))
        return
    if case.name == "list":
        pytest.skip("a list cannot be out")
    if dtype == "bfloat16" and case.name == "`__cuda_array_interface__`":
        pytest.skip("the CUDA array interface cannot express this type")
    expected = bits(on_cpu(*host, N, dtype, seed=4))
    # Contiguous, rows apart, columns apart, transposed.
    for strides, first in ((N, 1), 0), ((N + 3, 1), 5), ((3 * N + 1, 3), 2), ((1, D), 0):
        out = case.library.out(dtype, strides, first, first + (D - 1) * strides[0] + (N - 1) * strides[1] + 1)
        if case.where == "host" and case.backend != "cpu":
            with pytest.raises(ValueError, match=rf"^out: backend '{case.backend}' writes \w+ arrays, got host memory"):
                case.sample(mu, sigma, N, seed=4, out=out)
            continue
        assert case.sample(mu, sigma, N, seed=4, dtype=dtype, out=out) is out
        assert case.reached[2] == pointer_of(out)
        written = out.array if hasattr(out, "array") else out
        if library_name(written) in ("torch", "cupy", "numba") and case.where == "cuda":
            # A copy to the host may not keep strides, so pack the elements first.
            memory = memory_of(library_name(written))
            memory.synchronize()
            written = memory.packed(written)
        elif library_name(written) == "torch":
            written = written.contiguous()
        assert np.array_equal(bits(settled(written)), expected)


@pairs(serves=True)
def test_an_empty_result_has_the_library_of_the_inputs(case: Case) -> None:
    mu, sigma = map(case.library.put, host_vectors("float32"))
    none = case.library.put(np.zeros(0, np.float32))
    for source, n, shape in (((mu, sigma), 0, (D, 0)), ((none, 1.0), 3, (0, 3)), ((none, none), 0, (0, 0))):
        x = case.sample(*source, n, seed=1)
        assert (x.shape, library_name(x), device_of(x)) == (shape, case.result, case.device)
    assert case.reached == (0, 0, 0)


@pairs(serves=False)
def test_a_backend_that_does_not_serve_the_memory_raises(case: Case) -> None:
    mu, sigma = map(case.library.put, host_vectors("float32"))
    generator = multisample.Generator(1)
    with pytest.raises(ValueError, match=rf"^backend: '{case.backend}' serves \w+ memory, got an? .* in \w+ memory"):
        case.sample(mu, sigma, N, generator=generator)
    assert generator.offset == 0


IS_OLD = np.lib.NumpyVersion(np.__version__) < "2.1.0"
exports_versions = pytest.mark.skipif(IS_OLD, reason="NumPy exports versioned capsules from 2.1 on")


class Capsule:
    """Exports a host array as a capsule that `change` has modified."""

    def __init__(self, array: Any, change: Callable[[Any], None], versioned: bool = True) -> None:
        self.array, self.change, self.versioned = array, change, versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        if not self.versioned and "max_version" in options:
            raise TypeError("what is a version?")
        capsule = self.array.__dlpack__(**options)
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        structure: Any = dlpack._Versioned if self.versioned else dlpack._Managed
        self.change(structure.from_address(dlpack._pointer(id(capsule), name)))
        return capsule


@exports_versions
@pytest.mark.parametrize("versioned", [True, False])
def test_every_field_of_a_capsule_is_read(versioned: bool) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)

    def read(array: Any, change: Callable[[Any], None] = lambda structure: None) -> Array:
        shared = dlpack.Imported(Capsule(array, change, versioned))
        return np.asarray(shared)

    for view in (array, array.T, array[::-1, ::2], array[1:2, 1:], array[:0], array[0, 0, ...]):
        x = read(view)
        assert (x.dtype, x.shape) == (view.dtype, view.shape)
        if view.size:
            assert x.ctypes.data == view.ctypes.data
            assert np.array_equal(x, view)
        assert x.flags.writeable
    moved = read(array.reshape(-1)[:-1], lambda structure: setattr(structure.tensor, "byte_offset", 4))
    assert np.array_equal(moved, array.reshape(-1)[1:])
    assert np.array_equal(read(array, lambda structure: setattr(structure.tensor, "strides", None)), array)
    for dtype in ("int8", "uint64", "float16", "float64", "complex64", "bool"):
        assert read(np.zeros(3, dtype)).dtype == dtype


def test_imported_memory_lives_as_long_as_its_views() -> None:
    array = np.arange(5.0)
    owner = weakref.ref(array)
    x = np.asarray(dlpack.Imported(array))
    del array
    gc.collect(1)
    assert owner() is not None
    assert x.tolist() == [0, 1, 2, 3, 4]
    del x
    gc.collect(1)
    assert owner() is None


@exports_versions
def test_invalid_capsules_raise() -> None:
    def set_to(name: str, value: int) -> Callable[[Any], None]:
        return lambda structure: setattr(structure if hasattr(structure, name) else structure.tensor, name, value)

    array = np.zeros(3, np.float32)
    for change in (set_to("major", 2), set_to("code", 9), set_to("lanes", 4)):
        with pytest.raises(TypeError, match=r"^mu: expected an array whose memory can be shared"):
            multisample.sample(Capsule(array, change), 1.0, 3)
    used = array.__dlpack__()
    np.from_dlpack(SimpleNamespace(__dlpack__=lambda **options: used, __dlpack_device__=lambda: (1, 0)))
    for wrong in (used, None, "dltensor"):
        source = SimpleNamespace(__dlpack__=lambda wrong=wrong, **options: wrong, __dlpack_device__=lambda: (1, 0))
        with pytest.raises(TypeError, match=r"^mu: expected an array whose memory can be shared"):
            multisample.sample(source, 1.0, 3)


@pytest.mark.parametrize("error", [KeyError, AttributeError, StopIteration])
@pytest.mark.parametrize(
    "member", ["__dlpack__", "__dlpack_device__", "__array__", "__array_interface__", "__cuda_array_interface__"]
)
def test_any_error_of_a_foreign_protocol_names_the_argument(member: str, error: type[Exception]) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise error("of a foreign class")

    good, weights = np.ones(D, np.float32), np.ones(4, np.float32)
    members: list[dict[str, Any]] = [{member: property(fail)}]
    if member == "__array__":
        members.append({member: fail})
    elif member.startswith("__dlpack"):
        members.append({"__dlpack__": good.__dlpack__, "__dlpack_device__": good.__dlpack_device__, member: fail})
    for namespace in members:
        wrong = type("Wrong", (), namespace)()
        generator = multisample.Generator(1)
        for arguments in ({"mu": wrong}, {"sigma": wrong}, {"out": wrong}, {"mu": wrong, "sigma": wrong}):
            call = {"mu": good, "sigma": 1.0, **arguments}
            with pytest.raises(TypeError, match=r"^(mu|sigma|out)[:,]"):
                multisample.sample(**call, n=3, generator=generator)
        with pytest.raises(TypeError, match=r"^(mu, )?weights: "):
            multisample.weighted_moments(wrong, good, 1.0, seed=1)
        with pytest.raises(TypeError, match=r"^scores: "):
            multisample.cem.CEM(good, 1.0, 4, elite_frac=1).tell(np.ones((D, 4)), wrong)
        assert generator.offset == 0
        assert multisample.weighted_moments(weights, good, 1.0, seed=1)[0].shape == (D,)


@exports_versions
def test_a_read_only_out_raises() -> None:
    def read_only(structure: Any) -> None:
        structure.flags |= 1

    array, mu = np.zeros((D, 3), np.float32), np.zeros(D, np.float32)
    assert not dlpack.is_read_only(array)
    assert dlpack.is_read_only(Capsule(array, read_only))
    source = Capsule(mu, read_only)
    assert multisample.sample(source, 1.0, 3).shape == (D, 3)
    generator = multisample.Generator(1)
    with pytest.raises(ValueError, match=r"^out: expected a writable array, got a read-only one"):
        multisample.sample(source, 1.0, 3, out=Capsule(array, read_only), generator=generator)
    interface = {"data": (1 << 20, True), "shape": (D, 3), "typestr": "<f4", "version": 3}
    with pytest.raises(ValueError, match=r"^out: expected a writable array, got a read-only one"):
        multisample.sample(source, 1.0, 3, out=SimpleNamespace(__cuda_array_interface__=interface), generator=generator)
    assert generator.offset == 0
    assert not array.any()
    # DLPack before 1.0 has no read-only flag.
    out = Capsule(array, lambda structure: None, versioned=False)
    assert multisample.sample(source, 1.0, 3, out=out) is out
    assert array.all()


@pytest.mark.parametrize("case", [("`__dlpack__`, CUDA", backend) for backend in SERVES["cuda"]], indirect=True,
                         ids=lambda pair: pair[1])  # fmt: skip
def test_a_read_only_device_out_raises(case: Case) -> None:
    class ReadOnly(ExportedByDlpack):
        def __dlpack__(self, **options: Any) -> Any:
            capsule = super().__dlpack__(**options)
            dlpack._Versioned.from_address(dlpack._pointer(id(capsule), b"dltensor_versioned")).flags |= 1
            return capsule

    host = host_vectors("float32")
    mu, sigma = (ReadOnly(case.library.put(x).array) for x in host)
    assert case.sample(mu, sigma, N, seed=1).shape == (D, N)
    out = ReadOnly(case.library.out("float32", (N, 1), 0, D * N).array)
    with pytest.raises(ValueError, match=r"^out: expected a writable array, got a read-only one"):
        case.sample(mu, sigma, N, seed=1, out=out)


@pytest.mark.parametrize("case", [("`__cuda_array_interface__`", backend) for backend in SERVES["cuda"]], indirect=True,
                         ids=lambda pair: pair[1])  # fmt: skip
def test_read_only_and_empty_inputs_are_accepted(case: Case, bits: ToArray) -> None:
    host = host_vectors("float32")
    read_only = []
    for vector in host:
        array = case.library.put(vector).array
        read_only.append(Exported(array, data=(array.__cuda_array_interface__["data"][0], True)))
    x = case.sample(*read_only, N, seed=4)
    assert case.reached[:2] == tuple(map(pointer_of, read_only))
    assert np.array_equal(bits(settled(x)), bits(on_cpu(*host, N, seed=4)))
    interface = {"data": (0, False), "shape": (0,), "typestr": "<f4", "version": 3, "strides": None}
    empty = SimpleNamespace(__cuda_array_interface__=interface)
    assert case.sample(empty, 1.0, 3).shape == (0, 3)


class Both:
    """Memory on a second device with both protocols, like JAX's arrays; records the options of DLPack calls."""

    def __init__(self, array: Any) -> None:
        self.array, self.recorded = array, []

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 1

    def __dlpack__(self, **options: Any) -> Any:
        self.recorded.append(options)
        capsule = self.array.__dlpack__(max_version=(1, 0))
        tensor = dlpack._Versioned.from_address(dlpack._pointer(id(capsule), b"dltensor_versioned")).tensor
        tensor.device_type, tensor.device_id = 2, 1
        return capsule

    @property
    def __cuda_array_interface__(self) -> Any:
        pytest.fail("the interface of this array names no stream")


class Taken:
    """The array that a library makes from the CUDA array interface; records the current device and stream."""

    def __init__(self, source: Any, device: Any, **options: Any) -> None:
        self.source, self.device, self.options, self.dtype = source, device, options, None
        self.interface = source.__cuda_array_interface__

    def view(self, dtype: Any) -> Any:
        self.dtype = dtype
        return self


class Devices:
    """Contexts in which a device is current."""

    def __init__(self) -> None:
        self.current = 0

    def __getitem__(self, ordinal: int) -> Any:
        return self(ordinal)

    @contextlib.contextmanager
    def __call__(self, ordinal: int) -> Iterator[None]:
        before, self.current = self.current, ordinal
        yield
        self.current = before


@pytest.fixture(params=["cupy", "numba"])
def adopting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``adopt`` of a backend with a recording library; ``streams`` are the library's current streams by device."""
    devices, streams = Devices(), {0: 0, 1: 0}
    if request.param == "cupy":
        cuda = SimpleNamespace(Device=devices, get_current_stream=lambda: SimpleNamespace(ptr=streams[devices.current]))
        cupy = SimpleNamespace(cuda=cuda, asarray=lambda source: Taken(source, devices.current))
        monkeypatch.setitem(sys.modules, "cupy", cupy)  # type: ignore[arg-type]
    else:
        cuda = SimpleNamespace(gpus=devices)
        cuda.as_cuda_array = lambda source, **options: Taken(source, devices.current, **options)
        monkeypatch.setitem(sys.modules, "numba", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    backend: Any = importlib.import_module(f"multisample.backends.{request.param}")
    monkeypatch.setattr(cuda_driver, "device_of", lambda address: 1 if address else 0)
    if request.param == "numba":
        monkeypatch.setattr(backend, "on_device", devices.__getitem__)
    return SimpleNamespace(adopt=backend.BACKEND.adopt, streams=streams, name=request.param)


def test_dlpack_is_preferred_and_receives_the_stream_of_the_kernel(adopting: SimpleNamespace, dtype: str) -> None:
    array = torch.zeros((6, 2), dtype=getattr(torch, dtype))[::2, 1]
    for stream, named in ((0, 1), (77, 77)):
        adopting.streams[1] = stream
        source = Both(array)
        taken = adopting.adopt(source)
        # Numba arrays that name no stream are ready on the default stream.
        assert source.recorded == [{"max_version": (1, 0), "stream": named if adopting.name == "cupy" else 1}]
        assert (taken.device, taken.dtype) == (1, numpy_dtype(dtype))
        assert taken.interface["data"] == (array.data_ptr(), False)
        size = array.element_size()
        assert (taken.interface["shape"], taken.interface["strides"]) == ((3,), (4 * size,))
        assert "stream" not in taken.interface
        assert np.dtype(taken.interface["typestr"]).itemsize == size


def test_the_cuda_array_interface_is_adopted_on_its_device_without_waiting(adopting: SimpleNamespace) -> None:
    source = SimpleNamespace(__cuda_array_interface__={"data": (4096, False), "stream": 5})
    taken = adopting.adopt(source)
    assert (taken.source, taken.device, taken.dtype) == (source, 1, None)
    assert taken.options == ({} if adopting.name == "cupy" else {"sync": False})


def test_pytorch_adopts_memory_as_writable_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = importlib.import_module("multisample.backends.torch_ext")
    recorded: list[tuple[Any, Any]] = []
    tensor = torch.zeros(3)

    def as_tensor(source: Any, device: Any) -> Any:
        recorded.append((source, device))
        return tensor

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    monkeypatch.setattr(backend, "device_of", lambda address: 3)
    interface = {"data": (tensor.data_ptr(), True), "shape": (3,), "typestr": "<f4", "version": 3}
    source = SimpleNamespace(__cuda_array_interface__=interface)
    assert backend.BACKEND.adopt(source) is tensor
    ((shown, device),) = recorded
    assert device == "cuda:3"
    assert shown.__cuda_array_interface__ == {**interface, "data": (tensor.data_ptr(), False)}
    assert shown.owner is source
    interface["data"] = (4096, False)
    with pytest.raises(BufferError, match="copy"):
        backend.BACKEND.adopt(source)


def test_objects_with_a_protocol_have_the_device_of_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "device_of", lambda address: address // 1000)
    library = foreign.FOREIGN
    for address, ordinal in ((0, 0), (1000, 1), (7000, 7)):
        array = SimpleNamespace(__cuda_array_interface__={"data": (address, False)})
        assert library.device("mu", array) == ("cuda", ordinal)
    # DLPack's device takes precedence.
    assert library.device("mu", Both(np.zeros(3))) == ("cuda", 1)
    with pytest.raises(TypeError, match=r"^sigma: expected an array on one device, .*\('data'\)"):
        library.device("sigma", SimpleNamespace(__cuda_array_interface__={}))


def test_numba_arrays_name_their_streams() -> None:
    pytest.importorskip("numba.cuda")
    numba = library_called("numba")
    streams = (0, SimpleNamespace(handle=77), SimpleNamespace(handle=0))
    assert [numba.named_stream(SimpleNamespace(stream=stream)) for stream in streams] == [None, 77, 0]
    stream_of = numba.stream(numba.device("mu", SimpleNamespace(gpu_data=SimpleNamespace(context=_CONTEXT))))
    assert [stream_of(SimpleNamespace(stream=stream)) for stream in streams] == [0, 77, 0]


_CONTEXT = SimpleNamespace(device=SimpleNamespace(id=0))


class Driver:
    """A fake libcuda that records calls; `answers` are the functions' error codes, `values` their outputs."""

    def __init__(self, device: int = 0, **answers: int) -> None:
        self.recorded: list[tuple[Any, ...]] = []
        self.device, self.answers = device, answers
        self.values = {"cuPointerGetAttribute": 3, "cuStreamIsCapturing": 1, "cuEventCreate": 1000,
                       "cuDevicePrimaryCtxRetain": 2000}  # fmt: skip

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(*arguments: Any) -> int:
            plain = [getattr(getattr(x, "_obj", x), "value", x) for x in arguments]
            self.recorded.append((name, *plain))
            if name == "cuCtxGetDevice":
                arguments[0]._obj.value = self.device
            elif name in self.values:
                arguments[-1 if name == "cuStreamIsCapturing" else 0]._obj.value = self.values[name]
            return self.answers.get(name, 0)

        return function

    def names(self) -> list[str]:
        return [name for name, *_ in self.recorded]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    def use(*arguments: Any, **options: Any) -> Driver:
        driver = Driver(*arguments, **options)
        monkeypatch.setattr(cuda_driver, "driver", lambda: driver)
        return driver

    return use


def test_the_driver_knows_the_device_of_an_address_and_captured_streams(driver: Callable[..., Driver]) -> None:
    recorded = driver()
    assert cuda_driver.device_of(0) == 0
    assert not cuda_driver.is_capturing(0)
    assert not cuda_driver.is_capturing(1)
    assert recorded.recorded == []
    assert cuda_driver.device_of(2**47 + 4096) == 3
    assert recorded.recorded[0][2:] == (9, 2**47 + 4096)
    assert cuda_driver.is_capturing(2)
    assert cuda_driver.is_capturing(2**47)
    driver(cuPointerGetAttribute=1, cuStreamIsCapturing=1)
    assert cuda_driver.device_of(4096) == 0
    assert not cuda_driver.is_capturing(77)


def test_streams_are_ordered_by_an_event_on_their_device(driver: Callable[..., Driver]) -> None:
    recorded = driver()
    cuda_driver.order(77, 88, 0)
    made = [("cuEventCreate", None, 2), ("cuEventRecord", 1000, 77)]
    used = [("cuStreamWaitEvent", 88, 1000, 0), ("cuEventDestroy_v2", 1000)]
    assert [call for call in recorded.recorded if call[0] != "cuCtxGetDevice"] == made + used
    recorded = driver()
    # The legacy default stream has two handles.
    for first, then in ((0, 0), (0, 1), (1, 0), (77, 77)):
        cuda_driver.order(first, then, 0)
    assert recorded.recorded == []
    # An event of a device that is not current pushes and pops that device's context.
    recorded = driver(1)
    event = cuda_driver.Event(77, 0)
    begin = ["cuCtxGetDevice", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"]
    work, end = ["cuEventCreate", "cuEventRecord"], ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]
    assert recorded.names() == begin + work + end
    assert event.is_done()
    # The query does not invalidate a capture, and the capture mode is restored.
    mode = "cuThreadExchangeStreamCaptureMode"
    assert recorded.names()[-3:] == [mode, "cuEventQuery", mode]
    driver(cuEventQuery=600)
    assert not cuda_driver.Event(77, 0).is_done()
    # In a destroyed context all work is done.
    driver(cuEventQuery=709)
    assert cuda_driver.Event(77, 0).is_done()


def test_the_current_context_is_restored(driver: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = driver()
    recorded.values["cuCtxGetCurrent"] = 3000
    with pytest.raises(KeyError), cuda_driver.keeping_context():
        assert recorded.recorded == [("cuCtxGetCurrent", None)]
        raise KeyError
    assert recorded.recorded[1:] == [("cuCtxSetCurrent", 3000)]
    # If no context was current before, none is current afterwards.
    recorded = driver()
    with cuda_driver.keeping_context():
        pass
    assert recorded.recorded[1:] == [("cuCtxSetCurrent", None)]
    # If the driver is not initialized, no context is restored.
    recorded = driver(cuCtxGetCurrent=3)
    with cuda_driver.keeping_context():
        pass
    assert recorded.names() == ["cuCtxGetCurrent"]
    monkeypatch.setattr(cuda_driver, "driver", lambda: None)
    with cuda_driver.keeping_context():
        assert cuda_driver.device_of(4096) == 0
        assert not cuda_driver.is_capturing(77)


def test_driver_errors_raise_with_their_code(driver: Callable[..., Driver]) -> None:
    for name in ("cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuCtxPushCurrent_v2"):
        recorded = driver(1, **{name: 905})
        with pytest.raises(RuntimeError, match=r"^the CUDA driver refused .*905"):
            cuda_driver.order(77, 88, 0)
        retained, released = map(recorded.names().count, ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"))
        assert retained == released
        pushed = recorded.names().count("cuCtxPushCurrent_v2") - (name == "cuCtxPushCurrent_v2")
        assert recorded.names().count("cuCtxPopCurrent_v2") == pushed


def test_the_real_driver_has_every_function_that_we_call() -> None:
    real = cuda_driver.driver()
    if real is None:
        pytest.skip("no CUDA device: there is no driver")
    for name in ("cuPointerGetAttribute", "cuStreamIsCapturing", "cuCtxGetDevice", "cuDevicePrimaryCtxRetain",
                 "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2", "cuEventCreate",
                 "cuEventRecord", "cuEventQuery", "cuEventDestroy_v2", "cuStreamWaitEvent",
                 "cuThreadExchangeStreamCaptureMode", "cuGetErrorName", "cuCtxGetCurrent",
                 "cuCtxSetCurrent"):  # fmt: skip
        assert isinstance(getattr(real, name), ctypes._CFuncPtr)


def test_device_of_works_in_any_thread(to_numpy: Callable[[Any], Array]) -> None:
    require("numba")
    memory = memory_of("numba")
    for device in range(len(memory.cuda.gpus)):
        array = memory.put(np.ones(3, np.float32), device)
        place = memory.pointer(array)
        assert cuda_driver.device_of(place) == device
        # A new thread has no current context.
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            assert other.submit(cuda_driver.device_of, place).result() == device
    assert cuda_driver.device_of(np.ones(3).ctypes.data) == 0
