"""One matrix on several GPUs: the speed-up for a fixed matrix, and for a matrix that grows with the GPUs.

python bench/studies/torch_sharded.py results.json

Starts one process per GPU, for 1, 2, 4, ... GPUs. "strong": the same matrix for any number of GPUs; "weak": a matrix of
the same size for each GPU. A time is the median over repetitions of the slowest rank. `device` is the time between two
events around the call; the device is busy before, so that this is the kernel's time alone. `wall` is the host's time
from a barrier until the part is complete.

Predicted before the first measurement: no rank communicates, so k GPUs take 1/k of the kernel's time, and weak scaling
is level, both to 2 %. Parts of a gigabyte have negligible tails, and GPUs of one host differ by about that much.
Sharding over dimensions and over samples is alike: either part is rows in its own memory, and parts of the samples
begin at multiples of 4. `wall` adds the host's time of a call, which does not fall with k: the time of `sample`, and
about 0.1 ms for a DTensor (0.11 ms measured on a CPU). So sharding pays from a few milliseconds of sampling on.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import multisample
from multisample.backends.native import csrc_files
from multisample.torch import sample_sharded

REPEATS = 15
CALLS = 200
BUSY = 2**31  # Bytes whose fill takes longer, half a millisecond, than a call on the host.
STRONG = (16_384, 65_536)
WEAK = (4096, 65_536)
SMALL = (2500, 1024)
MODES: dict[str, dict[str, Any]] = {"portable": {}, "fast_math": {"fast_math": True}}

Call = Callable[[], Any]


class Clock:
    """Times of calls that all ranks make together."""

    def __init__(self, rank: int, size: int) -> None:
        self.size = size
        self.device = torch.device("cuda", rank)
        self.busy = torch.empty(BUSY, dtype=torch.uint8, device=self.device)

    def slowest(self, seconds: list[float]) -> float:
        """The median over repetitions of the slowest rank."""
        times = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        distributed.all_reduce(times, distributed.ReduceOp.MAX)
        return statistics.median(times.tolist())

    def together(self) -> None:
        distributed.barrier(device_ids=[self.device.index])
        torch.cuda.synchronize()

    def device_seconds(self, call: Call) -> float:
        seconds = []
        for _ in range(REPEATS + 1):
            self.together()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.busy.zero_()
            begin.record()
            result = call()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1000)
            del result
        return self.slowest(seconds[1:])

    def wall_seconds(self, call: Call) -> float:
        seconds = []
        for _ in range(REPEATS + 1):
            self.together()
            begin = time.perf_counter()
            result = call()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            del result
        return self.slowest(seconds[1:])

    def host_seconds(self, call: Call) -> float:
        """The host's time of one of many calls."""
        seconds = []
        for _ in range(REPEATS + 1):
            self.together()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            seconds.append((time.perf_counter() - begin) / CALLS)
        return self.slowest(seconds[1:])


