"""Means of any shape, `n` of any shape, and standard normals of any shape: the numbers of the flattened call."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tables import DTYPES

import multisample
from multisample import Generator, Key, sample, standard_normal

Array = np.ndarray[Any, Any]
ONE = np.ones(1, np.float32)


def flattened(x: Array, dims: tuple[int, ...], batch: int | None) -> Array:
    """A mean or standard deviation of any shape as a vector, or in a batch as (B, d)."""
    lead = x.shape[: int(batch is not None and x.ndim > 1)]
    own = x.shape[len(lead) :]
    whole = np.broadcast_to(x.reshape(*lead, *(1,) * (len(dims) - len(own)), *own), (*lead, *dims))
    return np.ascontiguousarray(whole).reshape(*lead, math.prod(dims))


def test_samples_of_any_shape_equal_the_flattened_call(backend: str, place: Any, view_of: Any, bits: Any) -> None:
    draw, source = random.Random(5), np.random.default_rng(5)
    for _ in range(150):
        batch, dtype = draw.choice([None, None, 1, 3]), draw.choice(["float32", "float64", "float16"])
        lead = () if batch is None else (batch,)
        dims = draw.choice([(2, 3), (2, 1, 3), (5, 2, 2), (3, 3)])
        cut = draw.choice([dims, (1, *dims[1:]), (*dims[:-1], 1), (1,) * len(dims), dims[1:]])
        shapes = [(*lead, *dims), (*lead, *cut) if len(cut) > 1 or batch is None else cut]
        if len(cut) > 1 or cut[0] != dims[0]:  # A mean (d,) with (d, d) may be meant as a covariance.
            draw.shuffle(shapes)
        hosts, arrays = [], []
        for shape, low in zip(shapes, (-1.0, 0.0), strict=True):
            hosts.append(source.uniform(low, 1.0, shape).astype(dtype))
            order = draw.choice([list(range(len(shape))), draw.sample(range(len(shape)), len(shape))])
            base = np.ascontiguousarray(hosts[-1].transpose(order))
            back = [order.index(axis) for axis in range(len(shape))]

            def view(x: Any, back: list[int] = back) -> Any:
                return x.permute(*back) if hasattr(x, "permute") else x.transpose(back)

            arrays.append(view_of(place(base), base, view))
        columns = draw.choice([7, (), (3,), (2, 3), (2, 1, 2)])
        lengths = columns if isinstance(columns, tuple) else (columns,)
        options: dict[str, Any] = {
            "antithetic": draw.random() < 0.3, "layout": draw.choice(["dn", "nd"]), "backend": backend,
            "dim_offset": draw.choice([0, 3]), "sample_offset": draw.choice([0, 5]),
            "seed": 7 if batch is None else [7, 8, 9][:batch],
        }  # fmt: skip
        shape = (*lead, *dims, *lengths) if options["layout"] == "dn" else (*lead, *lengths, *dims)
        out = place(np.zeros(shape, dtype))
        try:
            x = bits(sample(*arrays, columns, **options))
        except ValueError as error:  # Numba cannot copy device arrays.
            assert "single stride" in str(error)
            continue
        assert sample(*arrays, columns, out=out, **options) is out
        rows = [place(flattened(host, dims, batch)) for host in hosts]
        expected = bits(sample(*rows, math.prod(lengths), **options)).reshape(shape)
        assert np.array_equal(x, expected), (shapes, columns, options)
        assert np.array_equal(bits(out), expected), (shapes, columns, options)


@pytest.mark.parametrize("layout", ["dn", "nd"])
def test_an_out_of_any_strides_that_flatten_is_filled_and_others_raise(layout: Any) -> None:
    mu = np.arange(6, dtype=np.float32).reshape(2, 3)
    for columns in ((4, 5), (4,), ()):
        shape = (2, 3, *columns) if layout == "dn" else (*columns, 2, 3)
        x = sample(mu, 1.0, columns, seed=7, layout=layout)
        split = 2 if layout == "dn" else len(columns)
        rows, rest = math.prod(shape[:split]), math.prod(shape[split:])
        for memory in (np.zeros((rows, 2 * rest), np.float32)[:, ::2], np.zeros((rest, rows), np.float32).T):
            out = memory.reshape(shape)
            if not np.shares_memory(out, memory):  # NumPy copied the view.
                continue
            assert sample(mu, 1.0, columns, seed=7, layout=layout, out=out) is out
            assert np.array_equal(out, x)
    with pytest.raises(ValueError, match=r"^out: .* flatten without a copy to shape \(6, 4\), got shape \(2, 3, 4\)"):
        sample(mu, 1.0, 4, seed=7, out=np.zeros((3, 2, 4), np.float32).transpose(1, 0, 2))
    with pytest.raises(ValueError, match=r"^out: expected memory of its own"):
        sample(mu, 1.0, (), seed=7, out=mu)


@pytest.mark.parametrize("place_scalar", [np.float32, np.float64], ids=str)
def test_numbers_in_arrays_have_the_shape_of_n(place_scalar: Any) -> None:
    x = sample(place_scalar(2), np.ones(()), (2, 3), seed=7)
    assert x.shape == (2, 3)
    assert np.array_equal(x.reshape(-1), sample(np.full(1, 2, x.dtype), 1.0, 6, seed=7)[0])


def test_shapes_without_a_meaning_raise_and_advance_nothing() -> None:
    mu, generator = np.zeros((2, 3)), Generator(7)
    for arguments, error, message in (
        ((mu, np.ones(2), 4), ValueError, r"^mu, sigma: expected shapes that broadcast, got \(2, 3\) and \(2,\)"),
        ((mu, 1.0, [2, 2]), TypeError, r"^n: expected an integer, got \[2, 2\]"),
        ((mu, 1.0, (2, True)), TypeError, r"^n\[1\]: expected an integer, got the bool True"),
        ((mu, 1.0, (2, 1.0)), TypeError, r"^n\[1\]: expected an integer, got 1\.0"),
        ((mu, 1.0, (2, -1)), ValueError, r"^n\[1\]: expected 0 <= n\[1\] <= 2\*\*34, got -1"),
        ((mu, 1.0, (2**20, 2**20)), ValueError, r"^n: expected"),
    ):
        sample(mu, 1.0, (2, 1), generator=Generator(1))  # Its plan serves no bool and no float.
        for _ in range(2):
            with pytest.raises(error, match=message):
                sample(*arguments, generator=generator)
    with pytest.raises(ValueError, match=r"^mu: expected shape \(B, \*S\) or \(d,\), B being 3 seeds, got \(2, 3\)"):
        sample(mu, 1.0, 4, seed=[1, 2, 3])
    with pytest.raises(ValueError, match=r"^mu: expected shape \(d,\) or \(d, 1\), got \(2, 3\)"):
        multisample.weighted_moments(np.ones(3), mu, 1.0, seed=7)
    assert generator.offset == 0


@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_standard_normals_are_row_0_whatever_their_shape(dtype: Any) -> None:
    row = sample(ONE * 0, ONE, 60, seed=Key(7, 3), sample_offset=5, dtype=dtype or "float64")[0]
    for size in ((3, 4, 5), 60, [60], (60, 1), np.int64(60)):
        for _ in range(2):
            z = standard_normal(size, seed=Key(7, 3), start=5, dtype=dtype)  # type: ignore[arg-type]
            assert z.dtype == DTYPES[dtype or "float64"]
            assert z.shape == ((60,) if isinstance(size, (int, np.integer)) else tuple(size))
            assert z.reshape(-1).tobytes() == row.tobytes()
            out = np.zeros(z.shape, z.dtype)
            assert standard_normal(size, seed=Key(7, 3), start=5, out=out) is out  # type: ignore[arg-type]
            assert out.tobytes() == row.tobytes()
    assert standard_normal((), seed=7).shape == ()
    assert standard_normal((0, 3), seed=7).shape == (0, 3)


def test_standard_normals_fill_arrays_of_each_library(backend: str, place: Callable[[Array], Any], bits: Any) -> None:
    out = place(np.zeros((3, 4), np.float32))
    for _ in range(2):
        assert standard_normal((3, 4), seed=7, out=out) is out
    assert bits(out).tobytes() == standard_normal(12, seed=7, dtype="float32").tobytes()


def test_standard_normals_are_the_noise_of_parameter_0() -> None:
    (noise,) = multisample.perturb([np.zeros((3, 4), np.float32)], 1.0, seed=7)
    assert np.array_equal(noise, standard_normal((3, 4), seed=7, dtype="float32"))


@pytest.mark.parametrize("seed", [[7, 8], (7, 8), np.array([7, 8]), Generator(7).take(2), [Key(7, 1), 8]], ids=str)
def test_element_b_of_standard_normals_has_seed_b(seed: Any) -> None:
    for start in (0, 3):
        for _ in range(2):
            x = standard_normal((2, 3, 4), seed=seed, start=start)
            for part, own in zip(x, seed, strict=True):
                own = Key(*own.tolist()) if isinstance(own, np.ndarray) else own
                assert np.array_equal(part, standard_normal((3, 4), seed=own, start=start))


def test_a_list_of_generators_gives_one_key_each_after_all_checks() -> None:
    generators = [Generator(7), Generator(8)]
    x = standard_normal((2, 3), generator=generators)
    y = sample(np.zeros(3), 1.0, 4, generator=generators)
    for b, seed in enumerate((7, 8)):
        assert np.array_equal(x[b], standard_normal(3, seed=seed))
        assert np.array_equal(y[b], sample(np.zeros(3), 1.0, 4, seed=Key(seed, 1)))
    calls: list[tuple[Callable[..., Any], type[Exception], str]] = [
        (lambda g: sample(np.zeros(3), -1.0, 4, generator=g), ValueError, "^sigma"),
        (lambda g: sample(np.zeros((3, 5)), 1.0, 4, generator=g), ValueError, "^mu: .* 2 seeds"),
        (lambda g: sample(np.zeros(3), 1.0, 4, generator=g, seed=1), TypeError, "^seed, generator"),
        (lambda g: sample(np.zeros(3), 1.0, 4, generator=[*g, None]), TypeError, r"^generator\[2\]"),
        (lambda g: sample(np.zeros(3), 1.0, 4, generator=[*g, 5]), TypeError, r"^generator\[2\]"),
        (lambda g: sample(np.zeros(3), 1.0, 4, generator=[*g, Generator(1, graph_safe=True)]), ValueError,
            r"^generator\[2\]: .* graph-safe"),
        (lambda g: standard_normal((3, 2), generator=g), ValueError, "^size: .* number of generators, 2, got"),
        (lambda g: standard_normal((2, 2), generator=g, out=np.zeros((2, 3))), ValueError, "^out"),
    ]  # fmt: skip
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call(generators)
    assert [g.offset for g in generators] == [2, 2]


def test_wrong_arguments_of_standard_normals_raise_and_advance_nothing() -> None:
    generator = Generator(7)
    assert standard_normal((2, 1), generator=generator).shape == (2, 1)
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (None, {}, TypeError, "^size: expected an integer, got None"),
        ((2, True), {}, TypeError, r"^size\[1\]: expected an integer, got the bool"),
        ((2, 1.0), {}, TypeError, r"^size\[1\]: expected an integer, got 1\.0"),
        ((2, -1), {}, ValueError, r"^size\[1\]: expected 0 <="),
        ((2, 1), {"start": -1}, ValueError, "^start: expected 0 <= start"),
        ((2, 1), {"start": 1.0}, TypeError, "^start: expected an integer"),
        ((2, 1), {"start": 2**34 - 1}, ValueError, r"^size: expected start \+ elements <= 2\*\*34"),
        ((2, 1), {"dtype": int}, TypeError, "^dtype: expected float16"),
        ((2, 1), {"out": [1]}, TypeError, "^out: expected a NumPy array"),
        ((2, 1), {"out": np.zeros((2, 2))}, ValueError, r"^out: expected shape \(2, 1\), got \(2, 2\)"),
        ((2, 1), {"out": np.zeros((2, 1), int)}, ValueError, "^out: expected dtype float64, got int64"),
        ((2, 1), {"out": np.zeros((2, 1)), "dtype": "float32"}, ValueError, "^out: expected dtype float32"),
        ((2, 3), {"out": np.zeros((3, 2)).T}, ValueError, r"^out: .* flatten without a copy to shape \(1, 6\), got"),
    ]
    for size, options, error, message in cases:
        for _ in range(2):
            with pytest.raises(error, match=message):
                standard_normal(size, generator=generator, **options)
    with pytest.raises(ValueError, match=r"^size: expected the first length to be the number of seeds, 3"):
        standard_normal((2, 3), seed=[1, 2, 3])
    assert generator.offset == 1


def test_names_of_other_libraries_say_where_to_go() -> None:
    for owner, name, advice in (
        (Generator(1), "normal", r"use multisample\.sample\(mu, sigma, n\) with generator="),
        (Generator(1), "standard_normal", r"use multisample\.standard_normal\(size\) with generator="),
        (multisample, "randn", r"use multisample\.torch\.randn"),
        (multisample, "normal", r"multisample\.standard_normal"),
    ):
        with pytest.raises(AttributeError, match=rf"attribute '{name}'; .*{advice}"):
            getattr(owner, name)
    for owner in (Generator(1), multisample):
        with pytest.raises(AttributeError, match=r"attribute 'nothing'$"):
            getattr(owner, "nothing")  # noqa: B009
