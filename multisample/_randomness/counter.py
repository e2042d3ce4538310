"""`DeviceCounter`: the offset of a graph-safe generator, in the memory of a CUDA device.

Calls read the offset and add 1 in the order of their stream, so each replay of a CUDA graph takes the next offset.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from multisample.backends.system.cuda_driver import synchronize

from .._libraries.library import Device, Library

WORD_64 = 2**64
USED_UP = "generator: all offsets of this seed are used up; make one with another seed"

# Counters whose address a graph has captured. The graph may outlive the generator, and its replays write to them.
_captured: list[Any] = []


class DeviceCounter:
    """An unsigned 64-bit counter on `device`, in an array of `library`.

    `lock` is held from the launch that reads the counter to the launch that adds 1.
    """

    def __init__(self, value: int, device: Device, library: Library) -> None:
        _check_offset(value)
        self.device = device
        self.lock = threading.Lock()
        self._library = library
        self._is_captured = False
        self.array = library.to_device(_as_int64(value), device)
        self.address = library.address(self.array)
        # Some libraries return before a copy from pageable memory has reached the device.
        synchronize(device.ordinal)

    @property
    def value(self) -> int:
        """The counter; reading and assigning wait for the device."""
        synchronize(self.device.ordinal)
        return int(self._library.to_host(self.array)[0]) % WORD_64

    @value.setter
    def value(self, value: int) -> None:
        synchronize(self.device.ordinal)
        self._library.overwrite(self.array, _as_int64(value))
        synchronize(self.device.ordinal)

    def check(self, seed: int, offset: int, seed_before: int) -> None:
        """ValueError or OverflowError if the generator's state cannot be set to `seed` and `offset`."""
        _check_offset(offset)
        if self._is_captured and seed != seed_before:
            raise ValueError(
                f"state['seed']: expected {seed_before}, got {seed}: a CUDA graph has captured a call with this"
                " generator and keeps its seed; make another generator and capture again"
            )

    def keep_for_graph(self) -> None:
        """Never free the counter, since a graph has captured its address."""
        with self.lock:
            if not self._is_captured:
                self._is_captured = True
                _captured.append(self.array)


def _check_offset(offset: int) -> None:
    if offset == WORD_64:
        raise OverflowError(USED_UP)


def _as_int64(value: int) -> Any:
    return np.array([value], np.uint64).view(np.int64)
