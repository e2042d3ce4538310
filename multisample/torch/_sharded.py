"""`sample_sharded`: one matrix of samples on the ranks of a device mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from .._arguments import check_choice, describe
from .._libraries import is_number
from .._plan import Call
from .._randomness.generator import Generator, Key
from .._routes.dtensor import draw_shard
from .._sample import sample
from .._typing import DType, Layout, Noise

__all__ = ["sample_sharded"]


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
    """Draw one matrix of samples on the ranks of a device mesh, each its part.

    The DTensor's full matrix is that of `multisample.sample` on a single device, bit for bit, however it is placed:
    over samples, over dimensions, over both on a mesh of two dimensions, or whole on every rank. No rank communicates.

    Parameters
    ----------
    mu, sigma : torch.Tensor, DTensor or number, shape (d,) or (d, 1)
        Means, and standard deviations of at least 0: tensors that are whole and equal on every rank, or DTensors on
        `mesh`, replicated or sharded over dimensions as the result is. One of the two may be a number.
    n : int
        Number of samples in the whole matrix, at least 0; ``sample_offset + n <= 2**34``.
    mesh : torch.distributed.device_mesh.DeviceMesh
        The ranks, and the type of device that they draw on. Ranks that are not part of it may call too.
    placements : sequence of torch.distributed.tensor.Placement
        For each dimension of `mesh`, ``Shard(axis)`` of the result or ``Replicate()``. Shards are cut as by
        `torch.chunk`: they may be uneven, and the last ones empty.
    backend : str, default "auto"
        As for `multisample.sample`, here and below.
    seed : int or Key, optional
        ``0 <= seed < 2**64``, or a `multisample.Key`.
    generator : Generator or torch.Generator, optional
        Where to take a seed and an offset from: one in the same state on every rank. Each call advances it once on
        every rank that calls, whatever its part, so that it stays so. With neither `seed` nor `generator`, PyTorch's
        default generator of the rank's device: call ``torch.manual_seed`` with the same number on every rank.
    noise : {"independent", "shared"}, default "independent"
        Whether every component has noise of its own, or all dimensions use one row of noise.
    dtype : {"float16", "bfloat16", "float32", "float64"}, optional
        Type of the result.
    out : DTensor, shape (d, n), or (n, d) with layout "nd", optional
        Where to put the result: on `mesh`, placed as `placements` say.
    fast_math : bool, default False
        Take a faster, less exact transform on CUDA devices: the same bits on all GPUs of one kind.
    dim_offset, sample_offset : int, default 0
        Draw the window of the endless sample matrix that starts at this row and column; shards are parts of that.
    validate : bool, default False
        Look at the values in device memory, and make sure that all ranks draw the same matrix: with one collective
        for each dimension of `mesh`, so on every rank of it or on none.
    layout : {"dn", "nd"}, default "dn"
        One row for each dimension, or the transpose, one row for each sample.
    antithetic : bool, default False
        Draw the samples in pairs; a shard may cut a pair.

    Returns
    -------
    DTensor, shape (d, n), or (n, d) with layout "nd"
        On `mesh`, placed as `placements` say; its local tensor is C-contiguous unless it is that of `out`, and empty
        on ranks that are not part of `mesh`.

    Raises
    ------
    TypeError
        If `mesh` is no DeviceMesh, `mu` or `sigma` no tensor of PyTorch and no number, `out` no DTensor, and as by
        `multisample.sample`.
    ValueError
        If `placements` are not as above, or not as many as `mesh` has dimensions; if a tensor is on another type of
        device than `mesh`; if a DTensor is on another mesh, of partial sums, or sharded otherwise than the result; if
        `validate` finds ranks that differ; and as by `multisample.sample`.
    RuntimeError
        As by `multisample.sample`.

        An error on one rank alone leaves its generator behind the others'.

    Notes
    -----
    Gradients are those of DTensors: that of a replicated `mu` or `sigma` is of partial sums over the mesh dimensions
    which the result is sharded over, to be reduced where it is used. A plain tensor gets the gradient of this rank's
    part, and whoever passes one adds those of all ranks up.

    See Also
    --------
    multisample.sample : given DTensors, draws a result that is sharded over dimensions as they are.

    Examples
    --------
    On each of four ranks this would draw a quarter of the samples; here there is one.

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
    for name, x in (("mu", mu), ("sigma", sigma)):
        if not (is_number(x) or isinstance(x, torch.Tensor)):
            raise TypeError(f"{name}: expected a tensor or a number, got {describe(x)} of type {type(x).__name__}")
        if isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and x.device.type != mesh.device_type:
            raise ValueError(f"{name}: expected it on the mesh's type of device, {mesh.device_type}, got {x.device}")
    check_choice("layout", layout, ("dn", "nd"))
    call = Call(
        mu, sigma, n, backend, seed, generator, noise, dtype, out, fast_math, dim_offset, sample_offset, validate,
        layout, antithetic,
    )  # fmt: skip
    return draw_shard(call, mesh, placements, sample)
