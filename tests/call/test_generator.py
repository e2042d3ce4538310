"""Generators: offsets depend on the state only, and the state survives copies, pickles and forks."""

import copy
import functools
import inspect
import operator
import pickle
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_python

import multisample
from multisample import Generator, sample
from multisample._randomness.torch_offsets import taker
from reference import stream

MU, SIGMA = np.array([0.0, 10.0], np.float32), np.array([1.0, 0.5], np.float32)
TORCH_MU, TORCH_SIGMA = torch.from_numpy(MU), torch.from_numpy(SIGMA)


def draw(**call: Any) -> np.ndarray[Any, Any]:
    return np.asarray(sample(MU, SIGMA, 5, **call))


def torch_draw(**call: Any) -> np.ndarray[Any, Any]:
    """Draw with tensors on the cpu backend, which every machine has."""
    return np.asarray(sample(TORCH_MU, TORCH_SIGMA, 5, backend="cpu", **call).numpy())


def expected(seed: int, offset: int) -> list[list[float]]:
    """The numbers of `draw` for this key, from the reference implementation."""
    patterns = stream.sample(MU.tolist(), SIGMA.tolist(), 5, seed=seed, offset=offset)
    values: list[list[float]] = np.array(patterns, np.uint32).view(np.float32).tolist()
    return values


def test_every_kind_of_call_takes_the_next_offset() -> None:
    generator = Generator(11)
    calls: list[Any] = [
        lambda: sample(MU, SIGMA, 5, generator=generator),
        lambda: sample(MU, SIGMA, 0, generator=generator),
        lambda: sample(MU[:0], SIGMA[:0], 5, generator=generator),
        lambda: sample([0.0], 1.0, 5, generator=generator, noise="shared"),
        lambda: sample(MU, SIGMA, 50_000, generator=generator),
        lambda: sample(MU, SIGMA, 5, generator=generator, dtype="float64", sample_offset=9, dim_offset=3),
        lambda: sample(MU, SIGMA, 5, generator=generator, out=np.empty((2, 5), np.float32)),
        lambda: sample(TORCH_MU, TORCH_SIGMA, 5, generator=generator),
    ]
    for offset, call in enumerate(calls):
        assert generator.offset == offset
        call()
    assert draw(generator=generator).tolist() == expected(11, len(calls))
    assert (generator.seed, generator.offset) == (11, len(calls) + 1)


@pytest.mark.parametrize("n", [5, 50_000])
def test_a_generator_raises_after_its_last_offset(n: int) -> None:
    generator = Generator(11)
    generator.state = {"seed": 11, "offset": 2**64 - 1, "spawned": 0}
    last = sample(MU, SIGMA, n, generator=generator)
    assert np.array_equal(last, sample(MU, SIGMA, n, seed=multisample.Key(11, 2**64 - 1)))
    at_the_end = generator.state
    assert at_the_end["offset"] == 2**64
    assert pickle.loads(pickle.dumps(generator)).state == at_the_end
    for out in (None, np.full((2, n), 7, np.float32)):
        with pytest.raises(OverflowError, match=r"generator: .*used up"):
            sample(MU, SIGMA, n, generator=generator, out=out)
        assert out is None or (out == 7).all()
    assert generator.state == at_the_end


def test_manual_seed_restarts_the_default_generator_and_returns_it() -> None:
    default = multisample.manual_seed(11)
    assert isinstance(default, Generator)
    assert [draw().tolist() for _ in range(2)] == [expected(11, 0), expected(11, 1)]
    default.spawn(3)
    assert multisample.manual_seed(11) is default
    assert default.state == {"seed": 11, "offset": 0, "spawned": 0}
    assert draw(seed=11).tolist() == expected(11, 0)  # Calls with a seed take no offset.
    assert sample(MU.tolist(), SIGMA.tolist(), 5).tolist() == expected(11, 0)
    sample(0.0, [1.0], 3)
    assert default.offset == 2


