"""The cross-entropy method on an executor: threads, processes, a Dask cluster or MPI tune the gains of a controller.

python -m multisample.examples.cem_cluster --executor processes
python -m multisample.examples.cem_cluster --executor dask --scheduler tcp://host:8786
mpiexec -n 9 python -m mpi4py.futures -m multisample.examples.cem_cluster --executor mpi
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from multisample import cem

from ._running import run

STARTS, STEPS, SECONDS = 32, 150, 0.02
GRAVITY, LENGTH, POLE, CART = 9.8, 0.5, 0.1, 1.0
EXECUTORS = "none", "threads", "processes", "dask", "mpi"


def cost(gains: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The mean cost of controllers that push a cart so that the pole on it stays upright, shape (n,).

    The force is the product of a column of `gains`, shape (4, n), with position, velocity, angle and angular velocity.
    Every operation acts on each controller by itself, so its cost does not depend on the others, to the last bit.
    """
    rng = np.random.default_rng(7)
    first = rng.uniform(-0.3, 0.3, (4, STARTS, 1))
    x, v, angle, turn = (np.repeat(value, gains.shape[1], axis=1) for value in first)
    total = np.zeros_like(x)
    for _ in range(STEPS):
        force = np.clip(gains[0] * x + gains[1] * v + gains[2] * angle + gains[3] * turn, -20, 20)
        sine, cosine = np.sin(angle), np.cos(angle)
        push = (force + POLE * LENGTH * turn * turn * sine) / (CART + POLE)
        twist = (GRAVITY * sine - cosine * push) / (LENGTH * (4 / 3 - POLE * cosine * cosine / (CART + POLE)))
        x, angle = x + SECONDS * v, angle + SECONDS * turn
        v, turn = v + SECONDS * (push - POLE * LENGTH * twist * cosine / (CART + POLE)), turn + SECONDS * twist
        total += np.minimum(angle * angle + 0.1 * x * x, 10.0) + 0.001 * force * force
    mean: np.ndarray[Any, Any] = total.mean(axis=0)
    return mean


def tune(executor: Any = None, tasks: int | None = None, n: int = 400, iterations: int = 20) -> cem.Result[Any]:
    """Find the gains with the lowest cost. The result does not depend on `executor` and `tasks`."""
    return cem.minimize(
        cost, np.zeros(4), 10.0, n, iterations=iterations, smoothing=0.9, seed=7, executor=executor, tasks=tasks
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the gains."""
    parser = argparse.ArgumentParser(prog="python -m multisample.examples.cem_cluster", description=__doc__)
    parser.add_argument("--executor", choices=EXECUTORS, default="none")
    parser.add_argument("--tasks", type=int, help="tasks in each iteration (default: one for each processor)")
    parser.add_argument("--scheduler", metavar="ADDRESS", help="with dask: the scheduler (default: a local cluster)")
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        executor: Any = None
        if args.executor == "threads":
            from concurrent.futures import ThreadPoolExecutor

            executor = stack.enter_context(ThreadPoolExecutor())
        elif args.executor == "processes":
            from concurrent.futures import ProcessPoolExecutor
            from multiprocessing import get_context

            # Forked processes would inherit locks of the libraries that are loaded here.
            executor = stack.enter_context(ProcessPoolExecutor(mp_context=get_context("spawn")))
        elif args.executor == "dask":
            from distributed import Client

            executor = stack.enter_context(Client(args.scheduler)).get_executor()
        elif args.executor == "mpi":
            from mpi4py.futures import MPIPoolExecutor

            executor = stack.enter_context(MPIPoolExecutor())
        start = time.perf_counter()
        result = tune(executor, None if executor is None else args.tasks)
        seconds = time.perf_counter() - start
    print(f"gains {result.mu.round(3)}, cost {result.history['best'][-1]:.4f}; {seconds:.1f} s with {args.executor}")
    return 0


if __name__ == "__main__":
    run(main)
