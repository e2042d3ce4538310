"""What a kernel has to wait for, what has to wait for it, and what it needs until it has run.

A call returns before its kernel has run, on a stream that need not be the one on which its arrays are used elsewhere.
Whatever is done about that is done between streams: the caller never waits.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable
from typing import Any

from ._cuda_driver import Event, is_capturing, order
from ._libraries import Device, Library

__all__ = ["KEEPER", "Keeper", "after_launch", "before_launch"]

# Each call brings one entry and looks at as many as this, so that there are soon none but those still needed.
_LOOKS = 8


class Keeper:
    """Objects held until something is done.

    There is no lock, since destructors may run at any point and call `keep` themselves: a deque's own steps are
    indivisible, and an entry that one thread looks at is in no other's hands.
    """

    def __init__(self) -> None:
        self._kept: collections.deque[tuple[Callable[[], bool], Any]] = collections.deque()
        self._inherited: list[Any] = []

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, is_done: Callable[[], bool], objects: Any) -> None:
        """Hold `objects` until `is_done` says so, and a later call asks; let go of what is done by now."""
        for _ in range(min(len(self._kept), _LOOKS)):
            try:
                entry = self._kept.popleft()
            except IndexError:  # Another thread looks at the last one.
                break
            if not entry[0]():
                self._kept.append(entry)
        self._kept.append((is_done, objects))

    def leave_to_parent(self) -> None:
        """In a forked child: ask for nothing of what there is and free nothing of it, as all of it is the parent's."""
        self._inherited.append(self._kept)
        self._kept = collections.deque()


KEEPER = Keeper()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=KEEPER.leave_to_parent)


def before_launch(
    caller: Library, library: Library, given: Iterable[Any], seen: Iterable[Any], device: Device, stream: int
) -> set[int]:
    """Let `stream` wait for the other streams on which arrays of a call are in use, which are returned.

    `given` are the arrays of `caller`, and `seen` the same as arrays of `library`.

    Raises
    ------
    RuntimeError
        If that cannot be, as where `stream` is being captured and another is not.
    """
    if device.kind != "cuda":
        return set()
    named = {caller.named_stream(array) for array in given}
    if caller.foreign:
        named.update(library.stream(device, array) for array in seen)
    others = {other for other in named if other is not None and other != stream}
    for other in others:
        order(other, stream, device.ordinal)
    return others


def after_launch(foreign: bool, arrays: Any, others: set[int], device: Device, stream: int) -> None:
    """Let the `others` wait for `stream`, and keep the arrays of a `foreign` library for as long as it needs them.

    Not while it is being captured, when there is no event to ask: all memory of a graph is its owner's to keep.
    """
    if device.kind != "cuda":
        return
    for other in others:
        order(stream, other, device.ordinal)
    if foreign and not is_capturing(stream):
        KEEPER.keep(Event(stream, device.ordinal).is_done, arrays)
