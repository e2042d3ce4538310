"""`perturb`: normal noise added to model parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

from ._parameters.plan import Request, run
from ._parameters.structure import matching, structure_of

if TYPE_CHECKING:
    from ._typing import AnyArray, Number, Seed

__all__ = ["perturb"]


def perturb(
    parameters: Any,
    coefficients: AnyArray | Number | Any,
    *,
    seed: Seed | Any,
    member: SupportsIndex = 0,
    out: Any = None,
    fast_math: bool = False,
    ids: Mapping[str, SupportsIndex] | Sequence[SupportsIndex] | None = None,
    backend: str = "auto",
) -> Any:
    """x"""
    structure = structure_of("parameters", parameters)
    targets = None
    if out is not None:
        targets = structure if out is parameters else matching(structure_of("out", out), structure)
    return run(Request(structure, targets, out, coefficients, seed, member, fast_math, ids, backend))
