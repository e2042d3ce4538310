"""`minimize` and `CEM`: arguments and state. The next mean and standard deviation, and why a run ends: `_refit`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, SupportsIndex, TypeAlias, TypedDict, overload

import numpy as np

from multisample.backends.contract import HostArray
from multisample.backends.memory.host import quiet, rounded

from .._arguments import checked_integer, describe
from .._libraries import CPU, HOST, is_number, library_of
from .._libraries.foreign import FOREIGN
from .._moments import weighted_moments
from .._operations import COLUMNS as MOST_SAMPLES
from .._randomness.generator import WORD_64, Generator, Key
from .._randomness.generator_argument import source_of
from .._randomness.seed_argument import batch_of, host_words
from .._sample import sample
from .._typing import AnyArray, ArrayT, Bounds, HostBackend, HostVector, Noise, Number, OwnArray, T, Tensor
from ._arrays import Arrays, adopted, arrays_like, as_numpy, either
from ._refit import COLUMNS, CONVERGED, DIVERGED, RUNNING, STOPPED, Settings, State, compiled, first_state, message_of
from ._tasks import Task, checked_tasks, host_scores, redraw, refuse_jax, refuse_searches, run_tasks

if TYPE_CHECKING:
    from concurrent.futures import Executor

    # Type checkers know typing_extensions, installed or not.
    from typing_extensions import Unpack

    Seed: TypeAlias = SupportsIndex | Sequence[SupportsIndex] | AnyArray

    class CEMOptions(TypedDict, total=False):
        """The options that all overloads share. `backend` is not among them, since it decides the result's library."""

        elite_frac: Number
        smoothing: Number
        noise_floor: Number | AnyArray | Callable[[int], Any]
        bounds: tuple[AnyArray | Number, AnyArray | Number] | Bounds | None
        tol: Number | None
        seed: Seed | None
        noise: Noise
        antithetic: bool
        fast_math: bool

    class MinimizeOptions(CEMOptions, total=False):
        iterations: SupportsIndex
        callback: Callable[[CEM[Any]], Any] | None
        check_every: SupportsIndex | None
        executor: Executor | None
        tasks: SupportsIndex | None


_NOTHING = np.array([math.nan] * (len(COLUMNS) - 1) + [0.0])
# Iterations between two checks of the status on a device, since a check waits for the device.
DEVICE_CHECK_EVERY = 16


class CEMState(TypedDict):
    """The state of a run between two iterations: tensors on the CPU where `mu` is a tensor, else NumPy arrays.

    `torch.save`, `numpy.savez` and other formats of checkpoints can store a state.
    """

    mu: Any
    sigma: Any
    x: Any
    history: Any
    told: Any
    seed: Any
    offset: Any


@dataclasses.dataclass(frozen=True)
class Result(Generic[ArrayT]):
    """The result of a run, with the names of `scipy.optimize.OptimizeResult`.

    After B searches, each attribute except `nfev` holds the results of all B. Arrays have an axis of length B in front,
    numbers and bools are NumPy arrays of shape (B,), and `message` is a tuple. Rows of the history after the end of a
    search are NaN, and 0 in "nonfinite".

    Attributes
    ----------
    x : array, shape (d,)
        The best sample of the run, in the library and on the device of the samples; the initial `mu` if no score was
        finite. If f is noisy, `x` is the luckiest sample, and `mu` is the better answer.
    fun : float
        The score of `x`; infinity if no score was finite.
    mu, sigma : array, shape (d,)
        Mean and standard deviation after the last iteration.
    nit : int
        Iterations until the run ended.
    nfev : int
        Scores that f computed, for each search; more than ``n * nit`` if `check_every` detected the end late, or other
        searches ran on.
    nonfinite : int
        Number of the ``n * nit`` scores that were NaN or infinite.
    success : bool
        With `tol`: whether `tol` was reached. Without `tol`: whether all iterations ran.
    status : int
        0: all iterations ran; 1: `tol` was reached; 2: sigma collapsed; 3: an iteration had no finite score;
        4: mean or standard deviation overflowed; 5: `callback` ended the run.
    message : str
        The status in words, with the number of scores that were not finite.
    history : dict of str to numpy.ndarray, shape (nit,)
        For each iteration: "best" and "mean" of its finite scores; "threshold", the highest score of an elite, which is
        infinite if the finite scores are fewer than the elites; "sigma", the largest standard deviation after the
        refit; and "nonfinite", the number of scores that were NaN or infinite.
    """

    x: ArrayT
    fun: float
    mu: ArrayT
    sigma: ArrayT
    nit: int
    nfev: int
    nonfinite: int
    success: bool
    status: int
    message: str
    history: dict[str, HostArray] = dataclasses.field(repr=False)


