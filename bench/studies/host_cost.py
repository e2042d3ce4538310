"""The host's time of a call, beside that of the code that it replaces.

python -m bench.studies.host_cost results.json group ...

Each call alternates with its peer. A turn is some tens of calls of one and then as many of the other, with an idle
device before each. A figure is the median over the turns; the ratio is the median of the ratios of one turn. Groups
that cannot run here are left out.

Predicted before the first run, for an H200, from a plan in plain Python that only looked itself up, allocated and
launched: 9 to 11 us for any option where `torch.randn` takes 8 to 12, 5.5 us with out=, and 20 us for a recorded
forward pass where PyTorch's takes 35; on the CPU, half the time of PyTorch's expression.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import multisample
import multisample.torch
from bench.suites.machine import describe

TURNS = 41
CALLS = 40
SHAPES = ((10, 10), (100, 256), (1000, 1024))

Call = Callable[[], Any]
Options = dict[str, Any]


class Pair(NamedTuple):
    """A call of ours, and the code that it replaces."""

    group: str
    name: str
    shape: tuple[int, int]
    ours: Call
    other: Call
    wait: Call


def measure(pair: Pair) -> dict[str, Any]:
    """Microseconds per call of ours and of the other, and their ratio."""
    for call in (pair.ours, pair.other):
        for _ in range(CALLS):
            call()
    ours, other = [], []
    gc.disable()
    try:
        for _ in range(TURNS):
            ours.append(_seconds(pair.ours, pair.wait))
            other.append(_seconds(pair.other, pair.wait))
    finally:
        gc.enable()
    ratios = [a / b for a, b in zip(ours, other, strict=True)]
    return {
        "group": pair.group, "call": pair.name, "shape": pair.shape,
        "us": round(statistics.median(ours) * 1e6, 2), "other_us": round(statistics.median(other) * 1e6, 2),
        "ratio": round(statistics.median(ratios), 3),
    }  # fmt: skip


def _seconds(call: Call, wait: Call) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS


def _nothing() -> None:
    pass


# --- PyTorch ------------------------------------------------------------------------------------------------------


def _torch(device: str) -> Iterator[Pair]:
    import torch

    group, wait = f"torch {device}", torch.cuda.synchronize if device == "cuda" else _nothing
    for d, n in SHAPES if device == "cuda" else SHAPES[:1]:
        mu, sigma = torch.zeros(d, device=device), torch.ones(d, device=device)
        half, spread = (mu.half(), sigma.half()), torch.zeros(2 * d, device=device)[::2]
        column, scale = mu[:, None], sigma[:, None]

        def randn(d: int = d, n: int = n, column: Any = column, scale: Any = scale) -> Any:
            made = torch.randn(d, n, device=device)
            return made if device == "cuda" else column + scale * made

        def calling(mu: Any, sigma: Any, n: int = n, **options: Any) -> Call:
            return lambda: multisample.sample(mu, sigma, n, **options)

        generator = torch.Generator(device).manual_seed(1)
        every = {"dtype": "float16", "layout": "nd", "antithetic": True, "noise": "shared", "sample_offset": 3}
        calls = {
            "seed=": calling(mu, sigma, seed=7),
            "PyTorch's default generator": calling(mu, sigma),
            "generator=torch.Generator": calling(mu, sigma, generator=generator),
            "generator=Generator": calling(mu, sigma, generator=multisample.Generator(7)),
            "dtype=": calling(mu, sigma, seed=7, dtype="float16"),
            "layout='nd'": calling(mu, sigma, seed=7, layout="nd"),
            "antithetic=": calling(mu, sigma, seed=7, antithetic=True),
            "noise='shared'": calling(mu, sigma, seed=7, noise="shared"),
            "fast_math=": calling(mu, sigma, seed=7, fast_math=True),
            "window": calling(mu, sigma, seed=7, dim_offset=5, sample_offset=3),
            "a number for sigma": calling(mu, 1.0, seed=7),
            "float16 tensors": calling(*half, seed=7),
            "strided mu": calling(spread, sigma, seed=7),
            "backend=": calling(mu, sigma, seed=7, backend="torch_ext"),
            "every option": calling(mu, sigma, seed=7, **every),
        }
        if device == "cuda":
            calls["graph-safe generator"] = calling(mu, sigma, generator=multisample.Generator(7, graph_safe=True))
        for name, call in calls.items():
            yield Pair(group, name, (d, n), call, randn, wait)
        out = torch.empty(d, n, device=device)
        wide = torch.empty(d, n + 8, device=device)[:, :n]

        def filled(out: Any = out, column: Any = column, scale: Any = scale) -> Any:
            made = torch.randn(out.shape, out=out)
            return made if device == "cuda" else torch.add(column, made.mul_(scale), out=made)

        for name, call in {
            "out=": calling(mu, sigma, seed=7, out=out),
            "out=, PyTorch's default generator": calling(mu, sigma, out=out),
            "out=, window, antithetic": calling(mu, sigma, seed=7, out=out, sample_offset=3, antithetic=True),
            "strided out=": calling(mu, sigma, seed=7, out=wide),
        }.items():
            yield Pair(group, name, (d, n), call, filled, wait)
        yield from _recorded(group, device, d, n, wait)
        theirs, ours = torch.distributions.Normal(mu, sigma), multisample.torch.Normal(mu, sigma)
        for name in ("rsample", "sample"):
            draws = (functools.partial(getattr(normal, name), (n,)) for normal in (ours, theirs))
            yield Pair(group, f"Normal.{name}", (d, n), *draws, wait)


def _recorded(group: str, device: str, d: int, n: int, wait: Call) -> Iterator[Pair]:
    import torch

    mu, sigma = (torch.zeros(d, 1, device=device) + k for k in (0, 1))
    mu.requires_grad_()
    sigma.requires_grad_()
    grad = torch.ones(d, n, device=device)
    vectors = [x.detach()[:, 0].requires_grad_() for x in (mu, sigma)]

    def ours() -> Any:
        return multisample.sample(*vectors, n)

    def other() -> Any:
        return mu + sigma * torch.randn(d, n, device=device)

    yield Pair(group, "requires grad, forward", (d, n), ours, other, wait)
    yield Pair(
        group, "requires grad, forward and backward", (d, n), lambda: torch.autograd.grad(ours(), vectors, grad),
        lambda: torch.autograd.grad(other(), (mu, sigma), grad), wait,
    )  # fmt: skip


# --- NumPy, CuPy and Numba ----------------------------------------------------------------------------------------


def _numpy() -> Iterator[Pair]:
    d, n = SHAPES[0]
    rng = np.random.default_rng()
    mu, sigma = np.zeros(d, np.float32), np.ones(d, np.float32)
    wide = mu.astype(np.float64), sigma.astype(np.float64)
    out = np.empty((d, n), np.float32)
    calls: dict[str, tuple[Any, Any, Options]] = {
        "seed=": (mu, sigma, {"seed": 7}),
        "default generator": (mu, sigma, {}),
        "generator=": (mu, sigma, {"generator": multisample.Generator(7)}),
        "dtype=float16": (mu, sigma, {"seed": 7, "dtype": "float16"}),
        "dtype=float64": (mu, sigma, {"seed": 7, "dtype": "float64"}),
        "float64 arrays": (*wide, {"seed": 7}),
        "layout='nd'": (mu, sigma, {"seed": 7, "layout": "nd"}),
        "antithetic=": (mu, sigma, {"seed": 7, "antithetic": True}),
        "noise='shared'": (mu, sigma, {"seed": 7, "noise": "shared"}),
        "window": (mu, sigma, {"seed": 7, "dim_offset": 5, "sample_offset": 3}),
        "a number for sigma": (mu, 1.0, {"seed": 7}),
        "strided mu": (np.zeros(2 * d, np.float32)[::2], sigma, {"seed": 7}),
        "out=": (mu, sigma, {"seed": 7, "out": out}),
    }
    for name, (a, b, options) in calls.items():
        real = np.float64 if name.endswith(("float64", "float64 arrays")) else np.float32
        column, scale = np.asarray(a, real)[:, None], np.asarray(b, real).reshape(-1, 1)

        def other(column: Any = column, scale: Any = scale, real: Any = real) -> Any:
            return column + scale * rng.standard_normal((d, n), dtype=real)

        def ours(a: Any = a, b: Any = b, options: Options = options) -> Any:
            return multisample.sample(a, b, n, **options)

        yield Pair("numpy", name, (d, n), ours, other, _nothing)


def _cupy(backend: str) -> Iterator[Pair]:
    import cupy
    import torch

    for d, n in SHAPES:
        mu, sigma, out = cupy.zeros(d, "f4"), cupy.ones(d, "f4"), cupy.empty((d, n), "f4")
        for name, (b, options) in {
            "seed=": (sigma, {}),
            "layout='nd'": (sigma, {"layout": "nd"}),
            "dtype=": (sigma, {"dtype": "float16"}),
            "window, antithetic": (sigma, {"sample_offset": 3, "antithetic": True}),
            "a number for sigma": (1.0, {}),
            "out=": (sigma, {"out": out}),
        }.items():

            def ours(mu: Any = mu, b: Any = b, n: int = n, options: Options = options) -> Any:
                return multisample.sample(mu, b, n, seed=7, backend=backend, **options)

            yield Pair(
                f"cupy through {backend}", name, (d, n), ours,
                lambda d=d, n=n: torch.randn(d, n, device="cuda"), torch.cuda.synchronize,
            )  # fmt: skip


GROUPS: dict[str, Callable[[], Iterator[Pair]]] = {
    "torch-cpu": lambda: _torch("cpu"),
    "numpy": _numpy,
    "torch-cuda": lambda: _torch("cuda"),
    "cupy": lambda: _cupy("cupy"),
    "numba": lambda: _cupy("numba"),
}


# --- First calls --------------------------------------------------------------------------------------------------


def first_calls() -> dict[str, float]:
    """Microseconds of a call with a new shape, by library. Kernels are compiled already."""
    mu, sigma = np.zeros(10, np.float32), np.ones(10, np.float32)
    arrays: dict[str, tuple[Any, Any]] = {"numpy": (mu, sigma)}
    import torch

    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        arrays[f"torch {device}"] = torch.zeros(10, device=device), torch.ones(10, device=device)
    result = {}
    for name, vectors in arrays.items():
        times = []
        for n in range(20, 320):
            start = time.perf_counter()
            multisample.sample(*vectors, n, seed=7)
            times.append(time.perf_counter() - start)
        result[name] = round(statistics.median(times[100:]) * 1e6, 1)
    return result


def _machine() -> dict[str, Any]:
    import torch

    # The device's clocks do not affect the host's time.
    return describe(None) | {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("groups", nargs="+", choices=GROUPS)
    arguments = parser.parse_args()
    rows = [measure(pair) for pair in itertools.chain.from_iterable(GROUPS[name]() for name in arguments.groups)]
    results = {"machine": _machine(), "host_cost": rows, "first_call_us": first_calls()}
    arguments.path.write_text(json.dumps(results, indent=1) + "\n")
    for row in rows:
        print(
            f"{row['group']:20} {row['call']:36} {row['shape']!s:13} {row['us']:8} {row['other_us']:8} {row['ratio']:7}"
        )
    print("first call, us:", results["first_call_us"])


if __name__ == "__main__":
    main()