@pytest.mark.parametrize("source", ["the system", "torch"])
def test_a_random_seed_uses_all_64_bits(source: str) -> None:
    generator, take = torch.Generator().manual_seed(5), taker("cpu")
    seeds = {Generator().seed if source == "the system" else take(generator)[0] for _ in range(64)}
    assert len(seeds) == 64
    # The chance that one of 64 bits is equal in all 64 seeds is 2^-57.
    assert functools.reduce(operator.or_, seeds) == 2**64 - 1
    assert functools.reduce(operator.and_, seeds) == 0


def used() -> Generator:
    generator = Generator(2**63 + 11)
    generator._take()
    generator._take()
    generator.spawn(3)
    return generator


def test_properties_are_read_only_and_the_state_is_a_copy_with_plain_integers() -> None:
    generator = used()
    assert repr(generator) == f"Generator(seed={2**63 + 11}, offset=2)"
    for name in ("seed", "offset"):
        with pytest.raises(AttributeError):
            setattr(generator, name, 3)
    state = generator.state
    assert state == {"seed": 2**63 + 11, "offset": 2, "spawned": 3}
    assert {type(value) for value in state.values()} == {int}
    state["offset"] = 77
    assert generator.offset == 2


@pytest.mark.parametrize(("state", "error", "message"), [
    (None, TypeError, "state: .*seed, offset, spawned, got None"),
    ({"seed": 1, "offset": 2}, TypeError, "state: .*seed, offset, spawned"),
    ({"seed": 1, "offset": 2, "spawned": 3, "more": 4}, TypeError, "state: .*seed, offset, spawned"),
    ({"seed": 1.0, "offset": 2, "spawned": 3}, TypeError, r"state\['seed'\]: .*integer, got 1.0"),
    ({"seed": 1, "offset": 2, "spawned": None}, TypeError, r"state\['spawned'\]: .*integer, got None"),
    ({"seed": 2**64, "offset": 2, "spawned": 3}, ValueError, r"state\['seed'\]: .*2\*\*64, got 18446744073709551616"),
    ({"seed": 1, "offset": -1, "spawned": 3}, ValueError, r"state\['offset'\]: .*2\*\*64, got -1"),
    ({"seed": 1, "offset": 2, "spawned": -3}, ValueError, r"state\['spawned'\]: .*2\*\*64, got -3"),
])  # fmt: skip
def test_a_bad_state_raises_and_changes_nothing(state: Any, error: type[Exception], message: str) -> None:
    generator = used()
    before = generator.state
    with pytest.raises(error, match=f"^{message}"):
        generator.state = state
    assert generator.state == before


def restored(generator: Generator) -> Generator:
    other = Generator()
    other.state = generator.state
    return other


@pytest.mark.parametrize("duplicate", [
    copy.copy, copy.deepcopy, restored,
    *(lambda g, p=p: pickle.loads(pickle.dumps(g, p)) for p in range(pickle.HIGHEST_PROTOCOL + 1)),
])  # fmt: skip
def test_a_copy_continues_independently_from_the_original_state(duplicate: Any) -> None:
    generator = used()
    twin = duplicate(generator)
    assert type(twin) is Generator
    assert twin is not generator
    assert twin.state == generator.state
    np.testing.assert_array_equal(draw(generator=twin), draw(generator=generator))
    assert [child.seed for child in twin.spawn(2)] == [child.seed for child in generator.spawn(2)]
    draw(generator=twin)
    assert (twin.offset, generator.offset) == (4, 3)


def child_seed(seed: int, child: int) -> int:
    key = ((seed & stream.MASK32) ^ 0x73706177, (seed >> 32) ^ 0x6E6B6579)
    words = stream.philox4x32_10((child & stream.MASK32, child >> 32, 0, 0), key)
    return words[0] | words[1] << 32


@pytest.mark.parametrize("first", [0, 2**32 - 1])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 0x0123456789ABCDEF, 2**64 - 1])
def test_children_have_the_seeds_of_the_specification(seed: int, first: int) -> None:
    generator = Generator(seed)
    generator.state = {"seed": seed, "offset": 0, "spawned": first}
    expected = [{"seed": child_seed(seed, first + c), "offset": 0, "spawned": 0} for c in range(5)]
    assert [child.state for child in generator.spawn(5)] == expected
    assert generator.state == {"seed": seed, "offset": 0, "spawned": first + 5}


