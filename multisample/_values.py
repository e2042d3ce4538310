"""Is every mean finite, and every standard deviation finite and not negative?"""

from __future__ import annotations

import math

import numpy as np

from multisample.backends.contract import HostArray

__all__ = ["check_values"]


def check_values(mu: HostArray, sigma: HostArray) -> None:
    """ValueError with the first offending index, unless every value will do; both float32 or both float64."""
    from multisample.backends.cpu_kernels import value_kernel  # Numba takes half a second to import.

    if value_kernel("float64" if mu.itemsize == 8 else "float32")(mu, sigma):
        return
    for name, vector, lowest, accepted in (
        ("mu", mu, -math.inf, "finite means"),
        ("sigma", sigma, 0, "finite standard deviations of at least 0"),
    ):
        bad = np.flatnonzero(~(np.isfinite(vector) & (vector >= lowest)))
        if bad.size:
            raise ValueError(
                f"{name}: expected {accepted}, got {name}[{bad[0]}] = {vector[bad[0]]}"
                f" ({bad.size} of {vector.size} values)"
            )
