"""Dask arrays and the cross-entropy method on executors: throughput, and what blocks, tasks and workers cost.

python -m bench.studies.dask_arrays results.json [throughput] [graph] ...

Without names of parts, all parts run; a file that exists keeps its other parts.

Contenders take turns, so that what disturbs one disturbs all: a time is the median over the turns, and a ratio the
median of the ratios within a turn.

"throughput": blocks of 10**7 elements are drawn and freed, on Dask's threaded scheduler with two threads. "direct" is
the same windows by `multisample.sample`, on two threads of a pool. "graph": an array of 10**6 blocks. "distributed":
one worker process of one thread, and two, on blocks of draws that pass through 100 sines; "pool of 2" is the same work
on two processes of a pool without Dask, which shows what the machine can do. "block": blocks of 100 elements, whose
draw costs nothing beside Dask's work. "cem": one generation of eight tasks on eight workers (for Dask, two processes
of four threads), scored by the square of a row, and by sleeping; the overhead is the time beyond the sleep. "task": the
slope of a generation's time by its tasks. "refit": the caller's part of a generation. "messages": pickled bytes.

Aims: "multisample.dask" at least 0.9 of "direct", and 8 times `dask.array.random.normal`; the graph under 2 s and
10 MB; two processes 1.8 times one; 5 ms for a generation on processes; scores under 16 n / tasks + 1 kB.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import dask
import dask.array as da
import distributed
import numpy as np

import multisample.dask
from bench.suites.machine import describe
from multisample import cem

TURNS = 7
THREADS = 2
D, COLUMNS, BLOCKS = 1000, 10_000, 32  # Blocks of 10**7 elements.
MU, SIGMA = np.linspace(-1, 1, D, dtype=np.float32), np.linspace(1, 2, D, dtype=np.float32)

Call = Callable[[], Any]
Row = dict[str, Any]


def seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def take_turns(calls: dict[str, Call], base: str, turns: int = TURNS) -> list[Row]:
    """For each call, the median time, and the median of how many times as fast as `base` it is."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            times[name].append(seconds(call))
    return [
        {
            "name": name,
            "seconds": round(statistics.median(found), 5),
            f"speed by {base}": round(statistics.median(b / a for a, b in zip(found, times[base], strict=True)), 3),
        }
        for name, found in times.items()
    ]


def corner(block: Any) -> Any:
    return block[:1, :1].copy()


# --- Threads --------------------------------------------------------------------------------------


def throughput() -> list[Row]:
    n = COLUMNS * BLOCKS
    pool = ThreadPoolExecutor(THREADS)

    def draw(first: int) -> Any:
        with multisample.limit_threads(1):
            return corner(multisample.sample(MU, SIGMA, COLUMNS, seed=7, sample_offset=first))

    def drawn(array: da.Array) -> Any:
        reduced = array.map_blocks(corner, chunks=(1, 1), dtype=array.dtype)
        return reduced.compute(scheduler="threads", num_workers=THREADS)

    chunks = (D, COLUMNS)
    generator = da.random.default_rng(7)
    rows = take_turns(
        {
            "direct": lambda: list(pool.map(draw, range(0, n, COLUMNS))),
            "multisample.dask": lambda: drawn(multisample.dask.sample(MU, SIGMA, n, chunks=chunks, seed=7)),
            "multisample.dask, float64": lambda: drawn(
                multisample.dask.sample(MU, SIGMA, n, chunks=chunks, seed=7, dtype="float64")
            ),
            "dask.array.random.normal": lambda: drawn(da.random.normal(size=(D, n), chunks=chunks)),
            "default_rng().standard_normal": lambda: drawn(generator.standard_normal(size=(D, n), chunks=chunks)),
        },
        "direct",
    )
    pool.shutdown()
    for row in rows:
        row["normals per second"] = round(D * n / row["seconds"])
    return rows


# --- Graphs ---------------------------------------------------------------------------------------


def graphs() -> list[Row]:
    rows = []
    for d, n, chunks in ((10**6, 10**6, (1000, 1000)), (100, 10**10, (100, 10**4))):
        mu = np.zeros(d, np.float32)

        def build(mu: Any = mu, n: int = n, chunks: Any = chunks) -> da.Array:
            return multisample.dask.sample(mu, 1.0, n, chunks=chunks, seed=7)

        array = build()
        rows.append({
            "shape": array.shape, "blocks": array.npartitions,
            "seconds": round(statistics.median(seconds(build) for _ in range(TURNS)), 3),
            "bytes": len(cloudpickle.dumps(array.dask)), "bytes of mu in it": mu.nbytes,
        })  # fmt: skip
    return rows


