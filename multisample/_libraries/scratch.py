"""Scratch memory of launches, from the allocator of the caller's library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .library import Device, Library

_captured: list[Any] = []
"""Memory whose address a CUDA graph has captured."""


def scratch_allocator(library: Library, device: Device) -> Callable[[int, Any, int], Any]:
    """``allocate(size, like, stream)``: memory for `size` float64 numbers; None if `size` is 0.

    The caller may drop the memory after the launch: the allocator reuses memory in stream order. A CUDA graph writes to
    captured memory at each replay, so captured memory is never freed. PyTorch's own graphs keep what they capture.
    """
    allocators: dict[int, Callable[[Any], Any]] = {}
    keeps = device.kind == "cuda" and library.name != "torch"
    is_capturing = library.is_capturing(device) if keeps else None

    def allocate(size: int, like: Any, stream: int) -> Any:
        if size == 0:
            return None
        if size not in allocators:  # At most two sizes: `sample_offset` can add one group of columns.
            allocators[size] = library.allocator((size,), "float64", device)
        memory = allocators[size](like)
        if is_capturing is not None and is_capturing(stream):
            _captured.append(memory)
        return memory

    return allocate
