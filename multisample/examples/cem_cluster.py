"""The cross-entropy method on threads, processes, a Dask cluster, MPI, or the GPUs of PyTorch's `torchrun`.

Executors tune the gains of a controller. Ranks of `torchrun` minimise Rastrigin's function: each draws and scores its
part of the samples, and the ranks exchange scores only.

python -m multisample examples cem_cluster --executor processes
python -m multisample examples cem_cluster --executor dask --scheduler tcp://host:8786
mpiexec -n 9 python -m mpi4py.futures -m multisample.examples.cem_cluster --executor mpi
torchrun --nproc-per-node 4 -m multisample.examples.cem_cluster --executor torchrun                  # CPUs
torchrun --nproc-per-node 4 -m multisample.examples.cem_cluster --executor torchrun --device cuda    # GPUs
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import numpy as np

from multisample import cem

from ._running import parsed
from .cart_pole import next_state

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

STARTS, STEPS = 32, 75
DIMENSIONS, SAMPLES = 20, 4096
EXECUTORS = "none", "threads", "processes", "dask", "mpi", "torchrun"


def cost(gains: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The mean cost of controllers that push a cart so that the pole on it stays upright, shape (n,).

    The force is the product of a column of `gains`, shape (4, n), with position, velocity, angle and angular velocity.
    Every operation acts on each controller by itself, so its cost does not depend on the others, to the last bit.
    """
    rng = np.random.default_rng(7)
    first = rng.uniform(-0.3, 0.3, (4, STARTS, 1))
    state = [np.repeat(value, gains.shape[1], axis=1) for value in first]
    total = np.zeros_like(state[0])
    for _ in range(STEPS):
        force = np.clip(sum(gain * x for gain, x in zip(gains, state, strict=True)), -20, 20)
        state = next_state(np, state, force)
        position, _, angle, _ = state
        total += np.minimum(angle * angle + 0.1 * position * position, 10.0) + 0.001 * force * force
    mean: np.ndarray[Any, Any] = total.mean(axis=0)
    return mean


@contextlib.contextmanager
def executor_of(kind: str, scheduler: str = "") -> Iterator[Any]:
    """The executor of this kind, or None."""
    with contextlib.ExitStack() as stack:
        executor: Any = None
        if kind == "threads":
            executor = stack.enter_context(ThreadPoolExecutor())
        elif kind == "processes":
            # Forked processes would inherit locks of the libraries that are loaded here.
            executor = stack.enter_context(ProcessPoolExecutor(mp_context=get_context("spawn")))
        elif kind == "dask":
            from distributed import Client

            executor = stack.enter_context(Client(scheduler or None)).get_executor()
        elif kind == "mpi":
            from mpi4py.futures import MPIPoolExecutor

            executor = stack.enter_context(MPIPoolExecutor())
        yield executor


# --- Ranks --------------------------------------------------------------------------------------------------------


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
) -> cem.Result[Any]:
    """Minimise `f` on the ranks of a mesh of one dimension; each rank refits by itself.

    `f` takes a rank's samples, of shape (d, n of the rank), and returns their scores. `mu` and `sigma` are equal on
    every rank, and `n` counts the samples of all ranks. The options are those of `multisample.cem.CEM`, except
    `bounds`. `seed` is required: the ranks must draw one matrix. The result is equal on every rank. It equals that of
    one rank if GPUs are of one model and `f` scores each sample by itself.
    """
    import torch
    from torch.distributed.tensor import DTensor, Shard

    from multisample.torch import sample_sharded

    search = cem.CEM(mu, sigma, n, **options)
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


def minimize_on_ranks(device: str) -> None:
    """Minimise Rastrigin's function in 20 dimensions on the ranks of `torchrun`; the first rank prints the result."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Print the gains, or with `torchrun` the minimum."""
    args = parsed("cem_cluster", __doc__, argv, executor=EXECUTORS, tasks=0, scheduler="", device=("cpu", "cuda"))
    if args.executor == "torchrun":
        minimize_on_ranks(args.device)
        return 0
    with executor_of(args.executor, args.scheduler) as executor:
        start = time.perf_counter()
        result = cem.minimize(
            cost, np.zeros(4), 10.0, 400, iterations=20, smoothing=0.9, seed=7, executor=executor,
            tasks=(args.tasks or None) if executor else None,
        )  # fmt: skip
        seconds = time.perf_counter() - start
    print(f"gains {result.mu.round(3)}, cost {result.history['best'][-1]:.4f}; {seconds:.1f} s with {args.executor}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
