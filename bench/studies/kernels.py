"""Our CUDA kernels beside memset: each layout, noise and transform of each backend, and few samples beside torch.randn.

python -m bench.studies.kernels results.json

"of memset" is the time of a `cudaMemsetAsync` over the output's bytes, which is the practical write limit, divided by
the time of the kernel: medians of alternating calls, by device events, with outputs rotated past the cache. Shapes with
at most eight samples have 2^26 normals.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import multisample
from bench.report.results import Row
from bench.studies.rows import main, rows_of
from bench.suites.timing import Call, cuda_device, on_device

SHAPES = [
    (4096, 65_536), (262_144, 1024), (1_048_576, 128), (4_194_304, 32), (4096, 65_537), (262_144, 1025),
    (1_048_576, 127), (4_194_304, 33), (32, 8_388_608), (257, 1_000_000), (1001, 262_144), (2500, 1024),
    (10, 1_000_000), *((2**26 // n, n) for n in range(1, 9)),
]  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "portable": {}, "fast_math": {"fast_math": True}, "shared": {"noise": "shared"},
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "dn": {},
    "nd": {"layout": "nd"},
    "dn, antithetic": {"antithetic": True},
    "nd, antithetic": {"layout": "nd", "antithetic": True},
}
ROTATED = 2**31  # Bytes of the outputs in rotation: far more than a cache.


def outputs(d: int, n: int) -> Iterator[Any]:
    """Aligned outputs in rotation, whose bytes together exceed the cache."""
    import cupy

    size = 4 * d * n
    pitch = -(-size // 256) * 256
    count = max(2, min(256, ROTATED // pitch))
    memory = cupy.empty(count * pitch, "u1")
    return itertools.cycle([memory[k * pitch :][:size].view("f4").reshape(d, n) for k in range(count)])


def contenders(d: int, n: int) -> dict[str, Call]:
    import cupy
    import torch

    mu, sigma, out = cupy.linspace(-1, 1, d, dtype="f4"), cupy.linspace(0.5, 2, d, dtype="f4"), outputs(d, n)

    def memset() -> None:
        matrix = next(out)
        cupy.cuda.runtime.memsetAsync(matrix.data.ptr, 1, matrix.nbytes, 0)

    def drawing(**options: Any) -> Call:
        shape = (n, d) if options.get("layout") == "nd" else (d, n)
        return lambda: multisample.sample(mu, sigma, n, seed=7, out=next(out).reshape(shape), **options)

    calls: dict[str, Call] = {"memset": memset}
    if n <= 8:
        calls["torch.randn"] = lambda: torch.randn((d, n), out=torch.from_dlpack(next(out)))
    statuses = multisample.list_backends()
    for backend in ("torch_ext", "cupy", "numba"):
        for (mode, options), (way, layout) in itertools.product(MODES.items(), WAYS.items()):
            if statuses[backend].available and (n > 8 or (mode != "shared" and way in ("dn", "nd"))):
                calls[f"{backend}, {mode}, {way}"] = drawing(backend=backend, **options, **layout)
    return calls


def rows() -> Iterator[Row]:
    for d, n in SHAPES:
        for row in rows_of(f"{d}x{n}", on_device(contenders(d, n)), "memset"):
            yield {"case": row["case"], "call": row["call"], "us": row["us"], "of memset": 1 / row["ratio"]}
        cuda_device().release()


if __name__ == "__main__":
    main(__doc__ or "", {"cuda": rows})