def test_children_are_counted_over_the_life_of_a_generator() -> None:
    generator = Generator(7)
    parts = [generator.spawn(2), generator.spawn(0), generator.spawn(1), generator.spawn(np.int64(2))]
    assert [len(part) for part in parts] == [2, 0, 1, 2]
    children = [child for part in parts for child in part]
    assert [child.seed for child in children] == [child.seed for child in Generator(7).spawn(5)]
    assert generator.state["spawned"] == 5
    grandchildren = [seed.seed for child in children for seed in child.spawn(3)]
    assert len({7, *(child.seed for child in children), *grandchildren}) == 21


def test_take_k_gives_the_keys_of_the_next_k_calls() -> None:
    generator, calls = used(), used()
    for k in (0, 1, 5, np.int64(5)):
        keys = generator.take(k)
        assert keys.dtype == np.uint64
        assert keys.shape == (k, 2)
        assert keys.tolist() == [list(calls.take()) for _ in range(k)]
        assert generator.state == calls.state
    batch = sample(MU, SIGMA, 5, seed=generator.take(3))
    assert batch.tolist() == [draw(generator=calls).tolist() for _ in range(3)]


def test_take_k_begins_with_the_offsets_that_failed_calls_put_back_and_ends_with_the_last_offset() -> None:
    generator = Generator(3)
    first, second = generator.take(), generator.take()
    generator._put_back(*second)
    generator._put_back(*first)
    assert generator.take(3).tolist() == [[3, 0], [3, 1], [3, 2]]
    assert generator.offset == 3
    generator.state = {"seed": 3, "offset": 2**64 - 3, "spawned": 0}
    with pytest.raises(OverflowError, match=r"^generator: all offsets of this seed are used up"):
        generator.take(4)
    assert generator.take(3)[:, 1].tolist() == [2**64 - 3, 2**64 - 2, 2**64 - 1]
    assert generator.offset == 2**64
    assert generator.take(0).shape == (0, 2)


# There is memory for the array of `take`, and for some children.
LITTLE_MEMORY = """
import resource, sys
import multisample
generator, method, k = multisample.Generator(7), sys.argv[1], int(sys.argv[2])
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 20 * 10**6, resource.RLIM_INFINITY))
try:
    getattr(generator, method)(k)
except MemoryError:
    print(generator.state)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("method", "k"), [("take", 10**6), ("spawn", 10**5)])
def test_a_call_that_runs_out_of_memory_changes_no_generator(method: str, k: int) -> None:
    # A process of its own has little free memory in its heap.
    assert run_python("-c", LITTLE_MEMORY, method, str(k)).stdout == f"{Generator(7).state}\n"


@pytest.mark.parametrize(
    "call",
    [Generator.take, lambda x: x.take(3), lambda x: x.spawn(2), lambda x: draw(generator=x)],
    ids=["take", "take k", "spawn", "sample"],
)
def test_a_call_without_room_on_the_stack_changes_no_generator(call: Callable[[Generator], Any]) -> None:
    call(Generator(7))
    limit, depth, finished = sys.getrecursionlimit(), len(inspect.stack(0)), []
    for room in range(2, 60):
        generator = Generator(7)
        try:
            sys.setrecursionlimit(depth + room)  # Raises if there is no room for itself.
            call(generator)
            finished.append(True)
        except RecursionError:
            finished.append(False)
        finally:
            sys.setrecursionlimit(limit)
        assert (generator.state != Generator(7).state) == finished[-1]
    assert finished[-1]
    assert not all(finished) or call is Generator.take  # From Python 3.12 on, its calls need no room of their own.


def test_take_k_skips_offsets_when_another_call_takes_one_between() -> None:
    """Another call, as of a signal handler, takes an offset after the returned one and before the new ones."""
    generator = Generator(3)
    generator._put_back(*generator.take())
    counts = generator._counts

    class Interrupted(list):  # type: ignore[type-arg]
        def pop(self, *at: Any) -> Any:
            offset = super().pop(*at)
            next(counts.offsets)
            return offset

    counts.returned = Interrupted(counts.returned)
    assert generator.take(3)[:, 1].tolist() == [4, 5, 6]


@pytest.mark.parametrize(("value", "error"), [
    (1.0, TypeError), ("1", TypeError), (None, TypeError), (True, TypeError), (-1, ValueError), (2**64, ValueError),
])  # fmt: skip
def test_bad_seeds_and_counts_raise_and_change_nothing(value: Any, error: type[Exception]) -> None:
    default, generator = multisample.manual_seed(11), used()
    default._take()
    before = default.state, generator.state
    calls: list[tuple[str, Any]] = [("seed", multisample.manual_seed), ("n_children", generator.spawn)]
    if value is not None:
        calls += [("seed", Generator), ("k", generator.take)]
    for name, call in calls:
        with pytest.raises(error, match=rf"^{name}: expected .*, got"):
            call(value)
    with pytest.raises(ValueError, match=r"^k: expected .*, got"):
        generator.take(2**59)
    with pytest.raises(ValueError, match=r"^generator: a graph-safe generator"):
        Generator(3, graph_safe=True).take(value)
    with pytest.raises(TypeError, match=r"^graph_safe: expected True or False"):
        Generator(3, graph_safe=1)  # type: ignore[arg-type]
    assert (default.state, generator.state) == before


def torch_seed(generator: torch.Generator | None) -> int:
    """One 64-bit draw from PyTorch's generator."""
    return int(torch.empty((), dtype=torch.int64).random_(-(2**63), None, generator=generator)) % 2**64


