"""Order of streams: a kernel runs after its inputs are written, before its result is read, and before memory is freed.

Kernels that only wait run first, so that the device lags behind the host. With ``sigma = 0`` every sample is its mean,
so a read that is too early, too late or after a free gives a wrong sample. ``MULTISAMPLE_TEST_ROUNDS`` sets the rounds.
"""

import collections
import concurrent.futures
import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_memory import CYCLES, Array, Exported, ExportedByDlpack, ToArray, memory_of, on_cpu
from cuda_memory import vectors as host_vectors
from forks import forked, in_forks
from skip_rules import device_count, require

import multisample
from multisample import _stream_order
from multisample._libraries import Device
from multisample._stream_order import keep
from multisample.backends.system import cuda_driver

ROUNDS = int(os.environ.get("MULTISAMPLE_TEST_ROUNDS", "2000"))
# Small, so that rounds are short and pools reuse their memory at once.
D, N = 64, 33
# Clock cycles of a kernel that only waits: about 0.2 ms, longer than a round takes on the host.
SHORT = 3 * 10**5
BACKENDS = {"torch_ext": "torch", "cupy": "cupy", "numba": "numba"}


class Kept:
    """An object that can be weakly referenced."""


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The entries of `keep`: none at first."""
    monkeypatch.setattr(_stream_order, "_kept", collections.deque())
    return _stream_order._kept


def test_objects_are_kept_until_they_are_done(kept: Any) -> None:
    done, things = set(), [Kept() for _ in range(3)]
    alive = [weakref.ref(thing) for thing in things]
    for number, thing in enumerate(things):
        keep(lambda number=number: number in done, (thing,))
    del things, thing
    gc.collect(1)
    assert all(reference() for reference in alive)
    # Objects may be done in any order.
    done.update((0, 2))
    assert all(reference() for reference in alive)
    keep(lambda: True, None)
    assert [reference() is None for reference in alive] == [True, False, True]
    done.add(1)
    keep(lambda: True, None)
    assert alive[1]() is None
    assert len(kept) == 1


def test_each_call_checks_few_entries_and_all_are_released(kept: Any) -> None:
    checks, over = list[int](), list[bool]()
    for number in range(1000 + 1000 // (_stream_order._CHECKS - 1) + 2):
        if number == 1000:
            assert len(kept) == 1000
            over.append(True)
        checks.clear()
        keep(lambda: checks.append(1) or bool(over), None)
        assert len(checks) <= _stream_order._CHECKS
    # The last entries have not been checked yet.
    assert len(kept) <= _stream_order._CHECKS


def test_threads_and_destructors_can_keep_objects(kept: Any) -> None:
    threads, each = 8, 500
    lock, freed = threading.Lock(), 0

    class Counted:
        def __del__(self) -> None:
            nonlocal freed
            with lock:
                freed += 1
            keep(lambda: True, None)

    def work(thread: int) -> None:
        for number in range(each):
            keep(lambda number=number: number % 3 > 0, Counted())

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    never_done = sum(number % 3 == 0 for number in range(each)) * threads
    assert never_done <= len(kept)
    for _ in range(threads * each):
        keep(lambda: True, None)
    assert freed == threads * each - never_done


@forked
def test_a_forked_child_neither_checks_nor_frees_objects_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stream_order, "_kept", collections.deque())
    freed, asked = [], []

    class Inherited:
        def __del__(self) -> None:
            freed.append(1)

    def child() -> list[Any]:
        before = len(_stream_order._kept)
        keep(lambda: True, None)
        return [before, len(_stream_order._kept), freed, asked]

    for thing in range(3):
        keep(lambda: False, thing)
    keep(lambda: asked.append(1) or True, Inherited())
    asked.clear()
    assert in_forks(child) == [[0, 1, [], []]]
    # The parent's objects are unchanged.
    assert len(_stream_order._kept) == 4


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch, kept: Any) -> list[Any]:
    """The calls of the driver that order streams."""
    driver_calls: list[Any] = []
    monkeypatch.setattr(_stream_order, "order", lambda *streams: driver_calls.append(streams))
    monkeypatch.setattr(_stream_order, "is_capturing", lambda stream: stream == 99)
    event = SimpleNamespace(is_done=lambda: False)
    monkeypatch.setattr(_stream_order, "Event", lambda *place: driver_calls.append(("event", *place)) or event)
    return driver_calls


CUDA = Device("cuda", 1)


def test_streams_wait_for_each_other_before_and_after(ordered: list[Any]) -> None:
    # The streams are those of three Numba arrays: mu names the kernel's stream; sigma and out name other streams.
    other_streams = _stream_order.order_before([7, 8, 9], CUDA, 7)
    assert other_streams == {8, 9}
    assert sorted(ordered) == [(8, 7, 1), (9, 7, 1)]
    ordered.clear()
    _stream_order.order_after(other_streams, CUDA, 7)
    assert sorted(ordered) == [(7, 8, 1), (7, 9, 1)]
    assert len(_stream_order._kept) == 0
    ordered.clear()
    # Arrays that name no stream are not ordered.
    assert _stream_order.order_before([7, None, None], CUDA, 7) == set()
    assert ordered == []


def test_arrays_are_kept_except_during_a_capture(ordered: list[Any]) -> None:
    arrays = Kept()
    _stream_order.keep_until_done(arrays, CUDA, 99)
    assert (len(_stream_order._kept), ordered) == (0, [])
    _stream_order.keep_until_done(arrays, CUDA, 7)
    assert (len(_stream_order._kept), ordered) == (1, [("event", 7, 1)])


# The library of the arrays, and the protocol by which they are passed.
PRODUCERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "PyTorch's, by DLPack": ("torch", ExportedByDlpack),
    "CuPy's, by DLPack": ("cupy", ExportedByDlpack),
    "Numba's, by the CUDA array interface": (
        "numba",
        lambda array: Exported(array, stream=array.__cuda_array_interface__["stream"]),
    ),
}


@pytest.fixture(params=[(p, b) for p in PRODUCERS for b in BACKENDS], ids=lambda pair: f"{pair[0]}, to {pair[1]}")
def pairing(request: pytest.FixtureRequest) -> SimpleNamespace:
    producer, backend = request.param
    require(backend)
    library, wrap = PRODUCERS[producer]
    consumer = memory_of(BACKENDS[backend])
    return SimpleNamespace(producer=memory_of(library), wrap=wrap, consumer=consumer, backend=backend)


@contextlib.contextmanager
def streams(producer: Any, consumer: Any) -> Iterator[None]:
    """A context in which each of two libraries has a new current stream."""
    with producer.stream(), contextlib.nullcontext() if consumer is producer else consumer.stream():
        yield


def hold_up(consumer: Any, by_dlpack: bool, cycles: int = SHORT) -> None:
    """Keep the kernel's stream busy: for Numba and DLPack, the default stream."""
    if consumer.name == "numba" and by_dlpack:
        consumer.kernels.spin[128, 1](cycles)
    else:
        consumer.keep_busy(cycles)


