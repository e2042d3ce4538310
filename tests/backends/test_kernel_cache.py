"""Failures of the kernel cache cost time only: they cause no errors, no wrong kernels and no silent waits."""

import calendar
import compileall
import contextlib
import functools
import gc
import hashlib
import itertools
import math
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from forks import answers, fork, forked, in_forks
from numba import types
from numba.core import config
from numba.core.compiler_lock import global_compiler_lock
from processes import run_python

import multisample
from multisample.__main__ import main
from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.errors import BackendUnavailableError
from multisample.backends.kernels import compilation
from multisample.backends.kernels.cpu import calls as cpu_calls
from multisample.backends.native import toolchain
from multisample.backends.system import cache, forks, sources

needs_tools = pytest.mark.skipif(bool(toolchain.missing_tools()), reason="; ".join(toolchain.missing_tools()))
# Seconds after which a process counts as hanging.
DEADLINE = 300


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; warnings and messages that are printed once may be printed again."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MULTISAMPLE_CACHE_DIR", str(folder))
    monkeypatch.setattr(cache, "_warned", set())
    cache.say_compiling.cache_clear()
    return folder


@pytest.fixture
def compiled() -> Iterator[Callable[[], int]]:
    """``compiled()``: the number of functions that Numba has compiled since the test began."""
    from numba.core import event

    with event.install_recorder("numba:compile") as recorder:
        yield lambda: sum(recorded.is_start for _, recorded in recorder.buffer)


def successor(kind: Any = types.int64, name: str = "test-successor", digest: str = "digest") -> Any:
    """A function of one line, compiled or from the cache."""
    return compilation.compile_cached(kind(kind), lambda x: x + 1, name, digest).entry_point


def only_file(root: Path) -> Path:
    (file,) = (root / "numba").iterdir()
    return file


def test_a_kernel_is_compiled_once(root: Path, compiled: Callable[[], int], capfd: pytest.CaptureFixture[str]) -> None:
    assert successor()(41) == 42
    assert compiled() == 1
    assert successor()(41) == 42
    assert compiled() == 1
    assert only_file(root).name.startswith("test-successor-")
    printed = capfd.readouterr()
    assert printed.out == ""
    says = "compiling kernels of cpu, once for this machine: some seconds for each kind of call"
    assert printed.err == f"multisample: {says}\n"


def test_different_kernels_and_compilers_have_different_files(root: Path, compiled: Any, monkeypatch: Any) -> None:
    successor()
    others: list[Any] = [
        {"kind": types.float64}, {"name": "test-other"}, {"digest": "other"}, "numba", "llvmlite", "OPT", "BOUNDSCHECK",
    ]  # fmt: skip
    for count, other in enumerate(others, 2):
        with monkeypatch.context() as patch:
            if other in ("OPT", "BOUNDSCHECK"):
                patch.setattr(config, other, 1)
                other = {}
            elif isinstance(other, str):
                patch.setattr(getattr(compilation, other), "__version__", "0.0")
                other = {}
            assert successor(**other)(41) == 42
        assert compiled() == len(list((root / "numba").iterdir())) == count
    assert successor()(41) == 42
    assert compiled() == 8


@pytest.mark.parametrize("digest", ["digest", ""])
def test_kernels_without_a_digest_are_not_cached(root: Path, compiled: Callable[[], int], digest: str) -> None:
    expected = contextlib.nullcontext() if digest else pytest.warns(RuntimeWarning, match="importer .* has no files")
    with expected:
        successor(digest=digest)
    assert successor(digest=digest)(41) == 42
    assert compiled() == 2 - bool(digest)
    assert (root / "numba").exists() == bool(digest)


@pytest.mark.parametrize("disabled", [False, True])
def test_kernels_are_compiled_where_numba_is_disabled(root: Path, monkeypatch: Any, disabled: bool) -> None:
    monkeypatch.setattr(config, "DISABLE_JIT", disabled)
    total = compilation.compile_cached(types.float64(types.float64[:]), lambda x: x.sum(), "test-sum", "digest")
    assert total.entry_point(np.ones(3)) == 3.0
    assert multisample.numba.normal(7, 0, 0, 1) == multisample.sample([0.0], 1.0, 2, seed=7)[0, 1]
    assert disabled == config.DISABLE_JIT


