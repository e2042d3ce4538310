"""A run on an executor has the bits of a run without one, and its tasks return only scores. Errors; interruptions."""

import multiprocessing
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from scored_functions import START, assert_same, dies, fails, run, sphere, torch_sphere
from tables import slow_but

import multisample
from multisample import cem
from multisample.cem import CEM, Task
from multisample.cem._tasks import redraw

D, N = 6, 200
OPTIONS: list[dict[str, Any]] = [
    {}, {"bounds": (-3.0, 3.5)}, {"antithetic": True, "smoothing": 0.7}, {"noise": "shared"},
    {"noise_floor": lambda t: 1 / t, "elite_frac": 0.5},
]  # fmt: skip


def processes() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def loky() -> Executor:
    executor: Executor = pytest.importorskip("loky").ProcessPoolExecutor(2)
    return executor


@pytest.fixture(
    scope="module",
    params=[lambda: ThreadPoolExecutor(3), processes, pytest.param(loky, marks=pytest.mark.slow)],
    ids=["threads", "processes", "loky"],
)
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with request.param() as executor:
        yield executor


def overwriting(x: Any) -> Any:
    """`sphere`, which overwrites its samples, and whose scores are a view of them."""
    scores = (sphere if isinstance(x, np.ndarray) else torch_sphere)(x)
    x[...] = 1e9
    x[-1] = scores
    return x[-1]


def test_a_function_may_overwrite_its_samples() -> None:
    for options in OPTIONS:
        expected = run(**options)
        with ThreadPoolExecutor(2) as executor:
            assert_same(run(overwriting, executor=executor, **options), expected)
        assert_same(run(overwriting, **options), expected)
    torch = pytest.importorskip("torch")
    start, own, state = torch.from_numpy(START), cem.start(START, 2.0), cem.start(START, 2.0)
    for bounds in (None, (-3.0, 3.5)):
        expected = run(torch_sphere, start, bounds=bounds)
        for inference in (False, True):
            with torch.inference_mode(inference):
                assert_same(run(overwriting, start, bounds=bounds), expected)
        own, state = (cem.step(x, 1, f, N, bounds=bounds) for x, f in ((own, sphere), (state, overwriting)))
        assert own.mu.tobytes() == state.mu.tobytes()


@pytest.mark.parametrize("options", OPTIONS)
def test_the_number_of_tasks_does_not_matter(options: dict[str, Any]) -> None:
    expected = run(**options)
    with ThreadPoolExecutor(3) as executor:
        for tasks in (2, 7, N, None):
            result = run(executor=executor, tasks=tasks, **options)
            assert_same(result, expected)
            assert result.nfev == expected.nfev


def test_the_executor_does_not_matter(executor: Executor) -> None:
    assert_same(run(mu=np.linspace(-1, 1, 2000), executor=executor, tasks=3), run(mu=np.linspace(-1, 1, 2000)))
    assert_same(run(n=3, elite_frac=0.9, executor=executor, tasks=5), run(n=3, elite_frac=0.9))
    tensor = pytest.importorskip("torch").from_numpy(START)
    assert_same(run(torch_sphere, tensor, executor=executor, tasks=3), run(torch_sphere, tensor))
    if isinstance(executor, ThreadPoolExecutor):
        for f in (lambda x: np.where(x[0] > 1, np.nan, sphere(x)), lambda x: np.rint(sphere(x)).astype(int).tolist()):
            assert_same(run(f, executor=executor, tasks=5), run(f))


@settings(max_examples=40)
@given(
    d=st.sampled_from([1, 3, 700, 5000]), n=st.integers(2, 60), antithetic=st.booleans(),
    bounds=st.sampled_from([None, (-1.0, 1.5)]), data=st.data(),
)  # fmt: skip
def test_elites_are_drawn_again(d: int, n: int, antithetic: bool, bounds: Any, data: Any) -> None:
    which = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, unique=True)))
    search = CEM(np.zeros(d), 1.0, n, elite_frac=1.0, seed=7, antithetic=antithetic, bounds=bounds)
    tasks = search.ask_tasks(data.draw(st.integers(1, 4)))
    samples = np.concatenate([task.draw() for task in tasks], axis=1)
    assert samples.shape == (d, n)
    assert redraw(tasks[0], which).tobytes() == samples[:, which].tobytes()


