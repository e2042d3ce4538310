"""Checks of scalars and choices. Each error names the argument, the received value and the accepted values."""

import enum
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from multisample.backends.element_types import MATRIX_TYPES

from ._tracing import is_symbol

DTYPES = tuple(MATRIX_TYPES)


def describe(value: object, limit: int = 60) -> str:
    """`value` for an error message: its repr on one line, cut off after `limit` characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # repr fails for integers of more than 4300 digits, and a class may raise anything.
        return f"a very large {type(value).__name__}" if isinstance(value, int) else f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[:limit]}..."


def checked_integer(name: str, value: Any, low: int, high: int, advice: Callable[[Any], str] | None = None) -> int:
    """`value` as an int with ``low <= value < high``, or a symbol. ``advice(value)`` ends a TypeError's message."""
    if is_symbol(value):
        symbol: int = value
        return symbol
    if type(value) is int and low <= value < high:
        return value
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected an integer, got the bool {value}")
    try:
        if isinstance(value, float):
            raise TypeError  # operator.index does too, but not while PyTorch 2.11 compiles the call.
        integer = operator.index(value)
    except TypeError:
        end = "" if advice is None else advice(value)
        raise TypeError(
            f"{name}: expected an integer, got {describe(value)} of type {type(value).__name__}{end}"
        ) from None
    if not low <= integer < high:
        raise ValueError(f"{name}: expected {_range(name, low, high)}, got {describe(integer)}")
    return integer


def _range(name: str, low: int, high: int) -> str:
    """``low <= name < high`` as text. Large powers of two stay powers: ``< 2**64``, or ``<= 2**34``."""
    if high - low == 2:
        return f"{low} or {low + 1}"
    for bound, sign in ((high, "<"), (high - 1, "<=")):
        if bound >= 1 << 16 and bound & (bound - 1) == 0:
            return f"{low} <= {name} {sign} 2**{bound.bit_length() - 1}"
    return f"{low} <= {name} < {high}"


class _Unchecked(enum.IntEnum):
    UNCHECKED = 0


UNCHECKED: Any = _Unchecked.UNCHECKED
"""A false flag that users do not have. With it as `validate`, a call does not check values in host memory either."""


def rounded_once(x: Any, dtype: str) -> float:
    """`x`, a Python number, as a double that rounds to the same number of the computing type of `dtype`.

    The nearest double of an integer from 2**53 on may lie between two numbers of float32. Then the two roundings would
    not be those of an integer array, which rounds once. OverflowError if `x` is too large.
    """
    number = float(x)
    if isinstance(x, int) and dtype != "float64" and not -(2**53) <= x <= 2**53:
        # Round to odd: the last bit of 53 is set if a lower bit is.
        low = abs(x).bit_length() - 53
        high = abs(x) >> low
        number = math.copysign(math.ldexp(high | (high << low != abs(x)), low), number)
    return number


def check_flag(name: str, value: object) -> None:
    if value is not True and value is not False and not isinstance(value, (np.bool_, _Unchecked)):
        raise TypeError(f"{name}: expected True or False, got {describe(value)} of type {type(value).__name__}")


def check_choice(name: str, value: object, accepted: tuple[object, ...]) -> None:
    """ValueError unless `value` is one of `accepted`, which have one type."""
    if not isinstance(value, type(accepted[0])) or value not in accepted:
        choices = " or ".join(repr(choice) for choice in accepted)
        raise ValueError(f"{name}: expected {choices}, got {describe(value)}")


def is_constant(dtype: Any) -> bool:
    """Whether a key may hold `dtype`, which is immutable and equals no number. Other objects may change their dtype."""
    if isinstance(dtype, type):
        return dtype.__module__.partition(".")[0] in ("builtins", "numpy", "ml_dtypes", "jax")
    return isinstance(dtype, (str, np.dtype)) or type(dtype).__module__ == "torch"


def dtype_name(dtype: Any) -> str:
    """The name of `dtype`, which is a name or a dtype of NumPy, ml_dtypes, PyTorch or JAX; TypeError otherwise."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    if type(dtype).__module__ == "torch":
        name = str(dtype).removeprefix("torch.")
    else:
        try:
            name = np.dtype(dtype).name if np.dtype(dtype).isnative else ""
        except Exception:  # np.dtype parses strings and structures, and raises more than TypeError.
            name = ""
    if name not in DTYPES:
        raise TypeError(f"dtype: expected {', '.join(DTYPES)}, got {describe(dtype)}")
    return name