@pytest.mark.parametrize("collects", [False, True])
def test_the_garbage_collector_pauses_during_a_compilation(root: Path, monkeypatch: Any, collects: bool) -> None:
    def add_ir_module(*code: Any) -> None:
        paused.append(not gc.isenabled())
        raise MemoryError

    paused: list[bool] = []
    monkeypatch.setattr(compilation._Code, "add_ir_module", add_ir_module)
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(MemoryError):
            successor()
        assert (paused, gc.isenabled()) == ([True], collects)
    finally:
        (gc.enable if before else gc.disable)()


def test_a_digest_is_of_all_sources_in_a_folder_or_in_an_archive(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "below").mkdir(parents=True)
    for name in ("__init__.py", "below/__init__.py", "below/kernel.py"):
        (package / name).write_text("")

    def digest(folder: Any = package) -> str:
        return sources.Sources(folder, ".py", ".pyc").digest()

    digests = [digest()]
    (package / "below" / "kernel.py").write_text("# Changed.")
    digests.append(digest())
    (package / "below" / "kernel.py").rename(package / "kernel.py")
    digests.append(digest())
    archive = shutil.make_archive(str(tmp_path / "archive"), "zip", tmp_path, "package")
    assert digest(zipfile.Path(archive, "package/")) == digests[-1]
    (package / "kernel.py").rename(package / "kernel.pyc")
    digests.append(digest())
    assert len(set(digests)) == 4
    (package / "data.txt").write_text("No source.")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "kernel.py").write_text("")
    assert digest() == digests[-1]
    assert digest(package / "__pycache__" / "nothing") == ""
    assert compilation.source_digest() == digest(sources.PACKAGE / "backends")


@pytest.mark.parametrize("change", ["content", "new file", "archive"])
def test_changed_sources_compile_nothing(tmp_path: Path, change: str) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "kernel.py").write_text("")
    archive = shutil.make_archive(str(tmp_path / "archive"), "zip", tmp_path, "package")
    imported = sources.Sources(zipfile.Path(archive, "package/") if change == "archive" else package, ".py")
    if change == "new file":
        imported.digest()
    changed = Path(archive) if change == "archive" else package / ("other.py" if change == "new file" else "kernel.py")
    changed.write_text("# Changed.")
    with pytest.raises(BackendUnavailableError, match=f"{changed} has changed since this process imported multisample"):
        imported.digest()


def _copied_package(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "prebuilt")
    return Path(shutil.copytree(sources.PACKAGE, folder / "multisample", ignore=ignored))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["archive", "without sources"])
def test_versions_whose_importer_has_no_sources_keep_their_numbers(tmp_path: Path, form: str) -> None:
    places = []
    for version in ("one", "two"):
        package = _copied_package(tmp_path / version)
        words = package / "backends/kernels/stream/words.py"
        if version == "two":
            words.write_text(re.sub("0x6D756C74", "0x11111111", words.read_text(), flags=re.IGNORECASE))
        if form == "archive":
            places.append(shutil.make_archive(str(package.parent), "zip", package.parent))
        else:
            assert compileall.compile_dir(package, quiet=2, legacy=True)
            for source in package.rglob("*.py"):
                source.unlink()
            places.append(str(package.parent))
    program = "import multisample as m; print(m.__file__, m.sample([0.0], 1.0, 1, seed=7)[0, 0])"
    cache_dir = str(tmp_path / "cache")
    numbers = []
    for place in (*places, *places):
        run = run_python("-c", program, folder=tmp_path, PYTHONPATH=place, MULTISAMPLE_CACHE_DIR=cache_dir)
        file, number = run.stdout.split()
        assert Path(file).is_relative_to(place)
        numbers.append(number)
    assert numbers[0] == str(multisample.sample([0.0], 1.0, 1, seed=7)[0, 0]) != numbers[1]
    assert numbers[2:] == numbers[:2]


