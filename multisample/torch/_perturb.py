"""`perturb_`: normal noise added to the parameters of a module, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, SupportsIndex, TypeVar

from .._model_parameters.structures import listed
from .._perturb import perturb

if TYPE_CHECKING:
    from .._typing import AnyArray, Decay, Number, Seed

Given = TypeVar("Given")


def perturb_(
    parameters: Given,
    coefficients: AnyArray | Number,
    *,
    seed: Seed,
    member: SupportsIndex = 0,
    decay: Decay = 0,
    fast_math: bool = False,
    ids: Mapping[str, SupportsIndex] | Sequence[SupportsIndex] | None = None,
    backend: str = "auto",
) -> Given:
    """Add normal noise to the parameters of a module, or to tensors, in place.

    Equals ``perturb(parameters, coefficients, out=parameters, ...)``. As with an optimizer's step, autograd records
    nothing, and version counters are incremented.

    Parameters
    ----------
    parameters : torch.nn.Module, torch.Tensor, or sequence, mapping, pairs or iterator of tensors
        For a module, its trainable parameters; to include frozen ones, pass ``module.named_parameters()``. As for
        `multisample.perturb`, positions are the ids of ``module.parameters()``, whose noise is not the module's. A
        tensor that requires grad must be a leaf.
    coefficients, seed, member, decay, fast_math, ids, backend : various
        As for `multisample.perturb`.

    Returns
    -------
    torch.nn.Module, torch.Tensor, sequence or mapping
        `parameters`; a list or dict of what an iterator or pairs had.

    Raises
    ------
    TypeError
    ValueError
    RuntimeError
        As for `multisample.perturb`.

    Examples
    --------
    README.md, beside this module, has a step of MeZO.

    >>> import torch
    >>> from multisample.torch import perturb_
    >>> layer = torch.nn.Linear(3, 1)
    >>> before = layer.weight.clone()
    >>> _ = perturb_(layer, 0.1, seed=7)
    >>> _ = perturb_(layer, -0.1, seed=7)
    >>> torch.allclose(layer.weight, before, atol=1e-6)
    True
    """
    parameters = listed(parameters)
    perturb(
        parameters, coefficients, seed=seed, member=member, decay=decay, out=parameters, fast_math=fast_math, ids=ids,
        backend=backend,
    )  # fmt: skip
    return parameters