@pytest.mark.parametrize("default", [True, False])
def test_a_call_draws_its_seed_from_one_torch_generator_once(default: bool) -> None:
    torch.manual_seed(3)
    ours, twins = multisample.manual_seed(3), [torch.Generator().manual_seed(9) for _ in range(2)]
    before = torch.get_rng_state()
    seeds = [torch_seed(None if default else twins[1]) for _ in range(3)]
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    for seed in seeds:
        assert torch_draw(generator=None if default else twins[0]).tolist() == expected(seed, 0)
    assert torch.get_rng_state().equal(after)
    assert twins[0].get_state().equal(twins[1].get_state())
    assert ours.offset == 0
    draw()
    assert torch.get_rng_state().equal(after)
    assert ours.offset == 1


class CudaGenerator:
    """The methods of a CUDA torch.Generator that multisample uses."""

    device = torch.device("cuda", 1)

    def __init__(self, seed: int, offset: int) -> None:
        self.seed, self.offset = seed, offset

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


@pytest.mark.parametrize("seed", [5, 2**64 - 1, -1])
def test_a_torch_cuda_generator_gives_its_seed_and_advances_by_four(seed: int) -> None:
    generator = CudaGenerator(seed, 8)
    take = taker("cuda:1")
    taken = [take(generator) for _ in range(3)]
    assert taken == [(seed % 2**64, 8), (seed % 2**64, 12), (seed % 2**64, 16)]
    assert generator.offset == 20


def test_a_signal_handler_may_take_an_offset_of_a_torch_cuda_generator_during_a_take() -> None:
    signals, taken = [1, 2], []

    class Interrupted(CudaGenerator):
        def get_offset(self) -> int:
            offset = super().get_offset()
            if signals:
                signals.pop()
                taken.append(take(self))
            return offset

    generator, take = Interrupted(5, 8), taker("cuda:1")
    thread = threading.Thread(target=lambda: taken.append(take(generator)), daemon=True)
    thread.start()
    thread.join(60)
    assert taken == [(5, 8), (5, 12), (5, 16)]


def test_cuda_tensors_use_the_default_generator_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = CudaGenerator(5, 0), CudaGenerator(6, 40)
    initialised: list[bool] = []
    cuda = SimpleNamespace(default_generators=())

    def init() -> None:
        initialised.append(True)
        cuda.default_generators = generators

    cuda.init = init
    monkeypatch.setattr(torch, "cuda", cuda)
    take = taker("cuda:1")
    assert [take(None) for _ in range(2)] == [(6, 40), (6, 44)]
    assert [generator.offset for generator in generators] == [0, 48]
    assert initialised == [True]
