"""The cross-entropy method on a GPU: all arrays stay there, and the loop does not wait for the GPU."""

import time
from typing import Any

import numpy as np
import pytest
from cuda_memory import CYCLES, OWN, Gpu, gpu_of, names
from scored_functions import sphere
from skip_rules import require, require_device

from multisample import cem
from multisample.cem import CEM

require_device()

D, N = 50, 4000
SEED = 7
START = np.linspace(-2, 3, D).astype(np.float32)
OPTIONS: dict[str, Any] = {
    "seed": SEED, "noise_floor": lambda t: max(1e-2 - t / 500, 0), "bounds": (-4, 4), "smoothing": 0.9, "tol": 1e-3,
}  # fmt: skip


@pytest.fixture(params=[pair for pair in OWN if pair[0] != "numba"], ids=names)
def gpu(request: pytest.FixtureRequest) -> Gpu:
    return gpu_of(request.param)


def test_results_are_device_arrays(gpu: Gpu, to_numpy: Any) -> None:
    start = gpu.memory.put(START)
    batches = set()

    def f(x: Any) -> Any:
        batches.add((type(x), x.shape, gpu.memory.device_of(x), gpu.memory.pointer(x)))
        return sphere(x)

    result = cem.minimize(f, start, 2.0, N, backend=gpu.backend, **OPTIONS)
    # All iterations use the same memory.
    assert [entry[:3] for entry in batches] == [(type(start), (D, N), 0)]
    for array in (result.x, result.mu, result.sigma):
        assert type(array) is type(start)
        assert gpu.memory.device_of(array) == 0
    expected = cem.minimize(sphere, START, 2.0, N, **OPTIONS)
    assert result.status == expected.status == 1
    np.testing.assert_allclose(to_numpy(result.mu), expected.mu, atol=1e-3)
    # Runs first differ by rounding only. Later, samples with nearly equal scores may differ in being elites.
    np.testing.assert_allclose(result.history["sigma"][:20], expected.history["sigma"][:20], rtol=0.05)


def test_samples_equal_those_of_the_cpu_and_of_a_resumed_run(gpu: Gpu, to_numpy: Any) -> None:
    starts = gpu.memory.put(START), gpu.memory.put(START), START
    run, resumed, on_cpu = (CEM(start, 2.0, N, **OPTIONS) for start in starts)
    for _ in range(3):
        x = run.ask()
        for other in (resumed, on_cpu):
            assert np.array_equal(to_numpy(x), to_numpy(other.ask()))
        run.tell(x, sphere(x))
        resumed.state = on_cpu.state = run.state


def test_scores_may_come_from_the_host(gpu: Gpu, to_numpy: Any) -> None:
    start = gpu.memory.put(START)
    here = cem.minimize(lambda x: to_numpy(sphere(x)), start, 2.0, N, iterations=5, seed=SEED)
    there = cem.minimize(sphere, start, 2.0, N, iterations=5, seed=SEED)
    assert np.array_equal(to_numpy(here.mu), to_numpy(there.mu))
    assert here.fun == there.fun


def test_check_every_does_not_change_the_result(gpu: Gpu, to_numpy: Any) -> None:
    start = gpu.memory.put(START)
    options = OPTIONS | {"iterations": 60}
    results = [cem.minimize(sphere, start, 2.0, N, check_every=every, **options) for every in (1, None, 0)]
    first = results[0]
    assert first.status == 1
    for other in results[1:]:
        assert (other.nit, other.fun, other.message) == (first.nit, first.fun, first.message)
        assert np.array_equal(to_numpy(other.mu), to_numpy(first.mu))
    assert [result.nfev // N for result in results] == [first.nit, -(-first.nit // 16) * 16, 60]


def test_the_loop_does_not_wait_for_the_device(gpu: Gpu) -> None:
    """Five iterations of about 100 launches are queued while a kernel only waits. A stream takes about 1000."""

    def iterate(run: CEM, iterations: int) -> None:
        x = None
        for _ in range(iterations):
            x = run.ask(x)
            run.tell(x, sphere(x))

    with gpu.memory.stream():
        run = CEM(gpu.memory.put(START), 2.0, N, backend=gpu.backend, **OPTIONS)
        iterate(run, 10)  # Compile and allocate.
        gpu.memory.synchronize()
        started = time.perf_counter()
        iterate(run, 10)
        gpu.memory.synchronize()
        # Other processes may use the GPU and the cores: wait for much longer than iterations take here and now.
        gpu.memory.keep_busy(CYCLES * int(2 + 100 * (time.perf_counter() - started)))
        is_done = gpu.memory.marker()
        iterate(run, 5)
        assert not is_done()
        assert run.result().nit > 10
        assert is_done()


def test_jax_arrays_stay_on_the_device() -> None:
    require("cupy")
    from cuda_memory import memory_of

    jax = memory_of("jax")
    start = jax.put(START)
    result = cem.minimize(sphere, start, 2.0, N, iterations=20, seed=SEED)
    assert result.x.devices() == start.devices()
    assert np.abs(np.asarray(result.mu) - 1).max() < 0.1
