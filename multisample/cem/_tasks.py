"""Tasks: windows of one generation of samples, which any process can draw and score.

A task is a mean, a deviation, a key and a window. A generation sends only these, and gets back scores, but no sample.
The process that refits draws the elites again, by `redraw`.
"""

import concurrent.futures
import dataclasses
import itertools
import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from multisample.backends.contract import HostArray
from multisample.backends.system.threads import thread_count

from .._arguments import checked_integer, describe
from .._libraries import CPU
from .._libraries.jax import is_jax
from .._limit_threads import limit_threads
from .._randomness.generator import Key
from .._randomness.seed_argument import batch_of
from .._sample import sample
from ._arrays import Arrays, adopted, as_numpy

_ON_HOST = Arrays("float64", CPU)
# A call costs about as much as this number of elements.
_ELEMENTS_OF_A_CALL = 1 << 13
# Elements that `redraw` holds at a time besides the elites.
_MOST_ELEMENTS = 1 << 22


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """Samples `start` to ``start + count`` of one generation; from `CEM.ask_tasks`, for `CEM.tell_scores`.

    A task is small and can be pickled. It belongs to no process: any process with `multisample` can score it.

    Attributes
    ----------
    mu, sigma : numpy.ndarray, of the shape of the run's mean
        Mean and standard deviation of the generation.
    key : Key
        Seed and offset of the generation.
    start, count : int
        The window: its first sample, and its number of samples.
    n : int
        Number of samples of the generation.
    """

    mu: HostArray = dataclasses.field(repr=False)
    sigma: HostArray = dataclasses.field(repr=False)
    key: Key
    start: int
    count: int
    n: int
    _bounds: tuple[HostArray, ...] | None = dataclasses.field(repr=False)
    _options: Mapping[str, Any] = dataclasses.field(repr=False)
    _arrays: Arrays = dataclasses.field(repr=False)

    def draw(self) -> Any:
        """Draw the samples of the task, by one thread.

        Returns
        -------
        array, shape (d, count), or ``(*S, count)`` with a mean of shape S
            An array of the library of the run.
        """
        with limit_threads(1):  # Other tasks run beside this one.
            return self._window(self.start, self.count)

    def score(self, f: Callable[[Any], Any]) -> HostArray:
        """Draw the samples of the task and score them.

        Parameters
        ----------
        f : callable
            As for `minimize`: takes samples of shape (d, count), returns their scores.

        Returns
        -------
        numpy.ndarray, shape (count,)

        Raises
        ------
        TypeError
            If the scores are not numbers.
        ValueError
            If there are not `count` scores; also whatever `f` raises.
        """
        return host_scores("f", f(self.draw()), self.count)

    def __dask_tokenize__(self) -> str:
        """A unique token, so that Dask reruns a repeated submission: `f` may be noisy, or have failed temporarily."""
        return uuid.uuid4().hex

    def _window(self, start: int, count: int) -> Any:
        arrays = self._arrays
        with arrays.scope():
            samples = sample(
                arrays.put(self.mu), arrays.put(self.sigma), count, seed=self.key, sample_offset=start, **self._options
            )
            if self._bounds is not None:
                samples = arrays.clipped(samples, *(arrays.put(edge) for edge in self._bounds))
        return samples


def host_scores(name: str, scores: Any, count: int) -> HostArray:
    """Argument or result `name` as a NumPy array of `count` numbers; TypeError or ValueError otherwise."""
    return np.ascontiguousarray(adopted(_ON_HOST, name, scores, (count,)))


# --- Elites -------------------------------------------------------------------------------------------------------


def redraw(task: Task, which: Any) -> Any:
    """Samples `which` of the generation of `task`, as columns in the order of `which`."""
    arrays, d = task._arrays, task.mu.size
    columns = as_numpy("which", which).astype(np.int64)
    order = np.argsort(columns)
    in_order, parts = columns[order], []
    with arrays.scope():
        for begin, end in _windows(in_order, d):
            first = int(in_order[begin])
            window = task._window(first, int(in_order[end - 1]) - first + 1).reshape((d, -1))
            parts.append(arrays.columns(window, arrays.put(in_order[begin:end] - first, "int64")))
        return arrays.columns(arrays.xp.concatenate(parts, axis=1), arrays.put(np.argsort(order), "int64"))


