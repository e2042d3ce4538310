"""Checks of `out`: shape, type, strides, and overlap with itself or with the arrays that the call reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from .._libraries import Library, Operand, check_memory
from .operands import Inputs, check_alignment, extent, item_size


def check_out(operand: Operand, inputs: Inputs, shape: tuple[int, ...]) -> None:
    """ValueError if `out` cannot hold the result."""
    if operand.shape != shape:
        raise ValueError(f"out: expected shape {shape}, got {operand.shape}")
    if operand.dtype != inputs.dtype:
        raise ValueError(f"out: expected dtype {inputs.dtype}, got {operand.dtype}")
    if operand.device != inputs.device:
        raise ValueError(f"out: expected it on the device of mu and sigma, {inputs.device}, got {operand.device}")
    if 0 in shape:
        return
    itemsize = item_size(operand.dtype)
    if any(stride % itemsize for stride in operand.strides):
        raise ValueError(f"out: expected strides of whole elements, {itemsize} bytes, got {operand.strides}")
    if _overlaps_itself(operand):
        raise ValueError(
            f"out: expected elements that do not overlap, got strides {operand.strides} under which they overlap"
        )


def _overlaps_itself(operand: Operand) -> bool:
    *_, s, t = map(abs, operand.strides)
    *batch, _, _ = shape = operand.shape
    if batch and batch[0] > 1:  # Refuses interleaved matrices.
        low, high = extent(operand._replace(shape=shape[1:], strides=operand.strides[1:]))
        if abs(operand.strides[0]) < high - low:
            return True
    shape = shape[-2:]
    # Two elements share an address if `a` row strides equal `b` column strides: a * s == b * t. Test the least pair.
    common = math.gcd(s, t)
    if common == 0:
        return shape != (1, 1)
    return t // common < shape[0] and s // common < shape[1]


def target_checker(
    out: Operand, inputs: Inputs, names: Iterable[str], library: Library, takes_arrays: bool, is_empty: bool
) -> Callable[[Any, Any, tuple[Any, ...], tuple[Any, ...]], None]:
    """``check(out, at, vectors, addresses)``: ValueError if `out` has no memory, is misaligned, or shares memory.

    `names` are those of the vectors.
    """
    on_device, (low, high), share_memory = out.device.kind == "cuda", extent(out), library.share_memory
    mask = item_size(out.dtype) - 1 if on_device else 0
    arrays = [
        (k, name, *extent(operand), on_device or (operand.read is None and not takes_arrays))
        for k, name in enumerate(names)
        if (operand := inputs.operands.get(name)) is not None and not is_empty
    ]

    def check(out: Any, at: Any, vectors: tuple[Any, ...], addresses: tuple[Any, ...]) -> None:
        if not takes_arrays:
            if not (at or is_empty):
                check_memory(at)
            if at & mask:
                check_alignment("out", library.describe("out", out), at)
        for k, name, begin, end, has_address in arrays:
            if has_address and not (at + low < addresses[k] + end and addresses[k] + begin < at + high):
                continue
            # On a device, overlapping address ranges count as shared memory.
            if on_device or share_memory(out, vectors[k]):
                raise ValueError(f"out: expected memory of its own, got memory that {name} also uses")

    return check
