"""`sample_sharded`: one matrix of samples on the ranks of a device mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from multisample.backends.launch import Operation

from .._arguments import describe
from .._checks.operands import with_scalars
from .._libraries import is_number
from .._operations import Call
from .._randomness.generator import Generator, Key
from .._routes.dtensor import draw_shard
from .._sample import sample
from .._typing import DType, Layout, Noise


def sample_sharded(
    mu: torch.Tensor | float,
    sigma: torch.Tensor | float,
    n: SupportsIndex,
    *,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    backend: str = "auto",
    seed: SupportsIndex | Key | None = None,
    generator: Generator | torch.Generator | None = None,
    noise: Noise = "independent",
    dtype: DType | None = None,
    out: DTensor | None = None,
    fast_math: bool = False,
    dim_offset: SupportsIndex = 0,
    sample_offset: SupportsIndex = 0,
    validate: bool = False,
    layout: Layout = "dn",
    antithetic: bool = False,
) -> DTensor:
    """Draw one matrix of samples on the ranks of a device mesh; each rank draws its part.

    The full matrix equals the result of `multisample.sample` on one device, bit for bit, for all placements: sharded
    over samples, over dimensions, over both on a two-dimensional mesh, or replicated. The ranks do not communicate.

    Parameters
    ----------
    mu, sigma : torch.Tensor, DTensor or number, shape (d,) or (d, 1)
        Means, and standard deviations of at least 0. Tensors must be whole and equal on every rank. DTensors must be on
        `mesh`, replicated or sharded over dimensions like the result. One of the two may be a number.
    mesh : torch.distributed.device_mesh.DeviceMesh
        The ranks and their type of device. Ranks outside `mesh` may call too.
    placements : sequence of torch.distributed.tensor.Placement
        For each dimension of `mesh`, ``Shard(axis)`` of the result or ``Replicate()``. The shards are those of
        `torch.chunk`: they may be uneven, and the last ones may be empty.
    n, backend, seed, noise, dtype, fast_math, dim_offset, sample_offset, layout, antithetic : various
        As in `multisample.sample`, for the whole matrix and with one seed. Shards may cut an antithetic pair.
    generator : Generator or torch.Generator, optional
        Source of a seed and an offset, in the same state on every rank. A call advances it by the same amount on
        every rank, so that the states stay equal. Without `seed` and `generator`, PyTorch's default generator of the
        rank's device is used: call ``torch.manual_seed`` with the same number on every rank.
    out : DTensor, shape (d, n), or (n, d) with layout "nd", optional
        Destination, on `mesh` and with `placements`.
    validate : bool, default False
        Check the values in device memory, and check that all ranks draw the same matrix. The second check runs one
        collective for each dimension of `mesh`, so set it on every rank of `mesh` or on none.

    Returns
    -------
    DTensor, shape (d, n), or (n, d) with layout "nd"
        The result, on `mesh` and with `placements`. Its local tensor is C-contiguous, unless `out` is passed, and empty
        on ranks outside `mesh`.

    Raises
    ------
    TypeError
        If `mesh` is not a DeviceMesh, `mu` or `sigma` is not a PyTorch tensor or a number, or `out` is not a DTensor.
        Also as for `multisample.sample`.
    ValueError
        If `placements` differ from the above, or their number differs from the dimensions of `mesh`. If a tensor is on
        another type of device than `mesh`. If a DTensor is on another mesh, holds partial sums, or is sharded
        differently from the result. If `validate` finds ranks that differ. Also as for `multisample.sample`.
    RuntimeError
        As for `multisample.sample`.

        After an error on one rank only, its generator is behind the generators of the other ranks.

    Notes
    -----
    Gradients follow the rules of DTensors. The gradient of a replicated `mu` or `sigma` is ``Partial`` over the mesh
    dimensions that shard the result, and is reduced where it is used. A plain tensor gets the gradient of this rank's
    part; the caller must add the gradients of all ranks.

    See Also
    --------
    multisample.sample : with DTensors, draws a result with their sharding over dimensions.

    Examples
    --------
    On four ranks, this call would draw a quarter of the samples on each. Here there is one rank.

    >>> import torch
    >>> from torch import distributed
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard
    >>> import multisample.torch
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> mu = torch.zeros(3)
    >>> x = multisample.torch.sample_sharded(mu, 1.0, 1000, mesh=mesh, placements=[Shard(1)], seed=7)
    >>> x.shape, x.placements
    (torch.Size([3, 1000]), (Shard(dim=1),))
    >>> torch.equal(x.to_local(), multisample.sample(mu, 1.0, 1000, seed=7))
    True
    >>> distributed.destroy_process_group()
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {describe(mesh)} of type {type(mesh).__name__}")
    call = Call(
        Operation.sample, mu, sigma, n, backend, seed, noise, dtype, fast_math, dim_offset, sample_offset, antithetic,
        generator, out, validate, layout,
    )  # fmt: skip
    call = with_scalars(call)
    for name, x in (("mu", call.mu), ("sigma", call.sigma)):
        if not (is_number(x) or isinstance(x, torch.Tensor)):
            raise TypeError(f"{name}: expected a tensor or a number, got {describe(x)} of type {type(x).__name__}")
        if isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and x.device.type != mesh.device_type:
            raise ValueError(
                f"{name}: expected a tensor on the device type of mesh, {mesh.device_type}, got {x.device}"
            )
    return draw_shard(call, mesh, placements, sample)
