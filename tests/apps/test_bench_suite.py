"""The tools of the benchmarks: wrong samplers are rejected before they are timed, and timers are accurate."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2, norm

from bench.suites import contenders, header_peers
from bench.suites.cases import MODES, Case, vectors
from bench.suites.contenders import CPU, CUDA, Contender
from bench.suites.running import CudaRunner
from bench.suites.sample_checks import BOUND, check_moments, moment_errors
from bench.suites.timing import BUSY, MOST_KEPT, Quartiles, Ring, measure, quartiles
from multisample.backends.native import toolchain

Array = np.ndarray[Any, Any]
Start = Callable[[Case, str], Callable[[], Any]]

D, N = 50, 400
mu, sigma = vectors(D)

PROGRAMS = header_peers.CURANDDX, header_peers.RAFT


def draw(seed: int, noise: str = "independent", d: int = D, n: int = N) -> Array:
    z = np.random.default_rng(seed).standard_normal((d if noise == "independent" else 1, n))
    columns = [vector[:, None] for vector in vectors(d)]
    return np.asarray(columns[0] + columns[1] * z, np.float32)


# --- Checks of samples ----------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["independent", "shared"])
@pytest.mark.parametrize(("d", "n"), [(D, N), (1, 100), (10, 10), (40_000, 32), (3, 2_000_000)])
def test_correct_samples_pass(noise: str, d: int, n: int) -> None:
    check_moments(draw(1, noise, d, n), draw(2, noise, d, n), *vectors(d), noise)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: x + 0.1 * sigma[:, None], "mean of all"),
        (lambda x: mu[:, None] + 1.1 * (x - mu[:, None]), "variance of all"),
        (lambda x: np.where(np.arange(D)[:, None] == 7, x + 2, x), "'mean'"),
        (lambda x: np.where(np.arange(D)[:, None] == 7, mu[7], x), "'variance'"),
        (lambda x: np.where(np.arange(N) == 7, np.nan, x), "nan"),
        (lambda x: x[1:], "expected 50 rows, got 49"),
        (lambda x: draw(1), "expected new numbers"),
        (lambda x: draw(3, "shared"), "correlation"),
    ],
)
def test_wrong_samples_are_rejected(spoil: Callable[[Array], Array], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_moments(spoil(draw(1)), draw(1), mu, sigma, "independent")


def test_shared_noise_must_be_equal_in_every_row() -> None:
    with pytest.raises(AssertionError, match="the same noise in every row"):
        check_moments(draw(1), draw(2), mu, sigma, "shared")


def test_z_values_have_a_normal_distribution() -> None:
    # 2000 rows of 10: the largest of 2000 normals is between 2.5 and 5, except with probability 1e-4.
    errors = moment_errors(draw(1, d=2000, n=10).astype(np.float64), *vectors(2000), "independent")
    assert 2.5 < errors["mean"] < 5 and 2.5 < errors["variance"] < 5
    assert max(errors["mean of all"], errors["variance of all"], errors["correlation"]) < 4 < BOUND


# --- Times ----------------------------------------------------------------------------------------


class Clockwork:
    """A fake device with a simulated clock: filling a byte takes a nanosecond, and the host takes no time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fills: list[int] = []
        self.released = 0

    def reserve(self, size: int) -> None:
        self.reserved = size

    def release(self) -> None:
        self.released += 1

    def fill(self, size: int) -> None:
        self.fills.append(size)
        self.now += size * 1e-9

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, stop: float) -> float:
        return stop - start

    def wait(self) -> None:
        pass


def test_results_stay_alive_until_memory_has_rotated() -> None:
    alive: list[int] = []
    most = 0

    class Result:
        def __init__(self) -> None:
            nonlocal most
            alive.append(id(self))
            most = max(most, len(alive))

        def __del__(self) -> None:
            alive.remove(id(self))

    ring = Ring(2**27)
    ring.warm_up(Result)
    assert (len(alive), most) == (2, 3)
    for size, kept in ((2**40, 1), (2**28, 1), (2**20, 256), (4, MOST_KEPT), (0, MOST_KEPT)):
        assert Ring(size).kept.maxlen == kept


