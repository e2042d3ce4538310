"""Scratch memory of launches, from the allocator of the caller's library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .library import Device, Library

_captured: list[Any] = []
"""Memory whose address a CUDA graph has captured. It is never freed, since replays write to it."""


def scratch_allocator(library: Library, device: Device) -> Callable[[int, Any, int], Any]:
    """``allocate(size, like, stream)``: memory for `size` float64 numbers; None if `size` is 0.

    The allocator reuses the memory only for later work on the same stream. PyTorch's graphs own the memory that they
    capture.
    """
    allocators: dict[int, Callable[[Any], Any]] = {}
    is_captured = library.is_capturing(device) if device.kind == "cuda" and library.name != "torch" else None

    def allocate(size: int, like: Any, stream: int) -> Any:
        if size == 0:
            return None
        if size not in allocators:  # At most two sizes: `sample_offset` can add one group of columns.
            allocators[size] = library.allocator((size,), "float64", device)
        memory = allocators[size](like)
        if is_captured is not None and is_captured(stream):
            _captured.append(memory)
        return memory

    return allocate
