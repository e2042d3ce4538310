"""CUDA graphs: captured calls with a graph-safe generator draw with a new offset in each replay."""

import copy
import functools
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cuda_memory import ToArray
from skip_rules import device_count, require
from tables import ONE_OPTION

import multisample
from multisample import Generator, sample

D, N = 37, 1000
REPLAYS = 5


@pytest.fixture
def cupy() -> Any:
    module = pytest.importorskip("cupy")
    if device_count() == 0:
        pytest.skip("no CUDA device")
    return module


@pytest.fixture(params=("torch_ext", "cupy", "numba"))
def cuda_backend(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return str(request.param)


@pytest.fixture
def stream(cupy: Any) -> Iterator[Any]:
    """A new stream, which is current during the test."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        yield stream
    stream.synchronize()


def generator_at(seed: int, offset: int) -> Generator:
    generator = Generator(seed)
    generator.state = {"seed": seed, "offset": offset, "spawned": 0}
    return generator


class Call:
    """A call of CuPy arrays with `out`, which can be captured. All its arrays are ready on every stream."""

    def __init__(self, cupy: Any, backend: str, **options: Any) -> None:
        self.backend, self.options = backend, options
        self.mu, self.sigma = cupy.linspace(-3, 3, D, dtype=np.float32), cupy.linspace(0, 2, D, dtype=np.float32)
        shape = (N, D) if options.get("layout") == "nd" else (D, N)
        self.out = cupy.zeros(shape, options.get("dtype", "float32"))
        cupy.cuda.Device().synchronize()

    def __call__(self, **where: Any) -> Any:
        return sample(self.mu, self.sigma, N, backend=self.backend, out=self.out, **self.options, **where)

    def bits(self, **where: Any) -> Any:
        """The bytes of `out`, after an eager call if there are arguments."""
        return (self(**where) if where else self.out).get().tobytes()


def captured(stream: Any, call: Callable[[], object]) -> Any:
    stream.begin_capture()
    try:
        call()
    finally:
        graph = stream.end_capture()
    return graph


FLOAT16 = {"dtype": "float16", "layout": "nd", "antithetic": True}
CALLS = ONE_OPTION | {"fast": {"fast_math": True}, "float64": {"dtype": "float64"}, "float16": FLOAT16}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_replay_k_equals_eager_call_k(cupy: Any, stream: Any, cuda_backend: str, options: dict[str, Any]) -> None:
    call, generator, eager = Call(cupy, cuda_backend, **options), Generator(7, graph_safe=True), Generator(7)
    expected = [call.bits(generator=eager) for _ in range(REPLAYS + 3)]
    assert len(set(expected)) == len(expected)
    assert [call.bits(generator=generator) for _ in range(2)] == expected[:2]
    graph = captured(stream, lambda: call(generator=generator))
    assert generator.offset == 2  # A capture takes no offset.
    for k in range(REPLAYS):
        call.out.fill(0)
        graph.launch(stream)
        assert call.bits() == expected[2 + k], k
    assert generator.offset == 2 + REPLAYS
    # Eager calls continue after the offsets of the replays.
    assert call.bits(generator=generator) == expected[2 + REPLAYS]


def test_two_calls_in_a_graph_take_two_offsets(cupy: Any, stream: Any, cuda_backend: str) -> None:
    first, second = Call(cupy, cuda_backend), Call(cupy, cuda_backend, noise="shared")
    generator = Generator(3, graph_safe=True)
    first(generator=generator)
    second(generator=generator)

    def both() -> None:
        first(generator=generator)
        second(generator=generator)

    graph, eager = captured(stream, both), generator_at(3, 2)
    for _ in range(3):
        graph.launch(stream)
        got = first.bits(), second.bits()
        assert got == (first.bits(generator=eager), second.bits(generator=eager))


def test_replays_without_a_wait_or_on_another_stream_take_offsets(cupy: Any, stream: Any, cuda_backend: str) -> None:
    call, generator, replays = Call(cupy, cuda_backend), Generator(5, graph_safe=True), 3000
    call(generator=generator)
    graph = captured(stream, lambda: call(generator=generator))
    for _ in range(replays):
        graph.launch(stream)
    last = call.bits()
    assert generator.offset == 1 + replays
    assert last == call.bits(seed=multisample.Key(5, replays))
    other = cupy.cuda.Stream(non_blocking=True)
    for k in range(1, 4):
        graph.launch(other)
        other.synchronize()
        assert call.bits() == call.bits(seed=multisample.Key(5, replays + k))


def test_a_cuda_core_graph_draws_new_numbers_in_each_replay(cupy: Any, cuda_backend: str) -> None:
    core = pytest.importorskip("cuda.core")
    device = core.Device()
    device.set_current()
    stream = device.create_stream()
    call, generator = Call(cupy, cuda_backend), Generator(11, graph_safe=True)
    with cupy.cuda.Stream.from_external(stream):
        call(generator=generator)
        stream.sync()
        builder = stream.create_graph_builder()
        builder.begin_building()
        call(generator=generator)
        graph = builder.end_building().complete()
        eager = generator_at(11, 1)
        for _ in range(3):
            graph.launch(stream)
            got = call.bits()
            assert got == call.bits(generator=eager)


@pytest.mark.parametrize("options", [{}, {"dtype": "float64"}], ids=["default dtype", "float64"])
def test_capturing_a_host_side_or_an_unused_generator_raises(
    cupy: Any, stream: Any, cuda_backend: str, options: dict[str, Any]
) -> None:
    call, own, unused = Call(cupy, cuda_backend, **options), Generator(1), Generator(1, graph_safe=True)
    multisample.manual_seed(2)
    call(seed=1)
    host_side = r"^generator: expected multisample.Generator\(seed, graph_safe=True\)"
    unused_before = "generator: expected a graph-safe generator that has been used before"
    for where, message in (({"generator": own}, host_side), ({}, host_side), ({"generator": unused}, unused_before)):
        before = own.offset, multisample.manual_seed(2).offset

        def refused(where: dict[str, Any] = where, message: str = message) -> None:
            with pytest.raises(RuntimeError, match=message):
                call(**where)

        captured(stream, refused)
        assert (own.offset, multisample.manual_seed(2).offset) == before
    # Calls after the failed capture succeed.
    for generator in (own, unused):
        assert generator.offset == 0
        assert call.bits(generator=generator) == call.bits(seed=1)


def test_the_state_can_be_assigned_between_replays(cupy: Any, stream: Any, cuda_backend: str) -> None:
    call, generator = Call(cupy, cuda_backend), Generator(21, graph_safe=True)
    call(generator=generator)
    graph = captured(stream, lambda: call(generator=generator))
    for offset in (0, 2**32 - 1, 2**32, 2**64 - 2, 2**64 - 1):
        generator.state = {**generator.state, "offset": offset}
        graph.launch(stream)
        assert call.bits() == call.bits(seed=multisample.Key(21, offset))
        assert generator.offset == (offset + 1) % 2**64  # On the device it wraps to 0.


def test_assigning_another_seed_after_a_capture_raises(cupy: Any, stream: Any, cuda_backend: str) -> None:
    call, generator = Call(cupy, cuda_backend), Generator(7, graph_safe=True)
    call(generator=generator)
    generator.state = {"seed": 8, "offset": 2, "spawned": 0}
    captured(stream, lambda: call(generator=generator))
    with pytest.raises(ValueError, match=r"^state\['seed'\]: expected 8, got 9: a CUDA graph has captured"):
        generator.state = {"seed": 9, "offset": 5, "spawned": 0}
    assert generator.state == {"seed": 8, "offset": 2, "spawned": 0}
    assert call.bits(generator=generator) == call.bits(seed=multisample.Key(8, 2))


def test_a_graph_may_outlive_its_generator(cupy: Any, stream: Any, cuda_backend: str) -> None:
    call, generator = Call(cupy, cuda_backend), Generator(7, graph_safe=True)
    call(generator=generator)
    graph = captured(stream, functools.partial(call, generator=generator))
    del generator
    gc.collect()
    # Memory pools reuse freed memory for the next arrays of its size.
    new_arrays = [cupy.zeros(1, np.int64) for _ in range(256)]
    for k in range(REPLAYS):
        graph.launch(stream)
        assert call.bits() == call.bits(seed=multisample.Key(7, 1 + k)), k
    assert not any(other.get()[0] for other in new_arrays)


def test_a_graph_keeps_the_memory_of_converted_vectors(cupy: Any, stream: Any, cuda_backend: str) -> None:
    call = Call(cupy, cuda_backend)
    call.mu = cupy.arange(D, dtype=np.int32)
    cupy.cuda.Device().synchronize()
    expected = call.bits(seed=7)
    graph = captured(stream, functools.partial(call, seed=7))
    new_arrays = [cupy.zeros(D // 2 + 2) for _ in range(256)]
    call.out.fill(0)
    graph.launch(stream)
    assert call.bits() == expected
    assert not any(other.get().any() for other in new_arrays)


def test_copies_continue_from_the_device_offset(cupy: Any, cuda_backend: str) -> None:
    call, generator = Call(cupy, cuda_backend), Generator(4, graph_safe=True)
    call(generator=generator)
    copies = [copy.copy(generator), copy.deepcopy(generator), pickle.loads(pickle.dumps(generator))]
    expected = call.bits(generator=generator)
    for other in copies:
        assert other.graph_safe
        assert other.state == {"seed": 4, "offset": 1, "spawned": 0}
        assert call.bits(generator=other) == expected
    assert generator.offset == 2


def test_empty_results_take_one_offset_and_refused_calls_none(cupy: Any, cuda_backend: str) -> None:
    call, generator = Call(cupy, cuda_backend), Generator(4, graph_safe=True)
    sample(call.mu, call.sigma, 0, backend=cuda_backend, generator=generator)
    sample(call.mu[:0], call.sigma[:0], 5, backend=cuda_backend, generator=generator)
    with pytest.raises(ValueError, match=r"^out: "):
        sample(call.mu, call.sigma, N + 1, backend=cuda_backend, generator=generator, out=call.out)
    assert generator.offset == 2


def test_calls_from_several_threads_take_different_offsets(cupy: Any, stream: Any, cuda_backend: str) -> None:
    calls, generator, rounds = [Call(cupy, cuda_backend) for _ in range(4)], Generator(6, graph_safe=True), 50
    calls[0](generator=generator)
    got: list[bytes] = []

    def draw(call: Call) -> None:
        with stream:
            got.extend(call(generator=generator).get().tobytes() for _ in range(rounds))

    threads = [threading.Thread(target=draw, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert generator.offset == 1 + rounds * len(calls)
    eager = generator_at(6, 1)
    assert sorted(got) == sorted(calls[0].bits(generator=eager) for _ in range(rounds * len(calls)))


@pytest.mark.parametrize("kind", ["torch", "numba"])
def test_arrays_of_other_libraries_are_captured_on_their_stream(cupy: Any, bits: ToArray, kind: str) -> None:
    cuda_backend = {"torch": "torch_ext", "numba": "numba"}[kind]
    require(cuda_backend)
    stream, generator, eager = cupy.cuda.Stream(non_blocking=True), Generator(8, graph_safe=True), Generator(8)
    host = np.linspace(-1, 1, D, dtype=np.float32), np.linspace(0, 1, D, dtype=np.float32)
    if kind == "torch":
        torch = pytest.importorskip("torch")
        mu, sigma = (torch.as_tensor(x, device="cuda") for x in host)
        out = torch.zeros((D, N), device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        sample(mu, sigma, N, backend=cuda_backend, out=out, generator=generator)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            sample(mu, sigma, N, backend=cuda_backend, out=out, generator=generator)
        replay: Callable[[], object] = graph.replay
    else:
        from numba import cuda

        own = cuda.external_stream(stream.ptr)
        mu, sigma = (cuda.to_device(x, stream=own) for x in host)
        out = cuda.device_array((D, N), np.float32, stream=own)
        sample(mu, sigma, N, backend=cuda_backend, out=out, generator=generator)
        stream.synchronize()
        graph = captured(stream, lambda: sample(mu, sigma, N, backend=cuda_backend, out=out, generator=generator))
        replay = lambda: graph.launch(stream)  # noqa: E731
    sample(*host, N, generator=eager)
    for _ in range(3):
        replay()
        cupy.cuda.Device().synchronize()
        assert np.array_equal(bits(out), bits(sample(*host, N, generator=eager)))


def test_the_default_generator_of_torch_cannot_be_captured() -> None:
    require("torch_ext")
    torch = pytest.importorskip("torch")
    mu, sigma, out = torch.zeros(D, device="cuda"), torch.ones(D, device="cuda"), torch.zeros((D, N), device="cuda")
    sample(mu, sigma, N, backend="torch_ext", out=out)
    offset = torch.cuda.default_generators[0].get_offset()
    stream = torch.cuda.Stream()
    cupy = pytest.importorskip("cupy")
    with torch.cuda.stream(stream):
        capturing = cupy.cuda.Stream.from_external(stream)

        def refused() -> None:
            with pytest.raises(RuntimeError, match="graph_safe=True"):
                sample(mu, sigma, N, backend="torch_ext", out=out)

        captured(capturing, refused)
    assert torch.cuda.default_generators[0].get_offset() == offset


@pytest.mark.skipif(device_count() < 2, reason="one CUDA device")
def test_a_graph_safe_generator_is_bound_to_the_device_of_its_first_call(cupy: Any, cuda_backend: str) -> None:
    call, generator = Call(cupy, cuda_backend), Generator(1, graph_safe=True)
    call(generator=generator)
    with cupy.cuda.Device(1):
        elsewhere = Call(cupy, cuda_backend)
        with pytest.raises(ValueError, match="generator: expected arrays on cuda:0"):
            elsewhere(generator=generator)
    assert generator.offset == 1


def test_an_unused_graph_safe_generator_has_a_host_offset() -> None:
    generator = Generator(7, graph_safe=True)
    generator.state = {"seed": 8, "offset": 3, "spawned": 0}
    assert (generator.seed, generator.offset) == (8, 3)
    assert repr(generator) == "Generator(seed=8, graph_safe=True)"
    other = pickle.loads(pickle.dumps(generator))
    assert other.graph_safe and other.state == generator.state
    (child,) = generator.spawn(1)
    (plain,) = Generator(8).spawn(1)
    assert child.graph_safe and not plain.graph_safe and child.seed == plain.seed