def test_the_time_of_a_call_is_between_its_marks() -> None:
    device, size = Clockwork(), 10**6
    results = iter(range(10**6))

    def call() -> int:
        device.now += 5e-3
        return next(results)

    ring = Ring(size)
    times = measure(device, call, ring, size)
    assert times.device == pytest.approx((5e-3,) * 3)
    assert times.memset == pytest.approx(1e-3)
    assert times.pipelined == pytest.approx(5e-3)
    assert 0 < times.host < 1
    # Before each fill and each single call, another fill evicts the cache; its time does not count.
    assert device.fills[::3] == device.fills[2::3] == [BUSY] * (len(device.fills) // 3)
    assert set(device.fills[1::3]) == {size}
    assert ring.kept[-1] == next(results) - 1


def test_libraries_with_private_streams_are_timed_by_the_host() -> None:
    device, ring, waited = Clockwork(), Ring(4), []
    ring.warm_up(lambda: "result")
    times = measure(device, lambda: "result", ring, 4, wait=waited.append)
    assert set(waited) == {"result"}
    assert "host" in times.way
    assert times.memset == pytest.approx(4e-9, abs=1e-14)
    assert 0 < times.device.low <= times.device.median <= times.device.high
    assert times.host <= times.pipelined == times.device.median


def test_quartiles_of_times() -> None:
    assert quartiles([3.0]) == Quartiles(3, 3, 3)
    assert quartiles([5.0, 1, 2, 4, 3]) == Quartiles(2, 3, 4)


# --- Benchmarks -----------------------------------------------------------------------------------


class Table:
    """Replaces pytest-benchmark's fixture."""

    def __init__(self) -> None:
        self.extra_info: dict[str, Any] = {}
        self.group = ""

    def pedantic(self, target: Callable[[], None], rounds: int, warmup_rounds: int) -> None:
        for _ in range(rounds + warmup_rounds):
            target()


def ticking(device: Clockwork, start: Start) -> Start:
    """`start` with calls that take 10 ms of the device."""

    def start_ticking(case: Case, mode: str) -> Callable[[], Any]:
        draw = start(case, mode)

        def call() -> Any:
            device.now += 0.01
            return draw()

        return call

    return start_ticking


def test_peers_are_measured_once_and_ours_once_per_mode() -> None:
    starts = []

    device = Clockwork()

    def start(case: Case, mode: str) -> Callable[[], Any]:
        starts.append(mode)
        return ticking(device, CPU["numpy"].start)(case, mode)

    runner = CudaRunner(device, None)
    case = Case(D, N)
    for ours in (False, True):
        contender = Contender("someone", lambda: None, start, ours=ours)
        tables = [Table(), Table()]
        for table, mode in zip(tables, ("portable", "fast_math"), strict=True):
            runner.run(table, "throughput", contender, case, mode)
        assert starts == (["portable", "fast_math"] if ours else ["portable"])
        starts.clear()
        infos = [table.extra_info for table in tables]
        assert [info["mode"] for info in infos] == ["portable", "fast_math"]
        assert (infos[0]["device_s"] == infos[1]["device_s"]) or ours
        assert infos[0]["of_memset"] == infos[0]["memset_s"] / infos[0]["device_s"]
        assert [table.group for table in tables] == [
            f"throughput (50, 400) float32 independent {mode}" for mode in ("portable", "fast_math")
        ]
    assert device.reserved == BUSY
    assert device.released == 3


def test_unavailable_contenders_are_skipped_with_a_reason() -> None:
    contender = Contender("someone", lambda: "not at home", CPU["numpy"].start)
    with pytest.raises(pytest.skip.Exception, match="someone: not at home"):
        CudaRunner(Clockwork(), None).run(Table(), "throughput", contender, Case(D, N), "portable")


def test_transposed_results_are_checked_as_such() -> None:
    case, device, table = Case(40, 300, layout="nd"), Clockwork(), Table()
    right = Contender("right", lambda: None, ticking(device, CPU["cpu"].start))
    CudaRunner(device, None).run(table, "throughput", right, case, "portable")
    assert table.extra_info["layout"] == "nd"
    assert table.group == "throughput (40, 300) float32 independent nd portable"
    wrong = Contender("wrong", lambda: None, lambda case, mode: CPU["cpu"].start(replace(case, layout="dn"), mode))
    with pytest.raises(AssertionError, match="expected 40 rows, got 300"):
        CudaRunner(device, None).run(Table(), "throughput", wrong, case, "portable")


def test_contenders_are_in_the_groups_of_their_modes_and_layouts() -> None:
    groups = {
        (layout, mode): {name for name, each in CUDA.items() if mode in each.modes and each.fits(case)}
        for layout in ("dn", "nd") for mode in MODES for case in [Case(D, N, layout=layout)]
    }  # fmt: skip
    ours, tables = {"torch_ext", "cupy", "numba"}, {"raft_table", "raft_table_philox"}
    assert groups["nd", "portable"] == groups["nd", "fast_math"] == ours | tables
    assert groups["dn", "fast_math"] - groups["dn", "portable"] == {"curanddx_fast_math"}
    assert ours | {"curanddx", "torch_compile"} <= groups["dn", "portable"] and not tables & groups["dn", "portable"]


# --- Peers from headers ---------------------------------------------------------------------------


def packages_with(folder: Path, program: header_peers.Program) -> Path:
    """A folder for Python's path with empty headers."""
    for header in program.headers:
        path = folder / header.folder.replace("*", "cu13") / header.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.source)
