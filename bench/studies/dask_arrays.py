"""Dask arrays and the cross-entropy method on executors: throughput, and what blocks, tasks and workers cost.

python -m bench.studies.dask_arrays results.json [throughput] [processes] [block] [generation] [task] [refit]

"throughput": blocks of 10**7 elements on Dask's threaded scheduler with two threads; `us` is the time of a block on one
thread. "direct" is the same windows by `multisample.sample` in a pool of two threads. "processes": worker processes of
one thread, which apply a sine 100 times to each draw; "pool of 2" is a pool without Dask. "block": blocks of 100
elements, whose draw costs nothing beside Dask's work. "generation": eight tasks on eight processes, with and without a
sleep in the score; `us` excludes the sleep. "task": how much each task adds to a generation's time, on each executor.
"refit": the caller's part of a generation. `speed` is relative to the first call of a part.
"""

import functools
import multiprocessing
import time
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import dask
import dask.array as da
import distributed
import numpy as np

import multisample.dask
from bench.studies.rows import Call, Rows, main, on_host, rows_of
from multisample import cem

THREADS = 2
D, COLUMNS, BLOCKS = 1000, 10_000, 32  # Blocks of 10**7 elements.
MU, SIGMA = np.linspace(-1, 1, D, dtype=np.float32), np.linspace(1, 2, D, dtype=np.float32)


def speeds(case: str, calls: dict[str, Call], turns: int, each: float = 1.0) -> Rows:
    """Rows with the time of a call divided by `each`, and its speed relative to the first call."""
    for row in rows_of(case, on_host(calls, turns=turns, repeats=1), next(iter(calls))):
        yield {"case": case, "call": row["call"], "us": row["us"] / each, "speed": 1 / row["ratio"]}


def window(width: int, first: int) -> Any:
    with multisample.limit_threads(1):
        return multisample.sample(MU, SIGMA, width, seed=7, sample_offset=first)


def corner(block: Any) -> Any:
    return block[:1, :1].copy()


def corners(array: da.Array) -> da.Array:
    return array.map_blocks(corner, chunks=(1, 1), dtype=array.dtype)


def on_threads(array: da.Array) -> Any:
    return dask.persist(array, scheduler="threads", num_workers=THREADS)


def throughput() -> Rows:
    n, chunks = COLUMNS * BLOCKS, (D, COLUMNS)
    with ThreadPoolExecutor(THREADS) as pool:
        calls: dict[str, Call] = {
            "direct": lambda: list(pool.map(lambda first: corner(window(COLUMNS, first)), range(0, n, COLUMNS))),
            "multisample.dask": lambda: on_threads(
                corners(multisample.dask.sample(MU, SIGMA, n, chunks=chunks, seed=7))
            ),
            "dask.array.random.normal": lambda: on_threads(corners(da.random.normal(size=(D, n), chunks=chunks))),
        }
        yield from speeds("throughput", calls, 7, BLOCKS / THREADS)


def cluster(workers: int, threads: int = 1) -> distributed.Client:
    return distributed.Client(
        n_workers=workers, threads_per_worker=threads, dashboard_address=":0", memory_limit=0, set_as_default=False
    )


WIDTH, PASSES, WINDOWS = 500, 100, 64
SPAWN = multiprocessing.get_context("spawn")


def simulated(block: Any) -> Any:
    """Some work on every draw, in the block's memory."""
    for _ in range(PASSES):
        np.sin(block, out=block)
    return block


def simulated_window(first: int) -> float:
    return float(simulated(window(WIDTH, first)).sum())


def pooled(workers: int) -> Call:
    pool = ProcessPoolExecutor(workers, SPAWN)
    return lambda: list(pool.map(simulated_window, range(0, WIDTH * WINDOWS, WIDTH)))


def processes() -> Rows:
    x = multisample.dask.sample(MU, SIGMA, WIDTH * WINDOWS, chunks=(D, WIDTH), seed=7)
    array = x.map_blocks(simulated, dtype=x.dtype).sum()
    with cluster(1) as one, cluster(2) as two:
        calls: dict[str, Call] = {
            "1 worker": lambda: one.compute(array, sync=True),
            "2 workers": lambda: two.compute(array, sync=True),
            "pool of 1": pooled(1),
            "pool of 2": pooled(2),
        }
        yield from speeds("processes", calls, 5)


def block() -> Rows:
    count, n = 2000, 10
    array = corners(multisample.dask.sample(MU[:10], SIGMA[:10], n * count, chunks=(10, n), seed=7))
    dasks = corners(da.random.normal(size=(10, n * count), chunks=(10, n)))
    with cluster(2) as client, client.as_current():
        calls: dict[str, Call] = {
            "threaded scheduler": functools.partial(on_threads, array),
            "distributed, 2 processes": lambda: distributed.wait(client.persist(array)),
            "dask.array.random.normal, threaded scheduler": functools.partial(on_threads, dasks),
            "dask.array.random.normal, distributed": lambda: distributed.wait(client.persist(dasks)),
        }
        yield from speeds("block", calls, 5, count)


TASKS, SLEEP = 8, 0.05


def scores_only(x: Any) -> Any:
    return x[0] * x[0]


def sleeps(x: Any) -> Any:
    time.sleep(SLEEP)
    return scores_only(x)


def generation_seconds(f: Any, d: int, n: int, executor: Executor, tasks: int, iterations: int) -> float:
    stamps: list[float] = []
    cem.minimize(
        f, np.zeros(d, np.float32), 1.0, n, iterations=iterations, seed=7, executor=executor, check_every=0,
        tasks=tasks, callback=lambda search: stamps.append(time.perf_counter()),
    )  # fmt: skip
    return float(np.median(np.diff(stamps)))


def generation() -> Rows:
    executor = ProcessPoolExecutor(TASKS, SPAWN)
    for d, n in ((10, 1000), (100, 10_000)):
        for f, sleep in ((scores_only, 0.0), (sleeps, SLEEP)):
            us = 1e6 * (generation_seconds(f, d, n, executor, TASKS, 20) - sleep)
            yield {"case": f"generation {d}x{n}, {f.__name__}", "call": "processes", "us": us}


def task() -> Rows:
    import loky

    with cluster(2, TASKS // 2) as client:
        executors = {
            "threads": ThreadPoolExecutor(TASKS),
            "processes": ProcessPoolExecutor(TASKS, SPAWN),
            "loky": loky.ProcessPoolExecutor(TASKS),
            "distributed": client.get_executor(),
        }
        for name, executor in executors.items():
            few, many = (generation_seconds(scores_only, 100, 10_000, executor, count, 6) for count in (100, 500))
            yield {"case": "task", "call": name, "us": 1e6 * (many - few) / 400}


def refit() -> Rows:
    """The caller's work in a generation: it draws the elites again."""
    search = cem.CEM(np.zeros(100, np.float32), 1.0, 10_000, seed=7)
    (first,) = search.ask_tasks(1)
    scores = scores_only(first.draw())
    calls: dict[str, Call] = {"tell_scores": lambda: search.tell_scores(search.ask_tasks(1)[0], scores)}
    yield from speeds("refit 100x10000", calls, 7)


if __name__ == "__main__":
    parts = (throughput, processes, block, generation, task, refit)
    main(__doc__ or "", {part.__name__: part for part in parts})
