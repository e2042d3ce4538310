"""Our CUDA kernels beside memset: each layout, noise and transform of each backend, and few samples beside torch.randn.

"of memset" is the time of `cudaMemsetAsync` over the output's bytes, divided by the kernel's. A memset is the practical
write limit. Times are medians of alternating calls, from device events. Outputs rotate through more memory than the
cache has. Shapes with at most eight samples have 2^26 normals. "randn cuda": standard normals of an image's shape, with
a seed for each image, beside `torch.randn`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import multisample
from bench.report.results import Row
from bench.studies.rows import main, rows_of
from bench.suites.cases import MODES
from bench.suites.timing import Call, Ring, cuda_device, on_device

SHAPES = [
    (4096, 65_536), (262_144, 1024), (1_048_576, 128), (4_194_304, 32), (4096, 65_537), (262_144, 1025),
    (1_048_576, 127), (4_194_304, 33), (32, 8_388_608), (257, 1_000_000), (1001, 262_144), (2500, 1024),
    (10, 1_000_000), *((2**26 // n, n) for n in range(1, 9)),
]  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "dn": {},
    "nd": {"layout": "nd"},
    "dn, antithetic": {"antithetic": True},
    "nd, antithetic": {"layout": "nd", "antithetic": True},
}


def contenders(d: int, n: int) -> dict[str, Call]:
    import cupy
    import torch

    mu, sigma = cupy.linspace(-1, 1, d, dtype="f4"), cupy.linspace(0.5, 2, d, dtype="f4")
    sample = functools.partial(multisample.sample, mu, sigma, n, seed=7)

    def memset() -> Any:
        out = cupy.empty((d, n), "f4")
        cupy.cuda.runtime.memsetAsync(out.data.ptr, 1, out.nbytes, 0)
        return out

    calls: dict[str, Call] = {"memset": memset}
    if n <= 8:
        calls["torch.randn"] = lambda: torch.randn((d, n), device="cuda")
    statuses, modes = multisample.list_backends(), {**MODES, "shared": {"noise": "shared"}}
    for backend in ("torch_ext", "cupy", "numba"):
        for (mode, options), (way, layout) in itertools.product(modes.items(), WAYS.items()):
            if statuses[backend].available and (n > 8 or (mode != "shared" and way in ("dn", "nd"))):
                calls[f"{backend}, {mode}, {way}"] = functools.partial(sample, backend=backend, **options, **layout)
    ring = Ring(4 * d * n)
    ring.warm_up(ring.keeping(memset))
    return {name: ring.keeping(call) for name, call in calls.items()}


def rows() -> Iterator[Row]:
    for d, n in SHAPES:
        for row in rows_of(f"{d}x{n}", on_device(contenders(d, n)), "memset"):
            yield {"case": row["case"], "call": row["call"], "us": row["us"], "of memset": 1 / row["ratio"]}
        cuda_device().release()


def randn() -> Iterator[Row]:
    import torch

    from multisample.torch import randn as ours

    for shape in [(64, 4, 64, 64), (64, 4, 128, 128), (256, 4, 64, 64), (64, 3, 512, 512)]:
        seeds, ring = torch.arange(shape[0], device="cuda"), Ring(4 * torch.Size(shape).numel())
        calls: dict[str, Call] = {
            "torch.randn": functools.partial(torch.randn, shape, device="cuda"),
            "a seed for each": functools.partial(ours, *shape, seed=seeds, device="cuda"),
            "one seed": functools.partial(ours, *shape, seed=7, device="cuda"),
        }
        turns = on_device({name: ring.keeping(call) for name, call in calls.items()})
        yield from rows_of("randn " + "x".join(map(str, shape)), turns, "torch.randn")
        cuda_device().release()


if __name__ == "__main__":
    main(__doc__ or "", {"cuda": rows, "randn cuda": randn})
