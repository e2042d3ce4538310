"""One matrix on several GPUs, and the parameters of one model: how many times as fast as on one GPU.

Runs 1, 2, 4, ... processes, each with a GPU. A time is that of the slowest rank. Ranks communicate in "broadcast" only.
"strong" is one matrix for all GPUs, and "host" the host's time of a call for a small one. "update" is that of GPT-2 XL
(1.6 B parameters of bfloat16) by 32 members: of the shards of ``fully_shard``, or of the whole model on each GPU, where
a broadcast of the weights would do instead.
"""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import multisample
from bench.studies.rows import Call, Row, Rows, Turns, cuda_vectors, main, medians, on_device, on_host
from bench.suites.cases import MODES
from multisample.torch import perturb_, sample_sharded

LARGE = 16_384, 65_536
SMALL = 2500, 1024
WAYS = {"samples": Shard(1), "dimensions": Shard(0)}


def slowest(turns: Turns) -> dict[str, float]:
    """Each call's time in us: the median of the rank where it is largest."""
    us = torch.tensor([1e6 * seconds for seconds in medians(turns).values()], dtype=torch.float64, device="cuda")
    distributed.all_reduce(us, distributed.ReduceOp.MAX)
    return dict(zip(turns, us.tolist(), strict=True))


def updates(mesh: DeviceMesh) -> dict[str, Call]:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("cuda"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25)).to(torch.bfloat16)
    whole, coefficients = copy.deepcopy(model), [1e-3] * 32
    fully_shard(model, mesh=mesh)
    weights = torch.nn.utils.parameters_to_vector(whole.parameters()).detach()
    return {
        "update, fully_shard": lambda: perturb_(model, coefficients, seed=7),
        "update of the whole model": lambda: perturb_(whole, coefficients, seed=7),
        "broadcast": lambda: distributed.broadcast(weights, 0),
    }


def measured(size: int) -> Rows:
    """The rows of `size` GPUs; the same on every rank."""
    mesh = init_device_mesh("cuda", (size,))

    def sharded(d: int, n: int, placement: Any, **options: Any) -> Call:
        mu, sigma = cuda_vectors(d)
        return lambda: sample_sharded(mu, sigma, n, mesh=mesh, placements=[placement], seed=7, **options)

    calls = {
        f"strong, {way}, {mode}": sharded(*LARGE, placement, **options)
        for way, placement in WAYS.items()
        for mode, options in MODES.items()
    } | updates(mesh)
    device = slowest(on_device(calls, fills=16))  # A call for 580 DTensors takes the host longer than one fill.
    host = slowest(on_host(calls, wait=lambda result: torch.cuda.synchronize(), repeats=1))
    for case in calls:
        yield {"case": case, "call": f"{size} GPUs", "us": device[case], "us with the host": host[case]}

    d, n = SMALL
    rows = [distribute_tensor(vector, mesh, [Shard(0)], src_data_rank=None) for vector in cuda_vectors(d)]
    small: dict[str, Call] = {
        "sample, DTensors": lambda: multisample.sample(*rows, n, seed=7),
        "sample_sharded, tensors": sharded(d, n, Shard(1)),
    }
    for name, us in slowest(on_host(small)).items():
        yield {"case": "host", "call": f"{size} GPUs, {name}", "us": us}


def work(rank: int, size: int, folder: str) -> None:
    import cupy

    torch.cuda.set_device(rank)
    cupy.cuda.Device(rank).use()
    store = distributed.FileStore(f"{folder}/store", size)
    distributed.init_process_group("nccl", store=store, rank=rank, world_size=size)
    found = list(measured(size))
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def rows() -> Rows:
    alone: dict[str, Row] = {}
    for size in (2**k for k in range(torch.cuda.device_count().bit_length())):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(work, (size, folder), size)
            found = json.loads(Path(folder, "found.json").read_text())
        for row in found:
            one = alone.setdefault(row["case"], row)
            if (host := row.get("us with the host")) is not None:
                row["speed-up"], row["speed-up with the host"] = one["us"] / row["us"], one["us with the host"] / host
            yield row


if __name__ == "__main__":
    main(__doc__ or "", {"cuda": rows})
