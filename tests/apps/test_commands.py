"""The command line: a command writes the whole matrix, or prints a one-line error and writes no file."""

import errno
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend
from tables import slow_but

import multisample
from multisample.__main__ import main
from multisample.backends import registry
from multisample.backends.launch import Launch
from multisample.backends.memory.host import arrays_at
from multisample.commands import arrays, draw, report

D, N, SEED = 40, 300, 7
RNG = np.random.default_rng(1)
MU = RNG.normal(size=D).astype(np.float32)
SIGMA = RNG.uniform(0.5, 2.0, D).astype(np.float32)

Run = Callable[..., "Outcome"]


class Outcome(SimpleNamespace):
    """The result of a command: its exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    def failed(self, text: str, code: int = 1) -> None:
        """Check that the command printed one error line with `text`, and nothing else."""
        assert self.code == code, self
        assert self.out == "", self
        assert re.fullmatch(r"multisample: error: [^\n]*\n", self.err), self
        assert text in self.err, self


# stderr has this line too, if no test before has compiled the kernels of a call.
COMPILING = "multisample: compiling kernels of cpu, once for this machine: some seconds for each kind of call\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with mu.npy and sigma.npy."""
    np.save(tmp_path / "mu.npy", MU)
    np.save(tmp_path / "sigma.npy", SIGMA)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process."""

    def run(*argv: object) -> Outcome:
        try:
            code: Any = main([str(argument) for argument in argv])
        except SystemExit as error:
            code = error.code
        out, err = capfd.readouterr()
        return Outcome(code=code, out=out, err=err.replace(COMPILING, ""))

    return run


@pytest.fixture
def draw_files(folder: Path, run: Run) -> Run:
    """Run ``sample mu.npy sigma.npy -n N --seed SEED -o x.npy``, with changed or added options."""

    def draw_files(*more: object, mu: object = "mu.npy", sigma: object = "sigma.npy", n: object = N) -> Outcome:
        return run("sample", mu, sigma, "-n", n, "--seed", SEED, "-o", "x.npy", *more)

    return draw_files


def start(*argv: str) -> subprocess.Popen[str]:
    """Start Python in a process, with the default buffering of its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *argv], **pipes, text=True, env=environment)


def module(*argv: object) -> subprocess.Popen[str]:
    """Start a command in a process."""
    return start("-m", "multisample", *map(str, argv))


def finish(process: subprocess.Popen[str]) -> Outcome:
    with process:
        out, err = process.communicate(timeout=120)
    return Outcome(code=process.returncode, out=out, err=err.replace(COMPILING, ""))


def expected(mu: Any = MU, sigma: Any = SIGMA, n: int = N, **options: Any) -> np.ndarray[Any, Any]:
    result = multisample.sample(mu, sigma, n, seed=SEED, **options)
    assert isinstance(result, np.ndarray)
    return result


def same(path: str, array: np.ndarray[Any, Any]) -> None:
    found = np.load(path)
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.tobytes() == array.tobytes()


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_error_prints_one_line_and_sets_the_exit_code(folder: Path) -> None:
    finish(module("sample", "nowhere.npy", "sigma.npy", "-n", N, "-o", "x.npy")).failed("nowhere.npy: No such file")
    assert files(folder) == {"mu.npy", "sigma.npy"}


def test_the_report_runs_without_a_command_and_without_any_array_library(monkeypatch: pytest.MonkeyPatch) -> None:
    # Block the libraries and hide the GPU, so that the test depends neither on packages nor on the machine.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'cupy', 'jax')))"
    done = finish(start("-c", f"{blocked}; from multisample.__main__ import main; raise SystemExit(main([]))"))
    assert (done.code, done.err) == (0, "")
    assert re.search(r"^backend +available +version +device$", done.out, re.M)
    assert re.search(r"^cpu +yes +numba [\d.]+\S* +\S.* threads?$", done.out, re.M)
    assert re.search(r"^cpu +\d+ us +[\d.]+$", done.out, re.M)
    assert re.search(r"^Does .* same seed\? not compared, because cpu is the only backend that ran$", done.out, re.M)
    assert re.search(r"^cupy +no\b.*\n    - runs on NVIDIA GPUs only\n    - package cupy", done.out, re.M)
    assert not re.search(r"^torch_ext +no\b.*\n    - runs on NVIDIA", done.out, re.M), "it runs on the CPU too"


