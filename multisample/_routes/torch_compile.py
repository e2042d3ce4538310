"""Calls in a function that torch.compile or torch.export traces.

Such calls become operator calls without a graph break, and wrong arguments raise the eager errors. A call that no
operator serves breaks the graph, or raises where a graph break is not allowed. This module imports torch._dynamo, which
takes a second, so eager calls do not import it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from multisample.backends.launch import Operation

from .._backends import choose
from .._libraries import is_number
from .._operations import Call
from .torch_transforms import draw_by_operator, is_batched

_COMPILED = (
    "sample can be part of a graph only with plain PyTorch tensors, backend torch_ext, and seed= or PyTorch's default"
    " generator; not with tensor subclasses, other arrays, other backends or generator=; weighted_moments cannot"
)


def run_compiled(call: Call, function: Callable[..., Any]) -> Any:
    """Run a call whose scalars and choices have been checked; `function` is the public function of the operation."""
    tensors = [x for x in (call.mu, call.sigma, call.out) if not (x is None or is_number(x))]
    if (
        call.operation == Operation.sample
        and tensors
        and all(map(_is_tensor, tensors))
        and call.generator is None
        and _has_operators(call.backend, tensors[0].device.type)
    ):
        return draw_by_operator(call, statically_known_true)
    if not torch.compiler.is_dynamo_compiling():
        raise ValueError(_COMPILED)
    return _run_between_graphs(call, function)


@torch.compiler.disable(reason=_COMPILED)
def _run_between_graphs(call: Call, function: Callable[..., Any]) -> Any:
    return call.repeated(function)


def _is_tensor(x: Any) -> bool:
    if torch.compiler.is_dynamo_compiling():  # A tensor subclass may not support our operators.
        return type(x) in (torch.Tensor, torch.nn.Parameter)
    return isinstance(x, torch.Tensor)


@torch.compiler.assume_constant_result
def _has_operators(backend: str, device_kind: str) -> bool:
    """Whether operators serve tensors on such a device. If so, this call builds and loads the operators."""
    return choose(backend, "torch", device_kind).name == "torch_ext"


# PyTorch applies vmap to the operators of a graph only when the graph is complete.
torch.compiler.assume_constant_result(is_batched)
