"""Wrong samplers are rejected before they are timed, timers are accurate, and TestU01 reads the stream."""

import json
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2, norm

from bench.studies import testu01
from bench.suites import curanddx_peer
from bench.suites.cases import MODES, Case, vectors
from bench.suites.contenders import CPU, Contender
from bench.suites.running import CudaRunner
from bench.suites.sample_checks import check_moments, moment_errors
from bench.suites.timing import BUSY, measure
from multisample.backends.native import toolchain
from reference import stream as reference

D, N = 50, 400
mu, sigma = vectors(D)


def draw(seed: int, noise: str = "independent") -> Any:
    z = np.random.default_rng(seed).standard_normal((D if noise == "independent" else 1, N))
    return (mu[:, None] + sigma[:, None] * z).astype(np.float32)


@pytest.mark.parametrize(("spoil", "noise", "message"), [
    (lambda x: x + 0.1 * sigma[:, None], "independent", "mean of all"),
    (lambda x: mu[:, None] + 1.1 * (x - mu[:, None]), "independent", "variance of all"),
    (lambda x: np.where(np.arange(D)[:, None] == 7, x + 2, x), "independent", "'mean'"),
    (lambda x: np.where(np.arange(N) == 7, np.nan, x), "independent", "nan"),
    (lambda x: x[1:], "independent", "expected 50 rows, got 49"),
    (lambda x: draw(1), "independent", "expected new numbers"),
    (lambda x: draw(3, "shared"), "independent", "correlation"),
    (lambda x: draw(2), "shared", "the same noise in every row"),
])  # fmt: skip
def test_wrong_samples_are_rejected(spoil: Callable[[Any], Any], noise: str, message: str) -> None:
    check_moments(draw(1, noise), draw(2, noise), mu, sigma, noise)
    with pytest.raises(AssertionError, match=message):
        check_moments(spoil(draw(1)), draw(1), mu, sigma, noise)


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.95])
def test_variances_of_few_samples_are_compared_with_chi_square(probability: float) -> None:
    row = np.arange(31.0) / np.arange(31.0).std(ddof=1) * np.sqrt(chi2.ppf(probability, 30) / 30)
    found = moment_errors(row[None], np.zeros(1), np.ones(1), "shared")["variance"]
    assert abs(found - abs(norm.ppf(probability))) < 0.1