@pytest.mark.slow
def test_the_report_ends_with_commands_that_run(run: Run) -> None:
    heading = "\nNext, draw 5 samples with the means 0 and 10, and see what the examples do:\n"
    _, _, following = run().out.partition(heading)
    commands = [shlex.split(line) for line in following.splitlines()]
    assert [command[0] for command in commands] == ["python", "python"]
    for command in commands:
        done = finish(start(*command[1:]))
        assert done.code == 0
        assert done.out
        # The first run on a machine prints that it compiles.
        assert all(line.startswith("multisample: compiling") for line in done.err.splitlines())


CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129, "SIGUSR1": 138, "SIGALRM": 142, "SIGXCPU": 152}


@pytest.mark.slow
@pytest.mark.parametrize("name", CODES)
def test_a_signal_leaves_no_file(folder: Path, name: str) -> None:
    # The test process may ignore signals, which its children inherit.
    handler = "default_int_handler" if name == "SIGINT" else "SIG_DFL"
    code_line = f"import signal, sys; signal.signal(signal.{name}, signal.{handler});"
    # Windows are drawn slowly, so that the signal arrives before the end.
    code_line += "import time; from multisample.commands import draw; windows = draw.windows;"
    code_line += "draw.windows = lambda *args: (time.sleep(0.1) or window for window in windows(*args));"
    code_line += "from multisample.__main__ import main; raise SystemExit(main(sys.argv[1:]))"
    command = ["sample", "mu.npy", "1", "-n", "400000", "-o", "x.npy", "--memory", "4K"]
    process = start("-c", code_line, *command)
    began = time.monotonic()
    while not any(name.endswith(".part") for name in files(folder)) and time.monotonic() < began + 60:
        time.sleep(0.01)
    time.sleep(0.1)
    assert process.poll() is None
    assert any(name.endswith(".part") for name in files(folder))
    process.send_signal(getattr(signal, name))
    done = finish(process)
    assert (done.code, done.out) == (CODES[name], "")
    assert re.fullmatch(rf"(.*% .* s left\n)*multisample: stopped by {name}\n", done.err)
    assert files(folder) == {"mu.npy", "sigma.npy"}


IN_A_CALLBACK = """
import ctypes, os, signal, sys, time
from multisample import __main__
from multisample.commands import report

def send(*arguments):
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])
    return 0

def run(args):
    ctypes.CFUNCTYPE(ctypes.c_int)(send)()
    time.sleep(30)

for name, handler in (("SIGINT", signal.default_int_handler), ("SIGTERM", signal.SIG_DFL)):
    signal.signal(signal.Signals[name], handler)
report.run = run
raise SystemExit(__main__.main([]))
"""


@pytest.mark.parametrize("name", slow_but(["SIGTERM"], ["SIGINT", "SIGTERM"]))
def test_a_signal_in_a_callback_of_c_is_not_lost(name: str) -> None:
    done = finish(start("-c", IN_A_CALLBACK, name))
    assert (done.code, done.out, done.err) == (CODES[name], "", f"multisample: stopped by {name}\n")


@pytest.mark.slow
@pytest.mark.parametrize("argv", [[], ["sample", "mu.npy", "1", "-n", "5", "-o", "x.npy"]])
def test_a_closed_pipe_is_silent(folder: Path, argv: list[str]) -> None:
    process = module(*argv)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=120) == 141
    process.stderr.close()


