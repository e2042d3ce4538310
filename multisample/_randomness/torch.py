"""Seed and offset of a call from PyTorch's generators.

A CUDA generator counts Philox offsets, in steps of 4. A CPU generator has no offset, so a 64-bit draw is the seed.
While a CUDA graph is captured, PyTorch draws the offset itself, on the device and anew in each replay.
"""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable
from typing import Any

import torch

from .generator import LOCK, WORD_64

__all__ = ["SEED", "draw_offset", "take_transformed", "taker", "torch_generator"]

SEED = 0x636F6D70696C6564
"""The seed of calls whose offset is drawn on the device: the bytes of "compiled"."""

# Tensors of one 64-bit integer and their memory, each one call's at a time.
_scalars: collections.deque[tuple[Any, ctypes.c_uint64]] = collections.deque()


def torch_generator(generator: Any, device: str) -> Any:
    """`generator`, or PyTorch's default one of `device` for None."""
    if generator is not None:
        return generator
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.init()  # Makes the default generators.
        return torch.cuda.default_generators[where.index]
    return torch.default_generator


def taker(device: str) -> Callable[[Any], tuple[int, int]]:
    """``take(generator)``: seed and offset from a generator on `device`, by default from PyTorch's default one."""
    where = torch.device(device)
    if where.type != "cuda":
        return _take_from_cpu
    ordinal = where.index

    def take(generator: Any) -> tuple[int, int]:
        if generator is None:
            defaults = torch.cuda.default_generators  # None before PyTorch has initialized CUDA.
            generator = defaults[ordinal] if ordinal < len(defaults) else torch_generator(None, device)
        with LOCK:
            offset: int = generator.get_offset()
            generator.set_offset(offset + 4)
            return generator.initial_seed() % WORD_64, offset

    return take


def _take_from_cpu(generator: Any) -> tuple[int, int]:
    try:
        scalar, memory = _scalars.pop()
    except IndexError:
        scalar, memory = _new_scalar()
    scalar.random_(_LEAST, None, generator=generator)
    seed = memory.value
    _scalars.append((scalar, memory))
    return seed, 0


def take_transformed(device: str, generator: Any) -> tuple[int, int]:
    """The same where PyTorch transforms the call: torch.func refuses to write to tensors from outside of it."""
    if torch.device(device).type == "cuda":
        return taker(device)(generator)
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(_LEAST, None, generator=generator)) % WORD_64, 0


_LEAST = -(2**63)


def _new_scalar() -> tuple[Any, ctypes.c_uint64]:
    with torch.inference_mode(False):  # A tensor of inference mode could not be written to outside of it.
        scalar = torch.empty((), dtype=torch.int64, device="cpu")
    return scalar, ctypes.c_uint64.from_address(scalar.data_ptr())


def draw_offset(device: Any, generator: Any = None) -> Any:
    """A new offset from `generator`, or from PyTorch's default one of `device`, in the memory of `device`."""
    options: dict[str, Any] = {"dtype": torch.int64, "device": device}
    if generator is not None:
        options["generator"] = generator
    if not torch.compiler.is_compiling():
        return torch.randint(-(2**63), 2**63 - 1, (1,), **options)
    # A compiled randint has 2**32 values on the CPU, and on CUDA a range of 31 bits.
    low, high = [torch.randint(0, 2**31 - 1, (1,), **options) for _ in range(2)]
    return low | high << 31
