"""`multisample.dask.sample`, and searches on a cluster, have the bits of one process, whatever happens to workers."""

import functools
import itertools
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from processes import run_python

import multisample

dask = pytest.importorskip("dask")
cloudpickle = pytest.importorskip("cloudpickle")
distributed = pytest.importorskip("distributed")
import dask.array as da  # noqa: E402
from dask.callbacks import Callback  # noqa: E402
from dask_cluster import local_cluster  # noqa: E402
from scored_functions import DiesOnce, assert_same, fails, run, sphere  # noqa: E402
from skip_rules import require  # noqa: E402

import multisample.dask  # noqa: E402

D, N = 13, 50
MU = np.linspace(-3, 4, D).astype(np.float32)
SIGMA = np.linspace(0, 2, D).astype(np.float32)
LARGE = np.zeros(100, np.float32)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with local_cluster(n_workers=1) as client:
        yield client


@pytest.fixture(autouse=True)
def quiet_libraries() -> Iterator[None]:
    """Warnings of Dask and distributed about the load of this machine fail no test."""
    with warnings.catch_warnings():
        warnings.filterwarnings("default", module=r"(distributed|tornado|dask)\.")
        yield


@functools.cache
def expected(n: int = N) -> Any:
    return multisample.sample(MU, SIGMA, n, seed=7)


def drawn(chunks: Any = 5, n: int = N, **options: Any) -> Any:
    return multisample.dask.sample(MU, SIGMA, n, chunks=chunks, **{"seed": 7, **options})


def same(x: Any, expected: Any) -> bool:
    """Whether two NumPy arrays have the same type, shape and bits."""
    kinds = [(type(each), each.dtype, each.shape, each.tobytes()) for each in (x, expected)]
    return bool(kinds[0] == kinds[1])


@st.composite
def sizes(draw: Any, length: int) -> tuple[int, ...]:
    """Sizes of blocks that add up to `length`."""
    cuts = draw(st.lists(st.integers(0, length), max_size=5))
    edges = [0, *sorted(cuts), length]
    return tuple(b - a for a, b in itertools.pairwise(edges))


OPTIONS = st.fixed_dictionaries({
    "noise": st.sampled_from(["independent", "shared"]),
    "dtype": st.sampled_from([None, "float16", "float32", "float64"]),
    "antithetic": st.booleans(),
    "seed": st.one_of(st.integers(0, 2**64 - 1), st.builds(multisample.Key, st.just(7), st.integers(0, 2**64 - 1))),
})  # fmt: skip


@settings(max_examples=40)
@given(rows=sizes(D), columns=sizes(N), layout=st.sampled_from(["dn", "nd"]), options=OPTIONS,
       scheduler=st.sampled_from(["synchronous", "threads"]))  # fmt: skip
def test_values_do_not_depend_on_chunks(rows: Any, columns: Any, layout: Any, options: Any, scheduler: str) -> None:
    chunks = (rows, columns) if layout == "dn" else (columns, rows)
    x = drawn(chunks, layout=layout, **options)
    expected = multisample.sample(MU, SIGMA, N, layout=layout, **options)
    assert x.chunks == chunks
    assert x.dtype == expected.dtype
    assert same(x.compute(scheduler=scheduler), expected)


def test_values_do_not_depend_on_the_scheduler(client: Any) -> None:
    for chunks in ((5, 7), "auto"):
        assert same(drawn(chunks).compute(scheduler=client), expected())
    pickled = pickle.loads(pickle.dumps(drawn()))
    assert same(pickled.compute(scheduler="threads"), expected())


@pytest.mark.parametrize("layout", ["dn", "nd"])
def test_mu_and_sigma_may_be_what_sample_takes(layout: Any) -> None:
    for mu, sigma, n in (
        (MU.tolist(), SIGMA, N), (MU[:, None], SIGMA.astype(np.float64), N), (0.0, SIGMA, N), (MU, np.float32(2), N),
        (MU, np.array(1.5), N), (np.arange(2 * D, dtype=np.int64)[::2], 1.0, N), (MU.astype(">f4"), SIGMA, N),
        (MU[:0], 1.0, N), (MU, SIGMA, 0), (MU[:0], SIGMA[:0], 0),
    ):  # fmt: skip
        x = multisample.dask.sample(mu, sigma, n, chunks=6, seed=7, layout=layout)
        assert same(x.compute(scheduler="threads"), multisample.sample(mu, sigma, n, seed=7, layout=layout))


@pytest.mark.parametrize("layout", ["dn", "nd"])
def test_mu_and_sigma_may_be_dask_arrays(layout: Any) -> None:
    right = expected() if layout == "dn" else expected().T.copy()
    for pieces in (D, 1, (4, 9)):
        mu, sigma = (da.from_array(x, chunks=(pieces,)) for x in (MU, SIGMA))
        for pair in ((mu, SIGMA), (MU, sigma[:, None]), (mu * 1, sigma + 0)):
            x = multisample.dask.sample(*pair, N, chunks=5, seed=7, layout=layout)
            assert same(x.compute(scheduler="threads"), right)


