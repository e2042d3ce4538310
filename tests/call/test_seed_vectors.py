"""Vectors of seeds, and of key data: each matrix of a batch equals a separate call with its seed.

``MULTISAMPLE_TEST_BATCHES=100000 pytest -m slow tests/call/test_seed_vectors.py`` draws as many random batches.
"""

import contextlib
import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tables import DTYPES

import multisample
from multisample import Key
from multisample._checks.operands import Inputs, target_checker
from multisample._libraries import HOST, Device, Operand
from multisample._randomness import seed_argument

Array = np.ndarray[Any, Any]
Place = Callable[[Array], Any]
BATCHES = int(os.environ.get("MULTISAMPLE_TEST_BATCHES", "2000"))


def key_arrays(batch: int, draw: random.Random) -> list[tuple[Any, list[Key]]]:
    """Every form of `seed` for `batch` keys, each with its keys."""
    seeds = [draw.choice([draw.getrandbits(64), draw.getrandbits(9), 2**64 - 1]) for _ in range(batch)]
    offsets = [draw.choice([draw.getrandbits(64), draw.getrandbits(4)]) for _ in range(batch)]
    plain, keys = [Key(seed, 0) for seed in seeds], [Key(*x) for x in zip(seeds, offsets, strict=True)]
    mixed = [key if k % 2 else key.seed for k, key in enumerate(keys)]
    words = np.array(keys, np.uint64).reshape(batch, 2)
    halves = np.stack([words >> np.uint64(32), words & np.uint64(2**32 - 1)], -1).astype(np.uint32)
    forms: list[tuple[Any, list[Key]]] = [
        (seeds, plain), (tuple(mixed), [key if k % 2 else plain[k] for k, key in enumerate(keys)]),
        (words[:, 0].copy(), plain), (words, keys),
        (halves[:, 0].copy(), plain), (halves.reshape(batch, 4), keys),
    ]  # fmt: skip
    for kind in ("int64", "int32", "int16", "uint16", "int8", "uint8"):
        narrow = (words & np.uint64(np.iinfo(kind).max)).astype(kind)
        forms.append((narrow, [Key(int(a), int(b)) for a, b in narrow]))
    return forms


