"""Times of calls that alternate, so that a disturbance slows all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from bench.suites.timing import BUSY, Device

__all__ = ["ROTATED", "seconds"]

REPEATS = 15
ROTATED = 2**31
"""Bytes of the arrays in rotation: far more than a cache."""

Part = Callable[[Any], Any]


def seconds(device: Device, calls: dict[str, Sequence[Part]], arrays: Sequence[Any]) -> dict[str, list[list[float]]]:
    """The times of each part of each call, by the clock of the device.

    The first part gets an array, in rotation, and any other part the result of the part before. The device is busy
    until a call has been made, so that the host's time does not add.
    """
    times: dict[str, list[list[float]]] = {name: [[] for _ in parts] for name, parts in calls.items()}
    turns = itertools.cycle(arrays)
    device.reserve(BUSY)
    for repeat in range(-3, REPEATS):
        for name, parts in calls.items():
            value = next(turns)
            device.fill(BUSY)
            marks = [device.mark()]
            for part in parts:
                value = part(value)
                marks.append(device.mark())
            device.wait()
            if repeat >= 0:
                for found, (start, stop) in zip(times[name], itertools.pairwise(marks), strict=True):
                    found.append(device.seconds(start, stop))
    return times
