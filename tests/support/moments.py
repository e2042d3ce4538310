"""An exact reference for weighted moments, from the noise that `sample` draws."""

from typing import Any, NamedTuple

import numpy as np

import multisample

Array = np.ndarray[Any, Any]


class Exact(NamedTuple):
    """Both moments, and the largest errors that they may have."""

    first: Array
    second: Array
    first_bound: Array
    second_bound: Array

    def check(self, *moments: Array) -> None:
        for got, exact, bound in zip(moments, self[:2], self[2:], strict=False):
            assert got.shape == exact.shape
            wrong = np.argwhere(~(np.abs(got.astype(np.longdouble) - exact) <= bound))
            assert len(wrong) == 0, [(int(k), got[k], exact[k], bound[k]) for (k,) in wrong[:5]]


def exact_moments(w: Any, mu: Any, sigma: Any, dtype: str = "float32", **options: Any) -> Exact:
    """The moments of the rounded `w`, `mu` and `sigma`, and of the normals that ``sample(..., **options)`` uses.

    A sum in the computing type has at most 16 terms on a CPU, and 32 on a GPU, before it is added to a float64 total.
    Each term is rounded at most three times. The result is rounded at most twice: to the computing type, and to
    `dtype`. The bound allows 20 roundings of one sign: sums of 32 terms have more, of either sign.
    """
    real, exact = ("float64", np.longdouble) if dtype == "float64" else ("float32", np.float64)
    w, mu, sigma = (np.asarray(x).astype(real).astype(exact) for x in (w, mu, sigma))
    d = max(mu.size, sigma.size)
    z = _noise(d, len(w), dtype=real, **options).astype(exact)
    squares = z * z
    first, second, size_of_second = z @ w, squares @ w, squares @ np.abs(w)
    mass = np.abs(w).sum()
    # The float64 totals over n add the kernel's error and, for float32, that of the reference.
    unit = 2.0**-53 if real == "float64" else 2.0**-24
    terms = 20 * unit + (len(w) + 64) * 2.0**-53 * (1 if real == "float64" else 2)
    last = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(dtype, unit)
    m1, m2 = w.sum() * mu + sigma * first, sigma**2 * second
    size = np.abs(mu) * mass + sigma * (np.abs(z) @ np.abs(w))
    least = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}[dtype]
    errors = terms * size + last * np.abs(m1), terms * sigma**2 * size_of_second + last * np.abs(m2)
    return Exact(m1, m2, *(error + least for error in errors))


def _noise(d: int, n: int, antithetic: bool = False, sample_offset: int = 0, **options: Any) -> Array:
    """Normals in small windows without antithetic pairs: other kernels would take seconds to compile."""
    if antithetic:  # Column k of the noise gives the columns 2k and 2k + 1, the second negated.
        first, last = sample_offset // 2, (sample_offset + n + 1) // 2
        pairs = np.repeat(_noise(d, last - first, sample_offset=first, **options), 2, axis=1)
        pairs[:, 1::2] *= -1
        return pairs[:, sample_offset % 2 :][:, :n]
    width = max(1, (1 << 16) // max(d, 1))
    cuts = [(min(width, n - k), sample_offset + k) for k in range(0, n, width)]
    windows = [multisample.sample(np.zeros(d), np.ones(d), m, sample_offset=k, **options) for m, k in cuts]
    return np.concatenate(windows, axis=1)