def vectors(d: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    where = torch.arange(d, device=device, dtype=torch.float32)
    return torch.sin(where), 1.5 + torch.cos(where)


def measure(clock: Clock) -> list[dict[str, Any]]:
    """Rows of the table. They are the same on every rank."""
    size = clock.size
    line = init_device_mesh("cuda", (size,))
    ways: dict[str, Any] = {"samples": (line, [Shard(1)]), "dimensions": (line, [Shard(0)])}
    if size > 2:
        ways["both"] = (init_device_mesh("cuda", (2, size // 2)), [Shard(0), Shard(1)])
    rows = []
    for scaling, way in ((scaling, way) for scaling in ("strong", "weak") for way in ways):
        mesh, placements = ways[way]
        d, n = STRONG if scaling == "strong" else WEAK
        if scaling == "weak":
            d, n = {"samples": (d, size * n), "dimensions": (size * d, n), "both": (2 * d, size // 2 * n)}[way]
        mu, sigma = vectors(d, clock.device)
        part = torch.empty(d * n // size, device=clock.device)
        memset = clock.device_seconds(part.zero_)
        del part
        for mode, options in MODES.items():

            def call() -> Any:
                return sample_sharded(mu, sigma, n, mesh=mesh, placements=placements, seed=7, **options)  # noqa: B023

            rows.append({
                "gpus": size, "scaling": scaling, "sharded over": way, "shape": (d, n), "mode": mode,
                "device_us": round(clock.device_seconds(call) * 1e6, 1),
                "wall_us": round(clock.wall_seconds(call) * 1e6, 1),
                "memset_us": round(memset * 1e6, 1),
            })  # fmt: skip
    return rows


def host_costs(clock: Clock) -> dict[str, float]:
    """Microseconds of one call at a small shape: with tensors, and with DTensors."""
    mesh = init_device_mesh("cuda", (clock.size,))
    d, n = SMALL
    mu, sigma = vectors(d, clock.device)
    rows = [distribute_tensor(vector, mesh, [Shard(0)], src_data_rank=None) for vector in (mu, sigma)]
    part = [row.to_local() for row in rows]
    calls: dict[str, Call] = {
        "sample, tensors of this rank's part": lambda: multisample.sample(*part, n, seed=7),
        "sample, DTensors": lambda: multisample.sample(*rows, n, seed=7),
        "sample_sharded, tensors": lambda: sample_sharded(mu, sigma, n, mesh=mesh, placements=[Shard(1)], seed=7),
    }
    return {name: round(clock.host_seconds(call) * 1e6, 1) for name, call in calls.items()}


def work(rank: int, size: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    store = distributed.FileStore(str(Path(folder) / "store"), size)
    distributed.init_process_group("nccl", store=store, rank=rank, world_size=size)
    clock = Clock(rank, size)
    found = {"rows": measure(clock), "host_us": host_costs(clock)}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def environment() -> dict[str, str]:
    versions = {
        "gpu": torch.cuda.get_device_name(0),
        "gpus": str(torch.cuda.device_count()),
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "multisample": multisample.__version__,
        "sources": csrc_files.digest()[:12],
    }
    smi = shutil.which("nvidia-smi")
    if smi:
        query = ["--query-gpu=driver_version,clocks.sm,clocks.max.sm,clocks.mem", "--format=csv,noheader"]
        versions["nvidia-smi"] = subprocess.run([smi, *query], capture_output=True, text=True).stdout.strip()
    return versions


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Add to each row the speed-up of all GPUs over one. The ideal is their number."""
    alone = {
        (row["scaling"], row["sharded over"], row["mode"]): row for row in rows if row["gpus"] == 1
    }  # fmt: skip
    for row in rows:
        way = "samples" if row["sharded over"] == "both" else row["sharded over"]
        one = alone[row["scaling"], way, row["mode"]]
        work = row["shape"][0] * row["shape"][1] / (one["shape"][0] * one["shape"][1])
        for time_of in ("device", "wall"):
            row[f"{time_of} speed-up"] = round(work * one[f"{time_of}_us"] / row[f"{time_of}_us"], 3)


def main(path: str) -> None:
    count = torch.cuda.device_count()
    if count == 0:
        raise SystemExit("expected at least one CUDA device, got none")
    # Not every container has NVLink multicast, and NCCL fails without it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    rows: list[dict[str, Any]] = []
    host_us = {}
    size = 1
    while size <= count:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(work, (size, folder), size)
            found = json.loads((Path(folder) / "found.json").read_text())
        rows += found["rows"]
        host_us[size] = found["host_us"]
        size *= 2
    add_ratios(rows)
    result = {"environment": environment(), "scaling": rows, "host_us": host_us}
    Path(path).write_text(json.dumps(result, indent=1) + "\n")
    print("us, and how many times as fast as one GPU:")
    print(f"{'GPUs':>4} {'scaling':8} {'over':10} {'shape':>18} {'mode':9} {'device':>12} {'wall':>12}  memset")
    for row in rows:
        device, wall = (f"{row[f'{name}_us']:.0f} ({row[f'{name} speed-up']:.2f})" for name in ("device", "wall"))
        print(
            f"{row['gpus']:4} {row['scaling']:8} {row['sharded over']:10} {tuple(row['shape'])!s:>18} {row['mode']:9}"
            f" {device:>12} {wall:>12}  {row['memset_us']:.0f}"
        )
    for size, costs in host_us.items():
        print(f"host, {size} GPUs, {SMALL}: " + "; ".join(f"{name} {cost:.0f} us" for name, cost in costs.items()))


if __name__ == "__main__":
    main(sys.argv[1])