class Clockwork:
    """A fake device with a simulated clock: filling a byte takes a nanosecond, and the host takes no time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fills: list[int] = []
        self.reserved: list[int] = []
        self.reserve = self.reserved.append
        self.mark = lambda: self.now
        self.seconds = lambda start, stop: stop - start
        self.release = self.wait = lambda result=None: None

    def fill(self, size: int) -> None:
        self.fills.append(size)
        self.now += size * 1e-9

    def taking(self, seconds: float, call: Callable[[], Any]) -> Callable[[], Any]:
        def taking() -> Any:
            self.now += seconds
            return call()

        return taking


def test_the_time_of_a_call_is_between_its_marks() -> None:
    device, size, waited = Clockwork(), 10**6, list[str]()
    call = device.taking(5e-3, lambda: "result")
    times = measure(device, call, size)
    assert times.device == pytest.approx(5e-3) and times.memset == pytest.approx(1e-3)
    assert times.pipelined == pytest.approx(5e-3) and 0 < times.host < 1
    # An untimed memset evicts the cache before each timed memset and each timed call.
    assert device.fills[::3] == device.fills[2::3] == [BUSY] * (len(device.fills) // 3)
    assert set(device.fills[1::3]) == {size}
    # Libraries with private streams are timed by the host's clock.
    times = measure(device, call, size, wait=waited.append)
    assert set(waited) == {"result"}
    assert times.host <= times.pipelined == times.device


@pytest.mark.parametrize(("ours", "noise"), [(False, "independent"), (True, "shared")])
def test_peers_are_measured_once_and_ours_once_per_mode_and_the_fastest_variant_counts(ours: bool, noise: str) -> None:
    device, starts = Clockwork(), []

    def start(case: Case, mode: str) -> dict[str, Callable[[], Any]]:
        starts.append(mode)
        call = CPU["cpu"].start(case, mode)
        return {name: device.taking(seconds, call) for name, seconds in (("slow", 0.02), ("fast", 0.01))}

    runner, contender = CudaRunner(device), Contender("someone", start, ours=ours)
    # In place of pytest-benchmark's fixture.
    tables = [SimpleNamespace(extra_info={}, pedantic=lambda call, **options: call()) for _ in MODES]
    for table, mode in zip(tables, MODES, strict=True):
        runner.run(table, "throughput", contender, Case(D, N, noise=noise), mode)
    assert starts == (["portable", "fast_math"] if ours else ["portable"])
    assert device.reserved == [BUSY] * len(starts)
    info = tables[0].extra_info
    assert (info["noise"], info["device_s"], info["variant"]) == (noise, pytest.approx(0.01), "fast")
    assert info["memset_s"] == pytest.approx(1e-9 * info["bytes"])
    assert tables[1].group == f"throughput {D}x{N} {'shared ' * (noise == 'shared')}fast_math"


def test_unavailable_contenders_are_skipped_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contender = Contender("someone", CPU["numpy"].start, lambda: "not at home")
    with pytest.raises(pytest.skip.Exception, match="someone: not at home"):
        CudaRunner(Clockwork()).run(None, "throughput", contender, Case(D, N), "portable")
    monkeypatch.setattr(toolchain, "cuda_home", lambda: tmp_path)
    monkeypatch.setattr(sys, "path", [])
    reason = curanddx_peer.missing(curanddx_peer.HEADERS) or ""
    assert all(header.name in reason and header.package in reason for header in curanddx_peer.HEADERS)


def reference_numbers(test: int, order: str, seed: int, block: int) -> list[float]:
    """The two numbers that begin at `block`."""
    line, place = test + 256 * (block // 2**32), block % 2**32
    offset_i_j = {
        "rows": [(0, line, 4 * place + k) for k in range(2)],
        "columns": [(0, place + k, line) for k in range(2)],
        "offsets": [(block + k, 0, test) for k in range(2)],
    }
    if order in offset_i_j:
        return [reference.words(seed, offset, i, j // 4)[j % 4] / 2**32 for offset, i, j in offset_i_j[order]]
    dtype, known = ("float64", reference.F64) if order == "normals" else ("float32", reference.F32)
    z = [reference.from_bits(reference.normal(seed, 0, line, 4 * place + k, known), dtype) for k in range(4)]
    phi = [math.erfc(-x / math.sqrt(2)) / 2 for x in z]
    bits = sum(int(u * 2**20) << (60 - 20 * k) for k, u in enumerate(phi))
    return phi[:2] if order == "normals" else [(bits >> 48) / 2**32, (bits >> 16) % 2**32 / 2**32]


def test_numbers_equal_the_reference() -> None:
    get_u01, get_bits, _ = testu01.callbacks()
    for order, name in enumerate(testu01.ORDERS):
        for test, seed, block in ((1, 7, 0), (96, 2**64 - 1, 2**32 - 1024), (106, 2**33 + 5, 5 * 2**32 + 2**31)):
            place = np.array([order, test, seed, block, 0, 0], np.uint64)
            numbers = np.empty(4096)
            arguments = place.ctypes.data, numbers.ctypes.data
            drawn = [get_u01.ctypes(*arguments) for _ in range(2)]
            np.testing.assert_allclose(drawn, reference_numbers(test, name, seed, block), rtol=1e-13)
            assert get_bits.ctypes(*arguments) == int(numbers[2] * 2**32)
            # The next buffer begins with the next block.
            place[4] = place[5]
            get_u01.ctypes(*arguments)
            np.testing.assert_allclose(numbers[:2], reference_numbers(test, name, seed, block + 1024), rtol=1e-13)


def result_of(library: Path, battery: str, test: int, order: str, seed: int) -> dict[str, Any]:
    if test == 7:
        time.sleep(0.2)  # The other tests end first.
        raise OSError(f"{battery}, test 7, {order}")
    p = {"A": test / 10, "B": 1e-20}
    return {"test": test, "seconds": 1.5, "statistics": [{"name": name, "p": value} for name, value in p.items()]}


def test_every_test_runs_once_and_a_failure_leaves_the_results_of_others(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(testu01, "run_test", result_of)
    # Threads: JAX, which other tests import, must not be forked.
    monkeypatch.setattr(testu01, "ProcessPoolExecutor", lambda mp_context: ThreadPoolExecutor(2))
    run: testu01.Run = {"battery": "SmallCrush", "order": "rows", "seed": 1, "tests": []}
    run["tests"] = [{"test": 2, "seconds": 1000.0, "statistics": [{"name": "A", "p": 0.5}]}]
    with pytest.raises(OSError, match="SmallCrush, test 7, rows"):
        for _ in testu01.run_tests(tmp_path, [run]):
            testu01.write(tmp_path / "results.json", [run])
    (found,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    done = {each["test"]: (each["seconds"], each["statistics"][0]["p"]) for each in found["tests"]}
    assert done[2] == (1000, 0.5) and all(done[k] == (1.5, k / 10) for k in set(done) - {2}) and len(done) > 1
    assert found["summary"]["verdict"] == "failed, incomplete"


@pytest.mark.parametrize(("p", "verdict"), [
    (0.002, "passed"), (0.9991, "suspicious"), (2e-10, "suspicious"), (0.0, "failed"), (1.0, "failed"),
])  # fmt: skip
def test_verdicts(p: float, verdict: str) -> None:
    values = [*[0.5] * 9, p]
    tests = [{"test": k, "seconds": 1.0, "statistics": [{"name": "A", "p": one}]} for k, one in enumerate(values)]
    found = testu01.summary({"battery": "SmallCrush", "tests": tests})
    assert (found["verdict"], len(found["outside"]), found["statistics"]) == (verdict, verdict != "passed", 10)
