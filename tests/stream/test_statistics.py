"""Statistical tests: draws are normal and independent. One backend suffices, since all give the same bits.

The draws are the noise z. Samples with mu and sigma, shared noise, antithetic pairs and narrow types are exact
functions of z, which test_sample_stream.py compares bit for bit.

Every statistic computes one p-value: the probability that exact normals deviate at least as much. A test fails below
`ALPHA`. Seeds are fixed and no test is retried, so a failure means a changed stream. All statistics are also applied to
broken streams, and must reject them with a p-value below `CAUGHT`.

binary32 numbers lie on a lattice, and counts in cells are only valid if no edge lies on it. So the edges are midpoints
of adjacent lattice points, which are the boundaries of rounding to the lattice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba import njit
from scipy import special, stats
from tables import slow_but

import multisample

Array = np.ndarray[Any, Any]

# The probability, over all seeds, that a test rejects a correct stream. Fewer than 100 tests add up to 1e-4 at most.
ALPHA = 1e-6
# Broken streams must give a smaller p-value.
CAUGHT = 1e-12

THREADS = 2


# --- p-values -------------------------------------------------------------------------------------


def worst(p_values: Any) -> float:
    """Combine p-values, which may be dependent, into one: the smallest times their number (Bonferroni)."""
    values = np.ravel(p_values)
    return float(min(1.0, values.size * values.min()))


def of_standard_normal(t: Any) -> Array:
    """Two-sided p-values of standard normals."""
    return np.asarray(special.erfc(np.abs(t) / math.sqrt(2)))


def of_chi_square(statistic: float, degrees: int) -> float:
    """A two-sided p-value, since data that fit too well are suspicious too."""
    return worst((stats.chi2.sf(statistic, degrees), stats.chi2.cdf(statistic, degrees)))


def of_counts(counts: Array, probabilities: Array) -> float:
    """The p-value of Pearson's chi-square."""
    assert probabilities.sum() == pytest.approx(1, abs=1e-9)
    expected = counts.sum() * probabilities
    # The chi-square distribution holds for infinite counts. For finite counts, the variance 2 (cells - 1) grows by at
    # most the sum of 1 / expected (Haldane 1937): by 1 % at 50 per cell. A nominal p-value of 1e-6 is then 1.12e-6.
    assert expected.min() >= 50
    return of_chi_square(float(((counts - expected) ** 2 / expected).sum()), counts.size - 1)


# --- Counts in cells ------------------------------------------------------------------------------

# A class is a run of 2^12 adjacent binary32 numbers, identified by the upper 20 bits of their patterns. Classes are
# small enough (at most 2e-4 of all draws) to combine them into cells of any kind.
SHIFT = 12
CLASSES = 1 << (32 - SHIFT)
# Classes of positive numbers below 16. Classes of negative numbers follow from CLASSES / 2 on.
SIDE = int(np.float32(16).view(np.uint32)) >> SHIFT


def edges_between(numbers: Array) -> Array:
    """The midpoints between each of `numbers` and the number below. The first number is 0."""
    below = np.nextafter(numbers, numbers.dtype.type(0))
    edges: Array = (numbers.astype(np.float64) + below.astype(np.float64)) / 2
    assert edges[0] == 0
    assert (np.diff(edges) > 0).all()
    return edges


EDGES = edges_between((np.arange(SIDE, dtype=np.uint32) << SHIFT).view(np.float32))


def merged(edges: Array, cells: int) -> tuple[Array, Array]:
    """Merge the cells on the positive side into about `cells` cells of nearly equal probability.

    Returns the new cell of each old cell, and the probabilities of the new cells, which sum to 1/2.
    """
    beyond = special.ndtr(-edges)
    probability = beyond - np.append(beyond[1:], 0)
    index = np.minimum(2 * cells * beyond, cells - 1).astype(np.int64)
    # If a cell of `edges` is wider than a new cell, some indices of new cells stay unused.
    _, index = np.unique(index, return_inverse=True)
    return index, np.bincount(index, probability)


