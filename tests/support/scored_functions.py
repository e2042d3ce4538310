"""Score functions for tests of the cross-entropy method, which worker processes import from here, and short runs."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from multisample import cem

START = np.linspace(-2, 3, 6).astype(np.float32)


def sphere(x: Any) -> Any:
    """A function of arrays of any library, with its minimum at 1; it scores each column by itself."""
    return ((x - 1) * (x - 1)).sum(0)


def torch_sphere(x: Any) -> Any:
    """`sphere` of PyTorch, whose sums over dimension 0 depend on the number of columns."""
    return ((x - 1) * (x - 1)).T.contiguous().sum(1)


def fails(x: Any) -> Any:
    if (x[0] > 5).any():
        raise ArithmeticError("a score is missing")
    return sphere(x)


def dies(*_: Any) -> Any:
    os._exit(1)


class DiesOnce:
    """`sphere`; the process of the first call ends."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "died"

    def __call__(self, x: Any) -> Any:
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return sphere(x)
        os._exit(1)


def run(f: Any = sphere, mu: Any = START, n: int = 200, **options: Any) -> Any:
    """The result of a short run."""
    return cem.minimize(f, mu, 2.0, n, **{"iterations": 8, "seed": 7, **options})


def assert_same(a: Any, b: Any) -> None:
    """Check that results are equal bit for bit, except `nfev`."""
    for name in ("x", "mu", "sigma"):
        assert np.asarray(getattr(a, name)).tobytes() == np.asarray(getattr(b, name)).tobytes(), name
    assert a.history.keys() == b.history.keys()
    for name, column in a.history.items():
        assert column.tobytes() == b.history[name].tobytes(), name
    for name in ("fun", "nit", "nonfinite", "success", "status", "message"):
        assert getattr(a, name) == getattr(b, name), name
