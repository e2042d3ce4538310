"""Checks of the values of vectors: finite means and weights, and finite standard deviations of at least 0."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from multisample.backends.contract import HostArray
from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.kernels.cpu.floating_point import with_default_floats
from multisample.backends.memory.host import rounded

from .._arguments import describe, rounded_once
from .._libraries import Library, Operand, is_number

LIMITS = {"float32": 2.0**128 - 2.0**103, "float64": math.inf}
"""The least number that a computing type rounds to infinity."""

RULES = {
    "mu": (-math.inf, "finite means"),
    "sigma": (0.0, "finite standard deviations of at least 0"),
    "weights": (-math.inf, "finite weights"),
}


def least_and_most(name: str, dtype: str) -> tuple[float, float]:
    """The least and the greatest number accepted as `name` for results of type `dtype`."""
    most = math.nextafter(LIMITS[MATRIX_TYPES[dtype].computing], 0)
    return max(-most, RULES[name][0]), most


def vector_converter(
    operand: Operand, d: int, real: Any, batch: int | None = None
) -> Callable[[HostArray], HostArray] | None:
    """A function that converts arrays like `operand` to vectors of the computing type `real`; None for no conversion.

    The function takes arrays from `Library.host_array`, which may hold elements as integers with the same bits. In a
    batch of several matrices, a vector (B, d) keeps both axes.
    """
    steps: list[Callable[[HostArray], HostArray]] = []
    row = MATRIX_TYPES.get(operand.dtype)
    if row is not None and row.widen is not None:
        stored, widen = row.stored, row.widen
        steps.append(lambda raw: widen(raw.view(stored)))
    if len(operand.shape) == 2 and batch in (None, 1):
        steps.append(operator.itemgetter((slice(None), 0) if batch is None else 0))
    name = "float64" if real.itemsize == 8 else "float32"
    if operand.dtype == "float64" and name == "float32":  # `rounded` hides warnings of overflow.
        steps.append(lambda raw: rounded(raw, real))
    elif operand.dtype != name:  # Faster than `astype` with copy=False.
        steps.append(lambda raw: raw if raw.dtype == real else raw.astype(real))
    if operand.shape == ():
        steps.append(lambda raw: np.ndarray((d,), real, raw, 0, (0,)))
    return in_turn(steps) if steps else None


def in_turn(steps: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """The function that applies `steps`, at least one, one after the other."""
    return functools.reduce(lambda first, second: lambda x: second(first(x)), steps)


@with_default_floats
def check_values(library: Library, arguments: dict[str, Any], dtype: str) -> None:
    """ValueError that names the first invalid element: not finite, or a negative `sigma`.

    `arguments` holds vectors by name. For device arrays the check waits for the device.
    """
    real = MATRIX_TYPES[dtype].computing
    for name, x in arguments.items():
        least, accepted = RULES[name]
        try:
            values = rounded_once(x, real) if is_number(x) else library.to_host(x)
        except OverflowError:
            raise ValueError(f"{name}: expected a finite number, got {describe(x)}") from None
        vector = rounded(np.asarray(values), real).reshape(-1)
        bad = np.flatnonzero(~(np.isfinite(vector) & (vector >= least)))
        if bad.size:
            value = f"{vector[bad[0]]} as {vector.dtype}"
            if not is_number(x):
                shape = np.shape(x) if isinstance(x, (list, tuple)) else tuple(x.shape)
                index = np.unravel_index(bad[0], shape[:-1] if len(shape) == 2 and shape[1] == 1 else shape)
                at = ", ".join(str(int(k)) for k in index)
                value = f"{name}[{at}] = {value} ({bad.size} of {vector.size} values)"
            raise ValueError(f"{name}: expected {accepted}, got {value}")
