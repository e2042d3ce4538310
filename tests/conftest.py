"""Fixtures. The backend is a test parameter: every shared test runs once for each available backend.

``MULTISAMPLE_TEST_BACKENDS=torch_ext,cupy pytest`` runs them on exactly these, and fails if one cannot run.
"""

import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib.metadata
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from skip_rules import VARIABLE, device_count, requested, require

import multisample
from multisample import _backends
from multisample.backends import registry
from multisample.backends.kernels.cpu import helper_threads, launcher
from multisample.backends.launch import Launch
from multisample.backends.system import cuda_driver

# By default JAX reserves most of a GPU's memory when a test makes its first array, even on the CPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

Array = np.ndarray[Any, Any]


@functools.cache
def requested_backends() -> list[str]:
    """Backends for shared tests: those that the variable names, or all available backends without the variable."""
    names = requested()
    if names is None:
        return [name for name, status in multisample.list_backends().items() if status.available]
    if not names:
        raise pytest.UsageError(f"{VARIABLE} names no backend: {os.environ[VARIABLE]!r}")
    return names


def is_benchmark(config: pytest.Config) -> bool:
    """Whether only benchmarks run."""
    return bool(config.getoption("benchmark_only", False))


def compile_fast() -> None:
    """Let XLA compile programs in half the time: by its older code generator, and without LLVM's expensive passes."""
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("jaxlib").startswith("0.10."):  # XLA ends the process for unknown flags.
            flags = os.environ.get("XLA_FLAGS", "")
            os.environ["XLA_FLAGS"] = f"--xla_cpu_use_fusion_emitters=false {flags}"


def pytest_configure(config: pytest.Config) -> None:
    if is_benchmark(config) or config.getoption("numprocesses", None):  # Benchmarks, and the parent of workers.
        return
    if "not slow" in config.getoption("markexpr"):
        compile_fast()  # Slow tests compile as users do.
    import hypothesis

    # No deadline, since compiling takes seconds. Examples are fixed, like every seed of the tests.
    hypothesis.settings.register_profile("multisample", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("multisample")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", requested_backends(), indirect=True, scope="session")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """``pytest --benchmark-only`` needs the `bench` extra alone: it does not import the tests."""
    return True if is_benchmark(config) else None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Without a CUDA device, one line sums up the tests that need one. A line for each would hide other skips."""
    config = terminalreporter.config
    if is_benchmark(config) or not config.getoption("fold_skipped", True):
        return
    if device_count() > 0:
        return
    for report in terminalreporter.stats.get("skipped", []):
        if "CUDA device" in report.longrepr[2]:
            report.longrepr = (__file__, None, "no CUDA device")


def pytest_collection_finish() -> None:
    """The garbage collector skips what the tests have imported: a search of all of it takes most of a second."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def first_device() -> None:
    """Each test begins on the first CUDA device. When JAX starts, it leaves the last device current."""
    if device_count() > 1 and cuda_driver.current_device() > 0:
        import torch

        torch.cuda.set_device(0)


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a backend, for ``sample(..., backend=backend)``; the test runs once for each."""
    name: str = request.param
    known = multisample.list_backends()
    if name not in known:
        pytest.fail(f"{VARIABLE} asks for {name!r}, there are only {', '.join(known)}", pytrace=False)
    if not known[name].available:
        pytest.fail(f"{VARIABLE} asks for {name!r}: {'; '.join(known[name].reasons)}", pytrace=False)
    return name


@pytest.fixture
def new_choices() -> Iterator[None]:
    """Discard choices of backends before and after a test that registers or removes backends."""
    _backends.forget()
    yield
    _backends.forget()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch, new_choices: None) -> Callable[[Any], Any]:
    """``registered(backend)``: registers a backend for this test only, in place of a backend with its name."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

    def register(backend: Any) -> Any:
        if registry._registered.pop(backend.name, None) is not None:
            _backends.forget()
        multisample.register_backend(backend)
        return backend

    return register


@pytest.fixture
def thread_counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """``thread_counts()``: the threads of each call since the last `thread_counts()`, of calls that may use several."""
    pools: list[Any] = []
    threads, before = launcher._threads, helper_threads._shared[helper_threads._POOL]

    def threads_of_new_pool(launch: Launch, most: int) -> int:
        # Each call gets a new pool, whose helpers are its own. They sleep until the process ends.
        helper_threads._forget()
        pools.append(helper_threads._pool[helper_threads._FIRST + helper_threads._STATE :: helper_threads._LINE])
        return threads(launch, most)

    def counts() -> list[int]:
        found = [1 + int((states != helper_threads._NO_THREAD).sum()) for states in pools]
        pools.clear()
        return found

    monkeypatch.setattr(helper_threads, "_pool", helper_threads._pool)  # Restored after the test.
    monkeypatch.setattr(launcher, "_threads", threads_of_new_pool)
    yield counts
    helper_threads._shared[helper_threads._POOL] = before


@pytest.fixture(params=["cpu", "cuda"])
def torch_device(request: pytest.FixtureRequest) -> str:
    """A PyTorch device on which torch_ext runs; the test runs once for each."""
    device: str = request.param
    require("torch_ext", on_cuda=device == "cuda")
    return device


@pytest.fixture(scope="session")
def build_once(request: pytest.FixtureRequest) -> Callable[..., Path]:
    """``build_once(name, key, sources, make)``: a folder that one worker has filled by ``make(folder)`` for all.

    pytest's cache stores it until `key` or a file in `sources` changes.
    """
    root = Path(request.config.cache.mkdir("built"))

    def build_once(name: str, key: object, sources: Iterable[Path], make: Callable[[Path], None]) -> Path:
        digest, of_key = hashlib.sha256(), hashlib.sha256(repr(key).encode()).hexdigest()[:12]
        for source in sources:
            for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
                if path.is_file() and "__pycache__" not in path.parts:
                    digest.update(path.read_bytes())
        built = root / f"{name}-{of_key}"
        with built.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder = built / digest.hexdigest()[:12]
            if not (folder / "complete").exists():
                shutil.rmtree(built, ignore_errors=True)
                folder.mkdir(parents=True)
                make(folder)
                (folder / "complete").touch()
        return folder

    return build_once


def _to_numpy(array: Any) -> Array:
    if isinstance(array, np.ndarray):
        return array
    if type(array).__module__.partition(".")[0] == "torch":
        host = array.detach().cpu()
        if str(host.dtype) == "torch.bfloat16":
            import torch

            return np.asarray(host.view(torch.int16).numpy().view(np.uint16))
        return np.asarray(host.numpy())
    for method in ("get", "copy_to_host"):
        if hasattr(array, method):
            return np.asarray(getattr(array, method)())
    return np.asarray(array)


def _bits(array: Any) -> Array:
    host = _to_numpy(array)
    return host.view(f"u{host.dtype.itemsize}")


@pytest.fixture(scope="session")
def to_numpy() -> Callable[[Any], Array]:
    """``to_numpy(array)``: any library's array as a NumPy array; PyTorch's bfloat16 becomes uint16 bits."""
    return _to_numpy


@pytest.fixture(scope="session")
def bits() -> Callable[[Any], Array]:
    """``bits(array)``: the bit patterns of any library's floating-point array, as unsigned integers."""
    return _bits


