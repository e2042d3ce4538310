"""`perturb` of DTensors: each rank perturbs the elements that it holds, without communication."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from .._model_parameters.perturb_plan import perturbed
from .._model_parameters.request import Request, label
from .._model_parameters.spans import Block, steps_of, whole
from .dtensor import cuts_of, is_shard, runs_of


def perturb_dtensors(request: Request) -> Any:
    """Run a call of `perturb` with DTensors: each rank perturbs the elements that it holds."""
    parameters, out = request.parameters, request.out
    held = [_held(label("parameters", parameters, k), x) for k, x in enumerate(parameters.arrays)]
    part = parameters._replace(arrays=[local for local, _ in held], rebuild=list)
    targets = None
    if out is not None:
        for k, (x, target) in enumerate(zip(parameters.arrays, out.arrays, strict=True)):
            _check_target(label("out", out, k), target, x)
        targets = part if out is parameters else out._replace(arrays=[_held("out", x)[0] for x in out.arrays])
    request = request._replace(parameters=part, out=targets, blocks=tuple(blocks for _, blocks in held))
    results = perturbed(request)
    if out is not None:
        torch.autograd.graph.increment_version([x for x in out.arrays if isinstance(x, DTensor)])
        return request.given_out
    return parameters.rebuild(
        [
            DTensor.from_local(result, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
            if isinstance(x, DTensor)
            else result
            for x, result in zip(parameters.arrays, results, strict=True)
        ]
    )


def _held(name: str, x: Any) -> tuple[Any, tuple[Block, ...]]:
    """The elements of a parameter that this rank holds, and their blocks."""
    if not isinstance(x, DTensor):
        return x, (whole(tuple(x.shape)),)
    for placement in x.placements:
        if not (isinstance(placement, Replicate) or is_shard(placement)):
            raise ValueError(f"{name}: expected placements Shard or Replicate(), got {placement}; redistribute it")
    shape, local = tuple(x.shape), x._local_tensor
    if hasattr(local, "trigger_wait"):
        local = local.wait()
    runs = [runs_of(length, cuts_of(x.placements, axis), x.device_mesh) for axis, length in enumerate(shape)]
    if x.device_mesh.get_coordinate() is None or local.numel() == 0:
        return local, ()
    steps = steps_of(shape)
    begins = [[sum(map(len, of_axis[:k])) for k in range(len(of_axis))] for of_axis in runs]
    blocks = []
    for index in itertools.product(*(range(len(of_axis)) for of_axis in runs)):
        held = [of_axis[k] for of_axis, k in zip(runs, index, strict=True)]
        blocks.append(
            Block(
                tuple(of_axis[k] for of_axis, k in zip(begins, index, strict=True)), tuple(map(len, held)),
                sum(run.start * step for run, step in zip(held, steps, strict=True)), steps,
            )
        )  # fmt: skip
    return local, tuple(blocks)


def _check_target(name: str, target: Any, x: Any) -> None:
    if isinstance(target, DTensor) != isinstance(x, DTensor):
        raise TypeError(f"{name}: expected {type(x).__name__}, as the parameter is, got {type(target).__name__}")
    if isinstance(x, DTensor) and (target.device_mesh != x.device_mesh or target.placements != x.placements):
        raise ValueError(
            f"{name}: expected it on {x.device_mesh} with placements {x.placements}, got {target.device_mesh} with"
            f" {target.placements}"
        )
    if target.requires_grad and not target.is_leaf:
        raise ValueError(f"{name}: expected a leaf, got the result of an operation that autograd recorded")
