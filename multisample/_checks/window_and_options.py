"""Checks of the window and the options of a call."""

import math
from typing import Any

from multisample.backends.launch import Operation

from .._arguments import check_choice, check_flag, checked_integer
from .._operations import COLUMNS, ROWS, Call
from .._tracing import is_symbol


def checked_window(n: Any, dim_offset: Any, sample_offset: Any) -> tuple[int, int, int]:
    """`n`, `dim_offset` and `sample_offset` as ints in their ranges; TypeError or ValueError otherwise."""
    n = checked_integer("n", n, 0, COLUMNS + 1)
    dim_offset = checked_integer("dim_offset", dim_offset, 0, ROWS + 1)
    sample_offset = checked_integer("sample_offset", sample_offset, 0, COLUMNS + 1)
    if exceeds(sample_offset + n, COLUMNS):
        raise ValueError(f"n: expected sample_offset + n <= 2**34, got {sample_offset} + {n}")
    return n, dim_offset, sample_offset


def exceeds(x: Any, most: int) -> bool:
    """Whether the integer `x` is known to be greater than `most`."""
    return not is_symbol(x) and bool(x > most)


def checked_count(n: Any) -> Any:
    """`n` as an int, or as a tuple of ints; TypeError or ValueError otherwise."""
    return checked_lengths("n", n) if isinstance(n, tuple) else checked_integer("n", n, 0, COLUMNS + 1)


def checked_lengths(name: str, shape: Any) -> tuple[int, ...]:
    """`shape`, a tuple, a list or an integer, as a tuple of ints; TypeError or ValueError otherwise."""
    if not isinstance(shape, (tuple, list)):
        return (checked_integer(name, shape, 0, COLUMNS + 1),)
    return tuple([checked_integer(f"{name}[{k}]", length, 0, COLUMNS + 1) for k, length in enumerate(shape)])


def count_of(n: Any) -> Any:
    """The number of samples in a checked `n`, an integer or a tuple."""
    return math.prod(n) if isinstance(n, tuple) else n


def check_rows(dim_offset: Any, d: Any) -> None:
    if exceeds(dim_offset + d, ROWS):
        raise ValueError(f"dim_offset: expected dim_offset + d <= 2**32, got {dim_offset} + {d}")


def check_members(member: int, count: int) -> None:
    if member + count > ROWS:
        raise ValueError(f"member: expected member + K <= 2**32, got {member} + {count}")


def check_choices(call: Call) -> None:
    """TypeError or ValueError if an option is not accepted, or if both seed and generator are given."""
    check_choice("noise", call.noise, ("independent", "shared"))
    check_choice("layout", call.layout, ("dn", "nd"))
    for name in ("fast_math", "validate", "antithetic"):
        check_flag(name, getattr(call, name))
    if call.seed is not None and call.generator is not None:
        raise TypeError("seed, generator: expected one of the two, got both")


def checked_order(call: Call) -> int:
    """`order` as an int: 0 for a sample; TypeError or ValueError if it is wrong."""
    return checked_integer("order", call.order, 1, 3) if call.operation == Operation.moments else 0
