"""The cases of the measurements: shapes, types, noise and modes, and the names of their groups and tests.

A plain `pytest` runs one small shape of each kind; `--benchmark-only` runs all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from multisample.backends.element_types import SIZES

MODES: dict[str, dict[str, Any]] = {"portable": {}, "fast_math": {"fast_math": True}}

SMALL, BATCH = (6, 40), 3  # The shape, and the matrices of a batch, if nothing is timed.


@dataclass(frozen=True)
class Case:
    """What every contender computes."""

    d: int
    n: int
    dtype: str = "float32"
    noise: str = "independent"
    operation: str = "sample"  # A key of `OPERATIONS`. For "perturb", d is the number of members.
    matrices: int = 1  # The number of matrices of a batch. They have d rows together.
    headline: bool = False  # Whether the front page shows it: `pytest -m headline` selects these cases.

    @property
    def bytes(self) -> int:
        return self.d * self.n * SIZES[self.dtype]

    @property
    def small(self) -> Case:
        """The same case with a small shape, on no page."""
        matrices = min(self.matrices, BATCH)
        return replace(self, d=SMALL[0] * matrices, n=SMALL[1], matrices=matrices, headline=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return ((self.matrices,) if self.matrices > 1 else ()) + (self.d // self.matrices, self.n)

    def name(self, mode: str, separator: str = " ") -> str:
        """The shape, what is unusual, and the mode."""
        words = [self.dtype, self.noise, self.operation]
        usual = ("float32", "independent", "sample", "fill")
        return separator.join(["x".join(map(str, self.shape)), *(word for word in words if word not in usual), mode])


def is_timed(config: pytest.Config) -> bool:
    """Whether this run measures, or only checks that the benchmarks run."""
    return bool(config.option.benchmark_only or config.option.benchmark_enable)


def parametrize(
    metafunc: pytest.Metafunc, suites: Mapping[str, Iterable[Case]], contenders: Iterable[Any], modes: list[str]
) -> None:
    """Parametrize a test with every case of each suite, the contenders that fit it, and the modes that they have.

    If nothing is timed, cases that differ only in their shape become one small case. The modes of a contender are
    consecutive, so that a peer is started and measured once.
    """
    if not is_timed(metafunc.config):
        suites = {suite: dict.fromkeys(case.small for case in cases) for suite, cases in suites.items()}
    rows = [
        pytest.param(
            suite, case, contender.name, mode,
            id=f"{suite}-{case.name(mode, '-')}-{contender.name}",
            marks=[pytest.mark.headline] if case.headline else [],
        )
        for suite, cases in suites.items()
        for case in cases
        for contender in contenders
        # Where the host takes longer, as in the original experiment, JAX's time on the device cannot be measured.
        if contender.fits(case) and (contender.wait is None or suite != "original")
        for mode in modes
        if mode in contender.modes and (mode == "portable" or case.dtype != "float64")  # float64 has no fast transform.
    ]  # fmt: skip
    metafunc.parametrize(("suite", "case", "contender", "mode"), rows)


def vectors(d: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """mu and sigma in float64, of shape (d,), with few bits each: every type has them exactly."""
    return np.resize(np.arange(-8, 9) / 8, d), np.resize(0.5 + np.arange(13) / 8, d)


def weights(n: int) -> np.ndarray[Any, Any]:
    """Weights of samples in float64, whose sum is 1."""
    steps = np.arange(n) % 7 + 1.0
    return steps / steps.sum()


def clamp(value: float, low: int, high: int) -> int:
    """`value` as an integer within bounds; `high` for infinity."""
    return high if math.isinf(value) else min(max(int(value), low), high)
