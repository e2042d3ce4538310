"""Our CUDA kernels beside memset, and at usual sizes beside the kernels of others. Times are those of the device.

python -m bench.studies.kernels results.json [cuda] [cuda-randn] [cuda-graphs]

"of memset" is the time of a memset over the output's bytes, the practical limit, divided by the kernel's. Outputs
rotate through more memory than the cache has.

"cuda": each layout, noise and transform of each backend. Shapes with at most eight samples have 2^26 normals.
"cuda-randn": standard normals of an image's shape, with a seed for each image, beside `torch.randn`.

"cuda-graphs": time of a launch without the host's share, from 64 launches in a CUDA graph. Shapes are of usual size, in
both layouts. "randn" fills the output with `torch.randn`. "mu + sigma * randn" is that and one more kernel in place.
"cuRANDDx" is the fastest of nine kernels with cuRANDDx for the shape: see curanddx_peer.py.
"""

import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any, TypeAlias

import cupy
import torch

import multisample
from bench.studies.rows import Call, Ring, Rows, cuda_device, cuda_vectors, main, on_device, rows_of
from bench.suites import curanddx_peer
from bench.suites.cases import MODES
from multisample.torch import randn as our_randn

BACKENDS = "torch_ext", "cupy", "numba"
LARGE = [
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
USUAL = [
    (10, 1024), (100, 100), (1000, 100), (100, 1024), (500, 1024), (1000, 1024), (1000, 1001), (1000, 50), (2500, 1024),
    (5000, 1024), (40, 16_384), (512, 8192), (100, 100_000),
]  # fmt: skip
LAUNCHES, REPLAYS, ROTATED = 64, 25, 2**30  # Of a graph; the most bytes of its outputs.
Fill: TypeAlias = Callable[[torch.Tensor], Any]


def memset(out: torch.Tensor) -> torch.Tensor:
    stream = torch.cuda.current_stream().cuda_stream
    cupy.cuda.runtime.memsetAsync(out.data_ptr(), 1, out.nbytes, stream)  # Tensor.zero_ launches a kernel.
    return out


def drawing(d: int, n: int) -> dict[str, Call]:
    sample = functools.partial(multisample.sample, *cuda_vectors(d), n, seed=7)
    calls: dict[str, Call] = {"memset": lambda: memset(torch.empty((d, n), device="cuda"))}
    if n <= 8:
        calls["torch.randn"] = lambda: torch.randn((d, n), device="cuda")
    statuses, modes = multisample.list_backends(), {**MODES, "shared": {"noise": "shared"}}
    for backend, (mode, options), (way, layout) in itertools.product(BACKENDS, modes.items(), WAYS.items()):
        if statuses[backend].available and (n > 8 or (mode != "shared" and way in ("dn", "nd"))):
            calls[f"{backend}, {mode}, {way}"] = functools.partial(sample, backend=backend, **options, **layout)
    return calls


def rotated(calls: dict[str, Call], size: int) -> dict[str, Call]:
    """Calls whose latest results, of so many bytes each, are kept alive."""
    ring = Ring(size)
    ring.warm_up(ring.keeping(next(iter(calls.values()))))
    return {name: ring.keeping(call) for name, call in calls.items()}


def kernels() -> Rows:
    for d, n in LARGE:
        for row in rows_of(f"{d}x{n}", on_device(rotated(drawing(d, n), 4 * d * n)), "memset"):
            yield {"case": row["case"], "call": row["call"], "us": row["us"], "of memset": 1 / row["ratio"]}
        cuda_device().release()


def images() -> Rows:
    for shape in [(64, 4, 64, 64), (64, 4, 128, 128), (256, 4, 64, 64), (64, 3, 512, 512)]:
        seeds = torch.arange(shape[0], device="cuda")
        calls: dict[str, Call] = {
            "torch.randn": functools.partial(torch.randn, shape, device="cuda"),
            "a seed for each": functools.partial(our_randn, *shape, seed=seeds, device="cuda"),
            "one seed": functools.partial(our_randn, *shape, seed=7, device="cuda"),
        }
        turns = on_device(rotated(calls, 4 * torch.Size(shape).numel()))
        yield from rows_of("randn " + "x".join(map(str, shape)), turns, "torch.randn")
        cuda_device().release()


def in_a_graph(calls: list[Call]) -> float:
    """The median over replays of a call's time in microseconds, in a graph of all calls."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times = []
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(1000 * begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


def filling(d: int, n: int, layout: str) -> dict[str, list[Fill]]:
    """For each name, calls that fill an output of this shape and layout. The fastest counts."""
    mu, sigma = cuda_vectors(d)
    mean, deviation = (x[:, None] if layout == "dn" else x for x in (mu, sigma))
    sample = functools.partial(multisample.sample, mu, sigma, n, seed=7, layout=layout)

    def expression(out: torch.Tensor) -> None:
        torch.addcmul(mean, deviation, torch.randn(out.shape, device="cuda", out=out), out=out)

    calls: dict[str, list[Fill]] = {
        "memset": [memset],
        "multisample": [lambda out: sample(out=out)],
        "multisample, fast_math": [lambda out: sample(out=out, fast_math=True)],
        "multisample, cupy": [lambda out: sample(out=out, backend="cupy")],
        "multisample, numba": [lambda out: sample(out=out, backend="numba")],
        "randn": [lambda out: torch.randn(out.shape, device="cuda", out=out)],
        "mu + sigma * randn": [expression],
    }
    if layout == "dn" and curanddx_peer.missing(curanddx_peer.HEADERS) is None:
        architecture = "".join(map(str, torch.cuda.get_device_capability()))
        for name, options in {"cuRANDDx": (), "cuRANDDx, fast math": curanddx_peer.FAST}.items():
            draw = curanddx_peer.compiled(architecture, *options)
            calls[name] = [
                lambda out, draw=draw, variant=variant: draw(
                    out.data_ptr(), mu.data_ptr(), sigma.data_ptr(), d, n, 0, variant,
                    torch.cuda.current_stream().cuda_stream,
                )
                for variant in range(len(curanddx_peer.VARIANTS))
            ]  # fmt: skip
    return calls


def graphs() -> Rows:
    for layout, (d, n) in itertools.product(("dn", "nd"), USUAL):
        shape = (d, n) if layout == "dn" else (n, d)
        outs = [torch.empty(shape, device="cuda") for _ in range(min(LAUNCHES, max(ROTATED // (4 * d * n), 1)))]
        outs_of_launches = [outs[k % len(outs)] for k in range(LAUNCHES)]
        found = {
            name: min(in_a_graph([functools.partial(fill, out) for out in outs_of_launches]) for fill in variants)
            for name, variants in filling(d, n, layout).items()
        }
        for name, us in found.items():
            yield {"case": f"{d}x{n} {layout}", "call": name, "us": us, "of memset": found["memset"] / us}


if __name__ == "__main__":
    main(__doc__ or "", {"cuda": kernels, "cuda-randn": images, "cuda-graphs": graphs})
