"""`Call`, the arguments of a call of any operation."""

from collections.abc import Callable
from typing import Any, NamedTuple

from multisample.backends.launch import INPUTS, OPERANDS, Operation

ROWS = 2**32
COLUMNS = 2**34


class Call(NamedTuple):
    """The arguments of a call. `weighted_moments` reads no field that only `sample` has."""

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
