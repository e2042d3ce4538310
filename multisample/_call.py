"""`Call`, the arguments of a call of any operation, and `TRAITS`, a table of how the operations differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from multisample.backends.launch import INPUTS, OPERANDS, Operation

from ._arguments import check_choice, check_flag, checked_integer

ROWS = 2**32
COLUMNS = 2**34

FLAGS = "fast_math", "validate", "antithetic"
"""Options that are True or False. A launch gets those that are fields of `Launch`."""


class Traits(NamedTuple):
    """How calls of an operation differ from those of others, besides their `OPERANDS`."""

    name: str
    """The public function."""
    orders: tuple[int, int]
    """The range of `order`: the least, and one past the greatest."""
    needs_seed: bool
    """Whether a call must pass a seed, and cannot take one from a generator."""
    has_operator: bool
    """Whether PyTorch has an operator for it, so that torch.compile and torch.func can call it."""
    is_sharded: bool
    """Whether it takes DTensors."""


TRAITS = {
    Operation.sample: Traits("sample", (0, 1), needs_seed=False, has_operator=True, is_sharded=True),
    Operation.moments: Traits("weighted_moments", (1, 3), needs_seed=True, has_operator=False, is_sharded=False),
}


class Call(NamedTuple):
    """The arguments of a call. An operation ignores those that it does not have."""

    operation: Operation
    mu: Any
    sigma: Any
    n: Any
    backend: str
    seed: Any
    noise: str
    dtype: Any
    fast_math: bool
    dim_offset: Any
    sample_offset: Any
    antithetic: bool
    generator: Any = None
    out: Any = None
    validate: bool = False
    layout: str = "dn"
    weights: Any = None
    order: Any = 0
    """How many moments to return."""
    grad: Any = None
    """The gradient of a sample, for its gradients of `mu` and `sigma`."""

    def repeated(self, function: Callable[..., Any]) -> Any:
        """Call the public `function` of the operation with these arguments."""
        code = function.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return function(**{name: getattr(self, name) for name in names})


def vectors_of(call: Call) -> dict[str, Any]:
    """The arrays and numbers that a call reads, by name, without its matrix."""
    return {name: getattr(call, name) for name in INPUTS if name in OPERANDS[call.operation].reads}


def checked_window(n: Any, dim_offset: Any, sample_offset: Any) -> tuple[int, int, int]:
    """`n`, `dim_offset` and `sample_offset` as ints in their ranges; TypeError or ValueError otherwise."""
    n = checked_integer("n", n, 0, COLUMNS + 1)
    dim_offset = checked_integer("dim_offset", dim_offset, 0, ROWS + 1)
    sample_offset = checked_integer("sample_offset", sample_offset, 0, COLUMNS + 1)
    if sample_offset + n > COLUMNS:
        raise ValueError(f"n: expected sample_offset + n <= 2**34, got {sample_offset} + {n}")
    return n, dim_offset, sample_offset


def check_rows(dim_offset: Any, d: Any) -> None:
    """ValueError if a window ends after the last row."""
    if dim_offset + d > ROWS:
        raise ValueError(f"dim_offset: expected dim_offset + d <= 2**32, got {dim_offset} + {d}")


def check_choices(call: Call) -> None:
    """TypeError or ValueError unless each option has an accepted value."""
    check_choice("noise", call.noise, ("independent", "shared"))
    check_choice("layout", call.layout, ("dn", "nd"))
    for name in FLAGS:
        check_flag(name, getattr(call, name))


def checked_order(call: Call) -> int:
    """`order` as an int; TypeError or ValueError if the operation does not accept it."""
    return checked_integer("order", call.order, *TRAITS[call.operation].orders)
