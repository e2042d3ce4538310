"""Derive the float64 coefficients of the stream (STREAM.md), so that they are reproducible.

A Remez exchange gives the minimax polynomial on a dense Chebyshev grid. Its most significant coefficient is rounded to
binary64 and fixed, and the others are fitted again, down to the least significant one. So every coefficient compensates
for the roundings before it, and the rounded polynomial is as good as the unrounded one. The degrees are the smallest
whose truncation error is below 2^-54, half of the rounding error of one binary64 operation.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mpmath

Real = Any  # an mpmath.mpf; mpmath has no type stubs

# The monomial basis costs about 20 digits at these degrees: 50 leave 30 correct ones.
DIGITS = 50

# With one coefficient less, the truncation errors of L, S, C are 5, 1.6, 38 times 2^-54.
L_TERMS, S_TERMS, C_TERMS = 20, 9, 9


class Coefficients(NamedTuple):
    """Coefficients of the float64 transform, each exactly a binary64 number; those of the highest power first."""

    L: tuple[float, ...]
    LE: float
    S: tuple[float, ...]
    C: tuple[float, ...]


class Problem(NamedTuple):
    """A weighted approximation on a grid: minimise max(weight * abs(target - polynomial))."""

    points: list[Real]  # increasing, never 0, since the terms of the later fits vanish at 0
    target: list[Real]
    weight: list[Real]


def _log_target(f: Real) -> tuple[Real, Real]:
    """L: horner(L, f) * f is -8 ln(1 + f), fitted for a small relative error, as the root R in STREAM.md needs it."""
    value = -8 * mpmath.log1p(f) / f
    return value, 1 / abs(value)


def _sin_target(q: Real) -> tuple[Real, Real]:
    """S: horner(S, q) * y is sin((pi/2) y), q = y^2; the error counts absolutely."""
    y = mpmath.sqrt(q)
    return mpmath.sin(mpmath.pi / 2 * y) / y, y


def _cos_target(q: Real) -> tuple[Real, Real]:
    """C: horner(C, q) is cos((pi/2) y), q = y^2; the error counts absolutely."""
    return mpmath.cos(mpmath.pi / 2 * mpmath.sqrt(q)), mpmath.mpf(1)


def _problem(function: Callable[[Real], tuple[Real, Real]], points: list[Real]) -> Problem:
    pairs = [function(x) for x in points]
    return Problem(points, [value for value, _ in pairs], [weight for _, weight in pairs])


def _f_grid(size: int) -> list[Real]:
    """Chebyshev roots on [-1/3, 1/3], the range of f; an even number of them avoids 0."""
    return [-mpmath.cospi(mpmath.mpf(2 * k + 1) / (2 * size)) / 3 for k in range(size)]


def _q_grid(size: int) -> list[Real]:
    """Chebyshev extrema on (0, 1], the range of q, without 0."""
    return [(1 - mpmath.cospi(mpmath.mpf(k + 1) / size)) / 2 for k in range(size)]


def _alternating_extrema(errors: Sequence[Real], count: int) -> list[int]:
    """Choose ``count`` indices of large errors with alternating signs, the largest among them."""
    runs: list[int] = []  # the largest error of every stretch of one sign
    for index, error in enumerate(errors):
        if runs and (error > 0) == (errors[runs[-1]] > 0):
            if abs(error) > abs(errors[runs[-1]]):
                runs[-1] = index
        else:
            runs.append(index)

    while len(runs) > count:
        sizes = [abs(errors[index]) for index in runs]
        smallest, last = sizes.index(min(sizes)), len(runs) - 1
        if len(runs) == count + 1:
            runs.pop(0 if sizes[0] < sizes[last] else last)
        elif smallest in (0, last):
            runs.pop(smallest)
        else:  # drop two neighbours, so that the signs still alternate
            left = smallest - (sizes[smallest - 1] < sizes[smallest + 1])
            del runs[left : left + 2]
    return runs


def _remez(problem: Problem, low: int, high: int) -> list[Real]:
    """Coefficients of x^low, ..., x^high of the minimax polynomial on a grid, by exchange.

    x^low times a polynomial of degree high - low has at most high - low zeros outside 0, so the alternation theorem
    holds on a grid without 0, for the error times the sign of x^low.
    """
    (points, target, weight), terms = problem, high - low + 1
    sign = [-1 if low % 2 and x < 0 else 1 for x in points]
    reference = [round((len(points) - 1) * k / terms) for k in range(terms + 1)]
    for _ in range(100):
        matrix = mpmath.matrix(terms + 1, terms + 1)
        for row, index in enumerate(reference):
            for column in range(terms):
                matrix[row, column] = points[index] ** (low + column)
            matrix[row, terms] = (-1) ** row * sign[index] / weight[index]
        solution = mpmath.lu_solve(matrix, mpmath.matrix([target[index] for index in reference]))
        coefficients = [solution[k] for k in range(terms)]
        at_points = zip(points, target, weight, sign, strict=True)
        errors = [s * w * (t - x**low * mpmath.polyval(coefficients[::-1], x)) for x, t, w, s in at_points]
        extrema = _alternating_extrema(errors, terms + 1)
        if extrema == reference:
            return coefficients
        reference = extrema
    raise ArithmeticError("the Remez exchange did not converge within 100 steps")


def _fit_rounded(problem: Problem, terms: int, fixed: Sequence[float] = ()) -> tuple[float, ...]:
    """Round one coefficient after the other, the most significant first, refitting the rest."""
    points, target, weight = problem
    chosen = list(fixed)
    for power in range(terms):
        if power >= len(fixed):
            chosen.append(float(_remez(Problem(points, target, weight), power, terms - 1)[0]))
        target = [t - mpmath.mpf(chosen[power]) * x**power for x, t in zip(points, target, strict=True)]
    return tuple(reversed(chosen))


@mpmath.workdps(DIGITS)
def derive() -> Coefficients:
    """The float64 coefficients of the stream, the same on every machine: mpmath computes with enough digits."""
    return Coefficients(
        L=_fit_rounded(_problem(_log_target, _f_grid(10 * L_TERMS)), L_TERMS),
        # e has the factor 2^52 of the exponent field.
        LE=float(-8 * mpmath.log(2) * mpmath.mpf(2) ** -52),
        S=_fit_rounded(_problem(_sin_target, _q_grid(16 * S_TERMS)), S_TERMS),
        # cos 0 = 1 exactly: the last coefficient is prescribed, and the others are fitted.
        C=_fit_rounded(_problem(_cos_target, _q_grid(16 * C_TERMS)), C_TERMS, fixed=(1.0,)),
    )


def measurement_words(count: int) -> Iterator[tuple[int, int]]:
    """Yield pairs (A, signed B): edges first, then random words, most of them near edges."""
    two_thirds = 2**65 // 3
    radius_edges = [0, 1, 2, 2**10, 2**11 - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, two_thirds]
    radius_edges += [two_thirds - 2**11, two_thirds + 2**11, two_thirds // 2, two_thirds // 4]
    radius_edges += [2**64 - 1, 2**64 - 2**10, 2**64 - 2**11, 2**64 - 2**12, 2**64 - 3 * 2**12]
    angle_edges = [0, 1, -1, 2**10, -(2**63), 1 - 2**63, 2**63 - 1, 2**63 - 2**10, 2**61, 3 * 2**61]
    angle_edges += [2**62, 2**62 - 1, 2**62 + 1, -(2**62), 1 - 2**62, -(2**61), 2**53 + 1]
    yield from ((a, b) for a in radius_edges for b in angle_edges)

    random_words = random.Random(20240229).getrandbits  # the same on every Python version

    def below(limit: int) -> int:  # log-uniform, so that every distance from an edge is met
        return random_words(1 + random_words(16) % limit)

    for k in range(count):
        a, b = random_words(64), random_words(64) - 2**63
        if k % 6 == 1:
            a = two_thirds + (-1) ** (k // 6) * below(61)  # u near 2/3, where e changes
        elif k % 6 == 2:
            a = 2**64 - 1 - below(63)  # u near 1
        elif k % 6 == 3:
            a, b = below(63), (-1) ** (k // 6) * below(62)  # u tiny, y near 0
        elif k % 6 == 4:
            b = (-1) ** (k // 6) * (2**62 + (-1) ** (k // 12) * below(61))  # y near +-1/2
        elif k % 6 == 5:
            b = (-1) ** (k // 6) * (2**63 - 1 - below(62))  # y near +-1
        yield a, b


@mpmath.workdps(DIGITS)
def truncation_errors(coefficients: Coefficients) -> dict[str, float]:
    """Errors of the rounded polynomials in exact arithmetic, on grids finer than the fit's."""
    # Grids of 401 and 501 points share few points with the grids of the fit; the factor 2 avoids f = 0.
    problems = {"L": _problem(_log_target, _f_grid(2 * 401))}
    problems |= {"S": _problem(_sin_target, _q_grid(501)), "C": _problem(_cos_target, _q_grid(501))}
    result = {}
    for name, (points, target, weight) in problems.items():
        polynomial = [mpmath.mpf(value) for value in getattr(coefficients, name)]
        errors = (w * (t - mpmath.polyval(polynomial, x)) for x, t, w in zip(points, target, weight, strict=True))
        result[name] = float(max(map(abs, errors)))
    return result