class Survey(NamedTuple):
    """Statistics from one pass over draws that are too many to store."""

    size: int
    counts: Array
    """Counts of draws by class."""
    sums: Array
    """Sums of the powers 1 to 6."""


POWERS = 6


@njit(nogil=True, fastmath={"reassoc"})
def add_to_survey(z: Array, patterns: Array, counts: Array, sums: Array) -> None:
    for k in range(patterns.size):
        counts[patterns[k] >> np.uint32(SHIFT)] += 1
    s1 = s2 = s3 = s4 = s5 = s6 = 0.0
    for k in range(z.size):
        x = np.float64(z[k])
        y = x * x
        s1 += x
        s2 += y
        s3 += x * y
        s4 += y * y
        s5 += x * y * y
        s6 += y * y * y
    for power, value in enumerate((s1, s2, s3, s4, s5, s6)):
        sums[power] += value


def surveyed(chunks: Iterable[Array]) -> Survey:
    """A survey of float32 arrays."""
    counts, sums, size = np.zeros((THREADS, CLASSES), np.int64), np.zeros((THREADS, POWERS)), 0
    with ThreadPoolExecutor(THREADS) as pool:
        for chunk in chunks:
            assert chunk.dtype == np.float32
            pieces = np.array_split(chunk.reshape(-1), THREADS)
            list(pool.map(add_to_survey, pieces, [piece.view(np.uint32) for piece in pieces], counts, sums))
            size += chunk.size
    return Survey(size, counts.sum(0), sums.sum(0))


