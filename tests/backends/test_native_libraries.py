"""Builds of native libraries: interrupted builds, damaged files and parallel builds do no harm.

Compilers of tests report to a named pipe and wait until they are released or killed: no test sleeps or measures time.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import Mock

import pytest
from forks import answers, fork, forked

from multisample import BackendUnavailableError
from multisample.__main__ import main
from multisample.backends import registry
from multisample.backends.native import build, compiler_flags, csrc_files, library_cache, targets, toolchain, units
from multisample.backends.native.compiler_flags import Library
from multisample.backends.native.units import LibraryKind
from multisample.backends.system import cache
from multisample.backends.system.sources import Sources
from multisample.commands import build as commands

torch = pytest.importorskip("torch")
needs_tools = pytest.mark.skipif(bool(toolchain.missing_tools()), reason="; ".join(toolchain.missing_tools()))

# Seconds after which a process counts as hanging.
DEADLINE = 120
PROCESSES = 8

# The compilers of the fixture `compiler`, and their number of compilations.
Compiler = Callable[[str], Callable[[], int]]

# Folders of running builds in the cache.
BUILDS = "torch_ext/building/*"

# A source that compiles quickly.
PLAIN = '#include "answer.h"\nextern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n'
STABLE = """
#include <torch/csrc/stable/library.h>
#include "answer.h"
STABLE_TORCH_LIBRARY(multisample_test_build, m) { m.def("nothing(int x) -> int"); }
extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }
"""

# A wrapper of the compiler that runs a command before it compiles, but not before it links or prints its version.
COMPILER = """#!/bin/sh
for argument; do
    if [ "$argument" = -c ]; then
        echo compiled >> {count}
        {first}
    fi
done
exec {compiler} "$@"
"""

# This program builds in `processes` forks at once, and prints the library of each.
BUILD = """
import dataclasses, os, signal, sys
from pathlib import Path
import torch
from multisample.backends.native import compiler_flags, csrc_files, library_cache
from multisample.backends.system.sources import Sources

signal.signal(signal.SIGINT, signal.default_int_handler)  # A background job begins with SIGINT ignored.
sources, processes = sys.argv[1], int(sys.argv[2])
csrc_files.folder = lambda: Path(sources)
csrc_files.digest = Sources(Path(sources), *csrc_files.CSRC.suffixes).digest
library = compiler_flags.LIBRARIES["cpu"]
compiler_flags.LIBRARIES["cpu"] = dataclasses.replace(library, units=())
compiler_flags.all_units = lambda: ()
gate, opener = os.pipe()
forks = []
for _ in range(processes - 1):
    fork = os.fork()
    if fork == 0:
        forks = None
        break
    forks.append(fork)
os.close(opener)
os.read(gate, 1)  # Returns when every process has closed the other end.
os.write(1, f"{library_cache.libraries(['cpu'])['cpu']}\\n".encode())
if forks is None:
    os._exit(0)
for fork in forks:
    assert os.waitpid(fork, 0)[1] == 0
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources that replaces ours, with all caches in the test's folder."""
    folder = tmp_path / "a source folder"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/cpu.cpp").write_text(PLAIN)
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(csrc_files, "folder", lambda: folder)
    # The sources may change, as if each call were that of another process.
    monkeypatch.setattr(csrc_files, "digest", lambda: Sources(folder, *csrc_files.CSRC.suffixes).digest())
    for kind, library in compiler_flags.LIBRARIES.items():
        monkeypatch.setitem(compiler_flags.LIBRARIES, kind, dataclasses.replace(library, units=()))
    monkeypatch.setattr(compiler_flags, "all_units", lambda: ())
    monkeypatch.setattr(library_cache, "_failures", {})
    monkeypatch.setattr(commands, "_compile_kernels", lambda: "cpu: compiled 0 kernels in 0.0 s")
    monkeypatch.setenv("MULTISAMPLE_CACHE_DIR", str(tmp_path / "a cache"))
    return folder