def test_generators_advance_by_one_call() -> None:
    generator, other = multisample.Generator(7), multisample.Generator(7)
    for _ in range(2):
        x = multisample.dask.sample(MU, SIGMA, N, generator=generator)
        assert same(x.compute(scheduler="threads"), multisample.sample(MU, SIGMA, N, generator=other))
    assert generator.offset == 2
    multisample.manual_seed(3)
    x = multisample.dask.sample(MU, SIGMA, N)
    multisample.manual_seed(3)
    assert same(x.compute(scheduler="threads"), multisample.sample(MU, SIGMA, N))


def test_nothing_is_drawn_before_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    widths, draw = list[int](), multisample.dask.draw
    monkeypatch.setattr("multisample.dask.draw", lambda *args, **more: widths.append(args[2]) or draw(*args, **more))
    part = (drawn((-1, 10_000), 10**6)[3:5, 345_678:345_688] * 2).sum()
    assert widths == [0]
    part.compute(scheduler="synchronous")
    assert widths == [0, 10_000]


def test_a_graph_of_a_million_blocks_is_small() -> None:
    mu = np.zeros(10**6, np.float32)
    x = multisample.dask.sample(mu, 1.0, 10**6, chunks=1000, seed=7)
    assert x.npartitions == 10**6
    assert len(cloudpickle.dumps(x.dask)) - mu.nbytes < 10e6
    # The layer is symbolic: it has no dictionary of tasks.
    assert not x.dask.layers[x.name].is_materialized()


def test_the_graph_has_mu_and_sigma_once_and_fuses_operations_on_blocks() -> None:
    mu = np.zeros(10**5, np.float32)
    x = multisample.dask.sample(mu, mu + 1, 1000, chunks=(1000, 500), seed=7)
    for graph in (x.dask, dask.optimize(x * 2 + 1)[0].dask):
        # Tasks that a scheduler sends one by one do not contain the vectors.
        stored = [len(pickle.dumps(task)) for key, task in dict(graph).items() if len(key) == 3]
        assert len(stored) == x.npartitions == 200
        assert max(stored) < 4000


def name(**changes: Any) -> str:
    """An array's name, a hash of its arguments."""
    import multisample.dask

    given = {"mu": np.linspace(-3, 4, 13), "sigma": np.ones(13), "n": 50, "seed": 7, "chunks": 5, **changes}
    found: str = multisample.dask.sample(**given).name
    return found


def test_equal_arguments_give_equal_names(client: Any) -> None:
    different: list[dict[str, Any]] = [
        {}, {"mu": np.arange(13.0)}, {"sigma": np.arange(13.0)}, {"sigma": 2.0}, {"n": 51}, {"seed": 8},
        {"seed": multisample.Key(7, 1)}, {"chunks": 6}, {"noise": "shared"}, {"dtype": "float32"}, {"layout": "nd"},
        {"antithetic": True}, {"fast_math": True},
    ]  # fmt: skip
    names = [name(**changes) for changes in different]
    assert len(set(names)) == len(names)
    assert names == [name(**changes) for changes in different]
    # A name must be the same in each process. Python seeds its hashes anew in each.
    own = cloudpickle.dumps(name)
    assert set(client.run(lambda: cloudpickle.loads(own)()).values()) == {names[0]}


@pytest.mark.slow
def test_arrays_of_dask_expressions() -> None:
    """A new process sets ``array.query-planning``, which Dask reads only when it is imported."""
    command = (
        "import numpy as np, multisample.dask\n"
        "x = multisample.dask.sample(np.arange(5.0), 1.0, 40, seed=7, chunks=3)\n"
        "assert 'expr' in type(x).__module__, type(x)\n"
        "y = multisample.sample(np.arange(5.0), 1.0, 40, seed=7)\n"
        "assert (x.compute(scheduler='threads') == y).all()\n"
    )
    run_python("-c", command, DASK_ARRAY__QUERY_PLANNING="True")


def test_blocks_start_no_threads(monkeypatch: pytest.MonkeyPatch, thread_counts: Callable[[], list[int]]) -> None:
    monkeypatch.setenv("MULTISAMPLE_NUM_THREADS", "8")
    multisample.sample(LARGE, 1.0, 100_000, seed=7)
    assert max(thread_counts()) > 1
    multisample.dask.sample(LARGE, 1.0, 400_000, chunks=(-1, 100_000), seed=7).sum().compute(scheduler="threads")
    assert max(thread_counts(), default=1) == 1