def windows(size: int, seed: int, dtype: str = "float32", sample_offset: int = 0) -> Iterator[Array]:
    """`size` draws from a matrix of many rows, in chunks of 2^22 that share one buffer."""
    rows, columns = 64, 2**16
    out = np.empty((rows, columns), dtype)
    mu, sigma = np.zeros(rows, out.dtype), np.ones(rows, out.dtype)
    for k in range(size // out.size):
        down, right = k % 8, k // 8
        yield multisample.sample(
            mu, sigma, columns,
            backend="cpu", seed=seed, dtype=dtype, out=out,
            dim_offset=rows * down, sample_offset=sample_offset + columns * right,
        )  # fmt: skip


# --- Distribution of single draws -----------------------------------------------------------------


def double_factorial(k: int) -> int:
    return math.prod(range(k, 0, -2))


def moments(survey: Survey) -> float:
    """Sample means of z^k, k from 1 to 6, standardised by the exact moments E z^2k = (2k - 1)!!."""
    # The skewness of z^6 is 33, and the skewness of the mean of 2^24 of them is 0.008. So the normal approximation of a
    # p-value of 1e-6 is accurate to 15 % (Edgeworth: 0.008 / 6 (t^3 - 3 t) at t = 4.9).
    assert survey.size >= 2**24
    t = []
    for power, total in enumerate(survey.sums, 1):
        mean = 0 if power % 2 else double_factorial(power - 1)
        variance = double_factorial(2 * power - 1) - mean**2
        t.append((total / survey.size - mean) / math.sqrt(variance / survey.size))
    return worst(of_standard_normal(t))


def cells(survey: Survey, cells_a_side: int = 1024) -> float:
    """Chi-square over cells of nearly equal probability."""
    index, probability = merged(EDGES, cells_a_side)
    sides = [survey.counts[start : start + SIDE] for start in (0, CLASSES // 2)]
    assert sum(int(side.sum()) for side in sides) == survey.size
    counts = np.concatenate([np.bincount(index, side) for side in sides])
    return of_counts(counts, np.concatenate((probability, probability)))


# Each edge is just below one of these numbers, which are the first of their classes.
TAILS = (4.0, 4.5, 5.0, 5.5, 6.0)


def tails(survey: Survey) -> float:
    """Exact binomial tests of the numbers of draws beyond 4, 4.5, 5, 5.5 and 6, on each side."""
    p_values = []
    for start in (0, CLASSES // 2):
        side = survey.counts[start : start + SIDE]
        for tail in TAILS:
            k = int(np.float32(tail).view(np.uint32)) >> SHIFT
            law = stats.binom(survey.size, special.ndtr(-EDGES[k]))
            count = side[k:].sum()
            p_values.append(min(1.0, 2 * min(law.cdf(count), law.sf(count - 1))))
    return worst(p_values)


def symmetry(survey: Survey) -> float:
    """Equal counts on both sides, by class: given the sum, a count is binomial with probability 1/2."""
    positive, negative = (survey.counts[start : start + SIDE] for start in (0, CLASSES // 2))
    known = positive + negative >= 100
    t = (positive - negative)[known] / np.sqrt((positive + negative)[known])
    return of_chi_square(float((t**2).sum()), int(known.sum()))


SURVEY_STATISTICS: dict[str, Callable[[Survey], float]] = {
    "moments": moments,
    "cells": cells,
    "tails": tails,
    "symmetry": symmetry,
}


SURVEYS: dict[str, Callable[[], Iterable[Array]]] = {
    # About 300 of these draws are beyond 5 on each side, and one is beyond 6.
    "2^30 float32 draws": lambda: windows(2**30, seed=101),
    "the end of the stream": lambda: windows(2**26, seed=2**64 - 1, sample_offset=2**34 - 2**19),
    # NumPy rounds the draws to binary32, which the edges are made for.
    "float64 draws": lambda: (chunk.astype(np.float32) for chunk in windows(2**26, seed=102, dtype="float64")),
}


@pytest.fixture(scope="module", params=slow_but(["the end of the stream"], SURVEYS))
def survey(request: pytest.FixtureRequest) -> Survey:
    return surveyed(SURVEYS[request.param]())


@pytest.mark.parametrize("statistic", SURVEY_STATISTICS)
def test_draws_are_normal(survey: Survey, statistic: str) -> None:
    assert SURVEY_STATISTICS[statistic](survey) > ALPHA


def tripled(z: Array) -> Array:
    """One draw in a thousand comes from a wider distribution."""
    result = z.copy()
    result.reshape(-1)[::1000] *= 3
    return result


def with_a_gap(z: Array) -> Array:
    """Draws between 1 and 1.001 are moved below 1."""
    return np.where((z > 1) & (z < 1.001), z - np.float32(0.001), z)


BROKEN: dict[str, tuple[Callable[[Array], Array], tuple[str, ...]]] = {
    "mean of 0.001": (lambda z: z + np.float32(1e-3), ("moments",)),
    "deviation of 1.001": (lambda z: z * np.float32(1.001), ("moments",)),
    "one in a thousand tripled": (tripled, ("moments", "cells", "tails")),
    "clipped at 3": (lambda z: np.clip(z, -3, 3), ("moments", "cells", "tails")),
    "clipped at 4.25": (lambda z: np.clip(z, -4.25, 4.25), ("tails",)),
    "coarse": (lambda z: np.round(z * 128) / np.float32(128), ("cells",)),
    "a gap": (with_a_gap, ("cells", "symmetry")),
    "one tail longer": (lambda z: np.where(z > 3, z * np.float32(1.05), z), ("moments", "tails", "symmetry")),
    "too even": (lambda z: np.concatenate((z, -z)), ("symmetry",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN)
def test_draws_that_are_not_normal_are_rejected(broken: str) -> None:
    breaking, finders = BROKEN[broken]
    found = surveyed(breaking(chunk) for chunk in windows(2**26, seed=103))
    for statistic in finders:
        assert SURVEY_STATISTICS[statistic](found) < CAUGHT, statistic


def low_bits(z: Array) -> float:
    """Chi-square of the 256 values of binary digits 26 to 33; the density hardly changes over their range."""
    places = np.abs(z.astype(np.float64)) * 2.0**33
    counts = np.bincount(places.astype(np.int64).reshape(-1) & 255, minlength=256)
    return of_counts(counts, np.full(256, 1 / 256))


def test_low_bits_of_float64_draws_are_uniform() -> None:
    assert low_bits(next(windows(2**22, seed=106, dtype="float64"))) > ALPHA


def test_low_bits_of_float32_draws_are_rejected() -> None:
    assert low_bits(next(windows(2**22, seed=106))) < CAUGHT


# --- Pairs of draws -------------------------------------------------------------------------------


def square_cells(a_side: int) -> tuple[Array, Array]:
    """The cell of each class, and the probability of each cell."""
    index, probability = merged(EDGES, a_side)
    table = np.zeros(CLASSES, np.uint8)
    table[:SIDE] = index
    table[CLASSES // 2 : CLASSES // 2 + SIDE] = index + probability.size
    return table, np.concatenate((probability, probability))


@njit(nogil=True)
def count_pairs(a: Array, b: Array, table: Array, counts: Array) -> None:
    for r in range(a.shape[0]):
        for c in range(a.shape[1]):
            counts[table[a[r, c] >> np.uint32(SHIFT)], table[b[r, c] >> np.uint32(SHIFT)]] += 1


def pairs(a: Array, b: Array) -> float:
    """Chi-square of the points ``(a, b)`` over 32 by 32 cells of the plane."""
    table, probability = square_cells(16)
    counts = np.zeros((probability.size, probability.size), np.int64)
    count_pairs(a.view(np.uint32), b.view(np.uint32), table, counts)
    return of_counts(counts.reshape(-1), np.outer(probability, probability).reshape(-1))


@pytest.fixture(scope="module")
def matrix() -> Array:
    z: Array = multisample.sample(np.zeros(256), np.ones(256), 2**17, backend="cpu", seed=109, dtype="float32")
    return z


# Pairs (j, k) of nearby columns. One pair of words gives columns 0 and 1, the other gives 2 and 3. Column 4 begins a
# block.
NEIGHBOURS = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 2), (1, 3), (0, 3), (0, 4), (1, 5), (1, 6)]


@pytest.mark.parametrize(("j", "k"), NEIGHBOURS)
def test_pairs_of_adjacent_columns_are_bivariate_normal(matrix: Array, j: int, k: int) -> None:
    a, b = matrix[:, j::4], matrix[:, k::4]
    assert pairs(a[:, : b.shape[1]], b) > ALPHA


@pytest.mark.parametrize("lag", [1, 2, 16, 128])
def test_pairs_of_rows_are_bivariate_normal(matrix: Array, lag: int) -> None:
    # Every row is in one pair only.
    a = matrix.reshape(-1, 2, lag, matrix.shape[1])
    assert pairs(a[:, 0].reshape(128, -1), a[:, 1].reshape(128, -1)) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize(
    "breaking",
    [
        lambda a, b: b + np.float32(0.02) * a,
        lambda a, b: b * np.where(np.abs(a) < np.float32(0.6745), np.float32(0.97), np.float32(1.03)),
        lambda a, b: np.where(a.view(np.uint32) % 64 == 0, np.abs(b), b),
        lambda a, b: np.where((a > 0) & (a < 0.01), a, b),
    ],
    ids=["correlated", "of dependent sizes", "of dependent signs", "sometimes equal"],
)
def test_dependent_pairs_are_rejected(matrix: Array, breaking: Callable[[Array, Array], Array]) -> None:
    a, b = matrix[:, 0::4], matrix[:, 1::4]
    assert pairs(a, breaking(a, b)) < CAUGHT


# --- Sets of streams ------------------------------------------------------------------------------

# Functions of the draws with mean 0 and variance 1.
SEEN_AS: dict[str, Callable[[Array], Array]] = {
    "values": lambda z: z,
    "magnitudes": lambda z: (np.abs(z) - math.sqrt(2 / math.pi)) / math.sqrt(1 - 2 / math.pi),
    "squares": lambda z: (z * z - 1) / math.sqrt(2),
}


def correlation(z: Array, seen_as: str) -> float:
    """Correlations of all pairs of rows: the largest, and the sum of squares.

    The sum of n products with mean 0 and variance 1, over sqrt(n), is normal except for its skewness. The products of
    squares have skewness 8, and n = 2^17 leaves 0.02, which changes a p-value of 1e-6 by at most 40 %.
    """
    x = SEEN_AS[seen_as](z.astype(np.float64))
    above = np.triu_indices(len(x), 1)
    t = (x @ x.T)[above] / math.sqrt(x.shape[1])
    return worst((worst(of_standard_normal(t)), of_chi_square(float((t**2).sum()), t.size)))


LENGTH = 2**17
STREAMS = 64


def drawn(d: int, n: int, **options: Any) -> Array:
    zeros, ones = np.zeros(d, np.float32), np.ones(d, np.float32)
    z: Array = multisample.sample(zeros, ones, n, backend="cpu", **options)
    return z


def powers_up_to(limit: int) -> list[int]:
    """0 and all powers of two below `limit`: positions whose counters differ in one or two bits."""
    return [0, *(1 << exponent for exponent in range(limit.bit_length() - 1))]


def at_offsets(offsets: Iterable[int]) -> Array:
    generator = multisample.Generator(115)
    rows = []
    for offset in offsets:
        generator.state = {**generator.state, "offset": offset}
        rows.append(drawn(1, LENGTH, generator=generator))
    return np.concatenate(rows)


def of_family() -> Array:
    parent = multisample.Generator(119)
    return np.concatenate([drawn(1, LENGTH, generator=each) for each in (parent, *parent.spawn(STREAMS - 1))])


STREAM_SETS: dict[str, Callable[[], Array]] = {
    "consecutive rows": lambda: drawn(STREAMS, LENGTH, seed=110),
    "distant rows": lambda: np.concatenate([drawn(1, LENGTH, seed=111, dim_offset=i) for i in powers_up_to(2**32)]),
    "consecutive columns": lambda: drawn(LENGTH, STREAMS, seed=112).T,
    "distant columns": lambda: (
        np.concatenate([drawn(LENGTH, 1, seed=113, sample_offset=j) for j in powers_up_to(2**34)], axis=1).T
    ),
    "distant stretches of a row": lambda: np.concatenate(
        [drawn(1, LENGTH, seed=114, sample_offset=j) for j in powers_up_to(2**34) if not 0 < j < LENGTH]
    ),
    "consecutive offsets": lambda: at_offsets(range(STREAMS)),
    "distant offsets": lambda: at_offsets(powers_up_to(2**64)),
    "consecutive seeds": lambda: np.concatenate([drawn(1, LENGTH, seed=seed) for seed in range(STREAMS)]),
    "distant seeds": lambda: np.concatenate([drawn(1, LENGTH, seed=seed) for seed in powers_up_to(2**64)]),
    "a generator and its children": of_family,
}


@pytest.fixture(scope="module", params=slow_but(["distant seeds"], STREAM_SETS))
def streams(request: pytest.FixtureRequest) -> Array:
    return STREAM_SETS[request.param]()


@pytest.mark.parametrize("seen_as", SEEN_AS)
def test_independent_streams_are_uncorrelated(streams: Array, seen_as: str) -> None:
    assert len(streams) > 15
    assert correlation(streams, seen_as) > ALPHA


def with_one_pair(z: Array) -> Array:
    z[7] = 0.03 * z[3] + math.sqrt(1 - 0.03**2) * z[7]
    return z


def with_something_in_common(z: Array) -> Array:
    return z + np.float32(0.05) * drawn(1, LENGTH, seed=1)


def with_a_repetition(z: Array) -> Array:
    z[9] = -z[40]
    return z


def with_sizes_in_common(z: Array) -> Array:
    z[5] *= np.where(np.abs(z[2]) < 0.6745, 0.95, 1.05)
    return z


@pytest.mark.parametrize(
    ("breaking", "seen_as"),
    [
        (with_one_pair, "values"),
        (with_something_in_common, "values"),
        (with_a_repetition, "values"),
        pytest.param(with_a_repetition, "magnitudes", marks=pytest.mark.slow),
        pytest.param(with_a_repetition, "squares", marks=pytest.mark.slow),
        (with_sizes_in_common, "magnitudes"),
        pytest.param(with_sizes_in_common, "squares", marks=pytest.mark.slow),
    ],
)
def test_correlated_streams_are_rejected(breaking: Callable[[Array], Array], seen_as: str) -> None:
    assert correlation(breaking(drawn(STREAMS, LENGTH, seed=120)), seen_as) < CAUGHT
