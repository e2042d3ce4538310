"""Blocks of CuPy, drawn on the GPU of the worker; skipped where CuPy has no GPU.

MULTISAMPLE_TEST_BACKENDS=cupy pytest tests/with_dask/test_dask_cuda.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dask_cluster import local_cluster
from skip_rules import require, require_device

import multisample
import multisample.dask

require_device()

D, N = 13, 500
MU = np.linspace(-3, 4, D).astype(np.float32)
SIGMA = np.linspace(0, 2, D).astype(np.float32)


@pytest.fixture
def cupy() -> Any:
    require("cupy")
    return pytest.importorskip("cupy")


@pytest.mark.parametrize("layout", ["dn", "nd"])
def test_blocks_of_cupy_have_the_bits_of_numpy(cupy: Any, layout: Any) -> None:
    expected = multisample.sample(MU, SIGMA, N, seed=7, layout=layout)
    for mu, backend in ((MU, "cupy"), (cupy.asarray(MU), "auto"), (cupy.asarray(MU), "cupy")):
        sigma = SIGMA if mu is MU else cupy.asarray(SIGMA)
        x = multisample.dask.sample(mu, sigma, N, chunks=6, seed=7, layout=layout, backend=backend)
        assert type(x._meta) is cupy.ndarray
        assert x._meta.dtype == x.dtype == expected.dtype
        for scheduler in ("synchronous", "threads"):
            y = x.compute(scheduler=scheduler)
            assert type(y) is cupy.ndarray
            assert cupy.asnumpy(y).tobytes() == expected.tobytes()


def test_reductions_and_dask_arrays_of_cupy(cupy: Any) -> None:
    import dask.array as da

    expected = multisample.sample(MU, SIGMA, N, seed=7)
    mu, sigma = (da.from_array(cupy.asarray(x), chunks=4, asarray=False) for x in (MU, SIGMA))
    x = multisample.dask.sample(mu, sigma, N, chunks=6, seed=7)
    assert type(x._meta) is cupy.ndarray
    assert cupy.asnumpy(x.compute(scheduler="threads")).tobytes() == expected.tobytes()
    assert float(x.max().compute(scheduler="threads")) == expected.max()
    np.testing.assert_allclose(cupy.asnumpy(x.mean(axis=1).compute(scheduler="threads")), expected.mean(1), atol=1e-5)


def test_a_cluster_draws_on_its_gpu(cupy: Any) -> None:
    expected = multisample.sample(MU, SIGMA, N, seed=7)
    with local_cluster(n_workers=1) as client:
        x = multisample.dask.sample(MU, SIGMA, N, chunks=100, seed=7, backend="cupy")
        y = x.map_blocks(cupy.asnumpy, dtype=x.dtype, meta=np.empty((0, 0), x.dtype))
        assert y.compute(scheduler=client).tobytes() == expected.tobytes()


def test_numpy_and_cupy_together_are_refused(cupy: Any) -> None:
    with pytest.raises(TypeError, match="expected arrays of one library"):
        multisample.dask.sample(cupy.asarray(MU), SIGMA, N)
