"""A matrix that is sharded over processes: each rank holds its part of the single-device matrix.

Every rank runs the cases in ``sharded_ranks.py``: four processes with gloo on the CPU, and two and four with NCCL on
GPUs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from cuda_memory import require

# The names of the cases; importing them needs PyTorch.
pytest.importorskip("torch.distributed.tensor")
import sharded_ranks
import torch

import multisample

VARIABLE = "MULTISAMPLE_TEST_BACKENDS"
# Seconds after which ranks count as hanging. Four processes may compile at the same time.
DEADLINE = 900
SERVES = {"cpu": ("torch_ext", "cpu"), "cuda": ("torch_ext", "cupy", "numba")}
CASES = sorted(sharded_ranks.CASES)


class Runs:
    """Results of the ranks, which run once for each device type and number of ranks."""

    def __init__(self, folder: pytest.TempPathFactory) -> None:
        self.folder = folder
        self.found: dict[Any, list[dict[str, str]] | str] = {}

    def failures(self, device_type: str, size: int, backends: tuple[str, ...]) -> list[dict[str, str]]:
        """For each rank, the failed cases and their tracebacks."""
        key = device_type, size, backends
        if key not in self.found:
            self.found[key] = self.start(device_type, size, backends)
        found = self.found[key]
        if isinstance(found, str):
            pytest.fail(found, pytrace=False)
        return found

    def start(self, device_type: str, size: int, backends: tuple[str, ...]) -> list[dict[str, str]] | str:
        """Start the ranks; returns the failures of each, or the ranks' output if one died or timed out."""
        folder = self.folder.mktemp(f"{device_type}-{size}")
        # Some containers lack NVLink multicast, without which NCCL would fail.
        environment = os.environ | {"NCCL_NVLS_ENABLE": "0"}
        script, names = str(sharded_ranks.__file__), ",".join(backends)
        ranks = []
        for rank in range(size):
            command = [sys.executable, script, device_type, str(rank), str(size), str(folder), names]
            with (folder / f"{rank}.log").open("wb") as log:
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in ranks:
                process.wait(DEADLINE)
        for process in ranks:
            process.kill()
        if any(process.wait() for process in ranks):
            return "\n".join(f"rank {rank}:\n{(folder / f'{rank}.log').read_text()}" for rank in range(size))
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


def on_cpu() -> tuple[str, ...]:
    """The backends for the CPU: those that the variable names, or all available ones."""
    requested = os.environ.get(VARIABLE)
    known = multisample.list_backends()
    if requested is None:
        return tuple(name for name in SERVES["cpu"] if known[name].available)
    return tuple(name for name in SERVES["cpu"] if name in [part.strip() for part in requested.split(",")])


def on_cuda() -> tuple[str, ...]:
    """The backends for CUDA. Tests of the other backends are skipped or fail by `require`."""
    found = []
    for name in SERVES["cuda"]:
        try:
            require(name)
        except (pytest.skip.Exception, pytest.fail.Exception):
            continue
        found.append(name)
    return tuple(found)


def check(found: list[dict[str, str]], case: str) -> None:
    failed = [f"rank {rank}:\n{failures[case]}" for rank, failures in enumerate(found) if case in failures]
    assert not failed, "\n".join(failed)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend_on_cpu", SERVES["cpu"])
def test_four_cpu_processes(case: str, backend_on_cpu: str, runs: Runs) -> None:
    if backend_on_cpu not in on_cpu():
        pytest.skip(f"{backend_on_cpu} cannot run here, or the variable does not name it")
    check(runs.failures("cpu", 4, on_cpu()), f"{case}[{backend_on_cpu}]")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend_on_cuda", SERVES["cuda"])
@pytest.mark.parametrize("size", [2, 4])
def test_gpus(case: str, backend_on_cuda: str, size: int, runs: Runs) -> None:
    require(backend_on_cuda)
    if not torch.cuda.is_available() or torch.cuda.device_count() < size:
        pytest.skip(f"fewer than {size} CUDA devices for PyTorch")
    check(runs.failures("cuda", size, on_cuda()), f"{case}[{backend_on_cuda}]")


def test_unknown_attributes_of_the_torch_module_raise() -> None:
    import multisample.torch

    with pytest.raises(AttributeError, match=r"'multisample\.torch' has no attribute 'sample_charded'"):
        multisample.torch.sample_charded  # noqa: B018


KEPT = """
import gc, os, sys
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import multisample
from multisample._routes.dtensor import _SHARD_PLANS

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
vectors = [distribute_tensor(x, mesh, [Shard(0)]) for x in (torch.zeros(3), torch.ones(3))]
for _ in range(3):
    x = multisample.sample(*vectors, 5, seed=7)
    y = multisample.torch.sample_sharded(torch.zeros(3), 1.0, 5, mesh=mesh, placements=[Shard(1)], seed=7)
    assert torch.equal(x.full_tensor(), y.full_tensor())
assert len(_SHARD_PLANS) == 2
seen, waiting = set(), [*_SHARD_PLANS._plans, *_SHARD_PLANS._plans.values()]
while waiting:
    thing = waiting.pop()
    if id(thing) not in seen and not isinstance(thing, type) and type(thing).__name__ != "module":
        assert not isinstance(thing, (DeviceMesh, torch.Tensor, distributed.ProcessGroup)), thing
        seen.add(id(thing))
        if not (isinstance(thing, dict) and "__builtins__" in thing):  # Globals of a function.
            waiting += gc.get_referents(thing)
child = os.fork()
if child == 0:
    assert len(_SHARD_PLANS) == 0
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_shard_plans_keep_no_process_group_alive() -> None:
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