@pytest.mark.slow
def test_an_upgrade_after_the_import_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    file = _copied_package(tmp_path) / "backends/launch.py"
    program = f"""
import pathlib, numpy, multisample
assert multisample.__file__ == {str(tmp_path / "multisample/__init__.py")!r}
pathlib.Path({str(file)!r}).write_text("# Another version.")
try:
    multisample.sample(numpy.zeros(1), 1.0, 3, seed=7)
except multisample.BackendUnavailableError as error:
    print(error)
"""
    cache_dir = str(tmp_path / "cache")
    run = run_python("-c", program, folder=tmp_path, PYTHONPATH=str(tmp_path), MULTISAMPLE_CACHE_DIR=cache_dir)
    assert f"{file} has changed since this process imported multisample" in run.stdout
    assert not (tmp_path / "cache").exists()


Kernels = Callable[..., None]


@pytest.fixture
def kernels(root: Path, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """``kernels(*kernels)``: what ``build cpu`` compiles, in two processes."""
    monkeypatch.setenv("MULTISAMPLE_NUM_THREADS", "2")
    return lambda *kernels: monkeypatch.setattr(cpu_calls, "kernels", lambda: kernels)


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the build fork, since a spawned process imports Numba for a second. Only for builds that succeed: forked
    siblings hold each other's pipes open, so the exit of one goes unnoticed.
    """
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


@forked
def test_the_build_command_tells_compiled_from_cached_kernels(
    root: Path, kernels: Kernels, forking: None, capfd: pytest.CaptureFixture[str]
) -> None:
    kernels(successor)
    assert main(["build", "cpu"]) == 0
    printed = capfd.readouterr()
    assert re.fullmatch(r"cpu: compiled 1 kernels in [\d.]+ s\n", printed.out)
    assert re.fullmatch(r"(cpu: 0 of 1 kernels, \d+ s\n)+", printed.err)  # No line for each kernel without a terminal.
    assert only_file(root).name.startswith("test-successor-")
    assert main(["build", "cpu"]) == 0
    assert re.fullmatch(r"cpu: compiled 0 kernels in [\d.]+ s; 1 were compiled before\n", capfd.readouterr().out)


@forked
def test_kernels_are_compiled_in_parallel(tmp_path: Path, kernels: Kernels, forking: None) -> None:
    os.mkfifo(tmp_path / "pipe")  # Opening one end of a FIFO blocks until the other is open.
    ends = [["timeout", "30", "sh", "-c", f"{end} {tmp_path / 'pipe'}"] for end in ("cat", "echo >")]
    kernels(*(functools.partial(subprocess.check_call, end) for end in ends))
    assert main(["build", "cpu"]) == 0


@pytest.mark.slow
@forked
def test_a_terminal_shows_progress_in_a_line(kernels: Kernels, forking: None, terminal: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    kernels(*(functools.partial(time.sleep, seconds) for seconds in (0, 2.2)))
    assert main(["build", "cpu"]) == 0
    lines = terminal.getvalue().split("\r")
    assert lines[1] == "cpu: 0 of 2 kernels, 0 s"
    assert re.fullmatch(r"cpu: 2 of 2 kernels, [1-9]\d* s *\n", lines[-1])
    assert sum("1 of 2" in line for line in lines) >= 2  # The seconds continue while a kernel is compiled.


@pytest.mark.parametrize(("kernel", "error"), [
    (functools.partial(math.sqrt, -1), "math domain error"),
    (functools.partial(os._exit, 3), ".*terminated abruptly.*"),
])  # fmt: skip
def test_a_failure_ends_the_build_and_its_processes(kernels: Kernels, capfd: Any, kernel: Any, error: str) -> None:
    kernels(kernel, functools.partial(time.sleep, DEADLINE))
    of_others = set(multiprocessing.active_children())  # Other tests may have left some, such as those of Dask.
    assert main(["build", "cpu"]) == 1
    printed = capfd.readouterr()
    assert re.fullmatch(rf"(cpu: 0 of 2 kernels, \d+ s\n)+multisample: error: {error}\n", printed.err)
    assert printed.out == ""
    end = time.monotonic() + 10
    while set(multiprocessing.active_children()) - of_others:  # A thread of the pool reaps them.
        assert time.monotonic() < end
        time.sleep(0.01)


@forked
def test_a_warning_of_several_processes_is_issued_once(root: Path, kernels: Kernels, forking: None) -> None:
    root.write_text("no folder")
    compiling = functools.partial(compilation.compile_cached, types.boolean(types.int64), calendar.isleap)
    kernels(*(functools.partial(compiling, name, "digest") for name in ("test-one", "test-two")))
    with pytest.warns(RuntimeWarning, match=f"{root}.*set MULTISAMPLE_CACHE_DIR") as warned:
        assert main(["build", "cpu"]) == 0
    # Other libraries, such as JAX, may warn of the fork.
    assert sum("MULTISAMPLE_CACHE_DIR" in str(warning.message) for warning in warned) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seconds"), [("cpu", 0), ("cpu", 1), pytest.param("torch_ext", 1, marks=needs_tools)])
def test_an_interrupt_ends_the_build_and_its_processes(root: Path, name: str, seconds: int) -> None:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "multisample", "build", name]
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    assert process.stderr
    if name == "torch_ext":
        assert process.stderr.readline().startswith("multisample: building torch_ext ")
    assert process.stderr.readline() == f"cpu: 0 of {len(cpu_calls.kernels())} kernels, 0 s\n"
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)  # As a terminal does.
    output, error = process.communicate(timeout=DEADLINE)
    assert (process.returncode, output) == (130, ""), error
    assert re.fullmatch(r"(cpu: .*\n)*multisample: stopped by SIGINT\n", error)
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # Python's resource tracker ends a little later.
            os.killpg(process.pid, 0)
            time.sleep(0.1)
    assert not list(root.glob("torch_ext/building/*"))


@pytest.mark.slow
def test_the_build_command_compiles_all_cpu_kernels(capfd: pytest.CaptureFixture[str]) -> None:
    """Other tests have left most of the kernels in the cache."""
    assert main(["build", "cpu"]) == 0
    printed = re.fullmatch(r"cpu: compiled (\d+) kernels in .* s(?:; (\d+) were .*)?\n", capfd.readouterr().out)
    assert printed and int(printed[1]) + int(printed[2] or 0) == len(cpu_calls.kernels())
    kept = {path.name.rpartition("-")[0] for path in (cache.root() / "numba").glob("cpu-*")}
    assert kept >= {
        *(f"cpu-draw_{'_'.join(x)}" for x in itertools.product(MATRIX_TYPES, ("shared", "shared_antithetic"))),
        *(f"cpu-draw_{dtype}{pairs}" for dtype in MATRIX_TYPES for pairs in ("", "_antithetic")),
        *(f"cpu-{name}_{dtype}-address" for dtype in MATRIX_TYPES for name in ("moments", "perturb")),
        "cpu-draw_all-address",
        *(f"cpu-check_{dtype}" for dtype in ("float32", "float64")),
    }


# A file with a valid digest but without a kernel. An incompatible version of Numba could have written such a file.
PAYLOAD = pickle.dumps("no kernel")
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) // 2],
    "a flipped bit": lambda content: content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
    "another pickle": lambda content: cache._MAGIC + hashlib.sha256(PAYLOAD).digest() + PAYLOAD,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_compiled_again_and_replaced(root: Path, compiled: Callable[[], int], damage: str) -> None:
    successor()
    file = only_file(root)
    content = file.read_bytes()
    file.write_bytes(DAMAGES[damage](content))
    with pytest.warns(RuntimeWarning, match="a kernel of 'cpu' was compiled without its cached copy: ") as warned:
        assert successor()(41) == 42
    assert str(file) in str(warned[0].message)
    assert compiled() == 2
    assert cache.read(file)
    assert successor()(41) == 42
    assert compiled() == 2


def test_a_warning_is_issued_once(root: Path) -> None:
    root.write_text("no folder")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            assert successor()(41) == 42
    assert len(warned) == 1
    assert str(root) in str(warned[0].message)
    assert "set MULTISAMPLE_CACHE_DIR to a folder that can be written to" in str(warned[0].message)


@pytest.mark.parametrize("is_file", [False, True])
def test_what_others_can_write_to_is_not_unpickled(root: Path, compiled: Any, monkeypatch: Any, is_file: bool) -> None:
    successor()
    path = only_file(root) if is_file else root / "numba"
    path.chmod(path.stat().st_mode | 0o022)
    monkeypatch.setattr(pickle, "loads", lambda payload: pytest.fail("this runs code"))
    with pytest.warns(RuntimeWarning, match=f"{path}: others can write to it .*; run chmod go-w"):
        assert successor()(41) == 42
    assert compiled() == 2


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Limit the size of files, as on a full disk."""
    import resource

    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="this system limits no file sizes")
