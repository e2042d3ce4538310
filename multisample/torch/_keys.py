"""`take_key`: a key from a PyTorch generator, with which a program can repeat a draw."""

from __future__ import annotations

import torch

from .._arguments import describe
from .._randomness.generator import Key
from .._randomness.torch_offsets import taker
from .._routes.torch_transforms import is_recorded
from ._randn import device_of


def take_key(generator: torch.Generator | None = None, device: torch.device | str | int | None = None) -> Key:
    """Take seed and offset of one call from a PyTorch generator, as a call of `multisample.sample` does.

    Parameters
    ----------
    generator : torch.Generator, optional
        Default: PyTorch's default generator of `device`.
    device : torch.device, str or int, optional
        Default: the device of `generator`, or PyTorch's default device without `generator`.

    Returns
    -------
    multisample.Key

    Raises
    ------
    TypeError
        If `generator` is not a torch.Generator.
    ValueError
        If `generator` is not on `device`, or `device` is neither a CPU nor a CUDA device. If torch.jit.trace,
        torch.export or the like records the call.

    Notes
    -----
    A CUDA generator gives its seed and its Philox offset, which advances by 4. A CPU generator has no offset: the seed
    is a 64-bit number that it draws, and the offset is 0.

    Examples
    --------
    >>> import torch
    >>> import multisample
    >>> _ = torch.manual_seed(3)
    >>> key = multisample.torch.take_key()
    >>> _ = torch.manual_seed(3)
    >>> x = multisample.sample(torch.zeros(2), torch.ones(2), 5)
    >>> torch.equal(x, multisample.sample(torch.zeros(2), torch.ones(2), 5, seed=key))
    True
    """
    if not torch.compiler.is_dynamo_compiling() and is_recorded():
        raise ValueError(
            "take_key: expected a call outside of traces (torch.jit.trace, torch.export and the like), in which the key"
            " would be a constant; call sample without a seed"
        )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator: expected a torch.Generator, got {describe(generator)} of type {type(generator).__name__}"
        )
    where = device_of(generator.device if device is None and generator is not None else device)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected a CPU or a CUDA device, got {where}")
    if generator is not None and device_of(generator.device) != where:
        raise ValueError(f"generator: expected one on {where}, got one on {generator.device}")
    return Key(*taker(str(where))(generator))
