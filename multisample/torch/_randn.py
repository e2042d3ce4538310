"""`randn` and `randn_like`: standard normals of any shape as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from multisample.backends.system.cuda_driver import synchronize

from .._arguments import DTYPES, describe, dtype_name
from .._libraries.torch import TORCH, check_tensor, dtype_of
from .._standard_normal import Pair, normals
from .._tracing import is_traced

if TYPE_CHECKING:
    from .._typing import DType, Generators, Seed


def randn(
    *size: SupportsIndex | Sequence[SupportsIndex],
    seed: Seed | None = None,
    generator: Generators | None = None,
    dtype: DType | None = None,
    device: torch.device | str | int | None = None,
    out: torch.Tensor | None = None,
    start: SupportsIndex = 0,
) -> torch.Tensor:
    """Draw standard normals of any shape, as `torch.randn` does.

    Element e, counted in row-major order, is the normal ``z[0, start + e]`` of `multisample.sample`. So the numbers do
    not depend on the shape, and are those of `multisample.standard_normal` for the same seed.

    Parameters
    ----------
    size : int, or one tuple of int
        Shape of the result. With B seeds, the first length is B, and element b is ``randn(size[1:], seed=seed[b])``:
        all are drawn in one launch.
    seed : int or Key, or a vector of B of them, optional
        As for `multisample.sample`. Seeds in device memory stay there.
    generator : Generator or torch.Generator, or a list of B of them, optional
        As for `multisample.sample`.
    dtype : dtype, optional
        By default that of `out`, or ``torch.get_default_dtype()``.
    device : torch.device, str or int, optional
        By default that of `out`, or PyTorch's default device.
    out : torch.Tensor of shape `size`, optional
        Destination, a tensor whose axes flatten without a copy; returned.
    start : int, default 0
        The first element of the window: ``randn(b - a, seed=s, start=a)`` equals ``randn(b, seed=s)[a:]``, bit for bit.
        ``start`` plus the number of elements of one seed is at most 2**34.

    Returns
    -------
    torch.Tensor of shape `size`

    Raises
    ------
    TypeError
        If `size`, `seed` or `start` is no integer, or `dtype` or `out` is not accepted.
    ValueError
        If a value is out of range, if the first length is not the number of seeds or generators, or if `out` does
        not fit.

    Notes
    -----
    The numbers equal row 0 of `multisample.sample`, and the normals that `multisample.perturb` adds to its parameter 0
    as member 0, for the same key. Take a key for each use: ``seed=generator.take()``.

    Examples
    --------
    An image for each request, whatever the batch:

    >>> import torch
    >>> from multisample.torch import randn
    >>> x = randn(2, 3, 8, 8, seed=[7, 8])
    >>> torch.equal(x[1], randn(3, 8, 8, seed=8))
    True
    """
    lengths: Any = size
    if len(size) == 1 and isinstance(size[0], (tuple, list)):
        lengths = tuple(size[0])
    if out is None:
        element = torch.get_default_dtype() if dtype is None else dtype
        where = device if isinstance(device, torch.device) and device.index is not None else device_of(device)
    else:
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"out: expected a PyTorch tensor, got {describe(out)} of type {type(out).__name__}")
        element, where = out.dtype if dtype is None else dtype, out.device
        if device is not None and device_of(device) != where:
            raise ValueError(f"device: expected that of out, {where}, got {device}")
    name = (_NAMES.get(element) if type(element) is torch.dtype else None) or dtype_name(element)
    state = None if is_traced() else TORCH.state()
    pair = None if state is None else _PAIRS.get(where)
    if pair is None:
        pair = _new_pair(where, keep=state is not None)
    drawn: torch.Tensor = normals(TORCH, state, (name, where), pair, lengths, seed, generator, out, start)
    return drawn


def randn_like(
    x: torch.Tensor,
    *,
    seed: Seed | None = None,
    generator: Generators | None = None,
    dtype: DType | None = None,
    device: torch.device | str | int | None = None,
    out: torch.Tensor | None = None,
    start: SupportsIndex = 0,
) -> torch.Tensor:
    """Draw standard normals with the shape, type and device of `x`, as `torch.randn_like` does.

    Equals ``randn(x.shape, dtype=x.dtype, device=x.device, ...)``. The result is contiguous, whatever the strides of
    `x`.

    Parameters
    ----------
    x : torch.Tensor
        Its values and strides do not matter.
    seed, generator, dtype, device, out, start : optional
        As for `randn`. With B seeds, the first length of `x` is B.

    Returns
    -------
    torch.Tensor

    Raises
    ------
    TypeError
        If `x` is not a tensor; also as for `randn`.
    ValueError
        As for `randn`.

    Examples
    --------
    >>> import torch
    >>> from multisample.torch import randn, randn_like
    >>> latents = torch.zeros(2, 4, 8, 8)
    >>> torch.equal(randn_like(latents, seed=[7, 8])[0], randn(4, 8, 8, seed=7))
    True
    """
    if not isinstance(x, torch.Tensor) or hasattr(x, "placements"):
        raise TypeError(f"x: expected a PyTorch tensor in one memory, got {describe(x)} of type {type(x).__name__}")
    check_tensor("x", x)
    if out is None:
        dtype, device = x.dtype if dtype is None else dtype, x.device if device is None else device
    return randn(x.shape, seed=seed, generator=generator, dtype=dtype, device=device, out=out, start=start)


def device_of(device: Any) -> torch.device:
    """`device`, or PyTorch's default device for None; a CUDA device with its index, a CPU without."""
    if device is None:
        if not torch._C._len_torch_function_stack():  # A default device is a mode.
            return _CPU
        device = torch.get_default_device()
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return _CPU if where.type == "cpu" else where


_NAMES = {dtype_of(name): name for name in DTYPES}
_CPU = torch.device("cpu")
_PAIRS: dict[torch.device, Pair] = {}


def _new_pair(where: torch.device, keep: bool) -> Pair:
    """A pair for `normals`, kept in `_PAIRS` for later calls if `keep`."""
    if not keep:  # PyTorch traces or transforms the call.
        return torch.zeros(1, device=where, dtype=torch.float32), torch.ones(1, device=where, dtype=torch.float32)
    with torch.inference_mode(False):
        pair = _new_pair(where, keep=False)
    if where.type != "cuda":
        _PAIRS[where] = pair
    elif not torch.cuda.is_current_stream_capturing():  # A graph reuses the memory that it captures.
        synchronize(where.index)  # Other streams will read the pair.
        _PAIRS[where] = pair
    return pair