def test_a_task_and_its_scores_are_small() -> None:
    d, n, k = 4000, 5_000, 8
    task = CEM(np.zeros(d, np.float32), 1.0, n, seed=7).ask_tasks(k)[0]
    assert len(pickle.dumps(task)) < 16 * d + 1000
    assert len(pickle.dumps(task.score(sphere))) < 16 * n / k + 1000


def test_a_task_draws_by_one_thread(monkeypatch: pytest.MonkeyPatch, thread_counts: Callable[[], list[int]]) -> None:
    monkeypatch.setenv("MULTISAMPLE_NUM_THREADS", "4")
    search = CEM(np.zeros(100), 1.0, 50_000, seed=7)
    search.ask()
    assert max(thread_counts()) > 1
    search.ask_tasks(1)[0].draw()
    assert max(thread_counts(), default=1) == 1


def test_tasks_of_several_generations_are_told_in_any_order_to_any_run() -> None:
    expected, search = CEM(START, 2.0, N, seed=7), CEM(START, 2.0, N, seed=7)
    first, second = expected.ask(), expected.ask()
    expected.tell(second, sphere(second))
    expected.tell(first, sphere(first))
    one, two = search.ask_tasks(3), search.ask_tasks(2)
    restored = CEM(START, 2.0, N)
    restored.state = search.state
    for taker in (search, restored):
        for position, task in enumerate((one[0], two[1], one[2], two[0], one[1])):
            assert taker.result().nit == (position > 3)
            taker.tell_scores(pickle.loads(pickle.dumps(task)), task.score(sphere))
        assert_same(taker.result(), expected.result())


def test_a_failed_refit_loses_no_scores() -> None:
    variances = iter(["wrong", 0.5])
    search = CEM(START, 2.0, N, seed=7, noise_floor=lambda t: next(variances))
    *others, last = search.ask_tasks(4)
    for task in others:
        search.tell_scores(task, task.score(sphere))
    with pytest.raises(TypeError, match="noise_floor"):
        search.tell_scores(last, last.score(sphere))
    search.tell_scores(last, last.score(sphere))
    assert search.result().nit == 1


def test_wrong_tasks_and_scores_are_refused() -> None:
    search = CEM(START, 2.0, N, seed=7)
    task, other = search.ask_tasks(2)
    scores = task.score(sphere)
    for wrong, error, words in (
        (scores[1:], ValueError, r"scores: expected shape \(100,\), got \(99,\)"),
        (scores + 1j, TypeError, "scores: expected numbers"),
        (None, TypeError, "scores: "),
    ):
        with pytest.raises(error, match=words):
            search.tell_scores(task, wrong)
    with pytest.raises(ValueError, match=r"f: expected shape \(100,\), got \(1,\)"):
        task.score(lambda _: [1.0])
    with pytest.raises(TypeError, match="task: expected a Task from ask_tasks"):
        search.tell_scores(scores, scores)  # type: ignore[arg-type]
    for foreign in (CEM(START, 2.0, N, seed=8), CEM(START, 2.0, N + 1, seed=7), CEM(START[1:], 2.0, N, seed=7)):
        with pytest.raises(ValueError, match="task: expected a task of this run"):
            search.tell_scores(foreign.ask_tasks(2)[0], scores)
    search.tell_scores(task, scores)
    with pytest.raises(ValueError, match="task: expected a task whose scores are not known"):
        search.tell_scores(task, scores)
    search.tell_scores(other, other.score(sphere))
    with pytest.raises(ValueError, match="task: expected a task whose scores are not known"):
        search.tell_scores(other, scores)
    assert search.result().nit == 1


def test_a_task_that_raises_ends_the_run_and_its_state_continues(executor: Executor) -> None:
    states: list[Any] = []

    def callback(search: CEM[Any]) -> None:
        states.append(search.state)
        if len(states) == 3:
            search._state = search._state._replace(mu=search._state.mu + 100)  # The next samples make `fails` raise.

    with pytest.raises(ArithmeticError, match="a score is missing"):
        run(fails, executor=executor, tasks=3, callback=callback, bounds=(-4, 200))
    assert len(states) == 3
    search = CEM(START, 2.0, N, bounds=(-4, 200))
    search.state = states[-1]
    for _ in range(5):
        for task in search.ask_tasks(3):
            search.tell_scores(task, task.score(sphere))
    assert_same(search.result(), run(bounds=(-4, 200)))


