"""`limit_threads` limits the threads that work on a call."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import launches
import numpy as np
import pytest
import torch

import multisample
from multisample import limit_threads, sample
from multisample.backends import registry
from multisample.backends.launch import FIELD_AT, PACKED_LAUNCH

LARGE = 1 << 20
MU, SIGMA = np.zeros(8, np.float32), np.ones(8, np.float32)


@pytest.fixture
def threads_of_cpu(monkeypatch: pytest.MonkeyPatch, thread_counts: Callable[[], list[int]]) -> Callable[[], int]:
    """``threads_of_cpu()``: the number of threads for a large matrix of the cpu backend."""
    monkeypatch.setenv("MULTISAMPLE_NUM_THREADS", "6")

    def count() -> int:
        sample(MU, SIGMA, LARGE, seed=1, backend="cpu")
        return thread_counts().pop()

    return count


def test_a_block_limits_the_number_of_threads(threads_of_cpu: Callable[[], int]) -> None:
    assert threads_of_cpu() == 6
    with limit_threads(2):
        assert threads_of_cpu() == 2
        with limit_threads(4):  # The limit of the outer block still applies.
            assert threads_of_cpu() == 2
        with limit_threads(1):
            assert threads_of_cpu() == 1
            with ThreadPoolExecutor(1) as other:  # Another thread has a limit of its own.
                assert other.submit(threads_of_cpu).result() == 6
        assert threads_of_cpu() == 2
    with limit_threads(100):
        assert threads_of_cpu() == 6
    with pytest.raises(KeyError), limit_threads(1):
        raise KeyError
    assert threads_of_cpu() == 6
    for wrong, error in ((0, ValueError), (2**31, ValueError), (1.0, TypeError)):
        with pytest.raises(error, match=r"^n: expected"):
            limit_threads(wrong)  # type: ignore[arg-type]


def test_several_threads_perturb_parameters(
    monkeypatch: pytest.MonkeyPatch, thread_counts: Callable[[], list[int]]
) -> None:
    monkeypatch.setenv("MULTISAMPLE_NUM_THREADS", "6")
    for limit, expected in ((2, 2), (100, 6)):
        with limit_threads(limit):
            multisample.perturb(np.zeros(LARGE, np.float32), 0.5, seed=1, backend="cpu")
        assert thread_counts().pop() == expected


@pytest.mark.parametrize("road", ["builtins", "python"])
def test_torch_ext_passes_the_limit_to_its_library(road: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if registry.find("torch_ext").status().reasons:
        pytest.skip("torch_ext cannot run")
    mu, sigma = torch.zeros(8), torch.ones(8)
    expected = sample(mu, sigma, LARGE, seed=1, backend="torch_ext")
    backend: Any = registry.find("torch_ext")
    library, launched = backend._cpu, []

    def run(address: int) -> int:
        launched.append(ctypes.string_at(address, PACKED_LAUNCH))
        return int(library.multisample_run_cpu(launched[-1]))

    class Watched:
        multisample_is_valid_cpu = library.multisample_is_valid_cpu
        multisample_last_error = library.multisample_last_error
        multisample_has_unit = library.multisample_has_unit
        multisample_run_cpu = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(run)

    monkeypatch.setattr(backend, "_cpu", Watched())
    multisample._plan.PLANS.clear()
    try:
        with launches.without_builtins() if road == "python" else contextlib.nullcontext():
            for limit in (1, 3):
                with limit_threads(limit):
                    assert torch.equal(sample(mu, sigma, LARGE, seed=1, backend="torch_ext"), expected)
    finally:
        multisample._plan.PLANS.clear()
    assert [np.frombuffer(launch, np.uint64, 1, FIELD_AT["threads"])[0] for launch in launched] == [1, 3]
