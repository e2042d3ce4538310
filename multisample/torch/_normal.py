"""`torch.distributions.Normal`, drawn by multisample: what programs that hold distributions change their import to.

Everything but drawing is inherited from PyTorch: densities, divergences, and `isinstance` checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .._randomness.generator import Generator
from .._sample import sample
from .._typing import Layout

__all__ = ["Normal"]


class Normal(torch.distributions.Normal):
    """A normal distribution with independent components, in the place of PyTorch's.

    It is a `torch.distributions.Normal`, with `log_prob`, `cdf`, `icdf`, `entropy`, `expand` and the rest as they are
    there, and `kl_divergence` to and from others. `sample` and `rsample` draw by `multisample.sample`, of which they
    make one matrix: each element of `loc` is a dimension, and each element of ``sample_shape`` a sample.

    Parameters
    ----------
    loc, scale : torch.Tensor or number
        Means and standard deviations, of shapes that broadcast.
    validate_args : bool, optional
        Whether PyTorch looks at the values of the arguments; by default as it is told for all distributions.
        On the CPU, those that are drawn with are looked at anyway.
    generator : torch.Generator or multisample.Generator, optional
        Where each call takes new numbers from; by default PyTorch's default generator of the device, which follows
        ``torch.manual_seed``.
    backend : str, default "auto"
        As for `multisample.sample`. Gradients need torch_ext, which "auto" takes where it can run.
    fast_math : bool, default False
        Take a faster, less exact transform on CUDA devices.
    antithetic : bool, default False
        Draw samples in pairs that mirror each other in the mean, in the order of ``sample_shape``.

    Raises
    ------
    TypeError
        By `sample` and `rsample`, for options that `multisample.sample` refuses.
    ValueError
        If a value is looked at and is not as it has to be; by `sample` and `rsample` too.

    See Also
    --------
    multisample.sample : draws, and says what it is that is drawn.

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
    >>> torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum().item()
    0.0
    """

    def __init__(
        self,
        loc: torch.Tensor | float,
        scale: torch.Tensor | float,
        validate_args: bool | None = None,
        *,
        generator: Generator | torch.Generator | None = None,
        backend: str = "auto",
        fast_math: bool = False,
        antithetic: bool = False,
    ) -> None:
        self._options: dict[str, Any] = {
            "generator": generator, "backend": backend, "fast_math": fast_math, "antithetic": antithetic,
        }  # fmt: skip
        super().__init__(loc, scale, validate_args=validate_args)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Normal:
        """The same distribution, its parameters expanded to `batch_shape`, without a copy of them."""
        expanded: Normal = super().expand(batch_shape, self._get_checked_instance(Normal, _instance))
        expanded._options = self._options
        return expanded

    def sample(self, sample_shape: Sequence[int] = ()) -> torch.Tensor:
        """Samples, of shape ``sample_shape + batch_shape``, through which no gradient passes."""
        with torch.no_grad():
            return self.rsample(sample_shape)

    def rsample(self, sample_shape: Sequence[int] = ()) -> torch.Tensor:
        """Samples, of shape ``sample_shape + batch_shape``, that are differentiable in `loc` and `scale`."""
        loc, scale = self.loc, self.scale
        is_matrix = loc.dim() == 1 == len(sample_shape)
        if not is_matrix:
            loc, scale = loc.reshape(-1), scale.reshape(-1)
        # Of one dimension, a row is as good as a column, and quicker to draw.
        layout: Layout = "dn" if loc.shape[0] == 1 else "nd"
        drawn: torch.Tensor = sample(loc, scale, math.prod(sample_shape), layout=layout, **self._options)
        return drawn if is_matrix and layout == "nd" else drawn.view(self._extended_shape(sample_shape))