@pytest.mark.parametrize("streams", ["2>&-", ">&-", ">&- 2>&-", "2>/dev/full"])
def test_a_stream_that_cannot_be_written_to_does_not_stop_a_command(folder: Path, streams: str) -> None:
    command = [sys.executable, "-m", "multisample", "sample", "mu.npy", "sigma.npy", "-n", str(N), "-o", "x.npy"]
    # Four windows, each of which shows the progress.
    shell = f'exec "$0" "$@" --seed {SEED} --memory 16K {streams}'
    assert subprocess.run(["sh", "-c", shell, *command], stdin=subprocess.DEVNULL).returncode == 0
    same("x.npy", expected())


@pytest.mark.parametrize("disposition", [signal.SIG_IGN, signal.SIG_DFL])
def test_an_ignored_signal_stays_ignored_and_handlers_are_restored(
    run: Run, monkeypatch: pytest.MonkeyPatch, disposition: Any
) -> None:
    before = signal.signal(signal.SIGHUP, disposition)
    try:
        monkeypatch.setattr(report, "run", lambda args: print(signal.getsignal(signal.SIGHUP)) or 0)
        assert (run().out == f"{signal.SIG_IGN!s}\n") == (disposition is signal.SIG_IGN)
        assert run("sample").code == 2
        assert signal.getsignal(signal.SIGHUP) is disposition
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_bug_keeps_its_traceback_and_a_memory_error_does_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> int:
        raise errors.pop()

    errors: list[BaseException] = [MemoryError(), ZeroDivisionError("a bug")]
    monkeypatch.setattr(report, "run", fail)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run()
    run().failed("out of memory")


@pytest.mark.parametrize(("mu", "sigma"), [
    *((MU.astype(kind), SIGMA) for kind in ("float16", "float64", ">f4")),
    ((MU * 50).astype(np.int32), 2.0), (MU[:, None], SIGMA), (np.asfortranarray([MU, MU])[:1].T, SIGMA),
    (MU, np.float32(2)), (-1.5, SIGMA), (MU, 1e-3),
])  # fmt: skip
def test_vectors_are_npy_files_or_numbers(draw_files: Run, mu: Any, sigma: Any) -> None:
    arguments = {}
    for name, x in (("mu", mu), ("sigma", sigma)):
        arguments[name] = x if isinstance(x, float) else f"{name}.npy"
        if not isinstance(x, float):
            np.save(f"{name}.npy", x)
    assert draw_files("--memory", "4K", **arguments).code == 0
    same("x.npy", expected(mu, sigma))


