"""The cross-entropy method on several GPUs: each rank draws and scores its part, and the ranks exchange scores only.

torchrun --nproc-per-node 4 -m multisample.examples.cem_torchrun                # CPUs
torchrun --nproc-per-node 4 -m multisample.examples.cem_torchrun --device cuda  # a GPU for each rank
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from multisample.cem import CEM, Result

from ._running import parsed, run

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS, SAMPLES = 20, 4096


def rastrigin(x: torch.Tensor) -> torch.Tensor:
    """Rastrigin's function of each column, with its minimum 0 at 0."""
    import torch

    terms = x * x - 10 * torch.cos(2 * math.pi * x) + 10
    # Adding row by row rounds equally for any number of columns, and so of ranks; `terms.sum(0)` may not.
    total = torch.zeros_like(terms[0])
    for row in terms:
        total += row
    return total


def minimize(
    f: Callable[[torch.Tensor], torch.Tensor],
    mu: torch.Tensor,
    sigma: torch.Tensor | float,
    n: int,
    *,
    mesh: DeviceMesh,
    iterations: int = 100,
    **options: Any,
) -> Result[Any]:
    """Minimise `f` on the ranks of a mesh of one dimension; each rank refits by itself.

    `f` takes a rank's samples, of shape (d, n of the rank), and returns their scores. `mu` and `sigma` are equal on
    every rank, and `n` counts the samples of all ranks. The options are those of `multisample.cem.CEM`, except
    `bounds`. `seed` is required: the ranks must draw one matrix. The result is equal on every rank. It equals that of
    one rank if GPUs are of one model and `f` scores each sample by itself.
    """
    import torch
    from torch.distributed.tensor import DTensor, Shard

    from multisample.torch import sample_sharded

    search = CEM(mu, sigma, n, **options)
    drawing = {name: options[name] for name in ("noise", "antithetic", "fast_math", "backend") if name in options}
    for _ in range(iterations):
        (task,) = search.ask_tasks(1)
        part = sample_sharded(
            search.mu, search.sigma, n, mesh=mesh, placements=[Shard(1)], seed=task.key, **drawing
        ).to_local()
        scores = DTensor.from_local(f(part), mesh, [Shard(0)], shape=torch.Size((n,)), stride=(1,)).full_tensor()
        search.tell_scores(task, scores)  # Draws the elites again.
        if search.status:
            break
    return search.result()


def main(argv: Sequence[str] | None = None) -> int:
    """Minimise Rastrigin's function in 20 dimensions, and print the result on the first rank."""
    device = parsed("cem_torchrun", __doc__, argv, device=("cpu", "cuda")).device
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    where = torch.device(device)
    if device == "cuda":
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(where)
    # Without torchrun, there is one rank.
    store = None if "RANK" in os.environ else distributed.HashStore()
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        mu = torch.full((DIMENSIONS,), 3.0, device=where)
        result = minimize(rastrigin, mu, 2.0, SAMPLES, mesh=init_device_mesh(device, (size,)), tol=1e-4, seed=7)
    finally:
        distributed.destroy_process_group()
    if rank == 0:
        print(f"{result.message} Best score {result.fun:.3g} after {result.nit} iterations on {size} ranks")
    return 0


if __name__ == "__main__":
    run(main)
