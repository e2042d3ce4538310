"""`Call`, the arguments of a call of any operation, and `TRAITS`, a table of how the operations differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from multisample.backends.launch import INPUTS, OPERANDS, Operation

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
    shape: Any = None
    """The shape of the sample, if `mu`, `sigma` and `n` do not give it."""
    grad: Any = None
    """The gradient of a sample, to compute those of `mu` and `sigma`."""

    def repeated(self, function: Callable[..., Any]) -> Any:
        """Call the public `function` of the operation with these arguments."""
        code = function.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return function(**{name: getattr(self, name) for name in names})


def vectors_of(call: Call) -> dict[str, Any]:
    """The arrays and numbers that a call reads, by name, without its matrix."""
    return {name: getattr(call, name) for name in INPUTS if name in OPERANDS[call.operation].reads}
