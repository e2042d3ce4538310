"""Seed and offset of a call from PyTorch's generators.

A CUDA generator counts Philox offsets, in steps of 4. A CPU generator has no offset, so a 64-bit draw is the seed.
In the capture of a CUDA graph, a PyTorch operator draws the offset on the device, anew in each replay.
"""

import collections
import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from .generator import WORD_64, register_in_torch

register_in_torch()

SEED = 0x636F6D70696C6564
"""The seed of calls whose offset a PyTorch operator draws on the device: the bytes of "compiled"."""

# Reusable tensors of one 64-bit integer, each with a view of its memory. A call pops one and puts it back.
_scalars: collections.deque[tuple[Any, ctypes.c_uint64]] = collections.deque()


def torch_generator(generator: Any, device: str) -> Any:
    """`generator`, or PyTorch's default generator of `device` for None."""
    if generator is not None:
        return generator
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.init()  # Makes the default generators.
        return torch.cuda.default_generators[where.index]
    return torch.default_generator


def taker(device: str) -> Callable[[Any], tuple[int, int]]:
    """``take(generator)``: take seed and offset from a generator on `device`, or from PyTorch's default for None."""
    where = torch.device(device)
    if where.type != "cuda":
        return _take_from_cpu
    ordinal = where.index

    def take(generator: Any) -> tuple[int, int]:
        if generator is None:
            defaults = torch.cuda.default_generators  # Empty before PyTorch has initialized CUDA.
            generator = defaults[ordinal] if ordinal < len(defaults) else torch_generator(None, device)
        elif generator.device.type == "cpu":
            return _take_from_cpu(generator)
        return generator.initial_seed() % WORD_64, _advance(generator)

    return take


# A signal handler may draw while this thread has the lock.
_lock = threading.RLock()
_takes = 0


def _advance(generator: Any) -> int:
    """The Philox offset of a CUDA generator, which is advanced by 4."""
    global _takes
    with _lock:
        takes = -1
        while takes != _takes:  # Repeat if a signal handler took the offset.
            takes = _takes
            offset: int = generator.get_offset()
        _takes += 1
        generator.set_offset(offset + 4)
    return offset


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)  # Another thread may hold the lock at a fork.


def _take_from_cpu(generator: Any) -> tuple[int, int]:
    try:
        scalar, memory = _scalars.pop()
    except IndexError:
        with torch.inference_mode(False):  # A tensor made in inference mode is read-only outside it.
            scalar = torch.empty((), dtype=torch.int64, device="cpu")
        memory = ctypes.c_uint64.from_address(scalar.data_ptr())
    scalar.random_(_LEAST, None, generator=generator)
    seed = memory.value
    _scalars.append((scalar, memory))
    return seed, 0


_LEAST = -(2**63)


def draw_key(generator: Any) -> Any:
    """The key that `taker` takes on a CPU, as a tensor (1, 2), drawn by operators that a graph can record."""
    # Graphs of torch.fx cannot call `random_` with these bounds. `randint` lacks the greatest of 2**64 values.
    seed = torch.randint(_LEAST, -_LEAST - 1, (1, 1), dtype=torch.int64, device="cpu", generator=generator) ^ _LEAST
    return torch.nn.functional.pad(seed, (0, 1))


def draw_offset(device: Any, generator: Any = None) -> Any:
    """A new offset in the memory of `device`, from `generator` or PyTorch's default generator of `device`."""
    options: dict[str, Any] = {"dtype": torch.int64, "device": device}
    if generator is not None:
        options["generator"] = generator
    if not torch.compiler.is_compiling():
        return torch.randint(_LEAST, -_LEAST - 1, (1,), **options)
    # A compiled randint gives at most 2**32 values on the CPU, and 31 bits on CUDA. So combine two draws.
    low, high = [torch.randint(0, 2**31 - 1, (1,), **options) for _ in range(2)]
    return low | high << 31