# --- Clusters -------------------------------------------------------------------------------------


@contextlib.contextmanager
def cluster(workers: int, threads: int = 1) -> Iterator[distributed.Client]:
    with (
        distributed.LocalCluster(
            n_workers=workers, threads_per_worker=threads, processes=True, dashboard_address=":0", memory_limit=0
        ) as local,
        distributed.Client(local, set_as_default=False) as client,
    ):
        yield client


WIDTH, PASSES = 500, 100
WINDOWS = range(0, WIDTH * 64, WIDTH)


def simulated(block: Any) -> Any:
    """Some work on every draw, in the block's memory."""
    for _ in range(PASSES):
        np.sin(block, out=block)
    return block


def simulated_window(first: int) -> float:
    with multisample.limit_threads(1):
        x = multisample.sample(MU, SIGMA, WIDTH, seed=7, sample_offset=first)
    return float(simulated(x).sum())


def processes() -> list[Row]:
    x = multisample.dask.sample(MU, SIGMA, WIDTH * 64, chunks=(D, WIDTH), seed=7)
    array = x.map_blocks(simulated, dtype=x.dtype).sum()
    spawn = multiprocessing.get_context("spawn")
    with (
        cluster(1) as one,
        cluster(2) as two,
        ProcessPoolExecutor(1, spawn) as pool_of_1,
        ProcessPoolExecutor(2, spawn) as pool_of_2,
    ):
        calls: dict[str, Call] = {
            "1 worker": lambda: one.compute(array, sync=True),
            "2 workers": lambda: two.compute(array, sync=True),
            "pool of 1": lambda: list(pool_of_1.map(simulated_window, WINDOWS)),
            "pool of 2": lambda: list(pool_of_2.map(simulated_window, WINDOWS)),
        }
        return take_turns(calls, "1 worker", 5)


def blocks() -> list[Row]:
    """Seconds for each of many small blocks, and of a direct call for the same window."""
    count, n = 2000, 10
    array = multisample.dask.sample(MU[:10], SIGMA[:10], n * count, chunks=(10, n), seed=7)
    reduced = array.map_blocks(corner, chunks=(1, 1), dtype=array.dtype)
    dasks = da.random.normal(size=array.shape, chunks=array.chunks)
    dasks = dasks.map_blocks(corner, chunks=(1, 1), dtype=dasks.dtype)

    def direct() -> None:
        for i in range(count):
            multisample.sample(MU[:10], SIGMA[:10], n, seed=7, sample_offset=i * n)

    with cluster(2) as client:
        calls: dict[str, Call] = {
            "direct": direct,
            "threaded scheduler": lambda: dask.persist(reduced, scheduler="threads", num_workers=THREADS),
            "distributed, 2 processes": lambda: distributed.wait(client.persist(reduced)),
            "dask.array.random.normal, threaded scheduler": lambda: dask.persist(
                dasks, scheduler="threads", num_workers=THREADS
            ),
            "dask.array.random.normal, distributed": lambda: distributed.wait(client.persist(dasks)),
        }
        with client.as_current():
            rows = take_turns(calls, "direct", 5)
    for row in rows:
        row["us for each block"] = round(row.pop("seconds") / count * 1e6, 1)
    return rows


# --- The cross-entropy method ---------------------------------------------------------------------

TASKS, SLEEP, GENERATIONS = 8, 0.05, 20


def sleeps(x: Any) -> Any:
    time.sleep(SLEEP)
    return x[0] * x[0]


def scores_only(x: Any) -> Any:
    return x[0] * x[0]


