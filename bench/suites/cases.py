"""The cases of the measurements: shapes, types, noise and modes, and the names of their groups and tests.

A plain `pytest` runs one small shape of each kind; `--benchmark-only` runs all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol

import numpy as np
import pytest

from multisample.backends.element_types import SIZES

__all__ = ["ARGUMENTS", "MODES", "Case", "clamp", "is_timed", "modes_on_cpu", "modes_on_cuda", "parametrize", "vectors"]

MODES: dict[str, dict[str, Any]] = {"portable": {}, "fast_math": {"fast_math": True}}

SMALL = (6, 40)
"""The shape if nothing is timed."""

ARGUMENTS = ("d", "n", "dtype", "noise", "layout", "contender", "mode")
"""Arguments of the tests. pytest-benchmark can group by them, as in ``--benchmark-group-by=param:contender``."""


@dataclass(frozen=True)
class Case:
    """Samples that every contender draws."""

    d: int
    n: int
    dtype: str = "float32"
    noise: str = "independent"
    layout: str = "dn"

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return self.d * self.n * SIZES[self.dtype]

    @property
    def small(self) -> Case:
        """The same case with a small shape."""
        return replace(self, d=SMALL[0], n=SMALL[1])

    def group(self, mode: str) -> str:
        """The name of the group in pytest-benchmark's table."""
        return f"({self.d}, {self.n}) {self.kind(' ')} {mode}"

    def kind(self, separator: str) -> str:
        """The case without its shape. "dn", the usual layout, is not named."""
        return separator.join([self.dtype, self.noise, *([self.layout] if self.layout != "dn" else [])])


class Fits(Protocol):
    """The members of a contender that cases need."""

    name: str
    modes: tuple[str, ...]

    def fits(self, case: Case) -> bool: ...


Modes = Callable[[Case], list[str]]


def is_timed(config: pytest.Config) -> bool:
    """Whether this run measures, or only checks that the benchmarks run."""
    return bool(config.option.benchmark_only or config.option.benchmark_enable)


def parametrize(metafunc: pytest.Metafunc, cases: Iterable[Case], contenders: Iterable[Fits], modes: Modes) -> None:
    """Give a test its `ARGUMENTS`: every case, its contenders, and the modes of both.

    If nothing is timed, cases that differ only in their shape become one small case. The modes of a contender are
    consecutive, so that a peer is started and measured once.
    """
    if not is_timed(metafunc.config):
        cases = dict.fromkeys(case.small for case in cases)
    rows = [
        (case, contender.name, mode)
        for case in cases
        for contender in contenders
        if contender.fits(case)
        for mode in modes(case)
        if mode in contender.modes
    ]
    ids = [f"{case.d}x{case.n}-{case.kind('-')}-{mode}-{name}" for case, name, mode in rows]
    values = [(*astuple(case), name, mode) for case, name, mode in rows]
    metafunc.parametrize(ARGUMENTS, values, ids=ids)


def modes_on_cuda(case: Case) -> list[str]:
    """float64 has one transform only."""
    return [mode for mode in MODES if mode == "portable" or case.dtype != "float64"]


def modes_on_cpu(case: Case) -> list[str]:
    """The CPU has one transform only."""
    return ["portable"]


def vectors(d: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """mu and sigma in float64, of shape (d,), with few bits each: every type has them exactly."""
    steps = np.arange(d)
    return (steps % 17 - 8) / 8, 0.5 + (steps % 13) / 8


def clamp(value: float, low: int, high: int) -> int:
    """`value` as an integer within bounds; `high` for infinity."""
    return high if math.isinf(value) else min(max(int(value), low), high)
