"""Order between CUDA streams; scratch memory, and the lifetime of memory that a kernel uses.

A call returns before its kernel has run, and other streams than the kernel's may use its arrays. Streams wait for each
other; the host never waits.
"""

import collections
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

from multisample.backends.system.cuda_driver import Event, is_capturing, order

from ._libraries import Device, Library

# Number of entries that each call of `keep` checks. Each call adds only one, so finished entries are soon released.
_CHECKS = 8


# Objects in use by the GPU, each with a function that returns whether the GPU is done with it.
_kept: collections.deque[tuple[Callable[[], bool], Any]] = collections.deque()
_inherited: list[Any] = []


def keep(is_done: Callable[[], bool], objects: Any) -> None:
    """Hold `objects` until a later call finds that `is_done()` is true. Releases entries that are done.

    A lock could deadlock, since a destructor may call `keep` at any point. Instead `popleft`, which is atomic, gives
    each entry to one thread.
    """
    for _ in range(min(len(_kept), _CHECKS)):
        try:
            entry = _kept.popleft()
        except IndexError:  # Another thread has taken the last entry.
            break
        if not entry[0]():
            _kept.append(entry)
    _kept.append((is_done, objects))


def _leave_to_parent() -> None:
    """In a forked child, neither check nor free the objects of the parent."""
    global _kept
    _inherited.append(_kept)
    _kept = collections.deque()


os.register_at_fork(after_in_child=_leave_to_parent)


def order_before(named: Iterable[int | None], device: Device, stream: int) -> set[int]:
    """Make `stream` wait for the streams that the arrays of a call name, in `named`; returns those other than `stream`.

    RuntimeError if CUDA cannot order them, for example because `stream` is being captured and another is not.
    """
    other_streams = {other for other in named if other is not None and other != stream}
    for other in other_streams:
        order(other, stream, device.ordinal)
    return other_streams


def order_after(other_streams: set[int], device: Device, stream: int) -> None:
    """Make `other_streams` wait for `stream`."""
    for other in other_streams:
        order(stream, other, device.ordinal)


def keep_until_done(arrays: Any, device: Device, stream: int) -> None:
    """Keep `arrays` alive until the work that is queued on `stream` is done.

    Does nothing during a capture, when an event cannot be queried: the owner of a graph keeps its memory alive.
    """
    if not is_capturing(stream):
        keep(Event(stream, device.ordinal).is_done, arrays)


_captured: list[Any] = []
"""Memory whose address a CUDA graph has captured."""


def scratch_allocator(library: Library, device: Device) -> Callable[[int, Any, int], Any]:
    """``allocate(size, like, stream)``: memory for `size` float64 numbers; None if `size` is 0.

    The caller may drop the memory after the launch: the allocator reuses memory in stream order. A CUDA graph writes to
    captured memory at each replay, so captured memory is never freed. PyTorch's own graphs keep what they capture.
    """
    # At most two sizes: `sample_offset` can add one group of columns.
    allocator = functools.cache(lambda size: library.allocator((size,), "float64", device))
    keeps = device.kind == "cuda" and library.name != "torch"

    def allocate(size: int, like: Any, stream: int) -> Any:
        if size == 0:
            return None
        memory = allocator(size)(like)
        if keeps and is_capturing(stream):
            _captured.append(memory)
        return memory

    return allocate
