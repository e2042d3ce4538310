"""Calls in a function that torch.compile or torch.export traces.

They become calls of operators without a break in the graph, and a wrong argument is the same error as elsewhere. A call
that cannot be part of a graph is made between two of them, or refused where there may be only one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .._backends import choose
from .._libraries import is_number
from .._plan import Call
from .transformed import draw_by_operator, draw_separately, is_batched

__all__ = ["draw_compiled"]

_COMPILED = (
    "sample is compiled for tensors of PyTorch's own types and backend torch_ext, with seed= or PyTorch's default"
    " generator; other arrays and backends, and generators that are passed, are not for a graph"
)


def draw_compiled(call: Call, draw: Callable[..., Any]) -> Any:
    """A call whose scalars and choices have been checked; `draw` is `multisample.sample`."""
    tensors = [x for x in (call.mu, call.sigma, call.out) if not (x is None or is_number(x))]
    if (
        tensors
        and all(map(_is_tensor, tensors))
        and call.generator is None
        and _has_operators(call.backend, tensors[0].device.type)
    ):
        return draw_by_operator(call, statically_known_true)
    if not torch.compiler.is_dynamo_compiling():
        raise ValueError(_COMPILED)
    return _draw_between_graphs(call, draw)


@torch.compiler.disable(reason=_COMPILED)
def _draw_between_graphs(call: Call, draw: Callable[..., Any]) -> Any:
    return draw(**call._asdict())


def _is_tensor(x: Any) -> bool:
    if torch.compiler.is_dynamo_compiling():  # In a graph, a subclass gets operators that it may not know.
        return type(x) in (torch.Tensor, torch.nn.Parameter)
    return isinstance(x, torch.Tensor)


@torch.compiler.assume_constant_result
def _has_operators(backend: str, device_kind: str) -> bool:
    """Whether calls with tensors on such a device are calls of operators, which are built and loaded here if so."""
    return choose(backend, "torch", device_kind).name == "torch_ext"


# In a graph, PyTorch batches a call only when the graph is complete.
torch.compiler.assume_constant_result(is_batched)
torch.compiler.allow_in_graph(draw_separately)