def test_a_full_disk_only_causes_a_warning(root: Path, compiled: Callable[[], int]) -> None:
    with pytest.warns(RuntimeWarning, match="test-successor-.*: File too large"), full_disk():
        assert successor()(41) == 42
    assert list((root / "numba").iterdir()) == []
    assert successor()(41) == 42
    assert successor()(41) == 42
    assert compiled() == 2


def add(number: int) -> int:
    part = compilation.inline(lambda x: x + number)
    compiled = compilation.compile_cached(types.int64(types.int64), lambda x: part(x), f"test-add{number}", "digest")
    return int(compiled.entry_point(40))


@forked
def test_processes_share_equal_kernels_and_give_different_ones_different_files(
    root: Path, compiled: Callable[[], int], capfd: pytest.CaptureFixture[str]
) -> None:
    # Numba's own names count the functions of a process: kernels compiled first in two processes would share one.
    assert in_forks(*(functools.partial(add, number) for number in (1, 2, 1))) == [41, 42, 41]
    assert 1 <= capfd.readouterr().err.count("compiling kernels of cpu") <= 3
    assert in_forks(lambda: [add(2), add(1), compiled()]) == [[42, 41, 0]]
    assert "compiling" not in capfd.readouterr().err
    names = sorted(path.name.rpartition("-")[0] for path in (root / "numba").iterdir())
    assert names == ["test-add1", "test-add2"]