@pytest.fixture
def cache_root(tmp_path: Path) -> Path:
    return tmp_path / "a cache"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """``count = compiler(first)``: compilers first run the shell command `first`. ``count()`` is their number."""
    real, script, count = shutil.which(os.environ.get("CXX", "c++")), tmp_path / "cxx", tmp_path / "count"

    def use(first: str) -> Callable[[], int]:
        script.write_text(COMPILER.format(compiler=real, count=count, first=first))
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return lambda: len(count.read_text().splitlines()) if count.exists() else 0

    return use


@contextlib.contextmanager
def building(sources: Path, processes: int = 1) -> Iterator[subprocess.Popen[str]]:
    """Other processes that build; they are killed after a timeout."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", BUILD, str(sources), str(processes)]
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        alarm = threading.Timer(DEADLINE, os.killpg, (process.pid, signal.SIGKILL))
        alarm.start()
        try:
            yield process
        finally:
            alarm.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


def place(kind: LibraryKind = "cpu") -> Path:
    return library_cache._place(compiler_flags.LIBRARIES[kind])


def _compile_nothing(
    libraries: Mapping[Path, Library], show: Callable[[int], object], meanwhile: Callable[[], object]
) -> list[str]:
    for folder, library in libraries.items():
        folder.mkdir()
        (folder / f"{library.module}.so").write_text("a library")
        show(1)
    return [""] * len(libraries)


@pytest.mark.slow
@needs_tools
def test_the_build_command_builds_a_library_once(sources: Path, cache_root: Path, capfd: Any, monkeypatch: Any) -> None:
    (sources / "torch/cpu.cpp").write_text(STABLE)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not library_cache.is_built("cpu")
    library = place()
    assert main(["build", "torch_ext"]) == 0
    printed = capfd.readouterr()
    cpu, cuda, kernels = printed.out.splitlines()
    assert re.fullmatch(rf"torch_ext, CPU: built in [\d.]+ s: {re.escape(str(library))}", cpu)
    assert cuda.startswith("torch_ext, CUDA: not built: PyTorch is built without CUDA")
    assert kernels == "cpu: compiled 0 kernels in 0.0 s"
    says = r"multisample: building torch_ext for the CPU \(the operators\), .*about 9 s on .*\n"
    assert re.fullmatch(says, printed.err)
    assert library_cache.is_built("cpu")
    torch.ops.load_library(str(library))
    assert torch.ops.multisample_test_build.nothing
    assert answer(library) == 42

    # The build leaves only the library, its record, the lock, and an empty folder.
    assert {path.relative_to(cache_root) for path in cache_root.rglob("*")} == {
        Path("torch_ext"), Path("torch_ext/lock"), Path("torch_ext/building"),
        *(path.relative_to(cache_root) for path in (library.parent, library, library.with_name("record.json"))),
    }  # fmt: skip
    modified = library.stat().st_mtime_ns
    assert library_cache.libraries(["cpu"])["cpu"] == library
    assert capfd.readouterr() == ("", "")
    assert main(["build", "torch_ext"]) == 0
    printed = capfd.readouterr()
    assert printed.out.splitlines()[0] == f"torch_ext, CPU: was built before: {library}"
    assert printed.err == ""
    assert library.stat().st_mtime_ns == modified


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "another header": lambda sources, patch: (sources / "answer.h").write_text("#define ANSWER 43\n"),
    "another PyTorch": lambda sources, patch: patch.setattr(torch, "__version__", torch.__version__ + ".1"),
    "other flags": lambda sources, patch: patch.setitem(
        compiler_flags.LIBRARIES, "cpu", dataclasses.replace(compiler_flags.LIBRARIES["cpu"], flags=("-O0",))
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_dependency_changes_the_library(sources: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    before = place()
    assert place() == before
    CHANGES[change](sources, monkeypatch)
    after = place()
    assert after != before
    assert after.parent.parent == before.parent.parent


def test_architectures_from_the_environment(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = []
    for names in ("9.0", "8.0;9.0"):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", names)
        assert targets.cuda_architectures() == names
        places.append(place("cuda"))
    assert places[0] != places[1]


@pytest.mark.parametrize(("devices", "names"), [
    ([(9, 0)], "9.0+PTX"),
    ([(9, 0), (8, 0), (9, 0)], "8.0;9.0+PTX"),
    ([(12, 0), (8, 9)], "8.9;10.0+PTX"),  # Newer than the architectures of this PyTorch.
    ([], ""),
])  # fmt: skip
@pytest.mark.parametrize("variable", [None, "native"])
def test_architectures_of_the_devices(monkeypatch: Any, devices: Any, names: str, variable: str | None) -> None:
    if variable is None:
        monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    else:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", variable)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: devices[device])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90a", "sm_100", "compute_120"])
    assert targets.cuda_architectures() == names


@pytest.mark.slow
@needs_tools
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_build_is_repeated(
    sources: Path, cache_root: Path, tmp_path: Path, compiler: Compiler, number: signal.Signals
) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    count = compiler(f"exec 3> {begun}; echo begun >&3; while :; do sleep 1000; done")
    with building(sources) as process:
        # A running compiler holds the other end of the pipe.
        with open(os.open(begun, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as running:  # noqa: PTH123
            assert process.stdout is not None
            pipes = [running.fileno(), process.stdout.fileno()]
            assert select.select(pipes, [], [], DEADLINE)[0] == pipes[:1], "it did not begin"
            assert running.read(6) == b"begun\n"
            assert list(cache_root.glob(BUILDS))
            process.send_signal(number)
            process.wait(DEADLINE)
            assert select.select([running], [], [], DEADLINE)[0], "the compiler outlives the build"
            assert running.read() == b""
        assert process.stdout.read() == ""
    left = list(cache_root.glob(BUILDS))
    assert not left or number == signal.SIGKILL
    assert not library_cache.is_built("cpu")

    assert count() == 1
    compiler("")
    assert answer(library_cache.libraries(["cpu"])["cpu"]) == 42
    assert count() == 2
    assert not list(cache_root.glob(BUILDS))


def test_only_folders_of_killed_builds_are_removed(sources: Path, cache_root: Path, monkeypatch: Any) -> None:
    root = cache_root / "torch_ext" / "building"
    left, other, plans = root / "killed", root / "other", cache_root / "building-plans"
    for folder in (left, other, plans):
        folder.mkdir(parents=True)
        (folder / "lock").touch()  # PyTorch would wait for it.
    (left / "multisample-build").touch()

    def compile_beside_others(libraries: Any, show: Any, meanwhile: Any) -> list[str]:
        assert not left.exists()
        assert (other / "lock").exists()
        assert (plans / "lock").exists()
        return _compile_nothing(libraries, show, meanwhile)

    monkeypatch.setattr(toolchain, "missing_tools", lambda: ())
    monkeypatch.setattr(build, "compile_libraries", compile_beside_others)
    assert library_cache.libraries(["cpu"])["cpu"].read_text() == "a library"


@pytest.mark.slow
@needs_tools
def test_concurrent_processes_build_once(sources: Path, cache_root: Path, tmp_path: Path, compiler: Any) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    count = compiler(f"read line < {go}")
    with building(sources, PROCESSES) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        printed = sorted(process.stderr.readline() for _ in range(PROCESSES))
        assert printed[0].startswith("multisample: building torch_ext for the CPU (the operators), ")
        waits = f"multisample: waiting for another process that builds torch_ext in {cache_root}/torch_ext\n"
        assert printed[1:] == [waits] * (PROCESSES - 1)
        with go.open("r+b", buffering=0) as pipe:  # Open for reading too, so that the open does not wait.
            pipe.write(b"go\n")
            built = process.stdout.read().splitlines()
        assert process.wait(DEADLINE) == 0
        assert process.stderr.read() == ""
    assert built == [str(place())] * PROCESSES
    assert count() == 1
    assert answer(Path(built[0])) == 42


@forked
def test_a_forked_child_does_not_hold_a_lock_of_its_parent(cache_root: Path, sources: Path, monkeypatch: Any) -> None:
    lock, waited, lockf = cache.folder("torch_ext", create=True) / "lock", list[str](), fcntl.lockf
    monkeypatch.setattr(cache, "say", waited.append)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with cache.locked(lock, "the test has the lock"):
            # The child lives until the test replies.
            child = fork(lambda: [ours.close(), theirs.send(b"."), theirs.recv(1).decode()])
            ours.recv(1)
        monkeypatch.setattr(fcntl, "lockf", lambda descriptor, operation: lockf(descriptor, operation | fcntl.LOCK_NB))
        with cache.locked(lock, "the child has the lock"):
            pass
        assert waited == []
        ours.send(b"!")
        assert answers([child]) == [[None, 1, "!"]]


@pytest.fixture
def compiled(sources: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake library in the cache, with the record of a build."""
    monkeypatch.setattr(toolchain, "missing_tools", lambda: ())
    monkeypatch.setattr(build, "compile_libraries", _compile_nothing)
    return library_cache.libraries(["cpu"])["cpu"]


