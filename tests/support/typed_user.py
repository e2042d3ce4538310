"""Typed calls by a user: test_sdist_and_wheel.py runs mypy --strict on this file.

Each call that a type checker should refuse has a comment with the error. mypy reports comments without an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import multisample
from multisample import cem

Host = npt.NDArray[Any]
mu, sigma = np.zeros(3, np.float32), np.ones(3, np.float32)
host: Host = mu

assert_type(multisample.sample(mu, sigma, 5), Host)
assert_type(multisample.sample([0, 1.5], 1.0, np.int64(5), seed=np.uint64(7)), Host)
assert_type(multisample.sample(0.0, [[1.0], [2.0]], 5, backend="cpu"), Host)
assert_type(multisample.sample(mu.astype(np.int32), np.float32(1), 5, out=np.zeros((3, 5))), Host)
assert_type(multisample.sample(mu, sigma, 5, backend="cupy"), Any)
integers: list[int] = [1, 2]
multisample.sample(integers, tuple(integers), 5, generator=multisample.Generator(7))
for dtype in (np.float64, np.dtype("float16"), float, None):
    multisample.sample(mu, sigma, 5, dtype=dtype)
multisample.sample(
    mu, sigma, 5, noise="shared", dtype="float64", fast_math=True, dim_offset=1, sample_offset=2, validate=True,
    layout="nd", antithetic=True,
)  # fmt: skip
assert_type(multisample.list_backends()["cpu"].available, bool)
m1, m2 = multisample.weighted_moments([1.0, 2.0], mu, 1.0, seed=7, dtype="float64")
assert_type(m1, Host)
assert_type(multisample.weighted_moments(mu, mu, np.float32(1), order=1, seed=[7, 8], backend="cpu"), tuple[Host, ...])
assert_type(multisample.weighted_moments(mu, mu, sigma, seed=7, backend="cupy"), tuple[Any, ...])
assert_type(multisample.perturb(host, 0.1, seed=7), Host)
named = {"weight": host, "bias": host}
assert_type(multisample.perturb(named, [0.1, 0.2], seed=multisample.Key(7, 0)), dict[str, Host])
assert_type(multisample.perturb([mu], mu, seed=7, member=np.int64(3), ids=[5], out=(host,)), tuple[Host])

multisample.sample("x", sigma, 5)  # type: ignore[arg-type]
multisample.sample(mu, None, 5)  # type: ignore[call-overload]
multisample.sample(mu, sigma, 1.5)  # type: ignore[call-overload]
multisample.sample(mu, sigma)  # type: ignore[call-overload]
multisample.sample(mu, sigma, 5, seed="7")  # type: ignore[arg-type]
multisample.sample(mu, sigma, 5, seed=1.5)  # type: ignore[call-overload]
multisample.sample(mu, sigma, 5, noise="pink")  # type: ignore[call-overload]
multisample.sample(mu, sigma, 5, layout="dd")  # type: ignore[call-overload]
multisample.sample(mu, sigma, 5, dtype="float31")  # type: ignore[call-overload]
multisample.sample(mu, sigma, 5, dtype=np.zeros)  # type: ignore[call-overload]
multisample.sample(mu, sigma, 5, backend=None)  # type: ignore[call-overload]
multisample.sample(mu, sigma, 5, fast_math="yes")  # type: ignore[call-overload]
multisample.sample(mu, sigma, 5, dim_offset=0.5)  # type: ignore[call-overload]
multisample.sample(mu, sigma, 5, generator=np.random.default_rng())  # type: ignore[call-overload]
multisample.sample(mu, sigma, 5, sed=7)  # type: ignore[call-overload]
multisample.smaple(mu, sigma, 5)  # type: ignore[attr-defined]
multisample.weighted_moments(mu, mu, sigma)  # type: ignore[call-overload]
multisample.weighted_moments(mu, "x", sigma, seed=7)  # type: ignore[arg-type]
multisample.weighted_moments(mu, mu, sigma, seed=7, order=3)  # type: ignore[call-overload]
multisample.perturb(mu, 0.1)  # type: ignore[call-overload]
multisample.perturb(mu, "x", seed=7)  # type: ignore[arg-type]
multisample.perturb(mu, 0.1, seed=7, member=0.5)  # type: ignore[call-overload]


class JaxArray:
    def addressable_data(self, index: int) -> JaxArray:
        return self

    def block_until_ready(self) -> JaxArray:
        return self


class CudaArray:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {}


class CupyArray(CudaArray):
    def get(self, stream: Any = None) -> Host:
        return mu


class NumbaArray(CudaArray):
    def copy_to_host(self, ary: Any = None) -> Host:
        return mu


class DlpackArray:
    def __dlpack__(self, *, stream: Any = None) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def draw(jax: JaxArray, cupy: CupyArray, numba: NumbaArray, cuda: CudaArray, dlpack: DlpackArray, unknown: Any) -> None:
    assert_type(multisample.sample(jax, jax, 5), JaxArray)
    assert_type(multisample.sample(0.0, cupy, 5, backend="numba"), CupyArray)
    assert_type(multisample.sample(numba, 1.0, 5, out=numba), NumbaArray)
    assert_type(multisample.sample(cuda, 1.0, 5), Any)
    assert_type(multisample.sample(dlpack, dlpack, 5), Any)
    assert_type(multisample.sample(unknown, unknown, 5), Any)
    assert_type(multisample.sample(jax, np.float32(1), 5), JaxArray)
    assert_type(multisample.weighted_moments(cupy, 0.0, cupy, seed=7), tuple[CupyArray, ...])
    assert_type(multisample.weighted_moments(unknown, unknown, unknown, seed=7), tuple[Any, ...])
    assert_type(multisample.perturb({"layer": [jax, jax]}, dlpack, seed=dlpack), dict[str, list[JaxArray]])
    assert_type(multisample.perturb(unknown, unknown, seed=unknown), Any)
    multisample.sample(jax, jax, 5, seed="7")  # type: ignore[arg-type]
    multisample.sample(cupy, 1.0, 5.0)  # type: ignore[call-overload]
    multisample.sample(unknown, unknown, 5, seed="7")  # type: ignore[arg-type]


def score(x: Host) -> Host:
    scores: Host = (x * x).sum(axis=0)
    return scores


def watch(run: cem.CEM) -> bool:
    result: cem.Result = run.result()
    return result.fun < 1e-3


result = cem.minimize(score, [1.0, 2.0], 1.0, 100, tol=1e-6, noise_floor=lambda t: 1 / t, callback=watch)
assert_type(result, cem.Result[Host])
assert_type(result.x, Host)
assert_type(result.fun, float)
assert_type(result.history, dict[str, Host])
assert_type(cem.minimize(lambda x: x.sum(axis=0), mu, sigma, 100).mu, Host)
assert_type(cem.minimize(lambda x: x.sum(axis=0), mu, sigma, 100, backend="cupy").mu, Any)
run = multisample.cem.CEM(mu, 1.0, 100, bounds=(-1.0, np.ones(3)), seed=np.uint64(7))
assert_type(run, cem.CEM[Host])
assert_type(run.ask(), Host)
assert_type(run.result().mu, Host)
run.tell(run.ask(), [1.0] * 100)
run.state = run.state

cem.minimize(score, mu, 1.0, 100.5)  # type: ignore[call-overload]
cem.minimize(3, mu, 1.0, 100)  # type: ignore[call-overload]
cem.minimize(score, mu, 1.0, 100, tol="small")  # type: ignore[call-overload]
cem.CEM("x", 1.0, 100)  # type: ignore[arg-type]
cem.CEM(mu, 1.0, 100, noise="pink")  # type: ignore[call-overload]
run.tell(run.ask(), None)  # type: ignore[arg-type]
multisample.Generator(7).rand(3)  # type: ignore[attr-defined]