def _npy(header: str) -> bytes:
    """A .npy file of version 1 with this header, and with bytes for three numbers."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(12)


@pytest.mark.parametrize(("name", "data", "message"), [
    ("a.npy", b"hello", "a.npy: not a complete .npy file of numbers ("),
    ("a.npy", _npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n"), "a.npy: not a complete .npy file"),
    # More than there is memory.
    ("a.npy", _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,)}\n"), "shape (1099511627776,)"),
    ("a.npy", _npy("1" + "+1" * 4000 + "\n"), "a.npy: not a complete .npy file"),
    ("a.npy", _npy("{[]: 1}\n"), "a.npy: not a complete .npy file"),
    ("a.npz", b"hello", "mu: expected a number or a .npy file, got 'a.npz'"),
    ("a.npy", None, "a.npy: Is a directory"),
])  # fmt: skip
def test_unreadable_and_hostile_files_print_an_error(
    draw_files: Run, folder: Path, name: str, data: bytes | None, message: str
) -> None:
    if data is None:
        Path(name).mkdir()
    else:
        Path(name).write_bytes(data)
    failure = draw_files(mu=name, sigma=1)
    failure.failed(message)
    assert len(failure.err) < 500
    assert files(folder) == {"mu.npy", "sigma.npy", name}


def test_the_error_names_a_loop_of_links(draw_files: Run, folder: Path) -> None:
    Path("loop.npy").symlink_to("loop.npy")
    Path("around").symlink_to("around")
    draw_files(mu="loop.npy").failed("loop.npy: Too many levels of symbolic links")
    for output in ("loop.npy", "around/x.npy"):
        for force in ([], ["--force"]):
            draw_files("-o", output, *force).failed(f"{output}: Too many levels of symbolic links")
    assert Path("loop.npy").is_symlink()


def test_errors_for_bad_vectors_name_the_file(draw_files: Run) -> None:
    for array, message in ((MU[None, :], f"got (1, {D})"), (np.where(np.arange(D) == 3, np.nan, MU), "mu[3] = nan")):
        np.save("bad.npy", array)
        failure = draw_files(mu="bad.npy")
        failure.failed(message)
        failure.failed("; mu is bad.npy, sigma is sigma.npy")


@pytest.mark.parametrize("options", [
    {"noise": "shared", "dtype": "float16", "dim_offset": 5, "antithetic": True, "layout": "nd"},
    {"dtype": "float64", "sample_offset": 3, "dim_offset": 1, "backend": "cpu", "fast_math": True},
    {"layout": "nd"},
])  # fmt: skip
# In one window, in windows of several rows, and in windows of parts of a row.
@pytest.mark.parametrize(("d", "n", "memory"), [(D, N, "1G"), (D, N, "4K"), (5, 3001, "4K")])
def test_options_are_passed_to_sample(draw_files: Run, options: dict[str, Any], d: int, n: int, memory: str) -> None:
    np.save("mu.npy", MU[:d])
    np.save("sigma.npy", SIGMA[:d])
    argv = [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", value) if x is not True]
    assert draw_files(*argv, "--memory", memory, n=n).code == 0
    same("x.npy", expected(MU[:d], SIGMA[:d], n, **options))


def test_a_random_seed_is_printed(folder: Path, run: Run) -> None:
    done = [run("sample", "mu.npy", "sigma.npy", "-n", N, "-o", f"{name}.npy") for name in "ab"]
    seeds = [int(re.findall(r"seed (\d+)", outcome.out)[0]) for outcome in done]
    assert seeds[0] != seeds[1]
    for name, seed in zip("ab", seeds, strict=True):
        same(f"{name}.npy", multisample.sample(MU, SIGMA, N, seed=seed))


@pytest.mark.parametrize(("options", "message", "code"), [
    (["-n", "-1"], "n: expected 0 <= n", 1),
    (["-n", "1.5"], "-n/--samples: invalid int value: '1.5'", 2),
    (["--seed", "-1"], "seed: expected 0 <= seed < 2**64", 1),
    (["--backend", "gpu"], "no backend is called 'gpu'; accepted are 'auto', '", 1),
    (["--dtype", "bfloat16"], "--dtype: invalid choice: 'bfloat16' (choose from", 2),
    (["--dim-offset", 2**32 - 1], "dim_offset: expected dim_offset + d <= 2**32", 1),
    (["--sample-offset", 2**34], "n: expected sample_offset + n <= 2**34", 1),
    (["--memory", "4095"], "--memory: expected bytes, at least 4K", 2),
    (["--memory", "5X"], "--memory: expected bytes, at least 4K, such as 500M or 2G, got '5X'", 2),
    (["--forc"], "unrecognized arguments: --forc", 2),
    (["-o", "x.txt"], "x.txt: expected an output file that ends in .npy", 1),
    (["-o", "nowhere/x.npy"], "nowhere/x.npy: No such file or directory", 1),
    (["-o", "folder.npy", "--force"], "folder.npy: exists and is not a file", 1),
    (["-o", "fifo.npy", "--force"], "fifo.npy: exists and is not a file", 1),
    (["-o", "loop.npy"], "loop.npy: Too many levels of symbolic links", 1),
    (["-o", "mu.npy"], "mu.npy: exists; --force overwrites it", 1),
])  # fmt: skip
def test_bad_options_print_an_error(
    draw_files: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, options: list[Any], message: str, code: int
) -> None:
    monkeypatch.setattr(draw, "windows", lambda *args: pytest.fail("it began to draw"))
    Path("folder.npy").mkdir()
    os.mkfifo("fifo.npy")
    Path("loop.npy").symlink_to("loop.npy")
    draw_files(*options).failed(message, code)
    assert files(folder) == {"mu.npy", "sigma.npy", "folder.npy", "fifo.npy", "loop.npy"}
    assert Path("fifo.npy").is_fifo()


def test_the_version_and_bad_commands(run: Run) -> None:
    assert run("--version").out == f"multisample {multisample.__version__}\n"
    for argv in (["draw"], ["sample"], ["report", "x"]):
        run(*argv).failed("--help says more", code=2)


@pytest.mark.parametrize(("height", "width"), [
    (40, 300), (300, 40), (3, 1024), (1, 1025), (7, 5), (0, 9), (9, 0), (3, 3000), (3000, 10),
])  # fmt: skip
@pytest.mark.parametrize("capacity", [512, 1025, 2048])
def test_windows_cover_the_file_once_and_in_its_order(height: int, width: int, capacity: int) -> None:
    covered, done = np.zeros((height, width), int), 0
    for window in draw.windows((height, width), capacity):
        assert 0 < covered[window].size <= capacity
        assert window[1].start % 4 == 0
        covered[window] += 1
        done += covered[window].size
        assert (covered.reshape(-1)[:done] == 1).all()
    assert done == height * width


def test_windows_of_a_backend_with_its_own_memory(draw_files: Run, elsewhere: Any) -> None:
    for n in (N, 3001):
        assert draw_files("--memory", "4K", "--backend", "elsewhere", "--force", n=n).code == 0
        same("x.npy", expected(n=n))
    assert len(elsewhere.launched) > 2
    assert not elsewhere.launched[-1].fast_math
    np.save("mu.npy", MU.astype(">f4"))  # PyTorch has no swapped bytes.
    assert draw_files("--fast-math", "--backend", "elsewhere", "--force").code == 0
    same("x.npy", expected())
    assert elsewhere.launched[-1].fast_math


@pytest.mark.parametrize(("d", "n"), [(0, 5), (5, 0), (0, 0)])
def test_empty_matrices_are_written(draw_files: Run, d: int, n: int) -> None:
    np.save("mu.npy", MU[:d])
    done = draw_files(sigma=1, n=n)
    assert (done.code, done.err) == (0, "")
    same("x.npy", np.zeros((d, n), np.float32))


def test_windows_smaller_than_the_matrix_show_progress(draw_files: Run, folder: Path) -> None:
    done = draw_files()
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(rf"x\.npy: shape \({D}, {N}\), float32, seed {SEED}, [\d.e-]+ s\n", done.out)
    assert files(folder) == {"mu.npy", "sigma.npy", "x.npy"}
    # Without a terminal, lines are rare.
    done = draw_files("--memory", "16K", "--force")
    assert re.fullmatch(r" 30%  .* s left\n100%  46\.9 KiB of 46\.9 KiB  \S+ \S+/s  0 s left\n", done.err)


def test_progress_shows_percentage_rate_and_time_left() -> None:
    assert draw._progress(20 << 10, 8 << 20, 20.0) == "  0%  20.0 KiB of 8.0 MiB  1.0 KiB/s  8172 s left"
    assert draw._progress(8 << 20, 8 << 20, 41.0) == "100%  8.0 MiB of 8.0 MiB  199.8 KiB/s  0 s left"


def test_force_overwrites(draw_files: Run) -> None:
    Path("x.npy").write_text("mine")
    draw_files().failed("x.npy: exists; --force overwrites it")
    assert Path("x.npy").read_text() == "mine"
    assert draw_files("--force").code == 0
    same("x.npy", expected())
    # An input too, which is read until the end.
    assert draw_files("--force", "-o", "mu.npy", "--memory", "4K", sigma=1).code == 0
    same("mu.npy", expected(MU, 1))


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_appears_while_a_matrix_is_drawn_is_not_replaced(
    draw_files: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    linked, link = [], os.link

    def give_name(path: Path, name: Path) -> None:
        if not links:
            raise OSError(errno.EPERM, "no hard links")
        linked.append((name.exists(), path.stat().st_size))
        link(path, name)

    monkeypatch.setattr(os, "link", give_name)
    assert draw_files("-o", "y.npy").code == 0
    same("y.npy", expected())
    # The first file with the name is complete.
    assert linked == [(False, Path("y.npy").stat().st_size)] * links
    windows = draw.windows

    def disturbed(*args: Any) -> Iterator[tuple[slice, slice]]:
        Path("x.npy").write_text("mine")
        os.truncate("mu.npy", 0)  # The command must have read it.
        yield from windows(*args)

    monkeypatch.setattr(draw, "windows", disturbed)
    draw_files().failed("x.npy: exists; --force overwrites it")
    assert Path("x.npy").read_text() == "mine"
    assert files(folder) == {"mu.npy", "sigma.npy", "x.npy", "y.npy"}


def test_writing_to_a_link_keeps_the_link_and_a_new_file_has_default_permissions(draw_files: Run) -> None:
    Path("elsewhere").mkdir()
    Path("x.npy").symlink_to(Path("elsewhere", "y.npy"))
    assert draw_files().code == 0
    assert Path("x.npy").is_symlink()
    same("elsewhere/y.npy", expected())
    Path("new").touch()
    assert Path("elsewhere/y.npy").stat().st_mode == Path("new").stat().st_mode


@pytest.mark.parametrize(("mode", "error", "code"), [
    (0o400, None, 0), (0o664, None, 0), (0o664, KeyboardInterrupt(signal.SIGINT), 130), (0o664, MemoryError(), 1),
    (0o664, OSError(errno.EIO, "I/O error"), 1),
])  # fmt: skip
def test_an_old_file_is_replaced_by_a_complete_one_with_its_permissions(
    draw_files: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, mode: int, error: BaseException | None, code: int
) -> None:
    windows, recorded = draw.windows, []

    def interrupted(*args: Any) -> Iterator[tuple[slice, slice]]:
        first, *others = windows(*args)
        yield first
        recorded.extend(path.stat().st_mode & 0o777 for path in folder.iterdir() if path.suffix == ".part")
        if error is not None:
            raise error
        yield from others

    monkeypatch.setattr(draw, "windows", interrupted)
    Path("x.npy").write_text("mine")
    Path("x.npy").chmod(mode)
    done = draw_files("--force", "--memory", "4K")
    assert done.code == code
    assert re.fullmatch(r"(.*% .* s left\n)+(multisample: .*\n)?", done.err)
    assert recorded == [0o600], "others can read it while it is written"
    assert files(folder) == {"mu.npy", "sigma.npy", "x.npy"}
    assert Path("x.npy").stat().st_mode & 0o777 == mode
    if error is None:
        same("x.npy", expected())
    else:
        assert Path("x.npy").read_text() == "mine"


def test_a_matrix_larger_than_the_disk_prints_an_error(draw_files: Run, folder: Path) -> None:
    np.save("mu.npy", np.zeros(2**20, np.float32))
    draw_files(sigma=1, n=2**34).failed("x.npy: No space left on device: ")
    assert files(folder) == {"mu.npy", "sigma.npy"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_prints_an_error(draw_files: Run) -> None:
    Path("locked").mkdir(mode=0o500)
    draw_files("-o", "locked/x.npy").failed("locked/x.npy: Permission denied")


class _Elsewhere(FakeBackend):
    """A stand-in for a GPU backend: its results are PyTorch tensors, which only `to_numpy` can convert."""

    host_library = "torch"
    flip = False

    def adopt(self, array: Any) -> Any:
        import torch

        return array if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array))

    def launch(self, draw: Launch) -> None:
        super().launch(draw)
        if self.flip:
            arrays_at(draw)["matrix"][3, 5:7].view(np.uint32)[:] ^= 1


REASONS = ("package nothing is not installed: pip install nothing", "build failed:\nline 1\nline 2")


@pytest.fixture
def elsewhere(registered: Callable[[Any], Any]) -> Any:
    pytest.importorskip("torch")
    return registered(_Elsewhere("elsewhere"))


def test_the_report_compares_backends(run: Run, elsewhere: Any, registered: Callable[[Any], Any]) -> None:
    registered(FakeBackend("missing", *REASONS))
    done = run()
    assert done.code == 0
    # The first run of torch_ext on a machine prints that it builds.
    assert all(line.startswith("multisample: building") for line in done.err.splitlines())
    assert re.search(r"^elsewhere  yes +1\.2 +a stand-in$", done.out, re.M)
    assert re.search(r"^elsewhere +\d+ us +[\d.]+$", done.out, re.M)
    reasons = r"package nothing is not installed: pip install nothing\n    - build failed:\n      line 1\n      line 2"
    assert re.search(rf"^missing +no\b.*\n    - {reasons}$", done.out, re.M)
    assert not re.search(r"^missing +\d+ us", done.out, re.M)
    names = ", ".join(name for name, status in multisample.list_backends().items() if status.available)
    assert f" from the same seed? yes, to the last bit ({names})\n\nNext, draw 5 samples" in done.out
    assert len(elsewhere.launched) == 1 + report._REPEATS * report._CALLS


def test_the_report_names_backends_that_fail_or_have_different_bits(
    run: Run, registered: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise multisample.BackendUnavailableError("no compiler")

    pytest.importorskip("torch")
    flipped, broken = registered(_Elsewhere("flipped")), registered(_Elsewhere("broken"))
    monkeypatch.setattr(broken, "adopt", fail)
    for flipped.flip in (True, False):
        done = run("report")
        assert done.code == 1
        assert "\nbroken failed: BackendUnavailableError: no compiler\n" in done.out
        first = next(iter(multisample.list_backends()))
        different = f"same seed? NO. flipped differs from {first} in 2 of 2560000 numbers. This is a bug"
        assert (different if flipped.flip else "same seed? yes, to the last bit") in done.out


def test_the_report_without_backends_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "names", lambda: ("missing",))
    monkeypatch.setattr(registry, "find", lambda name: FakeBackend("missing", *REASONS))
    done = run()
    assert done.code == 1
    assert done.out.endswith("\nNo backend is available.\n")


def test_an_unavailable_backend_draws_nothing(draw_files: Run, folder: Path, registered: Callable[[Any], Any]) -> None:
    registered(FakeBackend("missing", REASONS[0]))
    draw_files("--backend", "missing").failed("pip install nothing")
    assert files(folder) == {"mu.npy", "sigma.npy"}


def test_to_numpy_copies_arrays_of_other_libraries() -> None:
    for array in (SimpleNamespace(get=lambda: MU), SimpleNamespace(copy_to_host=lambda: MU), MU):
        assert arrays.to_numpy(array) is MU
    torch = pytest.importorskip("torch")
    assert arrays.to_numpy(torch.from_numpy(MU)).tobytes() == MU.tobytes()


def test_sizes_have_binary_units() -> None:
    assert [draw._byte_count(text) for text in ("4096", "5k", "6M", "7G")] == [4096, 5 << 10, 6 << 20, 7 << 30]
    texts = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1 << 20: "1.0 MiB", 3 << 29: "1.5 GiB", 5 << 40: "5.0 TiB"}
    assert {size: arrays.size_text(size) for size in texts} == texts
    assert arrays.size_text(1 << 54) == "16384.0 TiB"