def test_missing_headers_are_named_with_their_packages(
    program: header_peers.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit = tmp_path / "toolkit"
    monkeypatch.setattr(toolchain, "cuda_home", lambda: toolkit)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "empty")])
    reason = header_peers.missing(program) or ""
    assert all(header.name in reason and header.package in reason for header in program.headers)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "empty"), str(packages_with(tmp_path / "some", program))])
    assert header_peers.missing(program) is None
    monkeypatch.setattr(toolchain, "cuda_home", lambda: None)
    assert "nvcc not found" in (header_peers.missing(program) or "")
    with pytest.raises(RuntimeError, match=r"\.cu: nvcc not found"):
        header_peers.compiled(program, "90")


def test_the_toolkits_curand_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "curand_kernel.h").touch()
    monkeypatch.setattr(toolchain, "cuda_home", lambda: tmp_path)
    monkeypatch.setattr(sys, "path", [])
    assert header_peers.header_folder(header_peers.CURAND_KERNEL) == tmp_path / "include"


@pytest.mark.parametrize("name", ["curanddx", "curanddx_fast_math", "raft_table", "raft_table_philox"])
def test_peers_without_their_headers_are_skipped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "cuda_reason", lambda: None)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(pytest.skip.Exception, match=f"{name}: .*pip install --no-deps (nvidia-mathdx|libraft-cu13)"):
        CudaRunner(Clockwork(), None).run(Table(), "throughput", CUDA[name], Case(D, N), "fast_math")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.source)
@pytest.mark.slow
def test_peers_compile_from_copied_headers(
    program: header_peers.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = header_peers.missing(program)
    if reason:
        pytest.skip(reason)
    assert 10**5 < header_peers.copy_headers(program, tmp_path) < 2 * 10**7
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    draw = header_peers.compiled(program, "90")
    if contenders.cuda_reason():
        with pytest.raises(RuntimeError, match=rf"{program.source}: .*CUDA"):
            draw(0, 0, 0, 1, 1, 0)


@pytest.mark.parametrize("degrees", [4, 30])
@pytest.mark.parametrize("probability", [0.05, 0.25, 0.5, 0.75, 0.95])
def test_variances_of_few_samples_are_compared_with_chi_square(degrees: int, probability: float) -> None:
    row = np.arange(degrees + 1.0)
    row = row / row.std(ddof=1) * np.sqrt(chi2.ppf(probability, degrees) / degrees)
    found = moment_errors(row[None], np.zeros(1), np.ones(1), "shared")["variance"]
    assert abs(found - abs(norm.ppf(probability))) < 0.1


def test_skipped_benchmarks_need_no_packages_of_the_tests(tmp_path: Path) -> None:
    code = (
        "import sys, pytest; sys.modules.update(hypothesis=None, ml_dtypes=None, cupy=None); pytest.main(sys.argv[1:])"
    )
    options = ["--benchmark-only", "-k", "bench_cuda and 10x10-float32-independent", "-p", "pytest_benchmark.plugin"]
    command = [sys.executable, "-c", code, *options]
    command.append(f"--benchmark-json={tmp_path / 'results.json'}")
    root = Path(__file__).parents[2]
    # pytest looks at the modules of plugins that it loads by itself.
    # pytest-benchmark refuses to run in a worker of xdist.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_XDIST_WORKER": ""}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stdout + done.stderr
    assert "CuPy has no CUDA device" in done.stdout
    assert " passed" not in done.stdout