@pytest.fixture(scope="session")
def place(backend: str) -> Callable[[Array], Any]:
    """``place(array)``: a copy of a NumPy array in memory that `backend` can write; for cpu, the array itself."""
    chosen = registry.find(backend)

    def place(array: Array) -> Any:
        if array.dtype.name != "bfloat16" or chosen.host_library == "numpy":
            return chosen.adopt(array)
        moved = chosen.adopt(array.view(np.int16))
        if chosen.host_library == "torch":
            import torch

            return moved.view(torch.bfloat16)
        return moved.view(array.dtype)

    return place


@pytest.fixture
def room() -> Iterator[Callable[[Any, int], None]]:
    """``room(memory, bytes)`` skips the test without enough free memory; the memory is released after the test."""
    from cuda_memory import release

    def check(memory: Any, needed: int) -> None:
        release()
        if memory.free_bytes() < needed:
            pytest.skip(f"needs {needed >> 20} MiB of free device memory, there are {memory.free_bytes() >> 20}")

    yield check
    release()


@pytest.fixture
def terminal() -> io.StringIO:
    """A stream that claims to be a terminal."""
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    return stream


class _Strided:
    """A strided view of a Numba array, through the CUDA array interface."""

    def __init__(self, base: Any, host: Array, part: Array) -> None:
        self.base = base
        interface = base.__cuda_array_interface__
        offset = part.__array_interface__["data"][0] - host.__array_interface__["data"][0]
        pointer = interface["data"][0] + offset if part.size else 0
        own = {"shape": part.shape, "strides": part.strides, "data": (pointer, False)}
        self.__cuda_array_interface__ = interface | own


@pytest.fixture(scope="session")
def view_of(backend: str) -> Callable[[Any, Array, Callable[[Any], Any]], Any]:
    """``view_of(base, host, view)``: ``view(base)``; for Numba's arrays, a view with the strides of ``view(host)``."""
    library = registry.find(backend).host_library

    def view_of(base: Any, host: Array, view: Callable[[Any], Any]) -> Any:
        if library != "numba":
            return view(base)
        from numba import cuda

        return cuda.as_cuda_array(_Strided(base, host, view(host))).view(host.dtype)

    return view_of