@pytest.mark.parametrize("make", slow_but([processes], [processes, loky]))
def test_a_process_that_dies_is_a_clear_error(make: Callable[[], Executor]) -> None:
    with make() as executor:
        for f in (dies, sphere):
            with pytest.raises(BrokenExecutor, match=r"^executor: expected one that runs all tasks, got .* which lost"):
                run(f, executor=executor, tasks=2)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
def test_ctrl_c_cancels_what_is_pending() -> None:
    release, main, calls = threading.Event(), threading.main_thread().ident, []
    assert main is not None

    def interrupts(x: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            time.sleep(0.2)  # The main thread now waits for scores.
            signal.pthread_kill(main, signal.SIGINT)
            release.wait(60)
        return sphere(x)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # A background job begins with SIGINT ignored.
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(KeyboardInterrupt):
            run(interrupts, executor=executor, tasks=10)
        release.set()
        signal.signal(signal.SIGINT, handler)
    assert len(calls) <= 2


class Refusing(ThreadPoolExecutor):
    def submit(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("a task was submitted")


class RefusingProcesses(ProcessPoolExecutor):
    submit = Refusing.submit  # type: ignore[assignment]


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ({"executor": ThreadPoolExecutor}, TypeError, "executor: expected a concurrent.futures.Executor, got <class"),
    ({"tasks": 2}, TypeError, "tasks: expected an executor too"),
    ({"executor": Refusing(1), "tasks": 0}, ValueError, "tasks: expected 1 <= tasks"),
    ({"executor": Refusing(1), "n": 1}, ValueError, "n: "),
    (
        {"executor": RefusingProcesses(1), "f": lambda x: x},
        TypeError,
        "f: expected a function that RefusingProcesses can send to other processes, got <function .*lambda",
    ),
])  # fmt: skip
def test_wrong_arguments_are_refused_before_anything_is_submitted(arguments: Any, error: Any, words: str) -> None:
    state = multisample._randomness.generator.DEFAULT_GENERATOR.state
    with pytest.raises(error, match=words):
        cem.minimize(**{"f": sphere, "mu": START, "sigma": 2.0, "n": N, **arguments})
    assert multisample._randomness.generator.DEFAULT_GENERATOR.state == state


@pytest.mark.slow
def test_loky_sends_what_cloudpickle_can_and_refuses_the_rest() -> None:
    package = pytest.importorskip("loky")
    with package.ProcessPoolExecutor(1) as executor:
        assert_same(run(lambda x: np.square(x).sum(axis=0), executor=executor), run(lambda x: np.square(x).sum(axis=0)))
        lock = threading.Lock()
        with pytest.raises(TypeError, match=r"f: expected a function that .* can send to other processes"):
            run(lambda x: lock, executor=executor)


def test_arrays_of_jax_are_refused() -> None:
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):
        mu = jax.numpy.asarray(START)
        with pytest.raises(TypeError, match="arrays of NumPy, PyTorch or CuPy, with tasks, got an array of JAX"):
            run(mu=mu, executor=Refusing(1))
        with pytest.raises(TypeError, match="got an array of JAX"):
            CEM(mu, 1.0, N, seed=7).ask_tasks(2)


def test_windows_cover_the_generation() -> None:
    search = CEM(START, 2.0, N, seed=7)
    for wrong, error in ((0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="k: expected"):
            search.ask_tasks(wrong)
    assert search.state["offset"] == 0
    for k in (1, 3, 99, N):
        tasks = CEM(START, 2.0, N, seed=7).ask_tasks(k)
        assert len(tasks) == min(k, N // 2)
        assert all(isinstance(task, Task) and task.count >= 2 for task in tasks)
        assert [task.start for task in tasks] == [sum(task.count for task in tasks[:i]) for i in range(len(tasks))]
        assert sum(task.count for task in tasks) == N
