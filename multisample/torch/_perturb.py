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
        As for `multisample.perturb`.
    ValueError
        As for `multisample.perturb`.
    RuntimeError
        As for `multisample.perturb`.

    Examples
    --------
    A step of MeZO: two evaluations at opposite perturbations give the coefficient of the update. They are the members,
    so the coefficient is ``-rate / (2 * sigma)`` times the difference of their losses.

    >>> import torch
    >>> import multisample.torch
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = torch.nn.Linear(3, 1), torch.randn(64, 3), torch.randn(64, 1)
    >>> def loss():
    ...     with torch.no_grad():
    ...         return float(torch.nn.functional.mse_loss(model(x), y))
    >>> before, sigma, rate = loss(), 1e-3, 0.05
    >>> for step in range(200):
    ...     key = multisample.Key(7, step)
    ...     _ = multisample.torch.perturb_(model, sigma, seed=key)
    ...     above = loss()
    ...     _ = multisample.torch.perturb_(model, -2 * sigma, seed=key)
    ...     step_size = rate / (2 * sigma) * (above - loss())
    ...     _ = multisample.torch.perturb_(model, sigma - step_size, seed=key)  # Back, and the update.
    >>> loss() < before
    True
    """
    parameters = listed(parameters)
    perturb(
        parameters, coefficients, seed=seed, member=member, decay=decay, out=parameters, fast_math=fast_math, ids=ids,
        backend=backend,
    )  # fmt: skip
    return parameters
