"""`Normal`: a drop-in replacement for `torch.distributions.Normal` that draws with multisample.

Everything except drawing is inherited from PyTorch: densities, divergences and `isinstance` checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._arguments import UNCHECKED
from .._randomness.generator_argument import is_listed
from .._randomness.seed_argument import batch_of
from .._sample import sample
from .._tracing import is_one
from .._typing import Layout

if TYPE_CHECKING:
    from .._typing import Generators, Seed


class Normal(torch.distributions.Normal):
    """A normal distribution with independent components, in place of PyTorch's.

    The class inherits `log_prob`, `cdf`, `icdf`, `entropy`, `expand` and all other members from
    `torch.distributions.Normal`, and supports `kl_divergence`. `sample` and `rsample` draw one matrix with
    `multisample.sample`: each element of `loc` is a dimension, and each index of ``sample_shape`` is a sample.

    Parameters
    ----------
    loc, scale : torch.Tensor or number
        Means and standard deviations, of shapes that broadcast.
    validate_args : bool, optional
        Whether PyTorch checks the values of the arguments; by default its setting for all distributions. On the CPU,
        drawing also checks the means and standard deviations, unless False was passed.
    generator : torch.Generator or multisample.Generator, optional
        Source of each call's seed and offset, for calls of `sample` and `rsample` without `seed` and `generator`.
        Default: PyTorch's default generator of the device, which ``torch.manual_seed`` seeds.
    backend, fast_math, antithetic : various
        As in `multisample.sample`. Gradients need torch_ext, which "auto" takes where it can run. Antithetic pairs are
        neighbours in the order of ``sample_shape``.

    Raises
    ------
    TypeError
        From `sample` and `rsample`, for options that `multisample.sample` refuses.
    ValueError
        If a checked value is invalid; from `sample` and `rsample` too.

    See Also
    --------
    multisample.sample : specifies the draw.

    Examples
    --------
    >>> import torch
    >>> from multisample.torch import Normal
    >>> loc = torch.zeros(3, requires_grad=True)
    >>> q = Normal(loc, torch.ones(3))
    >>> x = q.rsample((2, 5))
    >>> x.shape
    torch.Size([2, 5, 3])
    >>> x.sum().backward()
    >>> loc.grad
    tensor([10., 10., 10.])
    >>> torch.equal(q.sample((2, 5), seed=7), q.sample((2, 5), seed=7))
    True
    >>> torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum().item()
    0.0
    """

    def __init__(
        self,
        loc: torch.Tensor | float,
        scale: torch.Tensor | float,
        validate_args: bool | None = None,
        *,
        generator: Generators | None = None,
        backend: str = "auto",
        fast_math: bool = False,
        antithetic: bool = False,
    ) -> None:
        self._options: dict[str, Any] = {
            "generator": generator, "backend": backend, "fast_math": fast_math, "antithetic": antithetic,
            "validate": UNCHECKED if validate_args is False else False,
        }  # fmt: skip
        super().__init__(loc, scale, validate_args=validate_args)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Normal:
        """The same distribution with its parameters expanded to `batch_shape`, without a copy."""
        expanded: Normal = super().expand(batch_shape, self._get_checked_instance(Normal, _instance))
        expanded._options = self._options
        return expanded

    def sample(
        self, sample_shape: Sequence[int] = (), *, seed: Seed | None = None, generator: Generators | None = None
    ) -> torch.Tensor:
        """Samples of shape ``sample_shape + batch_shape``, without gradients; parameters as for `rsample`."""
        with torch.no_grad():
            return self.rsample(sample_shape, seed=seed, generator=generator)

    def rsample(
        self, sample_shape: Sequence[int] = (), *, seed: Seed | None = None, generator: Generators | None = None
    ) -> torch.Tensor:
        """Samples of shape ``sample_shape + batch_shape``, differentiable in `loc` and `scale`.

        Parameters
        ----------
        sample_shape : sequence of int
            Shape of the samples.
        seed, generator : optional
            Source of the noise, as for `multisample.sample`, in place of the distribution's generator. A vector of B
            seeds, or a list of B generators, needs an empty `sample_shape` and a batch shape whose first length is B:
            element b is drawn as from ``Normal(loc[b], scale[b])`` with its own seed.
        """
        options = self._options
        if seed is not None or generator is not None:
            options = {**options, "seed": seed, "generator": generator}
        loc, scale = self.loc, self.scale
        generators = options["generator"]
        batch = len(generators) if is_listed(generators) else batch_of(options.get("seed"))
        if batch is not None:
            if len(sample_shape) or self._batch_shape[:1] != (batch,):
                noun = "generator" if is_listed(generators) else "seed"
                raise ValueError(
                    f"{noun}: expected one {noun}, or with sample_shape () one for each of the first axis of"
                    f" {tuple(self._batch_shape)}, got {batch} {noun}s with sample_shape {tuple(sample_shape)}"
                )
            flat = batch, math.prod(self._batch_shape[1:])
            loc, scale = loc.reshape(flat), scale.reshape(flat)
            each: torch.Tensor = sample(loc, scale, 1, layout="nd", **options)
            return each.view(self._batch_shape)
        is_matrix = loc.dim() == 1 == len(sample_shape)
        if loc.dim() != 1:
            loc, scale = loc.reshape(-1), scale.reshape(-1)
        # With one dimension both layouts have the same memory, and "dn" is faster.
        layout: Layout = "dn" if is_one(loc.shape[0]) else "nd"
        drawn: torch.Tensor = sample(loc, scale, math.prod(sample_shape), layout=layout, **options)
        return drawn if is_matrix and layout == "nd" else drawn.view((*sample_shape, *self._batch_shape))
