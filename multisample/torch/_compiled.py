"""Calls of `multisample.sample` in a function that torch.compile or torch.export traces.

They become calls of operators without a break in the graph, and an argument that is wrong is the same error as
elsewhere. A call that cannot be part of a graph is made between two of them, or refused where there may be only one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .._dispatch import choose
from .._operands import is_number
from .._sample import sample
from ._dispatched import is_batched, sample_apart, sample_transformed

__all__ = ["sample_compiled"]

_COMPILED = (
    "sample is compiled for tensors of PyTorch's own types and backend torch_ext, with seed= or PyTorch's default"
    " generator; other arrays and backends, and generators that are passed, are not for a graph"
)


def sample_compiled(mu: Any, sigma: Any, n: Any, *, backend: str, generator: Any, out: Any, **options: Any) -> Any:
    """`sample`, as an operator if it can be one; what is neither array nor backend has been checked."""
    tensors = [x for x in (mu, sigma, out) if not (x is None or is_number(x))]
    if (
        tensors
        and all(map(_is_tensor, tensors))
        and generator is None
        and _has_operators(backend, tensors[0].device.type)
    ):
        return sample_transformed(mu, sigma, n, generator=None, out=out, is_known=statically_known_true, **options)
    if not torch.compiler.is_dynamo_compiling():
        raise ValueError(_COMPILED)
    return _sample_uncompiled(mu, sigma, n, backend=backend, generator=generator, out=out, **options)


def _is_tensor(x: Any) -> bool:
    if torch.compiler.is_dynamo_compiling():  # In a graph, a subclass sees operators that it may not know.
        return type(x) in (torch.Tensor, torch.nn.Parameter)
    return isinstance(x, torch.Tensor)


@torch.compiler.assume_constant_result
def _has_operators(backend: str, device_kind: str) -> bool:
    """Whether calls with tensors on such a device go to the operators, which are built and loaded here if so."""
    return choose(backend, "torch", device_kind).name == "torch_ext"


# In a graph, PyTorch batches a call when it is there as a whole.
torch.compiler.assume_constant_result(is_batched)
torch.compiler.allow_in_graph(sample_apart)
_sample_uncompiled = torch.compiler.disable(sample, reason=_COMPILED)
