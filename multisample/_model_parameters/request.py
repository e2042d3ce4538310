"""The arguments of a call of `perturb`, and the checks of its coefficients and members."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .._arguments import describe
from .._call import ROWS
from .._checks.operands import check_alignment
from .._libraries import HOST, Operand, described, is_number, library_of
from .spans import Block
from .structure import Structure


class Request(NamedTuple):
    """The arguments of a call of `perturb`."""

    parameters: Structure
    out: Structure | None
    given_out: Any
    """The argument `out` itself."""
    coefficients: Any
    seed: Any
    member: Any
    fast_math: bool
    ids: Any
    backend: str
    blocks: tuple[tuple[Block, ...], ...] | None = None
    """The blocks of each parameter, if arrays hold parts of parameters."""


class Coefficients(NamedTuple):
    """The coefficients of a call."""

    length: int
    on_host: Any
    """A float, or an array of float64; None if they are on a device."""
    on_device: Operand | None


def read_coefficients(given: Any) -> Coefficients:
    """The argument `coefficients`; TypeError or ValueError if it is no number and no vector, or is not finite."""
    if type(given) is float or is_number(given):
        try:
            number = float(given)
        except OverflowError:
            number = float("inf")
        if not abs(number) < float("inf"):
            raise ValueError(f"coefficients: expected finite numbers, got {describe(given)}")
        return Coefficients(1, number, None)
    library = library_of("coefficients", given)
    if library.foreign or library.is_opaque(given):
        raise TypeError(
            "coefficients: expected a number, a list, a NumPy array, or an array of the parameters' library, got"
            f" {described(given)}"
        )
    array = HOST.normalized("coefficients", given) if library is HOST else given
    operand = library.describe("coefficients", array)
    if len(operand.shape) > 1:
        raise ValueError(f"coefficients: expected a number or shape (K,), got {operand.shape}")
    count = operand.shape[0] if operand.shape else 1
    if operand.device.kind not in ("cpu", "cuda"):
        raise ValueError(f"coefficients: expected values in memory of the host or a GPU, got them on {operand.device}")
    if operand.device.kind == "cuda":
        check_alignment("coefficients", operand, library.address(array))
        return Coefficients(count, None, operand)
    values = np.ascontiguousarray(np.atleast_1d(library.to_host(array)), np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"coefficients: expected finite numbers, got {describe(values)}")
    return Coefficients(count, values if operand.shape else float(values[0]), None)


def check_members(member: int, count: int) -> None:
    """ValueError if `count` members from `member` on go beyond the last row."""
    if member + count > ROWS:
        raise ValueError(f"member: expected member + K <= 2**32, got {member} + {count}")
