"""Noise for model parameters, beside the loops of PyTorch that it replaces.

python -m bench.studies.perturb results.json [cpu] [cuda]

Contenders of a model take turns, so that a disturbance slows all. `us` is the median over the turns of a call in place:
on a GPU by events around five calls in a row. `ratio` is that of what it replaces: for each tensor and member,
``p.add_(torch.randn_like(p), alpha=c)``. "loop with a generator" is what published code does: it seeds a generator for
each tensor, draws, multiplies and adds. ``mul_`` shows what reading and writing costs alone. "host us" is the time
until the call returns.

Predicted before the first run. Two CPU cores, 2^24 float32: one member 0.13 of the loop, an update by 8 members 0.08,
since the loop's randn takes 5 ns a number and the kernel's noise 0.4. H200, us for 2^28 elements: float32 540, bfloat16
400 and with fast_math 300; an update by 30 members 305 a member, 205 with fast_math; the tensors of OPT-1.3B in
bfloat16 2.1 ms, 1.65 with fast_math; 388 tensors cost the host 150 us. Llama 7B in bfloat16: one member 11 ms, an
update by 30 members 0.28 of the loop with a generator, 0.19 with fast_math.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.suites.machine import describe
from multisample import Key
from multisample.torch import perturb_

TURNS, SECONDS, CALLS = 15, 3.0, {"cpu": 1, "cuda": 5}

Call = Callable[[], Any]


def opt_shapes() -> list[tuple[int, ...]]:
    """The shapes of the tensors of OPT-1.3B (Zhang et al., arXiv:2205.01068): 388, with 24 layers."""
    layer: list[tuple[int, ...]] = [(2048, 2048), (2048,)] * 4 + [(2048,)] * 4
    layer += [(8192, 2048), (8192,), (2048, 8192), (2048,)]
    return [(50272, 2048), (2050, 2048), *24 * layer, (2048,), (2048,)]


def llama_shapes() -> list[tuple[int, ...]]:
    """The shapes of the tensors of Llama 2 7B (Touvron et al., arXiv:2307.09288): 291, with 32 layers."""
    layer: list[tuple[int, ...]] = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)] + [(4096,)] * 2
    return [(32000, 4096), *32 * layer, (4096,), (32000, 4096)]


MODELS: dict[str, tuple[str, list[tuple[int, ...]], int]] = {
    # The type, the shapes, and the members of an update.
    "cpu 2^24 float32": ("float32", [(1 << 24,)], 8),
    "cpu 388 tensors of 100": ("float32", [(100,)] * 388, 8),
    "cuda 2^28 float32": ("float32", [(1 << 28,)], 30),
    "cuda 2^28 bfloat16": ("bfloat16", [(1 << 28,)], 30),
    "cuda OPT-1.3B bfloat16": ("bfloat16", opt_shapes(), 30),
    "cuda Llama 7B bfloat16": ("bfloat16", llama_shapes(), 30),
    "cuda 388 tensors of 100": ("float32", [(100,)] * 388, 8),
}


def contenders(dtype: str, shapes: list[tuple[int, ...]], members: int, device: str) -> dict[str, Call]:
    tensors = [torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for shape in shapes]
    many = torch.full((members,), 1e-3, device=device)

    def loop() -> None:
        for x in tensors:
            x.add_(torch.randn_like(x), alpha=1e-3)

    generator = torch.Generator(device)

    def generator_loop() -> None:
        for x in tensors:
            generator.manual_seed(7)
            x.add_(1e-3 * torch.randn(x.shape, generator=generator, dtype=x.dtype, device=device))

    calls: dict[str, Call] = {
        "one member": lambda: perturb_(tensors, 1e-3, seed=7),
        "update": lambda: perturb_(tensors, many, seed=Key(7, 1)),
        "loop, one member": loop,
        "loop with a generator, one member": generator_loop,
        "mul_": lambda: [x.mul_(0.5) for x in tensors],
    }
    if device == "cuda":
        calls["one member, fast_math"] = lambda: perturb_(tensors, 1e-3, seed=7, fast_math=True)
        calls["update, fast_math"] = lambda: perturb_(tensors, many, seed=Key(7, 1), fast_math=True)
    return calls


def timed(call: Call, device: str) -> tuple[float, float]:
    """Seconds of a call: until it returns, and until it is done."""
    count = CALLS[device]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if device == "cuda" else (None, None)
    start = time.perf_counter()
    if begin is not None:
        begin.record()
    for _ in range(count):
        call()
    if end is not None:
        end.record()
    host = time.perf_counter() - start
    if begin is None or end is None:
        return host, host
    end.synchronize()
    return host / count, begin.elapsed_time(end) / count / 1e3


def measured(model: str) -> list[dict[str, Any]]:
    device, (dtype, shapes, members) = model.partition(" ")[0], MODELS[model]
    calls = contenders(dtype, shapes, members, device)
    wait: Call = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + SECONDS * len(calls)
    for turn in range(TURNS):
        if turn >= 3 and time.perf_counter() > end:
            break
        for name, call in calls.items():
            wait()
            times[name].append(timed(call, device))
    us = {name: statistics.median(whole for _, whole in taken) * 1e6 for name, taken in times.items()}
    loops = {name: us["loop, one member"] * (members if name.startswith("update") else 1) for name in us}
    return [
        {
            "model": model,
            "contender": name,
            "members": members if name.startswith("update") else 1,
            "us": round(us[name], 1),
            "host us": round(statistics.median(host for host, _ in taken) * 1e6, 1),
            "ratio": round(us[name] / loops[name], 4),
        }
        for name, taken in times.items()
    ]


def main() -> None:
    path, *devices = sys.argv[1:]
    rows = [row for model in MODELS if model.partition(" ")[0] in (devices or ["cpu"]) for row in measured(model)]
    Path(path).write_text(json.dumps({"machine": describe(None), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