def test_a_build_says_what_it_compiles_counts_units_and_shows_progress_on_a_terminal(
    compiled: Path, terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("MAX_JOBS", "1")
    monkeypatch.setattr(library_cache, "cuda_reasons", lambda ahead_of_time: ())
    for module in (compiler_flags, library_cache):
        monkeypatch.setattr(module, "all_units", units.all_units)
    assert library_cache.compiled()[:2] == (0, 55)
    library_cache.unit_library(units.all_units()[1])
    assert library_cache.compiled()[:2] == (1, 55)
    assert terminal.getvalue() == (
        "multisample: building torch_ext for CUDA (sample_float16_fast_math), once for this machine and this version of"
        " PyTorch; it usually takes about 10 s on 1 processor\n\rmultisample: 1 of 1 sources compiled\n"
    )


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda library: library.write_text("a lib"), "lost": lambda library: library.unlink(),
    "zeros": lambda library: library.write_bytes(b"a li" + bytes(5)),
    "replaced": lambda library: library.write_text("b library"),
    "a damaged record": lambda library: library.with_name("record.json").write_text("{"),
    "a lost record": lambda library: library.with_name("record.json").unlink(),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_built_again(compiled: Path, capfd: pytest.CaptureFixture[str], damage: str) -> None:
    capfd.readouterr()
    DAMAGES[damage](compiled)
    assert not library_cache.is_built("cpu")
    assert library_cache.libraries(["cpu"])["cpu"] == compiled
    messages = capfd.readouterr().err
    assert messages.count("building torch_ext for the CPU") == 1
    assert (f"{compiled} is damaged, and is built again" in messages) == (damage != "lost")
    assert compiled.read_text() == "a library"
    assert library_cache.is_built("cpu")
    assert library_cache.libraries(["cpu"])["cpu"] == compiled
    assert capfd.readouterr().err == ""


def test_a_damaged_library_without_a_compiler_raises(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled.write_text("a lib")
    monkeypatch.setattr(toolchain, "missing_tools", lambda: ("no compiler",))
    assert registry.find("torch_ext").status().reasons == (f"{compiled} is damaged", "no compiler")
    damaged = re.escape(f"could not be built: {compiled} is damaged; no compiler")
    with pytest.raises(BackendUnavailableError, match=damaged):
        library_cache.libraries(["cpu"])


def _make_foreign(path: Path, how: str) -> str:
    """Let others write to a file, or give it away; returns the message about it."""
    if how == "of another user":
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(path, 4242, -1)
        return f"{path}: belongs to another user (uid 4242)"
    path.chmod(path.stat().st_mode | (0o002 if how == "to others" else 0o020))
    return f"{path}: others can write to it "


PLACES = {
    "the root": lambda library: library.parents[2],
    "the folder of torch_ext": lambda library: library.parents[1],
    "the folder of the library": lambda library: library.parent,
    "the library": lambda library: library,
    "the record": lambda library: library.with_name("record.json"),
}


@pytest.mark.parametrize("writable", ["to others", "to the group", "of another user"])
@pytest.mark.parametrize("place", PLACES)
def test_a_library_that_others_could_have_written_is_not_loaded(compiled: Path, place: str, writable: str) -> None:
    message = _make_foreign(PLACES[place](compiled), writable)
    assert not library_cache.is_built("cpu")
    with pytest.raises(BackendUnavailableError, match=re.escape(message)) as raised:
        library_cache.libraries(["cpu"])
    assert "set MULTISAMPLE_CACHE_DIR to a folder of your own" in str(raised.value)
    if place in ("the root", "the folder of torch_ext"):
        assert message in str(registry.find("torch_ext").status().reasons)


@pytest.mark.parametrize("place", ["the folder of torch_ext", "the folder of the library", "the library", "the record"])
def test_a_symbolic_link_in_the_cache_is_not_followed(compiled: Path, tmp_path: Path, place: str) -> None:
    path = PLACES[place](compiled)
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    assert not library_cache.is_built("cpu")


def test_the_root_may_be_a_symbolic_link(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(compiled.parents[2])
    monkeypatch.setenv("MULTISAMPLE_CACHE_DIR", str(tmp_path / "link"))
    assert library_cache.is_built("cpu")


@pytest.mark.parametrize("place", ["the library", "the record", "the lock"])
def test_a_fifo_in_the_cache_is_not_opened(compiled: Path, place: str) -> None:
    """Opening it would wait for a writer."""
    lock = compiled.parents[1] / "lock"
    path = lock if place == "the lock" else PLACES[place](compiled)
    path.unlink()
    os.mkfifo(path)
    found: list[object] = []

    def use() -> None:
        if path != lock:
            found.append(library_cache.is_built("cpu"))
            return
        try:
            with cache.locked(lock, ""):
                pass
        except cache.CacheError as error:
            found.append("expected a file" not in str(error))

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(20)
    assert found == [False]


def test_a_symbolic_link_as_lock_raises(sources: Path, cache_root: Path, tmp_path: Path) -> None:
    lock = cache.folder("torch_ext", create=True) / "lock"
    lock.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic"), cache.locked(lock, ""):
        pass
    assert not (tmp_path / "precious").exists()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_cache_folders_and_files_are_private(sources: Path, cache_root: Path, compiler: Any, umask: int) -> None:
    before = os.umask(umask)
    try:
        cache_root.rmdir() if cache_root.exists() else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(toolchain, "missing_tools", lambda: ())
            patch.setattr(build, "compile_libraries", _compile_nothing)
            library_cache.libraries(["cpu"])
        cache.write(cache.folder("numba", create=True) / "kernel", b"a kernel")
    finally:
        os.umask(before)
    for path in (cache_root, *cache_root.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.slow
@needs_tools
def test_a_failed_build_raises_with_the_compiler_output(
    sources: Path, cache_root: Path, compiler: Compiler, capfd: pytest.CaptureFixture[str]
) -> None:
    count = compiler("")
    (sources / "answer.h").write_text("#error not the answer\n" + "\n".join(f"int a = b{i};" for i in range(50)))
    with pytest.raises(BackendUnavailableError) as first:
        library_cache.libraries(["cpu"])
    lines = str(first.value).splitlines()
    assert lines[0] == "backend: 'torch_ext' could not be built:"
    assert "b49" in str(first.value)
    assert lines[-1] == "to try again: python -m multisample build torch_ext"
    assert len(lines) == 2 + build._LINES
    assert not list(cache_root.glob(BUILDS))
    assert not list(cache_root.rglob("*.so"))

    # The failure is cached, since the build would fail again; another process builds again.
    with pytest.raises(BackendUnavailableError) as second:
        library_cache.libraries(["cpu"])
    assert str(second.value) == str(first.value)
    assert count() == 1
    capfd.readouterr()
    library_cache._failures.clear()
    assert main(["build", "torch_ext"]) == 1
    assert count() == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "multisample: building torch_ext for the CPU (the operators), " in printed.err
    assert f"\nmultisample: error: {first.value}" in printed.err
    assert printed.err.endswith("\nto try again: python -m multisample build torch_ext\n")
    (sources / "answer.h").write_text("#error not this\n")
    with pytest.raises(BackendUnavailableError, match="#error not this"):
        library_cache.libraries(["cpu"])


@pytest.mark.slow
@needs_tools
def test_a_library_that_does_not_load_is_not_cached(sources: Path) -> None:
    (sources / "torch/cpu.cpp").write_text("int missing();\nint there = missing();\n")
    with pytest.raises(BackendUnavailableError, match="undefined symbol"):
        library_cache.libraries(["cpu"])
    assert not library_cache.is_built("cpu")


def test_an_unwritable_cache_raises(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    root = tmp_path / "file" / "below"
    monkeypatch.setenv("MULTISAMPLE_CACHE_DIR", str(root))
    monkeypatch.setattr(toolchain, "missing_tools", lambda: ())
    assert not library_cache.is_built("cpu")
    with pytest.raises(BackendUnavailableError, match="set MULTISAMPLE_CACHE_DIR to a folder") as raised:
        library_cache.libraries(["cpu"])
    assert str(root) in str(raised.value)


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTISAMPLE_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "all"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.root() == tmp_path / "ours"
    monkeypatch.delenv("MULTISAMPLE_CACHE_DIR")
    assert cache.root() == tmp_path / "all" / "multisample"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache.root() == tmp_path / "home" / ".cache" / "multisample"

    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with pytest.raises(cache.CacheError, match="Set MULTISAMPLE_CACHE_DIR"):
        cache.root()
    with pytest.raises(BackendUnavailableError, match="Set MULTISAMPLE_CACHE_DIR"):
        library_cache.libraries(["cpu"])
    assert not library_cache.is_built("cpu")


def _program(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(0o755)


@pytest.fixture
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Restrict PATH to the returned folder, which is also the folder of Python."""
    folder = tmp_path / "bin"
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    _program(folder / "python")
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path / "empty"))
    for variable in ("CXX", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(variable, raising=False)
    return folder


def _keep(library: Path) -> None:
    """Write a library into the cache, as a build does."""
    cache.folder("torch_ext", library.parent.name, create=True)
    library.write_text("a library")
    library_cache._put(library)


def test_the_error_lists_every_missing_tool(sources: Path, nothing_installed: Path, monkeypatch: Any) -> None:
    ninja = "ninja is not installed: pip install ninja"
    gcc = "no C++ compiler ('c++' not found): install g++, or set CXX to a compiler"
    assert toolchain.missing_tools() == (ninja, gcc)
    with pytest.raises(BackendUnavailableError) as raised:
        library_cache.libraries(["cpu"])
    remedy = "to try again: python -m multisample build torch_ext"
    assert str(raised.value) == f"backend: 'torch_ext' could not be built: {ninja}; {gcc}\n{remedy}"
    for name in (None, "", str(nothing_installed / "absent"), shutil.which("cat", path=os.defpath)):  # An application.
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", name)
            assert toolchain.interpreter() == str(Path(sys.prefix, "bin", f"python3.{sys.version_info[1]}"))
            patch.setattr(sys, "prefix", str(nothing_installed))
            patch.setattr(sys, "base_prefix", str(nothing_installed))
            assert toolchain.interpreter() is None
            assert f"sys.executable is {name!r}" in "; ".join(toolchain.missing_tools())
            assert name is None or toolchain.search_path()
    # In a virtual environment that is not activated, tools are next to Python.
    _program(nothing_installed / "ninja")
    assert toolchain.missing_tools() == (gcc,)
    _program(nothing_installed / "g++-13")
    monkeypatch.setenv("CXX", "g++-13")
    assert toolchain.missing_tools() == ()

    monkeypatch.setattr(toolchain, "is_installed", lambda module: False)
    assert toolchain.missing_tools() == (
        "PyTorch is not installed: pip install torch",
        "setuptools is not installed: pip install setuptools",
    )
    assert library_cache.cuda_reasons() == ("PyTorch is not installed: pip install torch",)
    with pytest.raises(BackendUnavailableError, match="PyTorch is not installed: pip install torch"):
        library_cache.libraries(["cpu"])


def test_a_missing_module_is_detected() -> None:
    assert toolchain.is_installed("torch")
    assert not toolchain.is_installed("multisample_of_nobody")
    assert not toolchain.is_installed("multisample_of_nobody.build")


def test_cuda_reasons_list_missing_parts(sources: Path, nothing_installed: Path, monkeypatch: Any) -> None:
    device = "no CUDA device: see nvidia-smi and CUDA_VISIBLE_DEVICES"
    nvcc = "nvcc not found: install the CUDA toolkit or set CUDA_HOME"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert library_cache.cuda_reasons() == ("PyTorch is built without CUDA: install a PyTorch that is built with CUDA",)
    _keep(place())
    with pytest.raises(BackendUnavailableError, match="PyTorch is built without CUDA"):
        library_cache.libraries(["cpu", "cuda"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_HOME", str(nothing_installed / "toolkit"))
    assert library_cache.cuda_reasons() == (device, nvcc)
    _program(nothing_installed / "toolkit" / "bin" / "nvcc")
    assert library_cache.cuda_reasons() == (device,)
    assert library_cache.cuda_reasons(ahead_of_time=True) == (device,)
    assert not library_cache.is_built("cuda")

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert library_cache.cuda_reasons(ahead_of_time=True) == ()
    assert library_cache.cuda_reasons() == (device,)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert library_cache.cuda_reasons() == ()
    # A library that is already built needs no nvcc.
    monkeypatch.setenv("CUDA_HOME", str(nothing_installed / "elsewhere"))
    assert library_cache.cuda_reasons() == (nvcc,)
    _keep(place("cuda"))
    assert library_cache.cuda_reasons() == ()

    monkeypatch.setattr(torch.cuda, "device_count", Mock(side_effect=RuntimeError("the driver is broken")))
    assert library_cache.cuda_reasons() == (device,)


def test_the_toolkit_is_found_on_path_and_in_the_environment(
    nothing_installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A link on PATH leads to the toolkit.
    _program(tmp_path / "toolkit" / "bin" / "nvcc")
    _program(tmp_path / "toolkit" / "include" / "cuda_runtime.h")
    (nothing_installed / "nvcc").symlink_to(tmp_path / "toolkit" / "bin" / "nvcc")
    assert toolchain.cuda_home() == tmp_path / "toolkit"
    # Environment variables take precedence.
    _program(tmp_path / "named" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "named"))
    assert toolchain.cuda_home() == tmp_path / "named"


@pytest.mark.parametrize("arguments", [("torch_ext",), ()])
def test_the_build_command_builds_all_libraries_and_kernels_at_once(
    sources: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    done: list[object] = []

    def build_all(
        kinds: Iterable[LibraryKind], whole: bool, meanwhile: Callable[[], object]
    ) -> dict[LibraryKind, Path]:
        done.append(kinds)
        meanwhile()
        return {kind: Path(kind) for kind in kinds}

    def compile_kernels() -> str:
        done.append("kernels")
        return "cpu: compiled 1 kernels in 1.5 s"

    monkeypatch.setattr(library_cache, "libraries", build_all)
    monkeypatch.setattr(library_cache, "cuda_reasons", lambda ahead_of_time=False: ())
    monkeypatch.setattr(commands, "_compile_kernels", compile_kernels)
    assert main(["build", *arguments]) == 0
    assert done == [("cpu", "cuda"), "kernels"]
    lines = capfd.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines][:2] == ["torch_ext, CPU", "torch_ext, CUDA"]
    assert lines[2] == "cpu: compiled 1 kernels in 1.5 s"


@pytest.mark.slow
@needs_tools
def test_a_failure_of_a_kernel_ends_the_compilers(
    sources: Path, cache_root: Path, tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    compiler(f"exec 3> {begun}; while :; do sleep 1000; done")

    def compile_kernels() -> str:
        running.append(begun.open("rb"))  # Waits for the compiler.
        raise ValueError("no such kernel")

    running: list[BinaryIO] = []
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(commands, "_compile_kernels", compile_kernels)
    assert main(["build", "torch_ext"]) == 1
    printed = capfd.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"multisample: building .*\nmultisample: error: no such kernel\n", printed.err)
    assert not list(cache_root.glob(BUILDS))
    with running[0] as compilers:
        assert select.select([compilers], [], [], DEADLINE)[0], "the compiler outlives the build"
        assert compilers.read() == b""


def test_the_build_command_builds_nothing_for_cupy_and_numba(capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("cupy", "numba"):
        assert main(["build", name]) == 0
        assert capfd.readouterr() == (f"{name}: nothing to build: {name} compiles each kernel on first use\n", "")
    with pytest.raises(SystemExit) as left:
        main(["build", "gpu"])
    assert left.value.code == 2
    assert "'torch_ext'" in capfd.readouterr().err