class CEM(Generic[ArrayT]):
    """The cross-entropy method as an ask-tell interface: `ask` draws samples, `tell` takes their scores.

    Use it if `minimize` cannot call the function: if other machines or people compute the scores, or if they come in
    larger batches. ``minimize(f, ...)`` is a loop of ``x = cem.ask()`` and ``cem.tell(x, f(x))``.

    Parameters
    ----------
    mu, sigma, n, elite_frac, smoothing, noise_floor, bounds, tol, backend, seed, noise, antithetic, fast_math : various
        As for `minimize`. `tol` sets `status` to 1, but does not stop the caller's loop.

    Raises
    ------
    TypeError
        As for `minimize`.
    ValueError
        As for `minimize`.

    Notes
    -----
    Several `ask` calls may precede the first `tell`, and samples may be scored in any order, as by the workers of an
    asynchronous run; each `tell` refits. Two threads must not call at once.

    Only `status`, `result` and `state` wait for the device. After `status` has left 0, `tell` changes nothing.

    Examples
    --------
    >>> import numpy as np
    >>> from multisample.cem import CEM
    >>> cem = CEM(np.zeros(3), 2.0, 200, seed=7, tol=1e-6)
    >>> while cem.status == 0:
    ...     x = cem.ask()
    ...     cem.tell(x, np.square(x - 1.0).sum(axis=0))
    >>> cem.result().mu.round(4)
    array([1., 1., 1.])
    """

    @overload
    def __init__(
        self: CEM[OwnArray], mu: OwnArray | float, sigma: OwnArray | float, n: SupportsIndex, *,
        backend: str = ..., **options: Unpack[CEMOptions],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: CEM[T], mu: Tensor[T] | float, sigma: Tensor[T] | float, n: SupportsIndex, *,
        backend: str = ..., **options: Unpack[CEMOptions],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: CEM[HostArray], mu: HostVector | Number, sigma: HostVector | Number, n: SupportsIndex, *,
        backend: HostBackend = ..., **options: Unpack[CEMOptions],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: CEM[Any], mu: HostVector | Number, sigma: HostVector | Number, n: SupportsIndex, *,
        backend: str, **options: Unpack[CEMOptions],
    ) -> None: ...  # fmt: skip
    def __init__(
        self,
        mu: Any,
        sigma: Any,
        n: SupportsIndex,
        *,
        elite_frac: Number = 0.1,
        smoothing: Number = 1.0,
        noise_floor: Any = 0.0,
        bounds: tuple[Any, Any] | Bounds | None = None,
        tol: Number | None = None,
        backend: str = "auto",
        seed: Seed | None = None,
        noise: Noise = "independent",
        antithetic: bool = False,
        fast_math: bool = False,
    ) -> None:
        self._n = checked_integer("n", n, 2, MOST_SAMPLES + 1)
        self._options: dict[str, Any] = {
            "backend": backend, "noise": noise, "antithetic": antithetic, "fast_math": fast_math,
        }  # fmt: skip
        self._seeds = _seeds_of_searches(seed)
        # An empty draw, in which `sample` checks the options.
        any_seed = 0 if self._seeds is None else np.zeros_like(self._seeds)
        no_samples = sample(mu, sigma, 0, seed=any_seed, validate=True, **self._options)
        self._arrays = arrays = arrays_like(no_samples)
        settings = checked_settings(arrays, self._n, elite_frac, smoothing, tol)
        self._tol = settings.tol
        # The shape of the mean: that of the dimensions, after B for B searches.
        self._shape = tuple(map(int, no_samples.shape[:-1]))
        self._batch = self._shape[: int(self._seeds is not None)]
        self._dims = self._shape[len(self._batch) :]
        if 0 in self._shape:
            name = "seed" if 0 in self._batch else "sigma" if is_number(mu) else "mu"
            raise ValueError(f"{name}: expected at least one element, got none")
        caller = library_of("mu", sigma if _is_scalar(mu) else mu)
        # Several searches share one generator, which counts offsets.
        self._generator = _generator(seed if self._seeds is None else 0, caller, arrays.device)
        with arrays.scope(), quiet():
            mu, sigma = (converted(arrays, x, self._shape, any_seed, backend) for x in (mu, sigma))
            self._state = first_state(arrays, mu, sigma, self._batch)
            self._noise_floor = noise_floor if callable(noise_floor) else self._variance(noise_floor)
            self._bounds = None if bounds is None else self._edges(bounds)
        self._refit, self._weights, self._refit_by_moments = compiled(settings)
        self._rows: list[Any] = []  # Rows of the history that are still on the device.
        self._history: list[HostArray] = []
        self._told = 0
        self._asked: Any = None  # Seed, mean and deviation of the latest `ask`.
        # Scores of generations, by the first sample of their tasks; None for complete generations.
        self._parts: dict[Key, dict[int, HostArray] | None] = {}

    def ask(self, out: ArrayT | None = None) -> ArrayT:
        """Draw new samples.

        Parameters
        ----------
        out : array of the result's shape, optional
            Destination, as for `multisample.sample`, such as earlier samples that are no longer needed.

        Returns
        -------
        array, shape (d, n), or ``(*S, n)`` with a mean of shape S; of B searches (B, d, n) or ``(B, *S, n)``
            The samples, of the library and on the device of `mu`, ready on that library's current stream.

        Raises
        ------
        TypeError
            If `out` is not an array of the library of `mu`, or the library's arrays are immutable.
        ValueError
            If the shape, type or device of `out` differs from the result's.
        """
        seed, key = self._seeds, self._generator.take()
        try:
            keys = key if seed is None else np.stack([seed, np.full_like(seed, key.offset)], -1)
            samples: ArrayT = self._drawn(keys, self._state.mu, self._state.sigma, out)
        except BaseException:
            self._generator._put_back(*key)
            raise
        self._asked = keys, self._state.mu, self._state.sigma
        return samples

    def _drawn(self, seed: Any, mu: Any, sigma: Any, out: Any = None) -> Any:
        samples = sample(mu, sigma, self._n, seed=seed, out=out, **self._options)
        if self._bounds is None:
            return samples
        with self._arrays.scope():
            return self._arrays.clipped(samples, *self._bounds)

    def tell(self, samples: AnyArray | None, scores: AnyArray) -> None:
        """Refit mean and standard deviation to the samples with the lowest scores.

        Parameters
        ----------
        samples : array, of the shape that `ask` returns, or None
            Samples from `ask`, which the caller may have repaired. None stands for the samples of the latest `ask` as
            they were drawn: their noise is drawn again by `multisample.weighted_moments`, so that samples need memory
            only while they are scored. The result is the same up to rounding. Not with `bounds`.
        scores : array, shape (n,) or (B, n)
            One number for each sample; lower is better. NaN and infinities count as worst. Arrays of other libraries or
            devices are copied to the device of the samples. Scores of searches that have ended are ignored.

        Raises
        ------
        TypeError
            If the elements of `samples` or `scores` are not numbers.
        ValueError
            If `samples` or `scores` has another shape, or the schedule of `noise_floor` returns an invalid variance. If
            `samples` is None and the run has `bounds`, or there was no `ask` since the last such call or assignment of
            `state`.
        """
        if samples is None and (self._bounds is not None or self._asked is None):
            reason = "there is no `ask` whose samples it stands for"
            if self._bounds is not None:
                reason = "samples are clipped to bounds, and cannot be drawn again as they are"
            raise ValueError(f"samples: expected an array, got None, but {reason}")
        if samples is not None:
            with self._arrays.scope():
                samples = adopted(self._arrays, "samples", samples, (*self._shape, self._n))
        self._tell(samples, scores)

    def _tell(self, samples: Any, scores: Any) -> None:
        """Refit; `samples` is an array, None for those of the latest `ask`, or a function that draws elites."""
        with self._arrays.scope():
            scores = adopted(self._arrays, "scores", scores, (*self._batch, self._n))
            noise = self._noise_floor
            if callable(noise):
                noise = self._variance(noise(self._told + 1), is_scheduled=True)
            if samples is None:
                (state, row), asked = self._refit_to_drawn(scores, noise), None
            else:
                (state, row), asked = self._refit(self._state, samples, scores, noise), self._asked
        # Python handles signals in calls and loops, so no handler runs between these assignments.
        self._state, self._told, self._asked = state, self._told + 1, asked
        self._rows += [row]

    def _refit_to_drawn(self, scores: Any, noise: Any) -> Any:
        """Refit to the samples of the latest `ask`, without them; returns the state and the row of the history."""
        seed, *vectors = self._asked
        mu, sigma = (vector.reshape((*self._batch, -1)) for vector in vectors)
        weights, best = self._weights(scores)
        options = {**self._options, "seed": seed}
        mean, square = weighted_moments(weights, mu, sigma, **options)
        (first,) = weighted_moments(best, mu, sigma, order=1, **options)
        return self._refit_by_moments(self._state, mu, mean, square, first, scores, noise)

    def ask_tasks(self, k: SupportsIndex) -> list[Task]:
        """Split new samples into tasks, which any process can draw and score.

        The samples are those that `ask` would draw.

        Parameters
        ----------
        k : int
            Number of tasks, at least 1. Each has at least two samples, so there may be fewer. The result of the run
            does not depend on `k`.

        Returns
        -------
        list of Task
            Small objects that can be pickled: mean, deviation, key and window. ``task.score(f)`` draws the samples and
            returns their scores; ``task.draw()`` returns the samples.

        Raises
        ------
        TypeError
            If `k` is not an integer, there are several searches, or the arrays are JAX's, whose compiled refit needs
            all samples.
        ValueError
            If `k` is less than 1.
        """
        k, arrays = checked_integer("k", k, 1, 2**31), self._arrays
        refuse_searches("ask_tasks", self._seeds)
        refuse_jax(self._state.mu)
        with arrays.scope():
            bounds = None if self._bounds is None else tuple(map(self._on_host, self._bounds))
        mu, sigma, key = self._on_host(self.mu), self._on_host(self.sigma), self._generator.take()
        # A task has at least two samples. NumPy adds the rows of a single column in another order than those of several
        # columns, so a score could round differently.
        k = min(k, self._n // 2)
        edges = [self._n * i // k for i in range(k + 1)]
        return [
            Task(mu, sigma, key, begin, end - begin, self._n, bounds, self._options, arrays)
            for begin, end in itertools.pairwise(edges)
        ]

    def tell_scores(self, task: Task, scores: AnyArray) -> None:
        """Take the scores of a task. The last task of a generation refits mean and standard deviation.

        Tasks may be told in any order. The elites are drawn again, as they were before `f` got them.

        Parameters
        ----------
        task : Task
            From `ask_tasks`, of this object or of one whose `state` this object has taken over.
        scores : array, shape (task.count,)
            One number for each sample of the task; lower is better.

        Raises
        ------
        TypeError
            If `task` is not a task, there are several searches, or the scores are not numbers.
        ValueError
            If `task` belongs to another run, its scores are known already, or `scores` has another shape; also as for
            `tell`.
        """
        refuse_searches("tell_scores", self._seeds)
        if not isinstance(task, Task):
            raise TypeError(f"task: expected a Task from ask_tasks, got {describe(task)} of type {type(task).__name__}")
        if (task.n, task.mu.shape, task.key.seed) != (self._n, self._shape, self._generator.seed):
            raise ValueError(f"task: expected a task of this run, with seed {self._generator.seed}, got {task}")
        parts = self._parts.get(task.key, {})
        if parts is None or task.start in parts:
            raise ValueError(f"task: expected a task whose scores are not known, got {task}")
        parts = {**parts, task.start: host_scores("scores", scores, task.count)}
        if sum(map(len, parts.values())) < self._n:
            self._parts[task.key] = parts
            return
        self._tell(functools.partial(redraw, task), np.concatenate([parts[start] for start in sorted(parts)]))
        self._parts[task.key] = None

    @property
    def mu(self) -> ArrayT:
        """The mean that `ask` draws around, on its device."""
        mu: ArrayT = self._state.mu
        return mu

    @property
    def sigma(self) -> ArrayT:
        """The standard deviation that `ask` draws with, on its device."""
        sigma: ArrayT = self._state.sigma
        return sigma

    @property
    def status(self) -> Any:
        """0 while the run continues; then the reason for its end, as in `Result`. Reading waits for the device.

        An int, or an array of int64 of shape (B,) for B searches.
        """
        self._fetch()
        return self._plain(self._history[-1][..., -1] if self._history else np.full(self._batch, RUNNING), np.int64)

    def _plain(self, values: Any, dtype: Any) -> Any:
        """Values for all searches: an array, or a number of Python for a single search."""
        array = np.asarray(values, dtype)
        return array if self._batch else array.item()

    def result(self) -> Result[ArrayT]:
        """The result of the run so far; waits for the device.

        Returns
        -------
        Result
            The status is 0 if the run has not ended.
        """
        return self._result(is_stopped=False)

    def _result(self, is_stopped: bool) -> Result[ArrayT]:
        """The result; with `is_stopped`, the callback has ended the searches that still ran."""
        status = np.asarray(self.status)
        if is_stopped:
            status = np.where(status == RUNNING, STOPPED, status)
        columns = dict(zip(COLUMNS[:-1], np.moveaxis(self._history_array(), -1, 0), strict=False))
        # Rows after the end of a search are NaN.
        nit = np.isfinite(columns["nonfinite"]).sum(axis=0)
        columns["nonfinite"] = np.nan_to_num(columns["nonfinite"]).astype(np.int64)
        nonfinite = columns["nonfinite"].sum(axis=0)
        searches = zip(*map(np.atleast_1d, (status, nit, nonfinite)), np.atleast_2d(columns["sigma"].T), strict=True)
        messages: Any = tuple(message_of(self._n, self._tol, *search) for search in searches)
        return Result(
            x=self._state.x,
            fun=self._plain(_lowest(columns["best"]), np.float64),
            mu=self.mu,
            sigma=self.sigma,
            nit=self._plain(nit, np.int64),
            nfev=self._n * self._told,
            nonfinite=self._plain(nonfinite, np.int64),
            success=self._plain((status == CONVERGED) | ((status == RUNNING) & (self._tol is None)), np.bool_),
            status=self._plain(status, np.int64),
            message=messages if self._batch else messages[0],
            history={name: column.T for name, column in columns.items()},
        )

    @property
    def state(self) -> CEMState:
        """The state of the run, for checkpoints; can be assigned.

        Tensors on the CPU where `mu` is a tensor, else NumPy arrays. Reading waits for the device. Arrays of other
        libraries and lists can be assigned too, such as lists from JSON. A `CEM` with the same arguments (except
        `seed`) continues from an assigned state with the same bits, on the same library and kind of device. The state
        excludes samples without scores. Their scores can still be passed to `tell` of the original or of the restored
        `CEM`.

        Raises
        ------
        TypeError
            If the assigned state has other keys, or values that are not numbers.
        ValueError
            If an array of the assigned state has another shape than the search needs, or if ``mu``, ``sigma``,
            ``told``, ``seed``, ``offset`` or a status in the history is out of range. The search is then unchanged.
        """
        self._fetch()
        generator, saved = self._generator.state, self._arrays.saved
        return {
            "mu": saved(self._on_host(self.mu)),
            "sigma": saved(self._on_host(self.sigma)),
            "x": saved(self._on_host(self._state.x)),
            "history": saved(self._history_array()),
            "told": saved(np.array(self._told)),
            "seed": saved(np.array(generator["seed"] if self._seeds is None else self._seeds, np.uint64)),
            "offset": saved(np.array(generator["offset"], np.uint64)),
        }

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        names = CEMState.__annotations__.keys()
        if not isinstance(state, Mapping) or state.keys() != names:
            raise TypeError(f"state: expected a mapping with keys {', '.join(names)}, got {describe(state)}")
        values = {name: _state_array(name, state[name]) for name in names}
        batch = self._batch
        history = values["history"] if values["history"].size else np.empty((0, *batch, len(COLUMNS)))
        shapes = {"history": (*history.shape[:1], *batch, len(COLUMNS)), "told": (), "seed": batch, "offset": ()}
        for name, value in {**values, "history": history}.items():
            shape = shapes.get(name, self._shape)
            if value.shape != shape:
                raise ValueError(f"state[{name!r}]: expected shape {shape}, got {value.shape}")
        status = history[..., -1]
        if bad := _first(~np.isin(status, range(DIVERGED + 1))):
            raise ValueError(f"state['history']: expected statuses 0 to {DIVERGED}, got {status[bad]} in row {bad[0]}")
        told, offset = (
            checked_integer(f"state[{name!r}]", values[name][()], 0, end)
            for name, end in (("told", WORD_64), ("offset", WORD_64 + 1))
        )
        seeds = [checked_integer("state['seed']", seed, 0, WORD_64) for seed in values["seed"].reshape(-1)]
        status = status[-1] if len(history) else np.full(batch, RUNNING)
        # A number that is too large becomes infinite; the check below reports it.
        vectors = {name: rounded(values[name], self._arrays.dtype_name) for name in ("mu", "sigma", "x")}
        for name, least in (("mu", -math.inf), ("sigma", 0)):  # Samples of a diverged run may be infinite.
            if bad := _first(~(np.isfinite(vectors[name]) & (vectors[name] >= least))):
                accepted = "finite numbers of at least 0" if name == "sigma" else "finite numbers"
                raise ValueError(f"state[{name!r}]: expected {accepted}, got {values[name][bad]} at {_text(bad)}")
        with self._arrays.scope():
            put, real = self._arrays.put, self._arrays.real
            fun, running = put(np.asarray(_lowest(history[..., 0])), real), put(np.asarray(status == RUNNING), real) > 0
            mu, sigma, x = (put(vector) for vector in vectors.values())
            restored = State(mu, sigma, x, fun, running)
        if self._seeds is not None:
            self._seeds = np.array(seeds, np.uint64)
        self._generator.state = {"seed": seeds[0] if self._seeds is None else 0, "offset": offset, "spawned": 0}
        self._state, self._rows, self._history, self._told = restored, [], list(history), told
        self._asked = None
        self._parts = {}

    def _fetch(self) -> None:
        """Copy new rows of the history from the device, up to the row that ended the last search."""
        if not self._rows:
            return
        with self._arrays.scope():
            rows = as_numpy("history", self._arrays.xp.stack(self._rows))
        history = self._history[-1:]
        for row in np.asarray(rows, np.float64):
            if history:
                status = history[-1][..., -1:]
                if (status != RUNNING).all():
                    break
                row = np.where(status == RUNNING, row, status + _NOTHING)
            history.append(row)
        self._history[-1:], self._rows = history, []  # As in `_tell`, no call: no signal handler runs between.

    def _history_array(self) -> HostArray:
        return np.array(self._history, np.float64).reshape(-1, *self._batch, len(COLUMNS))

    def _on_host(self, array: Any) -> HostArray:
        return np.array(rounded(as_numpy("state", array), self._arrays.dtype_name))

    def _variance(self, value: Any, is_scheduled: bool = False) -> Any:
        """`noise_floor` as a number, or as an array on the device. A check of a schedule's array would wait."""
        if isinstance(value, numbers.Real):
            return checked_number("noise_floor", value, 0, math.inf)
        if is_scheduled:
            return placed(self._arrays, "noise_floor", value, self._batch, self._dims)
        vector = self._placed_on_host("noise_floor", value)
        if not (np.isfinite(vector) & (vector >= 0)).all():
            raise ValueError(f"noise_floor: expected finite variances of at least 0, got {describe(value)}")
        return self._arrays.put(vector)

    def _placed_on_host(self, name: str, value: Any) -> Any:
        return placed(Arrays(self._arrays.dtype_name, CPU), name, value, self._batch, self._dims)

    def _edges(self, bounds: Any) -> tuple[Any, Any]:
        """`bounds` as columns on the device; ValueError if the mean is outside."""
        # In the type of the samples, in which they are clipped.
        low, high = (self._placed_on_host("bounds", edge).reshape(self._shape) for edge in pair_of(bounds))
        if bad := _first(~(low <= high)):
            raise ValueError(f"bounds: expected low <= high, got {low[bad]} and {high[bad]} at {_text(bad)}")
        mu = self._on_host(self.mu)
        if at := _first((mu < low) | (mu > high)):
            raise ValueError(
                f"mu: expected it within bounds, got mu[{_text(at)}] = {mu[at]}, not from {low[at]} to {high[at]}"
            )
        return self._arrays.put(low)[..., None], self._arrays.put(high)[..., None]


# The overloads overlap in calls with two numbers, which raise.
@overload
def minimize(
    f: Callable[[OwnArray], Any], mu: OwnArray | float, sigma: OwnArray | float, n: SupportsIndex, *,
    backend: str = ..., **options: Unpack[MinimizeOptions],
) -> Result[OwnArray]: ...  # fmt: skip
@overload
def minimize(  # type: ignore[overload-overlap]
    f: Callable[[T], Any], mu: Tensor[T] | float, sigma: Tensor[T] | float, n: SupportsIndex, *,
    backend: str = ..., **options: Unpack[MinimizeOptions],
) -> Result[T]: ...  # fmt: skip
@overload
def minimize(
    f: Callable[[HostArray], Any], mu: HostVector | Number, sigma: HostVector | Number, n: SupportsIndex, *,
    backend: HostBackend = ..., **options: Unpack[MinimizeOptions],
) -> Result[HostArray]: ...  # fmt: skip
@overload
def minimize(
    f: Callable[[Any], Any], mu: HostVector | Number, sigma: HostVector | Number, n: SupportsIndex, *,
    backend: str, **options: Unpack[MinimizeOptions],
) -> Result[Any]: ...  # fmt: skip
def minimize(
    f: Callable[[Any], Any],
    mu: Any,
    sigma: Any,
    n: SupportsIndex,
    *,
    iterations: SupportsIndex = 100,
    elite_frac: Number = 0.1,
    smoothing: Number = 1.0,
    noise_floor: Any = 0.0,
    bounds: tuple[Any, Any] | Bounds | None = None,
    tol: Number | None = None,
    callback: Callable[[CEM[Any]], Any] | None = None,
    check_every: SupportsIndex | None = None,
    executor: Executor | None = None,
    tasks: SupportsIndex | None = None,
    backend: str = "auto",
    seed: Seed | None = None,
    noise: Noise = "independent",
    antithetic: bool = False,
    fast_math: bool = False,
) -> Result[Any]:
    """Minimise a function by the cross-entropy method, with normal samples of independent components.

    Each iteration draws `n` samples by `multisample.sample` and scores them by `f`. The mean and the standard deviation
    of the `elite_frac` samples with the lowest scores become the next `mu` and `sigma` [1]_. The array library of `mu`
    computes everything, on the device of `mu`.

    Parameters
    ----------
    f : callable
        Takes the samples, of shape (d, n), and returns their n scores; lower is better. Scores that are not an array of
        the same library on the same device are copied there. NaN and infinite scores count as worst, and are counted.
        It may overwrite the samples, which changes no result. The next iteration overwrites them too, if the arrays are
        mutable. With B seeds, samples are (B, d, n) and scores (B, n).
    mu, sigma : array, shape (d,) or (d, 1), or shapes broadcast to S; with B seeds (B, d), ``(B, *S)`` or (d,)
        Initial means, and standard deviations of at least 0, as for `multisample.sample`, in float32 or float64. Arrays
        of NumPy, PyTorch, CuPy or JAX, or lists; one of the two may be a number. With means of shape S, such as (T, m)
        for T controls, samples are ``(*S, n)``, and each shape (d,) below is S.
    n : int
        Number of samples in each iteration, at least 2.
    iterations : int, default 100
        Maximum number of iterations.
    elite_frac : float, default 0.1
        Fraction of the samples that are elites. The number of elites is rounded, and must be at least 2.
    smoothing : float, default 1.0
        ``0 < smoothing <= 1``: the weight of the refitted mean and standard deviation; the previous ones have weight
        ``1 - smoothing``. Values such as 0.7 prevent an early collapse [1]_.
    noise_floor : float or array, shape (d,) or with B seeds (B, d), or callable, default 0.0
        A variance (the square of a standard deviation) that is added to the refitted variances, so that they cannot
        collapse. A callable is a schedule: it takes the number of the iteration, from 1, and returns the variance. The
        Tetris players of [2]_ were trained with a decreasing schedule, ``lambda t: max(5 - t / 10, 0)``.
    bounds : tuple of two floats or arrays, shape (d,) or with B seeds (B, d), or scipy.optimize.Bounds, optional
        Lowest and highest values, which may be infinite; `mu` must lie within. Components of samples are clipped to the
        bounds. So `f` sees no sample outside, and the method finds optima on the boundary, which samples of a truncated
        normal distribution only approach [3]_.
    tol : float, optional
        The run ends when the largest standard deviation is at most `tol`; of B searches, each by itself.
    callback : callable, optional
        Called with the `CEM` after each iteration; the run ends if it returns a true value. It waits for the device
        only if it reads results, as by ``cem.result()``.
    check_every : int, optional
        Number of iterations between checks for the end of the run; a check copies a few numbers to the host. Default:
        1 in host memory, and 16 on a device. 0 disables the checks. Only ``nfev`` depends on it, since iterations after
        the end change nothing else.
    executor : concurrent.futures.Executor, optional
        Runs `f` in threads or processes, here or on other machines: the executors of `concurrent.futures`, loky and
        mpi4py, ``distributed.Client.get_executor()``, and others. A task draws its own samples from mean, deviation,
        key and window, and returns their scores. So a task receives 2 d numbers and returns scores, never samples.
    tasks : int, optional
        With `executor`: number of tasks in each iteration, best one to four for each worker. Default: the number of
        processors of this machine. The result does not depend on it, nor on the executor.
    backend : str, default "auto"
        As for `multisample.sample`. A CUDA backend converts NumPy arrays and lists to arrays of its own library.
    seed : int, or a vector of B ints, optional
        ``0 <= seed < 2**64``: seed of the `Generator` that draws all samples. By default the seed comes from the
        generator that `multisample.sample` would use: PyTorch's for tensors, else the one of `multisample.manual_seed`.
        A vector, as for `multisample.sample` but without offsets, starts B searches side by side.
    noise, antithetic, fast_math : various
        As for `multisample.sample`. With shared noise, all samples of all iterations lie on one line, on which few
        functions have their minimum.

    Returns
    -------
    Result
        Best sample and score, last mean and standard deviation, status and history; of B searches, each of them with
        an axis of searches.

    Raises
    ------
    TypeError
        If an argument has a wrong type, or `mu` belongs to a library that is not listed above. With `executor`: if
        `f` cannot be sent to its processes, `mu` is an array of JAX, or `seed` is a vector.
    ValueError
        If an argument is out of range. `minimize` also raises every error of `multisample.sample` and `f`.
    concurrent.futures.BrokenExecutor
        If `executor` breaks, for example because a process was killed.

        After an error in an iteration with `executor`, and after Ctrl-C, tasks that have not begun are cancelled.

    Notes
    -----
    The run ends early if `tol` is reached; if the standard deviations collapse, so that adding them to the mean changes
    none of its components; if no score of an iteration is finite; or if mean or standard deviation overflow, as for a
    function without a minimum. None of these raises an exception: `Result.message` gives the reason.

    Samples of equal `mu` and `sigma` have the same bits everywhere. The array library computes sums over elites in its
    own order. So runs with different libraries or devices differ by rounding after the first refit.

    B searches share each draw and each call of `f`. Each equals its own run with its seed, bit for bit, on the same
    kind of device, if `f` computes a score alike for one search and for several. `f` gets the samples of all searches
    until the last has ended; scores of searches that have ended are ignored.

    With `executor`, `f` is called once for each task, with two or more of the samples. Results equal those without
    executor, bit for bit, if the score of a sample does not depend on the others, to the last bit. NumPy's sums over
    axis 0 are such functions. Products of matrices, and PyTorch's sums over dimension 0 on a CPU, round a column
    differently among other columns. With PyTorch, sum the rows of ``x.T.contiguous()``.

    The method fits no correlations. On ill-conditioned functions with rotated axes, and in curved valleys, methods with
    a covariance matrix, such as CMA-ES, are much better.

    References
    ----------
    .. [1] P.-T. de Boer, D. P. Kroese, S. Mannor, R. Y. Rubinstein, "A tutorial on the cross-entropy method", Annals of
       Operations Research 134, 2005, doi:10.1007/s10479-005-5724-z.
    .. [2] I. Szita, A. Lőrincz, "Learning Tetris using the noisy cross-entropy method", Neural Computation 18, 2006,
       doi:10.1162/neco.2006.18.12.2936.
    .. [3] C. Pinneri et al., "Sample-efficient cross-entropy method for real-time planning", CoRL 2020,
       arXiv:2008.06389.

    Examples
    --------
    >>> import numpy as np
    >>> from multisample import cem
    >>> def rastrigin(x):
    ...     return 10 * len(x) + (x * x - 10 * np.cos(2 * np.pi * x)).sum(axis=0)
    >>> result = cem.minimize(rastrigin, np.full(5, 3.0), 2.0, 500, tol=1e-6, seed=7)
    >>> result.message
    'The largest standard deviation, 7.09e-07, is at most tol = 1e-06.'
    >>> bool(abs(result.x).max() < 1e-5), result.nfev
    (True, 20500)
    """
    iterations = checked_integer("iterations", iterations, 0, WORD_64)
    if check_every is not None:
        check_every = checked_integer("check_every", check_every, 0, WORD_64)
    for name, function in (("f", f), ("callback", callback)):
        if not callable(function) and (name == "f" or function is not None):
            raise TypeError(f"{name}: expected a function, got {describe(function)} of type {type(function).__name__}")
    k = checked_tasks(executor, tasks, f, mu, sigma, seed)
    cem = CEM(
        mu, sigma, n, elite_frac=elite_frac, smoothing=smoothing, noise_floor=noise_floor, bounds=bounds, tol=tol,
        backend=backend, seed=seed, noise=noise, antithetic=antithetic, fast_math=fast_math,
    )  # fmt: skip
    if check_every is None:
        check_every = 1 if cem._arrays.device.kind == "cpu" else DEVICE_CHECK_EVERY
    buffer = copy = None
    for iteration in range(1, iterations + 1):
        if executor is not None:
            run_tasks(executor, cem.ask_tasks(k), lambda task: (task.score, f), cem.tell_scores)
        else:
            samples = cem.ask(buffer)
            if cem._arrays.mutable:
                buffer = samples
            scores, samples, copy = cem._arrays.score(f, samples, lambda: cem._drawn(*cem._asked), copy)
            cem.tell(samples, scores)
        if callback is not None and callback(cem):
            return cem._result(is_stopped=True)
        if check_every and iteration % check_every == 0 and np.all(np.not_equal(cem.status, RUNNING)):
            break
    return cem.result()


def checked_settings(arrays: Arrays, n: int, elite_frac: Any, smoothing: Any, tol: Any) -> Settings:
    """The settings of a refit to `n` samples; TypeError or ValueError if one is out of range."""
    elites = round(checked_number("elite_frac", elite_frac, 0, 1) * n)
    if elites < 2:
        raise ValueError(
            f"elite_frac: expected at least 2 elites, which have a standard deviation, such as {2 / n:.3g} for n = {n},"
            f" got {elite_frac}, which are {elites}"
        )
    smoothing = checked_number("smoothing", smoothing, 0, 1)
    if smoothing == 0:
        raise ValueError("smoothing: expected 0 < smoothing <= 1, got 0, with which nothing is ever refitted")
    return Settings(arrays, elites, smoothing, None if tol is None else checked_number("tol", tol, 0, math.inf))


def checked_number(name: str, value: Any, low: float, high: float) -> float:
    """`value` as a finite float, ``low <= value <= high``; TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {describe(value)} of type {type(value).__name__}")
    number = float(value)
    if not (math.isfinite(number) and low <= number <= high):
        accepted = f"{name} >= {low}" if high == math.inf else f"{low} <= {name} <= {high}"
        raise ValueError(f"{name}: expected a finite number, {accepted}, got {value}")
    return number


def pair_of(bounds: Any) -> tuple[Any, Any]:
    """The lowest and the highest values; TypeError unless `bounds` is a pair or a `scipy.optimize.Bounds`."""
    if hasattr(bounds, "lb") and hasattr(bounds, "ub"):
        return np.squeeze(bounds.lb), np.squeeze(bounds.ub)  # SciPy makes vectors of length 1 of numbers.
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise TypeError(
            f"bounds: expected a pair (low, high) or a scipy.optimize.Bounds, got {describe(bounds)} of type"
            f" {type(bounds).__name__}"
        )
    low, high = bounds
    return low, high


def converted(arrays: Arrays, x: Any, shape: tuple[int, ...], seed: Any, backend: str = "auto") -> Any:
    """A mean or deviation in the library of `arrays`: a sample with mean `x`, and with deviations 0 of this shape."""
    options: dict[str, Any] = {"seed": seed, "dtype": arrays.dtype_name, "backend": backend}
    library = None if _is_scalar(x) else library_of("mu, sigma", x)
    if library is FOREIGN:
        own = sample(x, 0.0, 1, **options)[..., 0]
        x = own.reshape(getattr(x, "shape", own.shape))  # An object that has only `__dlpack__` has no `shape`.
    zeros = np.zeros(shape)
    return sample(x, zeros if library is HOST else arrays.put(zeros), 1, **options)[..., 0]


def placed(arrays: Arrays, name: str, value: Any, batch: tuple[int, ...], dims: tuple[int, ...]) -> Any:
    """Argument `name` as an array of shape ``(*batch, d)`` on the device.

    ValueError unless it is a number, or has shape `dims` or ``(*batch, *dims)``. Several `dims` broadcast. A last axis
    of length 1 may be additional.
    """
    array = arrays.cast(adopted(arrays, name, np.array(value, float) if isinstance(value, numbers.Real) else value))
    outer, shape = (*batch, *dims), tuple(array.shape)
    if shape == (*outer, 1):
        array, shape = array[..., 0], outer
    pairs = zip(reversed(shape), reversed(outer), strict=False)
    fits = len(shape) <= len(outer) and all(x in (1, y) for x, y in pairs)
    if not fits or (len(dims) == 1 and shape not in ((), dims, outer)):
        raise ValueError(f"{name}: expected a number or shape {either(dims, outer)}, got shape {shape}")
    return arrays.xp.broadcast_to(array, outer).reshape((*batch, math.prod(dims)))


def _is_scalar(x: Any) -> bool:
    return is_number(x) or getattr(x, "shape", None) == ()


def _state_array(name: str, value: Any) -> HostArray:
    """``state[name]`` as an array of numbers, or of Python's integers; TypeError otherwise."""
    try:
        if name in ("told", "seed", "offset"):  # NumPy would convert [2**63, 0] to float64.
            return np.array(value if isinstance(value, (int, list, tuple)) else as_numpy(name, value), object)
        array = as_numpy(name, value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"state[{name!r}]: expected numbers, got {describe(value)} ({error})") from error
    if array.dtype.kind not in "fiu":
        raise TypeError(f"state[{name!r}]: expected numbers, got {describe(value)}")
    return array


def _generator(seed: Any, library: Any, device: Any) -> Generator:
    """A generator with `seed`. For None, take a seed and offset as `sample` does, and derive a generator from them."""
    if seed is not None:
        return Generator(checked_integer("seed", seed, 0, WORD_64))
    parent_seed, offset = source_of(None, library, device).take(None)
    parent = Generator(parent_seed)
    parent.state = {"seed": parent_seed, "offset": 0, "spawned": offset}
    return parent.spawn(1)[0]


def _seeds_of_searches(seed: Any) -> HostArray | None:
    """The seeds of a vector in host memory, as uint64; None for a single seed."""
    if batch_of(seed) is None:
        return None
    if not isinstance(seed, (list, tuple)):
        integers = as_numpy("seed", seed)
        if library_of("seed", seed).device("seed", seed) != CPU:  # Kernels read them modulo 2**bits of their type.
            integers = integers.astype(f"u{integers.itemsize}")
        seed = integers
    words = host_words(seed)
    if words[:, 1:].any():
        raise ValueError(f"seed: expected seeds without offsets, which the iterations count, got {describe(seed)}")
    return np.ascontiguousarray(words[:, 0])


def _first(mask: HostArray) -> tuple[int, ...]:
    """The index of the first true element; empty if there is none."""
    indices: list[list[int]] = np.argwhere(mask)[:1].tolist()
    return tuple(indices[0]) if indices else ()


def _text(index: tuple[int, ...]) -> str:
    return ", ".join(map(str, index))


def _lowest(best: HostArray) -> HostArray:
    """The best score of each search, in a column of the history, whose rows after the end are NaN."""
    lowest: HostArray = np.fmin.reduce(best, axis=0, initial=math.inf)
    return lowest