@contextlib.contextmanager
def executors() -> Iterator[dict[str, Executor | None]]:
    import loky

    with (
        ThreadPoolExecutor(TASKS) as threads,
        ProcessPoolExecutor(TASKS, mp_context=multiprocessing.get_context("spawn")) as pool,
        loky.ProcessPoolExecutor(TASKS) as loky_pool,
        cluster(2, TASKS // 2) as client,
    ):
        yield {
            "none": None, "threads": threads, "processes": pool, "loky": loky_pool, "distributed": client.get_executor()
        }  # fmt: skip


def generations() -> list[Row]:
    rows = []
    with executors() as found:
        for d, n in ((10, 1000), (100, 10_000), (10_000, 1000)):
            for name, executor in found.items():
                for f, sleep in ((scores_only, 0.0), (sleeps, SLEEP)):
                    stamps: list[float] = []

                    def note(search: Any, stamps: list[float] = stamps) -> None:
                        stamps.append(time.perf_counter())

                    cem.minimize(
                        f, np.zeros(d, np.float32), 1.0, n, iterations=GENERATIONS, seed=7, callback=note,
                        executor=executor, tasks=None if executor is None else TASKS, check_every=0,
                    )  # fmt: skip
                    each = np.diff(stamps) - sleep
                    rows.append({
                        "executor": name, "d": d, "n": n, "scores": f.__name__,
                        "ms beyond scoring": round(float(np.median(each)) * 1e3, 2),
                        "fastest": round(float(each.min()) * 1e3, 2),
                    })  # fmt: skip
    return rows


def task_costs() -> list[Row]:
    """Milliseconds for each of many tasks that do nothing else."""
    rows = []
    with executors() as found:
        for name, executor in found.items():
            if executor is None:
                continue
            times = {}
            for tasks in (100, 500):
                stamps: list[float] = []
                cem.minimize(
                    scores_only, np.zeros(100, np.float32), 1.0, 10_000, iterations=6, seed=7, executor=executor,
                    tasks=tasks, callback=lambda search: stamps.append(time.perf_counter()),  # noqa: B023
                )  # fmt: skip
                times[tasks] = float(np.median(np.diff(stamps)))
            rows.append({"executor": name, "ms for each task": round((times[500] - times[100]) / 400 * 1e3, 3)})
    return rows


def redraws() -> list[Row]:
    """The caller's work in a generation, with all samples and by drawing the elites again."""
    rows = []
    for d, n in ((100, 10_000), (10_000, 1000), (100, 1_000_000)):
        search = cem.CEM(np.zeros(d, np.float32), 1.0, n, seed=7)
        (task,) = search.ask_tasks(1)
        x = task.draw()
        scores = scores_only(x)

        def whole(search: Any = search, x: Any = x, scores: Any = scores) -> None:
            search.tell(x, scores)

        def again(search: Any = search, scores: Any = scores) -> None:
            (task,) = search.ask_tasks(1)
            search.tell_scores(task, scores)

        for row in take_turns({"tell, with all samples": whole, "tell_scores": again}, "tell, with all samples"):
            rows.append({"d": d, "n": n, **row})
    return rows


def messages() -> list[Row]:
    rows = []
    for d, n, tasks in ((100, 10_000, 8), (10_000, 1000, 8), (1000, 1_000_000, 1000)):
        task = cem.CEM(np.zeros(d), 1.0, n, seed=7).ask_tasks(tasks)[0]
        rows.append({
            "d": d, "n": n, "tasks": tasks, "bytes of a task": len(pickle.dumps(task)),
            "bytes of its scores": len(pickle.dumps(task.score(scores_only))), "allowed": 16 * n // tasks + 1000,
            "bytes of its samples": task.count * d * 8,
        })  # fmt: skip
    return rows


def scaling(results: dict[str, Any]) -> list[Row]:
    """Computed, not measured: workers of one thread each, whose tasks share one scheduler and one caller.

    The scheduler hands out a task in the measured time of a small block; the caller submits tasks and refits.
    """
    rate = (
        next(row for row in results["throughput"] if row["name"] == "multisample.dask")["normals per second"] / THREADS
    )
    scheduler = next(row for row in results["block"] if row["name"] == "distributed, 2 processes")["us for each block"]
    task = next(row for row in results["task"] if row["executor"] == "distributed")["ms for each task"] / 1e3
    refit = next(row for row in results["refit"] if row["name"] == "tell_scores")["seconds"]
    rows = []
    for workers in (1, 10, 100, 1000, 10_000):
        row: Row = {"workers": workers}
        for elements in (10**7, 10**8, 10**9):
            block = elements / rate
            row[f"efficiency, blocks of {elements:.0e}"] = round(min(1.0, block / (workers * scheduler * 1e-6)), 3)
        for scoring in (100, 10_000):
            seconds_of_generation = scoring / workers + workers * task + refit
            row[f"speed-up, generation of {scoring} s"] = round((scoring + task + refit) / seconds_of_generation, 1)
        rows.append(row)
    return rows


STUDIES: dict[str, Callable[[], list[Row]]] = {
    "throughput": throughput, "graph": graphs, "distributed": processes, "block": blocks, "cem": generations,
    "task": task_costs, "refit": redraws, "messages": messages,
}  # fmt: skip


def main() -> None:
    file, *names = sys.argv[1:]
    path = Path(file)
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"machine": describe(None)}
    for name in names or [*STUDIES, "scaling"]:
        load = os.getloadavg()[0]
        results[name] = scaling(results) if name == "scaling" else STUDIES[name]()
        results.setdefault("load before", {})[name] = round(load, 1)
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(name)
        for row in results[name]:
            print("   ", *(f"{key}: {value};" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