def on_current_stream(memory: Any, result: Any) -> Any:
    """`result` for use on the library's current stream. With Numba, this stream first waits for the result's stream."""
    if memory.name != "numba":
        return result
    named = result.__cuda_array_interface__["stream"] or 0
    cuda_driver.order(named, int(memory.current or 0), 0)
    return result.bind(memory.current)


def rounds(pairing: SimpleNamespace, count: int) -> tuple[int, Any]:
    """The number of samples, and the device's count of correct samples."""
    producer, consumer = pairing.producer, pairing.consumer
    found, right = consumer.put(np.zeros(1, np.int64)), 0
    sigma = producer.put(np.zeros(D, np.float32))
    producer.synchronize()
    consumer.synchronize()
    with streams(producer, consumer):
        for number in range(1, count + 1):
            producer.keep_busy(SHORT)
            mu = producer.full(D, float(number))
            wrapped = pairing.wrap(mu), pairing.wrap(sigma)
            if number % 2:
                hold_up(consumer, pairing.wrap is ExportedByDlpack)
            x = multisample.sample(*wrapped, N, seed=number, backend=pairing.backend)
            # `del` frees the inputs before the kernel runs; the next array may reuse their memory at once.
            del mu, wrapped
            producer.full(D, -1.0)
            x = on_current_stream(consumer, x)
            consumer.add_count(found, x, float(number))
            right += D * N
            del x
        consumer.finish()
        producer.finish()
    return right, found