def _windows(columns: HostArray, d: int) -> Iterator[tuple[int, int]]:
    """Ranges of the sorted `columns`. Each range is one draw, which includes the columns that `columns` skips."""
    ends = np.flatnonzero(np.diff(columns) > _ELEMENTS_OF_A_CALL // d) + 1
    for begin, end in itertools.pairwise([0, *ends.tolist(), len(columns)]):
        while begin < end:
            within = begin + int(np.searchsorted(columns[begin:end], columns[begin] + max(_MOST_ELEMENTS // d, 1)))
            yield begin, within
            begin = within


# --- Executors ----------------------------------------------------------------------------------------------------


def refuse_jax(*vectors: Any) -> None:
    """TypeError if an array is JAX's, whose compiled refit takes all samples."""
    if any(map(is_jax, vectors)):
        raise TypeError("mu, sigma: expected arrays of NumPy, PyTorch or CuPy, with tasks, got an array of JAX")


def refuse_searches(name: str, seed: Any) -> None:
    """TypeError if `seed` is a vector of seeds, whose searches would share each call of `f`."""
    if batch_of(seed) is not None:
        raise TypeError(
            f"{name}: expected a run with one seed, got {describe(seed)}, whose searches share each call of f"
        )


def checked_tasks(executor: Any, tasks: Any, f: Any, mu: Any, sigma: Any, seed: Any) -> int:
    """The number of tasks in a generation; TypeError or ValueError if `executor` cannot run them. 0: no executor."""
    if executor is None:
        if tasks is not None:
            raise TypeError(f"tasks: expected an executor too, got {describe(tasks)} without executor")
        return 0
    if not isinstance(executor, concurrent.futures.Executor):
        raise TypeError(
            f"executor: expected a concurrent.futures.Executor, got {describe(executor)} of type"
            f" {type(executor).__name__}"
        )
    refuse_searches("executor", seed)
    refuse_jax(mu, sigma)
    dumps = _pickler(executor)
    if dumps is not None:
        try:
            dumps(f)
        except Exception as error:  # Objects may raise anything while they are pickled.
            raise TypeError(
                f"f: expected a function that {type(executor).__name__} can send to other processes, got {describe(f)}"
                f" ({type(error).__name__}: {error})"
            ) from error
    return thread_count() if tasks is None else checked_integer("tasks", tasks, 1, 2**31)


def _pickler(executor: concurrent.futures.Executor) -> Callable[[Any], Any] | None:
    """The function with which a known executor pickles tasks; None for threads and for unknown executors."""
    packages = {kind.__module__.partition(".")[0] for kind in type(executor).__mro__}
    if packages & {"distributed", "loky"}:
        import cloudpickle  # Both packages depend on it.

        dumps: Callable[[Any], Any] = cloudpickle.dumps
        return dumps
    is_known = "mpi4py" in packages or isinstance(executor, concurrent.futures.ProcessPoolExecutor)
    return pickle.dumps if is_known else None


def run_tasks(
    executor: concurrent.futures.Executor,
    tasks: Iterable[Task],
    call: Callable[[Task], tuple[Any, ...]],
    tell: Callable[[Task, Any], None],
) -> None:
    """Submit ``call(task)``, a function and its arguments, for each task; ``tell(task, result)`` takes each result.

    After an error, the tasks that have not begun are cancelled. BrokenExecutor if the executor broke, or another
    program cancelled a task.
    """
    futures: dict[concurrent.futures.Future[Any], Task] = {}
    try:
        for task in tasks:
            futures[executor.submit(*call(task))] = task
        for future in concurrent.futures.as_completed(futures):
            tell(futures[future], future.result())
    except (concurrent.futures.BrokenExecutor, concurrent.futures.CancelledError) as error:
        raise concurrent.futures.BrokenExecutor(
            f"executor: expected one that runs all tasks, got {type(executor).__name__}, which lost tasks"
            f" ({type(error).__name__}: {error}); a saved `state` continues with the same bits on another executor"
        ) from error
    finally:
        for future in futures:
            future.cancel()  # Does nothing to a task that is done.
