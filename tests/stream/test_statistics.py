"""Statistical tests: draws are normal and independent. One backend suffices, since all give the same bits.

They are for new versions of the stream, as is TestU01: other tests compare bit for bit. Every statistic computes one
p-value: the probability that exact normals deviate at least as much.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from scipy import special, stats
from tables import slow_but

import multisample

Array = np.ndarray[Any, Any]

# The probability, over all seeds, that a test rejects a correct stream. Fewer than 100 tests add up to 1e-4 at most.
ALPHA = 1e-6


def drawn(d: int, n: int, **options: Any) -> Array:
    z: Array = multisample.sample(np.zeros(d, np.float32), 1.0, n, backend="cpu", **options)
    return z


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


def moments(z: Array) -> float:
    """Sample means of z^k, k from 1 to 6, standardised by the exact moments E z^2k = (2k - 1)!!."""
    # The skewness of z^6 is 33, and the skewness of the mean of 2^24 of them is 0.008. So the normal approximation of a
    # p-value of 1e-6 is accurate to 15 % (Edgeworth: 0.008 / 6 (t^3 - 3 t) at t = 4.9).
    assert z.size >= 2**24
    x, t = z.reshape(-1).astype(np.float64), []
    powers = np.ones_like(x)
    for power in range(1, 7):
        powers *= x
        mean = 0 if power % 2 else math.prod(range(1, power, 2))
        variance = math.prod(range(1, 2 * power, 2)) - mean**2
        t.append((powers.mean() - mean) / math.sqrt(variance / x.size))
    return worst(of_standard_normal(t))


def cells(z: Array) -> float:
    """Pearson's chi-square for 2048 cells of equal probability, which are far wider than the lattice of binary32.

    The chi-square distribution holds for infinite counts. At 50 per cell and more, its variance is 1 % too small.
    """
    counts = np.bincount(np.searchsorted(special.ndtri(np.arange(1, 2048) / 2048).astype(z.dtype), z.reshape(-1)))
    assert counts.size == 2048 and z.size >= 50 * 2048
    return of_chi_square(stats.chisquare(counts).statistic, 2047)


def tails(z: Array) -> float:
    """Exact binomial tests of the numbers of draws beyond 4, 4.5, 5 and 5.5, on each side."""
    counts = [(int((sign * z > tail).sum()), special.ndtr(-tail)) for tail in (4.0, 4.5, 5.0, 5.5) for sign in (-1, 1)]
    return worst([stats.binomtest(count, z.size, p).pvalue for count, p in counts])


SIZE = 64, 2**18
DRAWS: dict[str, dict[str, Any]] = {
    "the end of the stream": {"seed": 2**64 - 1, "dim_offset": 2**32 - SIZE[0], "sample_offset": 2**34 - SIZE[1]},
    "float32": {"seed": 101}, "float64": {"seed": 102, "dtype": "float64"},
}  # fmt: skip


@pytest.mark.parametrize("draws", slow_but(["the end of the stream"], DRAWS))
def test_draws_are_normal(draws: str) -> None:
    z = drawn(*SIZE, **DRAWS[draws])
    for statistic in (moments, cells, tails):
        assert statistic(z) > ALPHA, statistic


# Functions of the draws with mean 0 and variance 1.
SEEN_AS: dict[str, Callable[[Array], Array]] = {
    "values": lambda z: z,
    "magnitudes": lambda z: (np.abs(z) - math.sqrt(2 / math.pi)) / math.sqrt(1 - 2 / math.pi),
}


def correlation(z: Array, seen_as: str) -> float:
    """Correlations of all pairs of rows: the largest, and the sum of squares.

    The sum of n products with mean 0 and variance 1, over sqrt(n), is normal except for its skewness, which is 0 for
    values and 0.003 for magnitudes.
    """
    x = SEEN_AS[seen_as](z.astype(np.float64))
    above = np.triu_indices(len(x), 1)
    t = (x @ x.T)[above] / math.sqrt(x.shape[1])
    return worst((worst(of_standard_normal(t)), of_chi_square(float((t**2).sum()), t.size)))


LENGTH = 2**17
STREAMS = 64


def powers_up_to(limit: int) -> list[int]:
    """0 and all powers of two below `limit`: positions whose counters differ in one or two bits."""
    return [0, *(1 << exponent for exponent in range(limit.bit_length() - 1))]


def rows(options: Iterable[dict[str, Any]]) -> Array:
    return np.concatenate([drawn(1, LENGTH, **each) for each in options])


def of_family() -> Array:
    parent = multisample.Generator(119)
    return rows({"generator": each} for each in (parent, *parent.spawn(STREAMS - 1)))


STREAM_SETS: dict[str, Callable[[], Array]] = {
    "consecutive rows": lambda: drawn(STREAMS, LENGTH, seed=110),
    "distant rows": lambda: rows({"seed": 111, "dim_offset": i} for i in powers_up_to(2**32)),
    "consecutive columns": lambda: drawn(LENGTH, STREAMS, seed=112).T,
    "distant columns": lambda: (
        np.concatenate([drawn(LENGTH, 1, seed=113, sample_offset=j) for j in powers_up_to(2**34)], axis=1).T
    ),
    "distant stretches of a row": lambda: rows(
        {"seed": 114, "sample_offset": j} for j in powers_up_to(2**34) if not 0 < j < LENGTH
    ),
    "consecutive offsets": lambda: rows({"seed": multisample.Key(115, k)} for k in range(STREAMS)),
    "distant offsets": lambda: rows({"seed": multisample.Key(115, k)} for k in powers_up_to(2**64)),
    "consecutive seeds": lambda: rows({"seed": seed} for seed in range(STREAMS)),
    "distant seeds": lambda: rows({"seed": seed} for seed in powers_up_to(2**64)),
    "a generator and its children": of_family,
}


@pytest.mark.parametrize("streams", slow_but(["distant seeds"], STREAM_SETS))
def test_independent_streams_are_uncorrelated(streams: str) -> None:
    z = STREAM_SETS[streams]()
    assert len(z) > 15
    for seen_as in SEEN_AS:
        assert correlation(z, seen_as) > ALPHA, seen_as