def test_slices_rechunks_and_reductions(client: Any) -> None:
    x, y = drawn((5, 300), 1000), expected(1000)
    for scheduler in ("threads", client):
        found = x[2:9:3, 100:-7], x.rechunk((13, 77)), 2 * x.T, x.max()
        part, whole, turned, largest = dask.compute(*found, scheduler=scheduler)
        assert same(part, y[2:9:3, 100:-7].copy()) and same(whole, y) and same(turned, 2 * y.T.copy())
        assert largest == y.max()
        kept = x.persist(scheduler=scheduler)
        assert same(kept[:, ::10].compute(scheduler=scheduler), y[:, ::10].copy())
    xarray = pytest.importorskip("xarray")
    data = xarray.Dataset({"x": (("dim", "draw"), x)}, coords={"dim": np.arange(D)})
    with dask.config.set(scheduler="threads"):
        assert same(data.x.sel(dim=3).isel(draw=slice(5, 40)).values, y[3, 5:40])


@pytest.mark.slow
def test_a_killed_worker_changes_nothing() -> None:
    expected = multisample.sample(LARGE, 1.0, 20_000, seed=7)
    with local_cluster(threads_per_worker=1) as client:
        x = multisample.dask.sample(LARGE, 1.0, 20_000, chunks=(-1, 500), seed=7)
        kept = client.persist(x.map_blocks(lambda block: (time.sleep(0.05), block)[1], dtype=x.dtype))
        before = client.run(os.getpid)
        deadline = time.monotonic() + 60
        # Both workers hold blocks, and not all blocks are done.
        while min((len(keys) for keys in client.has_what().values()), default=0) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(next(iter(before.values())), signal.SIGKILL)
        assert same(client.compute(kept, sync=True), expected)
        assert set(client.run(os.getpid).values()) != set(before.values())


UNKNOWN = da.from_array(MU, chunks=4)[da.from_array(MU, chunks=4) > 0]


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ({"chunks": ((6, 6), (N,))}, ValueError, "chunks: expected blocks of shape"),
    ({"chunks": ((13,), (-1, N + 1))}, ValueError, "chunks: expected sizes that add up"),
    ({"chunks": (float("nan"), 5)}, ValueError, "chunks: .*unknown"),
    ({"chunks": ((13,), (float("nan"),) * 2)}, ValueError, "chunks: expected sizes"),
    ({"chunks": "many"}, ValueError, "chunks: "),
    ({"chunks": None}, ValueError, "chunks: "),
    ({"chunks": 0}, ValueError, "chunks: "),
    ({"mu": UNKNOWN}, ValueError, "mu: expected a Dask array with known chunks"),
    ({"mu": da.from_array(MU[1:], chunks=4)}, ValueError, "sigma: expected as many elements as mu, 12, got 13"),
    ({"mu": da.zeros(D, dtype=complex)}, TypeError, "mu: "),
    ({"sigma": -SIGMA}, ValueError, "sigma: "),
    ({"mu": "abc"}, TypeError, "mu: "),
    ({"mu": np.zeros((13, 2)), "sigma": 1.0}, ValueError, r"mu: expected shape \(d,\) or \(d, 1\), got \(13, 2\)"),
    ({"n": -1}, ValueError, "n: "),
    ({"n": (2, 3)}, TypeError, r"n: expected an integer, got \(2, 3\)"),
    ({"seed": -1}, ValueError, "seed: "),
    ({"seed": 7, "generator": multisample.Generator(1)}, TypeError, "seed, generator: "),
    ({"generator": "abc"}, TypeError, "generator: "),
    ({"noise": "red"}, ValueError, "noise: "),
])  # fmt: skip
def test_wrong_arguments_are_refused_before_anything_is_computed(arguments: Any, error: Any, words: str) -> None:
    generator = multisample.Generator(7)
    if "generator" not in arguments and "seed" not in arguments:
        arguments = {**arguments, "generator": generator}

    def ran(*_: Any) -> None:
        raise AssertionError("a task ran")

    with Callback(pretask=ran), pytest.raises(error, match=words):
        multisample.dask.sample(**{"mu": MU, "sigma": SIGMA, "n": N, **arguments})
    assert generator.offset == 0


def test_other_libraries_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="mu: expected an array of NumPy, CuPy or Dask"):
        multisample.dask.sample(torch.zeros(3), torch.ones(3), 5)
    if multisample.list_backends()["torch_ext"].available:
        with pytest.raises(TypeError, match="backend: expected one that gives blocks of NumPy or CuPy"):
            drawn(backend="torch_ext")