def strided_view(order: list[int], steps: list[int], shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """A function of an array: permutes its axes to `order`, applies `steps`, and cuts it to `shape`."""
    part = tuple(slice(0, size * step, step) for size, step in zip(shape, steps, strict=True))
    return lambda base: (base.permute(*order) if hasattr(base, "permute") else base.transpose(order))[part]


def random_view(shape: tuple[int, ...], draw: random.Random) -> tuple[tuple[int, ...], Callable[[Any], Any]]:
    """The shape of a base, and a function that returns its view of shape `shape`: whole, or strided and permuted."""
    if draw.random() < 0.5:
        return shape, lambda base: base
    order = draw.sample(range(len(shape)), len(shape))
    if len(shape) == 3:  # Matrices one after another.
        order = [0, *draw.sample([1, 2], 2)]
    steps = [draw.choice([1, 1, 2]) for _ in shape]
    base = tuple(shape[axis] * steps[axis] + draw.randrange(2) for axis in order)
    return base, strided_view([order.index(axis) for axis in range(len(shape))], steps, shape)


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_vectors_of_seeds_of_different_lengths_share_no_plan(backend: str, place: Place, bits: Any, kind: Any) -> None:
    mu, sigma = place(np.zeros(3, np.float32)), place(np.ones(3, np.float32))
    for seeds in ([1, 2], [3], [4, 5, 6], [7, 8]):
        found = bits(multisample.sample(mu, sigma, 4, seed=kind(seeds), backend=backend))
        for matrix, seed in zip(found, seeds, strict=True):
            assert np.array_equal(matrix, bits(multisample.sample(mu, sigma, 4, seed=seed, backend=backend)))


@pytest.mark.parametrize("batches", [100, pytest.param(BATCHES, marks=pytest.mark.slow)])
def test_each_matrix_of_a_random_batch_has_the_bits_of_its_own_call(
    backend: str, place: Place, view_of: Any, bits: Any, batches: int
) -> None:
    draw, source = random.Random(batches), np.random.default_rng(batches)
    backends = ["auto", backend, *["cpu"] * (str(getattr(place(np.zeros(1)), "device", "cuda")) == "cpu")]
    for _ in range(batches):
        batch, d = draw.randrange(9), draw.choice([0, 1, 1, 2, 3, 5, 8, 17])
        n, dtype = draw.choice([0, 1, 1, 2, 3, 4, 7, 16, 33, 64, 130]), draw.choice(list(DTYPES))
        # Quick tests compile the kernels for pairs and for several threads for float32 only.
        every_kernel = dtype == "float32" or batches == BATCHES
        if draw.random() < 0.01 and every_kernel:
            n = 9000  # Several threads share such a batch.
        real = "float64" if dtype == "float64" else draw.choice(["float32", "float16", "float64"])
        hosts: list[Any] = []
        vectors: list[Any] = []
        for low in (-2.0, 0.0):
            shape = draw.choice([(batch, d), (batch, d), (d,), None])
            if shape is None and (not hosts or not isinstance(hosts[0], float)):
                hosts.append(draw.uniform(0, 2))
                vectors.append(hosts[-1])
                continue
            whole, view = random_view(shape or (d,), draw)
            base = np.zeros(whole, real)
            hosts.append(view(base))
            hosts[-1][...] = source.uniform(low, 2.0, hosts[-1].shape)
            vectors.append(view_of(place(base), base, view))
        forms = key_arrays(batch, draw)
        seed, keys = draw.choice([form for form in forms if batch or not isinstance(form[0], tuple)])
        if isinstance(seed, np.ndarray) and draw.random() < 0.5:
            seed = place(seed)
        options: dict[str, Any] = {
            "dtype": dtype, "layout": draw.choice(["dn", "nd"]), "backend": draw.choice(backends),
            "antithetic": every_kernel and draw.random() < 0.4, "noise": draw.choice(["independent", "shared"]),
            "dim_offset": draw.choice([0, 0, draw.randrange(2**32 - 32)]),
            "sample_offset": draw.choice([0, 0, draw.randrange(99), draw.randrange(2**34 - 10000)]),
        }  # fmt: skip
        shape = (batch, d, n) if options["layout"] == "dn" else (batch, n, d)
        if draw.random() < 0.4:
            whole, view = random_view(shape, draw)
            memory = np.zeros(whole, DTYPES[dtype])
            base = place(memory)
            out = view_of(base, memory, view)
            assert multisample.sample(*vectors, n, seed=seed, out=out, **options) is out
            drawn = view(bits(base))
            assert np.count_nonzero(bits(base)) == np.count_nonzero(drawn)  # Memory between the elements is unchanged.
        else:
            drawn = bits(multisample.sample(*vectors, n, seed=seed, **options))
        assert drawn.shape == shape
        for b in range(batch):
            rows = [x[b] if np.ndim(x) == 2 else x for x in hosts]
            own = [x if isinstance(x, float) else place(np.ascontiguousarray(x)) for x in rows]
            alone = multisample.sample(*own, n, seed=keys[b], **options)
            assert np.array_equal(drawn[b], bits(alone)), (batch, d, n, b, seed, options)


@pytest.mark.parametrize("dtype", ["uint32", "int64", "uint8"])
def test_keys_on_a_device_need_adjacent_halves_unless_there_are_none(dtype: str) -> None:
    def layout(count: int, strides: tuple[int, int]) -> Any:
        return seed_argument._layout(Operand((count, 2), strides, dtype, dtype, Device("cuda", 0)), is_one=False)

    layout(0, (0, 0))
    layout(3, (16, 4))
    if dtype == "uint32":
        with pytest.raises(ValueError, match=r"^seed: expected key data .* got strides \(16, 8\)"):
            layout(3, (16, 8))


def test_two_and_four_halves_are_one_key(backend: str, place: Place, bits: Any) -> None:
    mu = np.arange(4, dtype=np.float32)
    for data, key in [([1, 2], Key(2**32 + 2, 0)), ([1, 2, 3, 4], Key(2**32 + 2, 3 * 2**32 + 4))]:
        expected = bits(multisample.sample(place(mu), 1.0, 9, seed=key, backend=backend))
        halves = np.array(data, np.uint32)
        for seed in (halves, place(halves)):
            for _ in range(2):  # The second call has a plan.
                got = multisample.sample(place(mu), 1.0, 9, seed=seed, backend=backend)
                assert np.array_equal(bits(got), expected)


ONE = {
    "list": ([7], 7), "Key": ([Key(7, 9)], Key(7, 9)), "int8": (np.array([7], np.int8), 7),
    "pair": (np.array([[3, 9]]), Key(3, 9)),
    "halves": (np.array([[1, 2, 3, 4]], np.uint32), Key(2**32 + 2, 3 * 2**32 + 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_a_vector_of_one_seed_adds_an_axis(backend: str, place: Place, bits: Any, name: str) -> None:
    vector, key = ONE[name]
    mu, weights = np.arange(4, dtype=np.float32), np.ones(5, np.float32)
    for seed in (vector, place(vector)) if isinstance(vector, np.ndarray) else (vector,):
        for means in (mu, mu[None]):
            for options in ({}, {"layout": "nd"}, {"dtype": "float64"}, {"dim_offset": 3, "antithetic": True}):
                alone = bits(multisample.sample(place(mu), 1.0, 5, seed=key, backend=backend, **options))
                for _ in range(2):  # The second call has a plan.
                    got = bits(multisample.sample(place(means), 1.0, 5, seed=seed, backend=backend, **options))
                    assert got.shape == (1, *alone.shape) and np.array_equal(got[0], alone)
            out = place(np.zeros((1, 4, 5), np.float32))
            assert multisample.sample(place(means), 1.0, 5, seed=seed, backend=backend, out=out) is out
            assert np.array_equal(bits(out)[0], bits(multisample.sample(place(mu), 1.0, 5, seed=key, backend=backend)))
            moments = multisample.weighted_moments(place(weights), place(means), 1.0, seed=seed, backend=backend)
            of_key = multisample.weighted_moments(place(weights), place(mu), 1.0, seed=key, backend=backend)
            assert all(np.array_equal(bits(x)[0], bits(y)) for x, y in zip(moments, of_key, strict=True))


@pytest.mark.parametrize("order", [1, 2])
def test_moments_of_a_batch(backend: str, place: Place, bits: Any, order: Any) -> None:
    d, n, batch = 6, 3000, 4
    source = np.random.default_rng(3)
    w, mu = source.random((batch, n)).astype(np.float32), source.normal(size=(batch, d)).astype(np.float32)
    keys = [Key(9, b) for b in range(batch)]
    for weights, means in [(w, mu), (w[1], mu), (w, mu[2]), (w, 0.25)]:
        sigma = np.full(d, 0.5, np.float32)
        arrays = [x if isinstance(x, float) else place(x) for x in (weights, means, sigma)]
        got = multisample.weighted_moments(*arrays, order=order, seed=keys, backend=backend, sample_offset=7)
        assert len(got) == order and all(tuple(x.shape) == (batch, d) for x in got)
        for b in range(batch):
            own = [x if isinstance(x, float) else place(x[b] if x.ndim == 2 else x) for x in (weights, means, sigma)]
            alone = multisample.weighted_moments(*own, order=order, seed=keys[b], backend=backend, sample_offset=7)
            assert all(np.array_equal(bits(x)[b], bits(y)) for x, y in zip(got, alone, strict=True))


NEGATIVE = {
    "int64": (np.array([1, -2]), [1, 2**64 - 2], r"seed\[1\]"),
    "one": (np.array([-7], np.int8), [2**8 - 7], r"seed\[0\]"),
    "pairs": (np.array([[3, 4], [-1, 9]], np.int16), [Key(3, 4), Key(2**16 - 1, 9)], r"seed\[1, 0\]"),
    "one pair": (np.array([[3, -4]], np.int32), [Key(3, 2**32 - 4)], r"seed\[0, 1\]"),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_negative_seeds_raise_on_the_host_and_count_modulo_their_type_on_a_device(
    backend: str, place: Place, bits: Any, name: str
) -> None:
    vector, keys, named = NEGATIVE[name]
    mu = place(np.arange(4, dtype=np.float32))
    for seed in (vector, place(vector)):
        first = place(abs(vector)) if seed is not vector else abs(vector)
        for changed in (first, seed, seed):  # The second call has a plan.
            options = {"seed": changed, "backend": backend}
            if changed is not seed:
                multisample.sample(mu, 1.0, 5, **options)
            elif isinstance(seed, np.ndarray) or str(getattr(seed, "device", "")) == "cpu":
                with pytest.raises(ValueError, match=rf"^{named}: expected 0 <= {named} < 2\*\*64, got -"):
                    multisample.sample(mu, 1.0, 5, **options)
            else:
                expected = bits(multisample.sample(mu, 1.0, 5, seed=keys, backend=backend))
                assert np.array_equal(bits(multisample.sample(mu, 1.0, 5, **options)), expected)


BAD = {
    "a negative number": ([1, -2], ValueError, r"seed\[1\]: expected 0 <= "),
    "swapped bytes": (np.arange(2, dtype=np.dtype("i8").newbyteorder()), ValueError, "seed: .* got swapped bytes"),
    "masked": (np.ma.array([1, 2], mask=[0, 1]), TypeError, "seed: .* got a masked array; fill it first"),
    "a bool": ([3, True], TypeError, r"seed\[1\]: expected an integer, got the bool True"),
    "a float": ([1, 2.5], TypeError, r"seed\[1\]: "),
    "a list in a list": ([[1], [2]], TypeError, r"seed\[0\]: "),
    "floats": (np.zeros(2), TypeError, "seed: expected integers, got .* of type float64"),
    "booleans": (np.zeros(2, bool), TypeError, "seed: expected integers, got .* of type bool"),
    "three halves": (np.zeros(3, np.uint32), ValueError, r"seed: expected key data .*got shape \(3,\)"),
    "three words": (np.zeros((2, 3), np.int64), ValueError, r"seed: expected .* \(B, 2\), got shape \(2, 3\)"),
    "too many": ([1, 2, 3], ValueError, r"mu: expected shape \(B, \*S\) or \(d,\), B being 3 seeds, got \(2, 3\)"),
    "too large a Key": ([1, Key(0, 2**64)], ValueError, r"seed\[1\]\.offset: "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_seeds_have_clear_errors(backend: str, place: Place, bits: Any, name: str) -> None:
    seed, error, message = BAD[name]
    out = place(np.full((2, 3, 4), 7.0, np.float32))
    mu = place(np.zeros((2, 3), np.float32))
    for _ in range(2):
        with pytest.raises(error, match=message):
            multisample.sample(mu, 1.0, 4, seed=seed, backend=backend, out=out)
        multisample.sample(mu, 1.0, 4, seed=[1, 2], backend=backend)
    assert (bits(out) == np.float32(7).view(np.uint32)).all()


def test_bad_shapes_have_clear_errors(backend: str, place: Place) -> None:
    seeds, vector = [1, 2], place(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"weights: expected shape \(n,\) or \(B, n\)"):
        multisample.weighted_moments(place(np.ones((3, 5), np.float32)), vector, 1.0, seed=seeds, backend=backend)
    with pytest.raises(ValueError, match=r"out: expected shape \(2, 3, 4\)"):
        multisample.sample(vector, 1.0, 4, seed=seeds, backend=backend, out=place(np.zeros((3, 4), np.float32)))


def test_out_that_overlaps_itself_or_an_input_and_the_index_of_a_bad_value() -> None:
    for make in (np.array, pytest.importorskip("torch").tensor):
        with pytest.raises(ValueError, match=r"sigma\[1, 2\] = -1.0"):
            multisample.sample(0.0, make([[1.0] * 4, [1.0, 1.0, -1.0, 1.0]]), 5, seed=[1, 2])
    memory = np.zeros(1000)
    overlapping = np.lib.stride_tricks.as_strided(memory, (2, 3, 4), (8 * 6, 8 * 4, 8))
    with pytest.raises(ValueError, match="out: expected elements that do not overlap"):
        multisample.sample(np.zeros(3), 1.0, 4, seed=[1, 2], out=overlapping)
    with pytest.raises(ValueError, match="out: expected memory of its own, got memory that mu also uses"):
        multisample.sample(memory[20:23], 1.0, 4, seed=[1, 2], out=memory[:24].reshape(2, 3, 4))


def test_seeds_on_the_host_are_read_before_out_is_written() -> None:
    expected, out = multisample.sample(np.zeros(3), 1.0, 4, seed=[5, 6]), np.empty((2, 3, 4))
    for _ in range(2):
        seeds = out.reshape(-1).view(np.int64)[10:12]
        seeds[:] = 5, 6
        np.testing.assert_array_equal(multisample.sample(np.zeros(3), 1.0, 4, seed=seeds, out=out), expected)


def test_seeds_on_a_device_are_not_written() -> None:
    """Addresses alone decide, so a device is not needed."""
    device = Device("cuda", 0)
    out = Operand((2, 3, 4), (96, 32, 8), "float64", "float64", device)
    seed = Operand((2,), (8,), "int64", "float32", device)
    inputs = Inputs({}, 3, 4, "float64", device, 2)
    for is_empty, address in itertools.product((False, True), (984, 985, 1191, 1192)):
        check = target_checker(out, inputs, ("mu", "sigma"), HOST, False, is_empty, seed)
        is_written = not is_empty and 984 < address < 1192
        expected = pytest.raises(ValueError, match=r"^out: expected memory of its own, got memory that seed also uses")
        with expected if is_written else contextlib.nullcontext():
            check(None, 1000, (0.0, 1.0, None, None), (0.0, 1.0, 0, address))
