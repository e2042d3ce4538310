"""The cpu backend, and torch_ext on the CPU, beside what people call today, on the same shapes in the same run.

Only ratios within one run mean anything. The peers called `bare` do less than `sample` does: they apply neither mu nor
sigma. Predictions, written before the first run on two cores with AVX-512 (Zen 4): NumPy draws 0.1 G normals/s on its
one thread and PyTorch 0.3; our loop needs 3 cycles a normal, which at 3.7 GHz is 1.25 G/s a core. So at (1000, 10000)
20 times NumPy and 8 times PyTorch with the output reused, and less where fresh memory has to be paged in; at (10, 10)
the call decides, 1.7 us of ours against 1.7 of NumPy's, so about 1.

Layout nd writes the same bits transposed, and antithetic pairs need half the noise; both are beside the plain call.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

import multisample
from multisample.backends.worker_pool import thread_count

SHAPES = [
    (10, 10),
    (100, 100),
    (1000, 100),
    (1000, 1000),
    (1000, 10_000),
    (10_000, 1000),
    (10, 1_000_000),
    (1, 10_000_000),
    (32, 300_000),
    (33, 30_000),
    (100_000, 100),
]

rng = np.random.default_rng(7)


def _vectors(d: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.linspace(-1, 1, d, dtype=np.float32), np.linspace(0.5, 2, d, dtype=np.float32)


def _fresh(d: int, n: int) -> dict[str, Callable[[], Any]]:
    """Calls that allocate their result."""
    mu, sigma = _vectors(d)
    t_mu, t_sigma = torch.from_numpy(mu), torch.from_numpy(sigma)
    column_mu, column_sigma = mu[:, None], sigma[:, None]
    t_column_mu, t_column_sigma = t_mu[:, None], t_sigma[:, None]
    return {
        "multisample": lambda: multisample.sample(mu, sigma, n),
        "multisample_seed": lambda: multisample.sample(mu, sigma, n, seed=7),
        "multisample_shared": lambda: multisample.sample(mu, sigma, n, noise="shared"),
        "multisample_torch": lambda: multisample.sample(t_mu, t_sigma, n, backend="torch_ext"),
        "multisample_torch_cpu": lambda: multisample.sample(t_mu, t_sigma, n, backend="cpu"),
        "numpy_bare": lambda: rng.standard_normal((d, n), dtype=np.float32),
        "numpy": lambda: column_mu + column_sigma * rng.standard_normal((d, n), dtype=np.float32),
        "torch_bare": lambda: torch.empty((d, n)).normal_(),
        "torch": lambda: t_column_mu + t_column_sigma * torch.randn((d, n)),
    }


def _reused(d: int, n: int) -> dict[str, Callable[[], Any]]:
    """Calls that write where they are told to."""
    mu, sigma = _vectors(d)
    t_mu, t_sigma = torch.from_numpy(mu), torch.from_numpy(sigma)
    out, out_nd = np.zeros((d, n), np.float32), np.zeros((n, d), np.float32)
    t_out, t_out_nd = torch.zeros((d, n)), torch.zeros((n, d))
    nd: dict[str, Any] = {"layout": "nd", "out": out_nd}
    t_nd: dict[str, Any] = {"layout": "nd", "out": t_out_nd, "backend": "torch_ext"}
    t_dn: dict[str, Any] = {"out": t_out, "backend": "torch_ext"}
    return {
        "multisample": lambda: multisample.sample(mu, sigma, n, out=out),
        "multisample_shared": lambda: multisample.sample(mu, sigma, n, noise="shared", out=out),
        "multisample_nd": lambda: multisample.sample(mu, sigma, n, **nd),
        "multisample_antithetic": lambda: multisample.sample(mu, sigma, n, antithetic=True, out=out),
        "multisample_nd_antithetic": lambda: multisample.sample(mu, sigma, n, antithetic=True, **nd),
        "multisample_nd_shared": lambda: multisample.sample(mu, sigma, n, noise="shared", **nd),
        "multisample_torch": lambda: multisample.sample(t_mu, t_sigma, n, **t_dn),
        "multisample_torch_shared": lambda: multisample.sample(t_mu, t_sigma, n, noise="shared", **t_dn),
        "multisample_torch_nd": lambda: multisample.sample(t_mu, t_sigma, n, **t_nd),
        "multisample_torch_antithetic": lambda: multisample.sample(t_mu, t_sigma, n, antithetic=True, **t_dn),
        "multisample_torch_nd_antithetic": lambda: multisample.sample(t_mu, t_sigma, n, antithetic=True, **t_nd),
        "multisample_torch_nd_shared": lambda: multisample.sample(t_mu, t_sigma, n, noise="shared", **t_nd),
        "multisample_torch_cpu": lambda: multisample.sample(t_mu, t_sigma, n, out=t_out, backend="cpu"),
        "numpy_bare": lambda: rng.standard_normal(out=out, dtype=np.float32),
        "torch_bare": lambda: t_out.normal_(),
    }


CALLS = {"fresh": _fresh, "reused": _reused}


@pytest.fixture(scope="module", autouse=True)
def _compiled_and_warm() -> None:
    for antithetic in (False, True):
        multisample.sample([0.0], [1.0], 1_000_000, antithetic=antithetic)  # Enough for every thread.
    multisample.sample(torch.zeros(1), torch.ones(1), 1_000_000, backend="torch_ext")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize(("memory", "name"), [(memory, name) for memory in CALLS for name in CALLS[memory](1, 1)])
@pytest.mark.benchmark(min_rounds=7)
def test_draw(benchmark: Any, timed: bool, memory: str, name: str, shape: tuple[int, int]) -> None:
    d, n = shape if timed else (4, 5)
    benchmark.group = f"{memory} {shape}"
    benchmark.extra_info.update(
        normals=d * n,
        threads=thread_count(),
        torch_threads=torch.get_num_threads(),
        cpu=_cpu_name(),
        numpy=np.__version__,
        numba=numba.__version__,
        torch=torch.__version__,
    )
    result = np.asarray(benchmark(CALLS[memory](d, n)[name]))
    assert result.shape == ((n, d) if "_nd" in name else (d, n))
    assert np.isfinite(result).all()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
