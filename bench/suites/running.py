"""Runs one benchmark: checks a contender, takes the times of `Times` on a GPU, and calls pytest-benchmark.

A peer has no modes, but appears in the groups of both modes, so that each group is complete. It is started and measured
once; only the timed calls of pytest-benchmark's table are repeated.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from bench.suites.cases import Case, clamp, vectors
from bench.suites.contenders import BARE, Contender
from bench.suites.sample_checks import OPERATIONS
from bench.suites.timing import BUSY, Call, CudaDevice, Ring, Times, Turns, measure, medians, on_device, on_host

TABLE_SECONDS = 0.02
TABLE_ROUNDS = 5, 40


def _start(contender: Contender, case: Case, mode: str) -> dict[str, Call]:
    """The calls of all variants, after their results have passed the checks."""
    reason = contender.reason()
    if reason:
        pytest.skip(f"{contender.name}: {reason}")
    started = contender.start(case, mode)
    calls = started if isinstance(started, dict) else {"": started}
    mu, sigma = vectors(case.d)
    if contender.lacks == BARE:
        mu, sigma = mu * 0, sigma * 0 + 1
    for call in calls.values():
        OPERATIONS[case.operation](call, case, mu, sigma)
    return calls


def _fastest(calls: dict[str, Call], timed: Callable[[], Turns]) -> tuple[Call, dict[str, Any]]:
    """The fastest variant; its name, and the times of all, if there are several."""
    if len(calls) == 1:
        return next(iter(calls.values())), {}
    seconds = medians(timed())
    best = min(seconds, key=seconds.__getitem__)
    return calls[best], {"variant": best, "variants": seconds}


def _info(suite: str, contender: Contender, case: Case, mode: str) -> dict[str, Any]:
    name = {"suite": suite, "contender": contender.name, "ours": contender.ours, "lacks": contender.lacks}
    return {**name, **asdict(case), "mode": mode, "bytes": case.bytes}


class CudaRunner:
    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._last: dict[Any, tuple[Call, Times, dict[str, Any]]] = {}

    def run(self, benchmark: Any, suite: str, contender: Contender, case: Case, mode: str) -> None:
        """Check `contender` and time it. The results are in the table and in the benchmark's `extra_info`."""
        call, times, variants = self._started(contender, case, mode)
        wait = contender.wait or self._device.wait
        benchmark.group = f"{suite} {case.name(mode)}"
        benchmark.extra_info.update(
            _info(suite, contender, case, mode), **variants, **{f"{name}_s": s for name, s in times._asdict().items()}
        )
        rounds = clamp(TABLE_SECONDS / max(times.device, times.host), *TABLE_ROUNDS)
        benchmark.pedantic(lambda: wait(call()), rounds=rounds, warmup_rounds=1)

    def _started(self, contender: Contender, case: Case, mode: str) -> tuple[Call, Times, dict[str, Any]]:
        """The fastest variant, its times, and what `_fastest` says about variants; kept until the next contender."""
        key = contender.name, case, mode if contender.ours else None
        if key not in self._last:
            self._last.clear()
            self._device.release()
            self._device.reserve(max(BUSY, case.bytes))
            ring = Ring(case.bytes)
            calls = {name: ring.keeping(call) for name, call in _start(contender, case, mode).items()}
            call, variants = _fastest(calls, lambda: on_device(calls, device=self._device))
            ring.warm_up(call)
            self._last[key] = call, measure(self._device, call, case.bytes, contender.wait), variants
        return self._last[key]


def run_on_cpu(benchmark: Any, suite: str, contender: Contender, case: Case) -> None:
    """Check `contender` and time it. A call ends after its `wait`."""
    calls, wait = _start(contender, case, "portable"), contender.wait
    call, variants = _fastest(calls, lambda: on_host(calls, turns=10, repeats=1))
    benchmark.group = f"{suite} {case.name('portable')}"
    benchmark.extra_info.update(_info(suite, contender, case, "portable"), **variants)
    benchmark(call if wait is None else lambda: wait(call()))
    benchmark.extra_info.update(dict.fromkeys(f"{name}_s" for name in Times._fields))
