"""A matrix that is sharded over processes: each rank holds its part of the single-device matrix."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_python
from skip_rules import VARIABLE, require

# The script of the ranks; importing it needs PyTorch.
pytest.importorskip("torch.distributed.tensor")
import sharded_ranks
import torch

import multisample

# Seconds after which ranks count as hanging. Four processes may compile at the same time.
DEADLINE = 900


def check_ranks(folder: Path, device_type: str, size: int, backends: list[str]) -> None:
    """Check that no rank fails a case. One start of the ranks serves all cases and backends."""
    # NCCL's NVLS is off, since it fails in containers without NVLink multicast.
    environment = os.environ | {"NCCL_NVLS_ENABLE": "0"}
    logs, ranks = [folder / f"{rank}.log" for rank in range(size)], []
    for rank, path in enumerate(logs):
        place = [device_type, str(rank), str(size), str(folder), ",".join(backends)]
        with path.open("wb") as log:
            command = [sys.executable, str(sharded_ranks.__file__), *place]
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    with contextlib.suppress(subprocess.TimeoutExpired):
        for process in ranks:
            process.wait(DEADLINE)
    for process in ranks:
        process.kill()
    codes = [process.wait() for process in ranks]
    if any(codes):
        pytest.fail("\n".join(f"rank {rank}:\n{path.read_text()}" for rank, path in enumerate(logs)), pytrace=False)
    for rank in range(size):
        failures: dict[str, str] = json.loads((folder / f"{rank}.json").read_text())
        assert not failures, "\n".join(f"rank {rank}, {case}:\n{error}" for case, error in failures.items())


@pytest.mark.slow
def test_four_cpu_processes(tmp_path: Path) -> None:
    requested, known = os.environ.get(VARIABLE), multisample.list_backends()
    backends = [name for name in ("torch_ext", "cpu") if requested is None and known[name].available]
    if requested is not None:
        backends = [name for name in ("torch_ext", "cpu") if name in map(str.strip, requested.split(","))]
    if not backends:
        pytest.skip(f"no backend for the CPU can run here, or {VARIABLE} names none")
    check_ranks(tmp_path, "cpu", 4, backends)


@pytest.mark.parametrize("size", [2, 4])
def test_gpus(size: int, tmp_path: Path) -> None:
    backends = []
    for name in ("torch_ext", "cupy", "numba"):
        with contextlib.suppress(pytest.skip.Exception):
            require(name)
            backends.append(name)
    if not backends or not torch.cuda.is_available() or torch.cuda.device_count() < size:
        pytest.skip(f"fewer than {size} CUDA devices for PyTorch")
    check_ranks(tmp_path, "cuda", size, backends)


def test_unknown_attributes_of_the_torch_module_raise() -> None:
    import multisample.torch

    with pytest.raises(AttributeError, match=r"'multisample\.torch' has no attribute 'sample_charded'"):
        multisample.torch.sample_charded  # noqa: B018


KEPT = """
import gc, os, sys
import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import multisample
from multisample._plan import PLANS

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
vectors = [distribute_tensor(x, mesh, [Shard(0)]) for x in (torch.zeros(3), torch.ones(3))]
for _ in range(3):
    x = multisample.sample(*vectors, 5, seed=7)
    y = multisample.torch.sample_sharded(torch.zeros(3), np.ones(()), 5, mesh=mesh, placements=[Shard(1)], seed=7)
    assert torch.equal(x.full_tensor(), y.full_tensor())
seen, waiting = set(), [item for item in PLANS.items() if type(item[0]) is tuple and item[0][0] == "shard"]
assert len(waiting) == 2
while waiting:
    thing = waiting.pop()
    if id(thing) not in seen and not isinstance(thing, type) and type(thing).__name__ != "module":
        assert not isinstance(thing, (DeviceMesh, torch.Tensor, distributed.ProcessGroup)), thing
        seen.add(id(thing))
        if not (isinstance(thing, dict) and "__builtins__" in thing):  # Globals of a function.
            waiting += gc.get_referents(thing)
child = os.fork()
if child == 0:
    assert len(PLANS) == 0
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_shard_plans_keep_no_process_group_alive() -> None:
    run_python("-c", KEPT, seconds=DEADLINE)