def test_inputs_are_written_before_the_kernel_and_freed_after_it(pairing: Any, to_numpy: ToArray) -> None:
    if pairing.producer is pairing.consumer and pairing.producer.name == "numba":
        count = ROUNDS // 10  # Without a memory pool, every allocation is slow.
    else:
        count = ROUNDS // (10 if "numba" in (pairing.producer.name, pairing.consumer.name) else 1)
    rounds(pairing, 3)
    right, found = rounds(pairing, count)
    assert int(to_numpy(found)[0]) == right


def test_streams_stay_in_order_with_several_threads(pairing: SimpleNamespace, to_numpy: Callable[[Any], Array]) -> None:
    if "numba" in (pairing.producer.name, pairing.consumer.name):
        pytest.skip("NumbaMemory has one current stream for all threads")
    rounds(pairing, 3)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for right, found in pool.map(lambda _: rounds(pairing, ROUNDS // 8), range(4)):
            assert int(to_numpy(found)[0]) == right


def test_out_is_written_before_its_stream_reads_it(pairing: SimpleNamespace, to_numpy: Callable[[Any], Array]) -> None:
    producer, consumer = pairing.producer, pairing.consumer
    if producer.name != "numba":
        pytest.skip("DLPack does not name the stream of out")
    found, right = producer.put(np.zeros(1, np.int64)), 0
    producer.synchronize()
    with streams(producer, consumer):
        for number in range(1, ROUNDS // 10 + 1):
            mu, sigma = producer.full(D, float(number)), producer.full(D, 0.0)
            out = producer.full(D * N, -2.0).reshape(D, N).bind(producer.current)
            hold_up(consumer, by_dlpack=False)
            target = pairing.wrap(out)
            multisample.sample(pairing.wrap(mu), pairing.wrap(sigma), N, seed=1, backend=pairing.backend, out=target)
            producer.add_count(found, out, float(number))
            right += D * N
        producer.finish()
        consumer.finish()
    assert int(to_numpy(found)[0]) == right


def test_validation_waits_for_the_values(pairing: SimpleNamespace) -> None:
    producer, consumer = pairing.producer, pairing.consumer
    with streams(producer, consumer):
        sigma = producer.full(D, 1.0)
        multisample.sample(0.0, pairing.wrap(sigma), N, seed=1, backend=pairing.backend, validate=True)
        for value in (-1.0, 1.0, -2.0):
            producer.keep_busy(CYCLES // 10)
            producer.fill(sigma, value)
            wrapped = {"mu": 0.0, "sigma": pairing.wrap(sigma), "n": N, "backend": pairing.backend, "validate": True}
            if value > 0:
                multisample.sample(**wrapped)
                continue
            with pytest.raises(ValueError, match=rf"^sigma: .*of at least 0, got sigma\[0\] = {value}"):
                multisample.sample(**wrapped)
        producer.finish()
        consumer.finish()


@pytest.mark.parametrize("late", ["mu", "sigma", "out"])
@pytest.mark.parametrize("default_dtype", [True, False], ids=["default dtype", "explicit dtype"])
def test_numba_arrays_on_several_streams_are_ordered(bits: ToArray, late: str, default_dtype: bool) -> None:
    require("numba")
    memory = memory_of("numba")
    memory.cuda.current_context()  # `cuStreamCreate` needs a current context.
    flag = memory.driver.binding.CUstream_flags.CU_STREAM_NON_BLOCKING.value
    streams = {name: memory.cuda.external_stream(int(memory.driver.driver.cuStreamCreate(flag))) for name in
               ("mu", "sigma", "out")}  # fmt: skip
    mean, deviation = np.linspace(-3, 3, 300, dtype=np.float32), np.linspace(0.5, 2, 300, dtype=np.float32)
    expected = bits(on_cpu(mean, deviation, 1031, seed=3))

    def draw(cycles: int) -> Any:
        mu, sigma = memory.put(np.full(300, 9, np.float32)), memory.put(np.full(300, 9, np.float32))
        out, copy = (memory.cuda.device_array((300, 1031), np.float32) for _ in range(2))
        ready = memory.put(mean), memory.put(deviation)
        memory.synchronize()
        # The late array is filled or read after a long wait on its stream, and overwritten right after the call.
        memory.kernels.spin[128, 1, streams[late]](cycles)
        memory.kernels.copy[128, 128, streams["mu"]](ready[0].reshape(300, 1), mu.reshape(300, 1))
        memory.kernels.copy[128, 128, streams["sigma"]](ready[1].reshape(300, 1), sigma.reshape(300, 1))
        memory.kernels.fill[128, 128, streams["out"]](out.reshape(300 * 1031), 9.0)
        bound = [array.bind(streams[name]) for name, array in (("mu", mu), ("sigma", sigma), ("out", out))]
        options = {} if default_dtype else {"dtype": "float32"}
        assert multisample.sample(*bound[:2], 1031, seed=3, backend="numba", out=bound[2], **options) is bound[2]
        done = memory.cuda.event(timing=False)
        done.record(streams["mu"])
        waited = cycles == CYCLES and bool(done.query())
        memory.kernels.fill[128, 128, streams["sigma"]](sigma, -1.0)
        memory.kernels.fill[128, 128, streams["mu"]](mu, -1.0)
        memory.kernels.copy[128, 128, streams["out"]](out, copy)
        memory.synchronize()
        assert not waited, "the call waited for the device"
        return copy

    draw(1)
    assert np.array_equal(bits(draw(CYCLES)), expected)


@pytest.mark.parametrize("to", BACKENDS)
@pytest.mark.parametrize("protocol", ["interface", "dlpack"])
def test_memory_is_kept_until_the_kernel_has_run(to: str, protocol: str) -> None:
    require(to)
    library = "numba" if protocol == "interface" else ("cupy" if to == "cupy" else "torch")
    producer, consumer = memory_of(library), memory_of(BACKENDS[to])

    class Given(Exported if protocol == "interface" else ExportedByDlpack):  # type: ignore[misc]
        pass

    # Copies to a busy stream would wait, so copy first.
    vectors = [producer.put(np.ones(D, np.float32)) for _ in range(2)]

    def draw(stream: int | None = None) -> list[Any]:
        arrays = [Given(vector) for vector in vectors]
        if protocol == "interface":
            for array in arrays:
                array.__cuda_array_interface__["stream"] = stream
        multisample.sample(*arrays, N, seed=1, backend=to)
        return [weakref.ref(array) for array in arrays]

    draw()
    consumer.synchronize()
    with consumer.stream() as stream:
        hold_up(consumer, protocol == "dlpack", CYCLES)
        # Numba has no current stream: the kernel runs on the stream that mu names.
        alive = draw(int(stream) if protocol == "interface" and to == "numba" else None)
        is_done, _ = _stream_order._kept[-1]
        assert not is_done(), "the call waited for the device"
        gc.collect()
        assert all(reference() for reference in alive)
        consumer.synchronize()
        assert is_done()
        for _ in range(2 + len(_stream_order._kept)):
            draw()
        gc.collect()
        assert not any(reference() for reference in alive)
        # The number of kept entries is bounded.
        for _ in range(300):
            draw()
            consumer.synchronize()
        assert len(_stream_order._kept) <= 2 * _stream_order._CHECKS


def wait(jnp: Any, number: Any, size: int = 512, times: int = 8) -> Any:
    """A zero from a slow computation that no compiler can remove."""
    square = jnp.outer(jnp.arange(size) + number, jnp.arange(size)) * 1e-9
    for _ in range(times):
        square = jnp.sin(square @ square)
    return 0.0 * square[0, 0]


@pytest.mark.parametrize("to", BACKENDS)
def test_jax_streams_are_ordered_with_the_kernel(to: str) -> None:
    require(to)
    jax = memory_of("jax").jax
    consumer = memory_of(BACKENDS[to])

    @jax.jit
    def late(number: Any) -> Any:
        """A mean from a slow computation."""
        return jax.numpy.full(D, number) + wait(jax.numpy, number)

    @jax.jit
    def wrong(x: Any, number: Any, before: Any) -> Any:
        """The number of samples that differ from their means, counted after a wait."""
        return before + (x + wait(jax.numpy, number) != number).sum()

    device = memory_of("jax").devices[0]
    sigma, found = jax.device_put(np.zeros(D, np.float32), device), jax.device_put(np.int32(0), device)
    for busy in (False, True):
        with consumer.stream() if busy else contextlib.nullcontext():
            for number in range(1, ROUNDS // 2 + 1):
                mu = late(jax.device_put(np.float32(number), device))
                if busy:
                    hold_up(consumer, by_dlpack=True)
                x = multisample.sample(mu, sigma, N, seed=number, backend=to)
                # `del` frees mu before the kernel runs, and x before `wrong` reads it.
                del mu
                found = wrong(x, np.float32(number), found)
                del x
    assert int(found) == 0


@pytest.mark.parametrize("to", BACKENDS)
def test_memory_that_jax_still_reads_is_not_reused(to: str) -> None:
    require(to)
    jax, memory = memory_of("jax").jax, memory_of(BACKENDS[to])

    @jax.jit
    def late_sum(x: Any, scale: Any) -> Any:
        return (x + wait(jax.numpy, scale, 2048, 20)).sum()

    device = memory_of("jax").devices[0]
    mu, sigma = (jax.device_put(np.full(1000, value, np.float32), device) for value in (1.0, 0.0))
    late_sum(multisample.sample(mu, sigma, 1024, seed=1, backend=to), 1.0).block_until_ready()
    sums = []
    for _ in range(20):
        x = multisample.sample(mu, sigma, 1024, seed=1, backend=to)
        sums.append(late_sum(x, 1.0))
        del x
        # Overwrite the freed memory, which a pool gives to an array of the same size.
        memory.full(1000 * 1024, -7.0)
    assert [float(value) for value in sums] == [1000.0 * 1024] * 20


@pytest.mark.parametrize("to", BACKENDS)
@pytest.mark.parametrize("library", ["torch", "cupy", "numba", "jax"])
def test_foreign_arrays_are_drawn_on_their_own_device(to: str, library: str, bits: ToArray) -> None:
    require(to)
    if device_count() < 2:
        pytest.skip("there is only one CUDA device")
    memory, consumer = memory_of(library), memory_of(BACKENDS[to])
    wrap = {"torch": ExportedByDlpack, "cupy": ExportedByDlpack, "numba": Exported, "jax": lambda array: array}[library]
    host = host_vectors(D)
    expected = bits(on_cpu(*host, N, seed=2))
    for there, here in ((1, 0), (0, 1), (1, 1)):
        arrays = [memory.put(x, there) for x in host]
        # PyTorch exports tensors of its current device only. An operation of JAX makes JAX's device current.
        nothing = library == "jax" or (library, to) == ("torch", "torch_ext")
        outer = memory.device(there) if library == "torch" else contextlib.nullcontext()
        with outer, contextlib.nullcontext() if nothing else consumer.device(here):
            current = consumer.current_device()
            x = multisample.sample(*map(wrap, arrays), N, seed=2, backend=to)
            where = memory_of("jax" if library == "jax" else BACKENDS[to])
            assert where.device_of(x) == there
            assert library == "jax" or consumer.current_device() == current
        with contextlib.nullcontext() if library == "jax" else consumer.device(there):
            assert np.array_equal(bits(x), expected)


def test_foreign_tensors_can_be_captured_with_out(bits: ToArray) -> None:
    require("torch_ext")
    torch = memory_of("torch").torch
    host = host_vectors(D)
    mu, sigma = (torch.from_numpy(x).cuda() for x in host)
    out = torch.empty((D, N), device="cuda")

    def draw() -> None:
        wrapped = map(ExportedByDlpack, (mu, sigma))
        multisample.sample(*wrapped, N, seed=6, backend="torch_ext", out=ExportedByDlpack(out))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        draw()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    kept, graph = len(_stream_order._kept), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draw()
    assert len(_stream_order._kept) == kept
    for value in (1.0, 5.0):
        mu.fill_(value)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert np.array_equal(bits(out), bits(on_cpu(np.full(D, value, np.float32), host[1], N, seed=6)))
