"""The host's time of a call, beside that of the code that it replaces.

python -m bench.studies.host_cost results.json [numpy] [first] [torch-cpu] [torch-cuda] [cuda-cupy] [cuda-numba]

Each call alternates with its peer. A turn is 40 calls, and starts on an idle device. `us` is our time and `other us`
the peer's. `ratio` is the median of the ratios of all turns. The peer is ``torch.randn(d, n)`` on a GPU, and
``mu + sigma * randn`` of the library on a CPU. Where the call has out= or autograd records it, the peer does the same.
"first" is the first call with a new shape; kernels are compiled already.
"""

import functools
import statistics
import time
from typing import Any

import numpy as np

import multisample
import multisample.torch
from bench.studies.rows import Call, Row, Rows, cuda_device, main, on_host, rows_of

d = n = 10
OPTIONS: dict[str, dict[str, Any]] = {
    "seed=": {},
    "dtype=": {"dtype": "float16"},
    "layout='nd'": {"layout": "nd"},
    "antithetic=": {"antithetic": True},
    "noise='shared'": {"noise": "shared"},
    "window": {"dim_offset": 5, "sample_offset": 3},
}


def compared(case: str, name: str, ours: Call, other: Call) -> Row:
    idle = cuda_device().wait if "torch cuda" in case or "cupy" in case else lambda result: None
    found = on_host({"ours": ours, "other": other}, idle, turns=41, repeats=40)
    row, peer = rows_of(case, found, "other", "host")
    return {"case": case, "call": name, "us": row["host us"], "other us": peer["host us"], "ratio": row["ratio"]}


def calling(mu: Any, sigma: Any, **options: Any) -> Call:
    return lambda: multisample.sample(mu, sigma, n, **options)


def calls_of(mu: Any, sigma: Any, generators: dict[str, dict[str, Any]]) -> dict[str, Call]:
    """Calls with each option and generator, a number for sigma, and a vector with gaps."""
    seeded = {name: {"seed": 7, **options} for name, options in OPTIONS.items()}
    return {
        **{name: calling(mu, sigma, **options) for name, options in (seeded | generators).items()},
        "a number for sigma": calling(mu, 1.0, seed=7),
        "strided mu": calling(mu.repeat(2)[::2], sigma, seed=7),
    }


def with_torch(device: str) -> Rows:
    import torch

    mu, sigma = torch.zeros(d, device=device), torch.ones(d, device=device)
    out, wide = torch.empty(d, n, device=device), torch.empty(d, n + 8, device=device)[:, :n]
    inputs = [x.clone().requires_grad_() for x in (mu, sigma)]
    grad, column, scale = torch.ones_like(out), mu[:, None], sigma[:, None]
    ours, theirs = multisample.torch.Normal(mu, sigma), torch.distributions.Normal(mu, sigma)

    def randn() -> Any:
        made = torch.randn(d, n, device=device)
        return made if device == "cuda" else column + scale * made

    def filled() -> Any:
        made = torch.randn(out.shape, out=out)
        return made if device == "cuda" else torch.add(column, made.mul_(scale), out=made)

    def recorded() -> Any:
        return inputs[0][:, None] + inputs[1][:, None] * torch.randn(d, n, device=device)

    generators = {
        "PyTorch's default generator": {},
        "generator=torch.Generator": {"generator": torch.Generator(device).manual_seed(1)},
        "generator=Generator": {"generator": multisample.Generator(7)},
    }
    if device == "cuda":
        generators["graph-safe generator"] = {"generator": multisample.Generator(7, graph_safe=True)}
    calls = calls_of(mu, sigma, generators)
    calls["float16 tensors"], recording = calling(mu.half(), sigma.half(), seed=7), calling(*inputs)
    pairs = {name: (call, randn) for name, call in calls.items()}
    pairs |= {
        "out=": (calling(mu, sigma, seed=7, out=out), filled),
        "out=, PyTorch's default generator": (calling(mu, sigma, out=out), filled),
        "strided out=": (calling(mu, sigma, seed=7, out=wide), filled),
        "requires grad, forward and backward": (
            lambda: torch.autograd.grad(recording(), inputs, grad),
            lambda: torch.autograd.grad(recorded(), inputs, grad),
        ),
        "Normal.rsample": (lambda: ours.rsample((n,)), lambda: theirs.rsample((n,))),
    }
    for name, pair in pairs.items():
        yield compared(f"torch {device} {d}x{n}", name, *pair)


def with_numpy() -> Rows:
    rng, out = np.random.default_rng(), np.empty((d, n), np.float32)
    mu, sigma = np.zeros(d, np.float32), np.ones(d, np.float32)
    generators = {"default generator": {}, "generator=": {"generator": multisample.Generator(7)}}
    doubles = mu.astype(np.float64), sigma.astype(np.float64)
    calls = calls_of(mu, sigma, generators) | {
        "out=": calling(mu, sigma, seed=7, out=out),
        "float64 arrays": calling(*doubles, seed=7),
        "dtype=float64": calling(mu, sigma, seed=7, dtype="float64"),
    }
    for name, call in calls.items():
        vectors = doubles if "float64" in name else (mu, sigma)

        def other(columns: Any = tuple(x[:, None] for x in vectors)) -> Any:
            return columns[0] + columns[1] * rng.standard_normal((d, n), dtype=columns[0].dtype)

        yield compared(f"numpy {d}x{n}", name, call, other)


def with_cupy(backend: str) -> Rows:
    import cupy
    import torch

    mu, sigma, out = cupy.zeros(d, "f4"), cupy.ones(d, "f4"), cupy.empty((d, n), "f4")
    randn = functools.partial(torch.randn, d, n, device="cuda")
    for name, options in {**OPTIONS, "out=": {"out": out}}.items():
        call = calling(mu, sigma, seed=7, backend=backend, **options)
        yield compared(f"cupy through {backend} {d}x{n}", name, call, randn)


def first_calls() -> Rows:
    import torch

    mu, sigma = np.zeros(10, np.float32), np.ones(10, np.float32)
    arrays: dict[str, tuple[Any, Any]] = {"numpy": (mu, sigma)}
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        arrays[f"torch {device}"] = torch.zeros(10, device=device), torch.ones(10, device=device)
    for name, vectors in arrays.items():
        times = []
        for n in range(20, 320):
            start = time.perf_counter()
            multisample.sample(*vectors, n, seed=7)
            times.append(time.perf_counter() - start)
        yield {"case": "first call", "call": name, "us": 1e6 * statistics.median(times[100:])}


if __name__ == "__main__":
    parts = {
        "numpy": with_numpy,
        "first": first_calls,
        "torch-cpu": functools.partial(with_torch, "cpu"),
        "torch-cuda": functools.partial(with_torch, "cuda"),
        "cuda-cupy": functools.partial(with_cupy, "cupy"),
        "cuda-numba": functools.partial(with_cupy, "numba"),
    }
    main(__doc__ or "", parts)
