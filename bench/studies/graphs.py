"""Device time of a launch without the host's share: 64 launches in a CUDA graph, over rotated outputs.

Shapes are of usual size, in both layouts. "of memset" is the time of a memset over the output's bytes, divided by the
launch's. "randn" fills the output with `torch.randn`. "mu + sigma * randn" is that and one more kernel in place.
"cuRANDDx" is the fastest of nine kernels with cuRANDDx for the shape: see header_peers.py.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

import multisample
from bench.report.results import Row
from bench.studies.rows import main
from bench.suites import header_peers
from bench.suites.timing import Call

SHAPES = [
    (10, 1024), (100, 100), (1000, 100), (100, 1024), (500, 1024), (1000, 1024), (1000, 1001), (1000, 50), (2500, 1024),
    (5000, 1024), (40, 16_384), (512, 8192), (100, 100_000),
]  # fmt: skip
LAUNCHES, REPLAYS = 64, 25
Fill: TypeAlias = Callable[[torch.Tensor], Any]
ROTATED = 2**30  # Maximum bytes of all outputs.


def microseconds(calls: list[Call]) -> float:
    """The median over replays of a call's time, in a graph of all calls."""
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


def contenders(d: int, n: int, layout: str) -> dict[str, list[Fill]]:
    """For each name, calls that fill an output of this shape and layout. The fastest counts."""
    mu, sigma = (torch.linspace(low, high, d, device="cuda") for low, high in ((-1, 1), (0.5, 2)))
    mean, deviation = (x[:, None] if layout == "dn" else x for x in (mu, sigma))
    sample = functools.partial(multisample.sample, mu, sigma, n, seed=7, layout=layout)

    def expression(out: torch.Tensor) -> None:
        torch.addcmul(mean, deviation, torch.randn(out.shape, device="cuda", out=out), out=out)

    calls: dict[str, list[Fill]] = {
        "memset": [torch.Tensor.zero_],
        "multisample": [lambda out: sample(out=out)],
        "multisample, fast_math": [lambda out: sample(out=out, fast_math=True)],
        **{
            f"multisample, {name}": [lambda out, name=name: sample(out=out, backend=name)] for name in ("cupy", "numba")
        },
        "randn": [lambda out: torch.randn(out.shape, device="cuda", out=out)],
        "mu + sigma * randn": [expression],
    }
    program = header_peers.CURANDDX
    if layout == "dn" and header_peers.missing(program.headers) is None:
        architecture = "".join(map(str, torch.cuda.get_device_capability()))
        for name, options in {"cuRANDDx": (), "cuRANDDx, fast math": header_peers.FAST}.items():
            draw = header_peers.compiled(program, architecture, *options)
            calls[name] = [
                lambda out, draw=draw, variant=variant: draw(
                    out.data_ptr(), mu.data_ptr(), sigma.data_ptr(), d, n, 0, variant,
                    torch.cuda.current_stream().cuda_stream,
                )
                for variant in range(len(program.variants))
            ]  # fmt: skip
    return calls


def rows() -> Iterator[Row]:
    for layout, (d, n) in itertools.product(("dn", "nd"), SHAPES):
        shape = (d, n) if layout == "dn" else (n, d)
        outs = [torch.empty(shape, device="cuda") for _ in range(min(LAUNCHES, max(ROTATED // (4 * d * n), 1)))]
        found = {
            name: min(
                microseconds([functools.partial(fill, outs[k % len(outs)]) for k in range(LAUNCHES)])
                for fill in variants
            )
            for name, variants in contenders(d, n, layout).items()
        }
        for name, us in found.items():
            yield {"case": f"{d}x{n} {layout}", "call": name, "us": us, "of memset": found["memset"] / us}


if __name__ == "__main__":
    main(__doc__ or "", {"cuda": rows})
