"""Order between CUDA streams, and memory that a kernel needs until it has run.

A call returns before its kernel has run, on a stream that need not be the one on which its arrays are used elsewhere.
Streams wait for each other; the caller never waits.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable
from typing import Any

from multisample.backends.system.cuda_driver import Event, is_capturing, order

from ._libraries import Device

__all__ = ["KEEPER", "Keeper", "keep_until_done", "order_after", "order_before"]

# Each call adds one entry and looks at this many, so that finished entries soon go.
_LOOKS = 8


class Keeper:
    """Objects held until something is done.

    There is no lock, since destructors may run at any point and call `keep` themselves. Instead the operations of a
    deque are atomic, and an entry that one thread looks at is in no other's hands.
    """

    def __init__(self) -> None:
        self._kept: collections.deque[tuple[Callable[[], bool], Any]] = collections.deque()
        self._inherited: list[Any] = []

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, is_done: Callable[[], bool], objects: Any) -> None:
        """Hold `objects` until a later call finds `is_done()`; release the objects that are done by now."""
        for _ in range(min(len(self._kept), _LOOKS)):
            try:
                entry = self._kept.popleft()
            except IndexError:  # Another thread looks at the last one.
                break
            if not entry[0]():
                self._kept.append(entry)
        self._kept.append((is_done, objects))

    def leave_to_parent(self) -> None:
        """In a forked child: neither look at nor free the objects, which are the parent's."""
        self._inherited.append(self._kept)
        self._kept = collections.deque()


KEEPER = Keeper()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=KEEPER.leave_to_parent)


def order_before(named: Iterable[int | None], device: Device, stream: int) -> set[int]:
    """Let `stream` wait for the other streams that arrays of a call name; return these.

    Raises
    ------
    RuntimeError
        If that cannot be, as where `stream` is being captured and another is not.
    """
    others = {other for other in named if other is not None and other != stream}
    for other in others:
        order(other, stream, device.ordinal)
    return others


def order_after(others: set[int], device: Device, stream: int) -> None:
    """Let the `others` wait for `stream`."""
    for other in others:
        order(stream, other, device.ordinal)


def keep_until_done(arrays: Any, device: Device, stream: int) -> None:
    """Keep `arrays` until the work that `stream` has now is done.

    Not while it is being captured, when there is no event to ask: the owner of a graph keeps all of its memory.
    """
    if not is_capturing(stream):
        KEEPER.keep(Event(stream, device.ordinal).is_done, arrays)
