"""Runs one benchmark: starts and checks a contender, measures it if it runs on a GPU, and times it by pytest-benchmark.

A peer has no modes, but appears in the groups of both modes, so that each group is complete. It is started and measured
once; only the timed calls of pytest-benchmark's table are repeated.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from bench.suites.cases import Case, clamp, vectors
from bench.suites.contenders import BARE, Contender
from bench.suites.sample_checks import OPERATIONS
from bench.suites.timing import BUSY, CudaDevice, Ring, Times, compared, measure

TABLE_SECONDS = 0.02
TABLE_ROUNDS = 5, 40

Call = Callable[[], Any]


@dataclass(frozen=True)
class _Started:
    """The fastest variant of a contender."""

    call: Call
    ring: Ring
    times: Times
    variants: dict[str, Any]


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


def _fastest(calls: dict[str, Call], compare: Callable[[], dict[str, float]]) -> tuple[Call, dict[str, Any]]:
    """The fastest variant; its name, and the times of all, if there are several."""
    if len(calls) == 1:
        return next(iter(calls.values())), {}
    seconds = compare()
    best = min(seconds, key=seconds.__getitem__)
    return calls[best], {"variant": best, "variants": seconds}


def _info(suite: str, contender: Contender, case: Case, mode: str) -> dict[str, Any]:
    name = {"suite": suite, "contender": contender.name, "ours": contender.ours, "lacks": contender.lacks}
    return {**name, **asdict(case), "mode": mode, "bytes": case.bytes}


class CudaRunner:
    """Runs contenders on `device`, one after the other."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._last: tuple[Any, _Started] | None = None

    def run(self, benchmark: Any, suite: str, contender: Contender, case: Case, mode: str) -> None:
        """Check `contender` and time it. The results are in the table and in the benchmark's `extra_info`."""
        started = self._started(contender, case, mode)
        times, wait = started.times, contender.wait

        def call_and_wait() -> None:
            result = started.call()
            started.ring.kept.append(result)
            if wait is None:
                self._device.wait()
            else:
                wait(result)

        benchmark.group = f"{suite} {case.group(mode)}"
        benchmark.extra_info.update(
            _info(suite, contender, case, mode),
            **started.variants,
            device_s=times.device.median,
            device_s_low=times.device.low,
            device_s_high=times.device.high,
            host_s=times.host,
            pipelined_s=times.pipelined,
            memset_s=times.memset,
        )
        rounds = clamp(TABLE_SECONDS / max(times.device.median, times.host), *TABLE_ROUNDS)
        benchmark.pedantic(call_and_wait, rounds=rounds, warmup_rounds=1)

    def _started(self, contender: Contender, case: Case, mode: str) -> _Started:
        key = contender.name, case, mode if contender.ours else None
        if self._last is None or self._last[0] != key:
            self._last = None
            self._device.release()
            self._device.reserve(max(BUSY, case.bytes))
            calls, ring = _start(contender, case, mode), Ring(case.bytes)
            call, variants = _fastest(calls, lambda: compared(self._device, calls, ring))
            ring.warm_up(call)
            times = measure(self._device, call, ring, case.bytes, contender.wait)
            self._last = key, _Started(call, ring, times, variants)
        return self._last[1]


def run_on_cpu(benchmark: Any, suite: str, contender: Contender, case: Case) -> None:
    """Check `contender` and time it. Its calls return when all work is done."""
    calls, wait = _start(contender, case, "portable"), contender.wait
    call, variants = _fastest(
        calls, lambda: {name: min(timeit.repeat(call, number=1, repeat=10)) for name, call in calls.items()}
    )
    benchmark.group = f"{suite} {case.group('portable')}"
    benchmark.extra_info.update(_info(suite, contender, case, "portable"), **variants)
    benchmark(call if wait is None else lambda: wait(call()))
    benchmark.extra_info.update(dict.fromkeys(("device_s", "device_s_low", "device_s_high", "host_s", "memset_s")))
