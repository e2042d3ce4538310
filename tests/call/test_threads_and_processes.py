"""Calls from threads, forked workers and exiting interpreters neither hang nor repeat numbers."""

import collections
import hashlib
import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import DEADLINE, forked, in_forks
from processes import run_python
from skip_rules import require

import multisample
from multisample import BackendUnavailableError, Generator, _backends, sample
from multisample._randomness import generator as _generator
from multisample.backends.system import threads

THREADS = 8
MU, SIGMA = np.array([0.0, 10.0, -5.0], np.float32), np.array([1.0, 0.5, 2.0], np.float32)
SMALL_N = 5
# Several work items of the cpu backend, the last of which is partial.
BIG_N = 100_003


def draw(n: int = SMALL_N, **call: Any) -> np.ndarray[Any, Any]:
    return np.asarray(sample(MU, SIGMA, n, **call))


def digest(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def printed(code: str, *args: str, **environment: str) -> str:
    """The output of `code` in a new interpreter."""
    run = run_python("-c", code, *args, seconds=DEADLINE, **environment)
    assert run.stderr == ""  # Errors of atexit handlers go there.
    return run.stdout


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make large calls use several threads, even on one processor."""
    monkeypatch.setenv("MULTISAMPLE_NUM_THREADS", "4")


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """The results of ``work(0)``, ``work(1)``, ... from threads that begin together."""
    barrier = threading.Barrier(THREADS, timeout=DEADLINE)

    def begin(thread: int) -> Any:
        barrier.wait()
        return work(thread)

    with ThreadPoolExecutor(THREADS) as executor:
        return [future.result(DEADLINE) for future in [executor.submit(begin, i) for i in range(THREADS)]]


@pytest.fixture
def switching() -> Iterator[None]:
    """Make Python switch threads as often as possible."""
    draw(BIG_N)  # Compile before: with these switches, compiling would take seconds longer.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("switching", "many_threads")
@pytest.mark.parametrize(("n", "calls"), [(SMALL_N, 200), (2000, 20), (BIG_N, 3)])
@pytest.mark.parametrize("default", [False, True])
def test_threads_take_each_offset_of_a_shared_generator_once(n: int, calls: int, default: bool) -> None:
    generator = multisample.manual_seed(11) if default else Generator(11)
    source = {} if default else {"generator": generator}
    drawn = in_threads(lambda thread: [digest(draw(n, **source)) for _ in range(calls)])
    alone = Generator(11)
    expected = [digest(draw(n, generator=alone)) for _ in range(THREADS * calls)]
    assert len(set(expected)) == len(expected)
    assert collections.Counter(part for parts in drawn for part in parts) == collections.Counter(expected)
    assert generator.offset == THREADS * calls
    # Within one thread, offsets ascend.
    places = {part: place for place, part in enumerate(expected)}
    for parts in drawn:
        assert [places[part] for part in parts] == sorted(places[part] for part in parts)


@pytest.mark.usefixtures("switching")
def test_threads_take_every_child_and_consecutive_offsets_of_a_shared_generator_once() -> None:
    generator = Generator(11)
    sizes = [1, 1, 7, 7, 64, 64, 500, 500]

    def work(thread: int) -> tuple[list[Any], list[int]]:
        rounds = [(generator.take(sizes[thread])[:, 1], generator.spawn(3)) for _ in range(50)]
        return [offsets for offsets, _ in rounds], [child.seed for _, children in rounds for child in children]

    taken, spawned = zip(*in_threads(work), strict=True)
    every = [offsets for of_thread in taken for offsets in of_thread]
    assert all((np.diff(offsets) == 1).all() for offsets in every)
    assert np.array_equal(np.sort(np.concatenate(every)), np.arange(50 * sum(sizes)))
    expected = [child.seed for child in Generator(11).spawn(THREADS * 150)]
    assert sorted(seed for seeds in spawned for seed in seeds) == sorted(expected)


@pytest.mark.parametrize("setting", ["1", "0007", str(2**63), "9" * 5000])
def test_any_positive_thread_setting_draws(monkeypatch: pytest.MonkeyPatch, new_choices: None, setting: str) -> None:
    expected = draw(BIG_N, seed=7)
    monkeypatch.setenv("MULTISAMPLE_NUM_THREADS", setting)
    assert threads.thread_count() == min(int(setting[:20]), 2**31 - 1)
    np.testing.assert_array_equal(draw(BIG_N, seed=7), expected)


@pytest.mark.parametrize("setting", ["0", "000", "-1", "1.5", " ", "2 threads", "\u00b2"])
def test_a_bad_thread_setting_raises(monkeypatch: pytest.MonkeyPatch, new_choices: None, setting: str) -> None:
    generator, out = Generator(1), np.empty((3, BIG_N), np.float32)
    draw(BIG_N, generator=generator, out=out)  # Makes a plan.
    out[...] = 7
    monkeypatch.setenv("MULTISAMPLE_NUM_THREADS", setting)
    with pytest.raises(ValueError, match=r"^MULTISAMPLE_NUM_THREADS.* positive integer, got ") as caught:
        threads.thread_count()
    assert repr(setting) in str(caught.value)
    for error in (ValueError, BackendUnavailableError):
        with pytest.raises(error, match="MULTISAMPLE_NUM_THREADS must be a positive integer, got"):
            draw(BIG_N, generator=generator, out=out)
        _backends.forget()
    assert (out == 7).all()
    assert generator.offset == 1
    status = multisample.list_backends()["cpu"]  # Never raises.
    assert not status.available
    assert any("MULTISAMPLE_NUM_THREADS" in reason and repr(setting) in reason for reason in status.reasons)
    monkeypatch.delenv("MULTISAMPLE_NUM_THREADS")
    assert 1 <= threads.thread_count() <= (os.cpu_count() or 1)


@forked
def test_forked_children_have_other_default_generators_and_equal_explicit_ones() -> None:
    default, generator = multisample.manual_seed(11), Generator(11)
    draw(), draw(generator=generator)

    def child() -> Any:
        before, drawn, after = default.state, digest(draw()), default.state
        multisample.manual_seed(5)
        return before, drawn, after, [digest(draw()), digest(draw(generator=generator)), generator.state]

    before = default.state
    children = in_forks(child, child, child)
    assert default.state == before
    assert generator.offset == 1
    equal = [digest(draw(seed=5)), digest(draw(generator=generator)), generator.state]
    assert [found for *_, found in children] == [equal] * 3
    assert len({11, *(state["seed"] for state, *_ in children)}) == 4
    assert len({digest(draw()), *(drawn for _, drawn, *_ in children)}) == 4
    for state, _, after, _ in children:
        assert (state["offset"], state["spawned"], after["offset"]) == (0, 0, 1)


@forked
@pytest.mark.usefixtures("switching")
def test_a_generator_in_use_during_a_fork_works_in_the_child() -> None:
    generator, done = Generator(11), threading.Event()

    def use() -> None:
        while not done.is_set():
            generator._take()
            draw()

    draw()  # The first call imports modules, whose locks a child would inherit.
    threads = [threading.Thread(target=use, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            in_forks(lambda: [generator._take(), digest(draw())])
    finally:
        done.set()
        for thread in threads:
            thread.join(DEADLINE)


# Draws wherever Python code runs during a fork: in hooks registered before and after multisample's, and, within these
# hooks, in a signal handler and in a thread.
FORK_HOOKS = """
import os, signal, sys, threading
import numpy as np

drawn = []

def draw(*_):
    mu, sigma = np.zeros(3, np.float32), np.ones(3, np.float32)
    for n in (5, 100_003):
        drawn.append(multisample.sample(mu, sigma, n)[0, 0])
    drawn.append(generator._take())
    generator._put_back(*generator._take())
    drawn.append(generator.spawn(1)[0].seed)

def draw_everywhere():
    draw()
    signal.raise_signal(signal.SIGUSR1)
    thread = threading.Thread(target=draw)
    thread.start()
    thread.join()

def register():
    os.register_at_fork(before=draw_everywhere, after_in_parent=draw_everywhere, after_in_child=draw_everywhere)

register()
import multisample
register()
generator = multisample.Generator(7)
signal.signal(signal.SIGUSR1, draw)
for count in ("1", "4"):
    os.environ["MULTISAMPLE_NUM_THREADS"] = count
    drawn.clear()
    draw()
    child = os.fork()
    draw()
    assert len(set(drawn)) == len(drawn) == 4 * (1 + 4 * 3 + 1), drawn
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_a_signal_handler_may_draw_at_each_point_of_a_call() -> None:
    """A trace function stands for the handler: both run between two steps of the interpreter."""
    generator = Generator(7)
    taken: list[Any] = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_globals.get("__name__") != _generator.__name__:
            return None
        frame.f_trace_opcodes = True
        sys.settrace(None)
        taken.append(generator._take()[1])
        taken.append(("child", generator.spawn(1)[0].seed))
        generator.state  # noqa: B018
        sys.settrace(trace)
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        mine = [generator._take()[1], ("child", generator.spawn(1)[0].seed)]
        generator._put_back(*generator._take())
        state = generator.state
    finally:
        sys.settrace(before)
    assert len(taken) > 20
    taken += mine
    assert len(set(taken)) == len(taken)
    assert state["offset"] > max(number for number in taken if isinstance(number, int)) - 40


SMALL_STACK = """
import threading

size = threading.stack_size(65536)
for dtype in ("float32", "float64"):
    def draw(seed):
        multisample.sample([0.0] * 30, 1.0, 10_007, seed=seed, dtype=dtype)

    for seed in range(8):
        draw(seed)
threading.stack_size(size)
"""

# Like gevent and eventlet, this runs the functions of threads on the calling thread.
PATCHED_THREADS = """
import _thread, threading
def start(function, args, kwargs={}):
    function(*args, **kwargs)
    return 1
_thread.start_new_thread = threading._start_new_thread = start
threading.Thread.start = lambda thread: thread.run()
threading.Thread.is_alive = lambda thread: False
import multisample
for seed in range(8):
    multisample.sample([0.0] * 3, 1.0, 100_003, seed=seed)
"""


@forked
@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("program", [FORK_HOOKS + SMALL_STACK + PATCHED_THREADS, PATCHED_THREADS])
def test_large_matrices_can_be_drawn_in_forks_on_small_stacks_and_where_threads_are_greenlets(program: str) -> None:
    """The first program patches threads after it imports multisample, the second before."""
    for dtype in ("float32", "float64"):  # Compile the kernels.
        draw(dtype=dtype), draw(BIG_N, dtype=dtype)
    printed(program, MULTISAMPLE_NUM_THREADS="4", PYTHONWARNINGS="ignore")


# The child draws by torch_ext, which is not yet loaded, on PyTorch's threads, which its parent has used.
LATE_LOAD = """
import os, signal, sys, torch
if sys.argv[1] == "parent":
    import multisample
torch.set_num_threads(2)
torch.exp(torch.zeros(10**6))
grad = torch.ones(1000, 2000)
child = os.fork()
if child == 0:
    signal.alarm(int(sys.argv[2]))  # A hang ends.
    import multisample
    mu = torch.zeros(1000, requires_grad=True)
    x = multisample.sample(mu, 1.0, 2000, seed=7, backend="torch_ext")
    x.backward(grad)
    expected = multisample.sample(mu.detach().numpy(), 1.0, 2000, seed=7)
    assert (x.detach().numpy() == expected).all() and mu.grad.tolist() == [2000] * 1000
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@forked
@pytest.mark.parametrize("imported_in", ["parent", "child"])
def test_a_forked_child_loads_torch_ext_after_its_parent_used_threads_of_pytorch(imported_in: str) -> None:
    require("torch_ext", on_cuda=False)
    arguments = "-c", LATE_LOAD, imported_in, str(DEADLINE // 2)
    run_python(*arguments, seconds=DEADLINE)  # Builds torch_ext, and compiles the kernels.
    printed(*arguments[1:], PYTHONWARNINGS="ignore")


# Forks while a thread compiles. Nothing imported logging before multisample.
COMPILING = """
import os, sys, threading, time
import multisample
assert "logging" not in sys.modules
import multisample.backends.kernels.cpu.launcher  # A child cannot finish an import that a thread of its parent began.
from numba.core.compiler_lock import global_compiler_lock
draw = lambda: multisample.sample([0.0] * 3, 1.0, 5, seed=7)
thread = threading.Thread(target=draw)
thread.start()
while thread.is_alive() and global_compiler_lock._lock.acquire(blocking=False):
    global_compiler_lock._lock.release()
    time.sleep(0.001)
for _ in range(5):
    time.sleep(0.1)
    child = os.fork()
    if child == 0:
        os._exit(len(draw()) == 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
"""


@forked
def test_a_fork_waits_for_a_thread_that_compiles(tmp_path: Path) -> None:
    run_python("-c", COMPILING, seconds=DEADLINE, MULTISAMPLE_CACHE_DIR=str(tmp_path), PYTHONWARNINGS="ignore")


@pytest.mark.slow
@forked
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_workers_of_every_start_method_draw_equal_bits(method: str, many_threads: None) -> None:
    expected = [draw(BIG_N, seed=seed) for seed in range(4)]
    generators = Generator(11).spawn(4)
    spawned = [draw(generator=child) for child in Generator(11).spawn(4)]
    with ProcessPoolExecutor(2, multiprocessing.get_context(method)) as executor:
        seeded = [executor.submit(sample, MU, SIGMA, BIG_N, seed=seed) for seed in range(4)]
        unseeded = [executor.submit(sample, MU, SIGMA, SMALL_N, generator=child) for child in generators]
        by_default = [executor.submit(sample, MU, SIGMA, SMALL_N) for _ in range(4)]
        for futures, arrays in ((seeded, expected), (unseeded, spawned)):
            for future, array in zip(futures, arrays, strict=True):
                np.testing.assert_array_equal(future.result(DEADLINE), array)
        assert len({digest(future.result(DEADLINE)) for future in by_default}) == 4


# Import Numba first: SciPy, which it may import, imports concurrent.futures, which fails at interpreter exit.
AT_EXIT = """
import atexit, hashlib, json, sys
import numba
import numpy as np
from multisample import sample

def draw(n):
    mu, sigma = np.array([0, 10, -5], np.float32), np.array([1, 0.5, 2], np.float32)
    print(hashlib.sha256(sample(mu, sigma, n, seed=3).tobytes()).hexdigest(), flush=True)

before, at_exit = json.loads(sys.argv[1])
atexit.register(lambda: [draw(n) for n in at_exit])
for n in before:
    draw(n)
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", [[], [SMALL_N, BIG_N]], ids=["nothing", "some"])
def test_matrices_can_be_drawn_while_the_interpreter_exits(before: list[int]) -> None:
    sizes = [BIG_N, SMALL_N, BIG_N]
    drawn = printed(AT_EXIT, json.dumps([before, sizes]), MULTISAMPLE_NUM_THREADS="4").split()
    assert drawn == [digest(draw(n, seed=3)) for n in before + sizes]