def test_a_backend_that_the_worker_lacks_is_named(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if multisample.list_backends()["cupy"].available:
        pytest.skip("cupy is available")
    with pytest.raises(multisample.BackendUnavailableError, match="'cupy' cannot run here"):
        drawn(backend="cupy")
    # As if the client had CuPy, and the workers did not.
    with monkeypatch.context() as patched:
        patched.setattr(multisample.dask, "draw", lambda *args, backend, **more: multisample.sample(*args, **more))
        y = drawn(backend="cupy")
    with pytest.raises(multisample.BackendUnavailableError, match="'cupy' cannot run here"):
        y.compute(scheduler=client)


def test_values_of_dask_arrays_are_checked_in_their_block(client: Any) -> None:
    sigma = da.from_array(np.where(np.arange(D) == 9, -1, SIGMA), chunks=4)
    x = multisample.dask.sample(MU, sigma, N, chunks=(8, -1), seed=7)
    for scheduler in ("threads", client):
        with pytest.raises(ValueError, match=r"sigma: .* got sigma\[1\] = -1.*\(in the rows from 8 on\)"):
            x.compute(scheduler=scheduler)


@pytest.fixture
def cupy() -> Any:
    require("cupy")
    return pytest.importorskip("cupy")


@pytest.mark.parametrize("layout", ["dn", "nd"])
def test_blocks_of_cupy_have_the_bits_of_numpy(cupy: Any, layout: Any) -> None:
    expected = multisample.sample(MU, SIGMA, N, seed=7, layout=layout)
    for mu, backend in ((MU, "cupy"), (cupy.asarray(MU), "auto"), (cupy.asarray(MU), "cupy")):
        sigma = SIGMA if mu is MU else cupy.asarray(SIGMA)
        x = multisample.dask.sample(mu, sigma, N, chunks=6, seed=7, layout=layout, backend=backend)
        assert type(x._meta) is cupy.ndarray
        assert x._meta.dtype == x.dtype == expected.dtype
        for scheduler in ("synchronous", "threads"):
            y = x.compute(scheduler=scheduler)
            assert type(y) is cupy.ndarray
            assert cupy.asnumpy(y).tobytes() == expected.tobytes()


def test_reductions_and_dask_arrays_of_cupy(cupy: Any) -> None:
    expected = multisample.sample(MU, SIGMA, N, seed=7)
    mu, sigma = (da.from_array(cupy.asarray(x), chunks=4, asarray=False) for x in (MU, SIGMA))
    x = multisample.dask.sample(mu, sigma, N, chunks=6, seed=7)
    assert type(x._meta) is cupy.ndarray
    assert cupy.asnumpy(x.compute(scheduler="threads")).tobytes() == expected.tobytes()
    assert float(x.max().compute(scheduler="threads")) == expected.max()
    np.testing.assert_allclose(cupy.asnumpy(x.mean(axis=1).compute(scheduler="threads")), expected.mean(1), atol=1e-5)


def test_a_cluster_draws_on_its_gpu(cupy: Any) -> None:
    expected = multisample.sample(MU, SIGMA, N, seed=7)
    with local_cluster(n_workers=1) as client:
        x = multisample.dask.sample(MU, SIGMA, N, chunks=100, seed=7, backend="cupy")
        y = x.map_blocks(cupy.asnumpy, dtype=x.dtype, meta=np.empty((0, 0), x.dtype))
        assert y.compute(scheduler=client).tobytes() == expected.tobytes()


def test_numpy_and_cupy_together_are_refused(cupy: Any) -> None:
    with pytest.raises(TypeError, match="expected arrays of one library"):
        multisample.dask.sample(cupy.asarray(MU), SIGMA, N)


def test_a_cluster_gives_the_same_bits_and_errors(client: Any) -> None:
    executor, lock = client.get_executor(), ThreadPoolExecutor(1)
    with pytest.raises(ArithmeticError, match="a score is missing"):
        run(lambda x: fails(x + 10), executor=executor, tasks=3)
    with pytest.raises(TypeError, match=r"f: expected a function that ClientExecutor can send .*, got <function"):
        run(lambda x: lock, executor=executor)
    assert_same(run(lambda x: np.square(x - 1).sum(axis=0), executor=executor, tasks=16), run())


def test_a_worker_that_dies_in_a_task_changes_nothing(client: Any, tmp_path: Path) -> None:
    before = set(client.run(os.getpid).values())
    assert_same(run(DiesOnce(tmp_path), executor=client.get_executor(), tasks=4), run())
    assert set(client.run(os.getpid).values()) != before
    client.wait_for_workers(1)


def test_an_executor_with_retries_repeats_a_failed_task(client: Any, tmp_path: Path) -> None:
    def twice(x: Any) -> Any:
        try:
            (tmp_path / "failed").touch(exist_ok=False)
        except FileExistsError:
            return sphere(x)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run(twice, executor=client.get_executor(), tasks=3)
    (tmp_path / "failed").unlink()
    assert_same(run(twice, executor=client.get_executor(retries=1), tasks=3), run())
