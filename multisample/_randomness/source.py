"""Where a call takes seed and offset from: chosen when a plan is made, used by each of its calls."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from multisample.backends.system.cuda_driver import is_capturing

from .._arguments import checked_integer, describe
from .._libraries.library import NOUNS, Device, Library
from .._tracing import refuse_jax
from .counter import DeviceCounter
from .generator import DEFAULT_GENERATOR, WORD_64, Generator, Key

__all__ = ["NOT_CAPTURED", "Source", "captured_offset", "check_generator", "checked_key", "counter_on", "source_of"]

NOT_CAPTURED = (
    "generator: expected multisample.Generator(seed, graph_safe=True) while a CUDA graph is captured, which draws new"
    " numbers in each replay, got one whose offset would never change; or pass seed=, for the same in each replay"
)


class Source(NamedTuple):
    """Of a call without `seed`."""

    take: Callable[[Any], tuple[int, int]]
    """Seed and offset of one call, from its `generator`."""
    put_back: Callable[[Any, int, int], None] | None
    """Undoes `take` after a failure, unless another call came in between; None where that is not safe."""
    check: Callable[[Any], None] | None
    """Raises unless `generator` is on the device; None where every generator of that type will do."""
    is_own: bool
    """Whether `generator` is a `Generator`, which may be graph-safe."""


def _take_from_default(generator: Any) -> tuple[int, int]:
    refuse_jax()
    return DEFAULT_GENERATOR._take()


def _take_from_own(generator: Any) -> tuple[int, int]:
    refuse_jax()
    return cast("Generator", generator)._take()


def _put_back_to_default(generator: Any, seed: int, offset: int) -> None:
    DEFAULT_GENERATOR._put_back(seed, offset)


_OWN = Source(_take_from_own, Generator._put_back, None, True)
_DEFAULT = Source(_take_from_default, _put_back_to_default, None, False)


def source_of(generator: Any, library: Library, device: Device) -> Source:
    """The source of calls with generators of that type, which has been checked."""
    if isinstance(generator, Generator):
        return _OWN
    if library.name != "torch":
        return _DEFAULT
    return _source_of_torch(generator is None, library, device)


@functools.cache
def _source_of_torch(by_default: bool, library: Library, device: Device) -> Source:
    import torch

    from .torch import taker

    take_from_torch, where = taker(str(device)), torch.device(str(device))

    def take(generator: Any) -> tuple[int, int]:
        refuse_jax()
        return take_from_torch(generator)

    def check(generator: Any) -> None:
        if generator.device != where:
            check_generator(generator, library, device)

    return Source(take, None, None if by_default else check, False)


def checked_key(seed: Any) -> tuple[int, int]:
    """Seed and offset of the argument `seed`, an integer or a `Key`; TypeError or ValueError otherwise."""
    if isinstance(seed, Key):
        return checked_integer("seed.seed", seed.seed, 0, WORD_64), checked_integer(
            "seed.offset", seed.offset, 0, WORD_64
        )
    return checked_integer("seed", seed, 0, WORD_64), 0


def check_generator(generator: Any, library: Library, device: Device) -> None:
    """TypeError or ValueError unless `generator` serves arrays of `library` on `device`."""
    if generator is None or isinstance(generator, Generator):
        return
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(generator, torch.Generator):
        raise TypeError(
            "generator: expected a multisample.Generator, or a torch.Generator with PyTorch tensors,"
            f" got {describe(generator)} of type {type(generator).__name__}"
        )
    if library.name != "torch":
        raise TypeError(
            f"generator: expected a multisample.Generator with {NOUNS[library.name]}, got a torch.Generator"
        )
    if generator.device.type != device.kind or (generator.device.index or 0) != device.ordinal:
        raise ValueError(f"generator: expected one on the device of mu, {device}, got one on {generator.device}")


# --- Offsets in device memory -------------------------------------------------------------------------------------


def captured_offset(generator: Any, library: Library, device: Device) -> tuple[int, Any]:
    """Seed and offset of a call that is captured into a CUDA graph; each replay draws the offset, a tensor.

    Raises
    ------
    RuntimeError
        If it would be the same in each replay.
    """
    if library.name != "torch" or isinstance(generator, Generator):
        raise RuntimeError(NOT_CAPTURED)
    from .torch import SEED, draw_offset

    try:
        return SEED, draw_offset(str(device), generator)
    except RuntimeError as error:  # The graph is not PyTorch's, or it does not know the generator.
        raise RuntimeError(f"{NOT_CAPTURED}; PyTorch's cannot be drawn from here: {error}") from error


# Held by the first calls with graph-safe generators. These are calls on CUDA, which no forked child can make.
_COUNTER_LOCK = threading.Lock()


def counter_on(generator: Generator, library: Library, device: Device, stream: int) -> DeviceCounter:
    """The counter of a graph-safe generator; its first call puts it on `device`.

    Raises
    ------
    ValueError
        If `device` is not that of the first call, or no CUDA device.
    RuntimeError
        If this is the first call, and `stream` is being captured.
    """
    if device.kind != "cuda":
        raise ValueError(f"generator: expected arrays on a CUDA device for a graph-safe one, got them on {device}")
    with _COUNTER_LOCK:
        if generator._counter is None:
            if is_capturing(stream):
                raise RuntimeError(
                    "generator: expected a graph-safe one that has been used before, since its first call puts the"
                    " offset on the device, got a new one while a CUDA graph is captured: draw once before"
                )
            generator._counter = DeviceCounter(generator._offset, device, library)
        counter = generator._counter
    if counter.device != device:
        raise ValueError(
            f"generator: expected arrays on {counter.device}, where this graph-safe one keeps its offset, got them"
            f" on {device}; make one for each device"
        )
    return counter