@forked
def test_a_relative_folder_in_a_deleted_working_directory_is_named(root: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MULTISAMPLE_CACHE_DIR", "relative")

    def compile_printer() -> None:
        function = lambda x: print(x)  # noqa: E731  For a print, Numba looks up the source's path.
        compilation.compile_cached(types.none(types.int64), function, "test-printer", "digest")

    def messages() -> list[str]:
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with pytest.raises(BackendUnavailableError) as raised:
                compile_printer()
        os.chdir(tmp_path)
        compile_printer()
        return [str(raised.value), *(str(warning.message) for warning in warned)]

    ((error, warning),) = in_forks(messages)
    assert re.fullmatch("backend: Numba cannot compile a kernel, since the working directory .* os.chdir", error, re.S)
    expected = "without its cached copy: MULTISAMPLE_CACHE_DIR: expected a folder, got 'relative' relative to a working"
    assert expected in warning
    assert list((tmp_path / "relative" / "numba").iterdir())


@forked
def test_a_child_forked_during_a_compilation_can_compile(root: Path) -> None:
    compiles, has_forked = threading.Event(), threading.Event()

    def compile_slowly() -> None:
        with global_compiler_lock:
            compiles.set()
            has_forked.wait(0.2)  # Until the timeout, if the fork waits for the lock.

    thread = threading.Thread(target=compile_slowly)
    thread.start()
    compiles.wait()
    child = fork(lambda: int(successor()(41)))
    has_forked.set()
    thread.join()
    assert answers([child]) == [42]
    only_file(root).unlink()
    assert successor()(41) == 42


@pytest.mark.parametrize("is_acquired", [True, False])
def test_a_fork_whose_hook_was_interrupted_releases_the_lock(is_acquired: bool, monkeypatch: Any) -> None:
    lock = threading.RLock()

    def interrupted_acquire() -> None:
        if is_acquired:
            lock.acquire()
        raise KeyboardInterrupt

    compiler_lock = SimpleNamespace(acquire=interrupted_acquire, release=lock.release)
    monkeypatch.setitem(sys.modules, "numba.core.compiler_lock", SimpleNamespace(global_compiler_lock=compiler_lock))
    with pytest.raises(KeyboardInterrupt):
        forks._acquire()
    forks._release()
    acquired: list[bool] = []
    thread = threading.Thread(target=lambda: acquired.append(lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    assert acquired == [True]
