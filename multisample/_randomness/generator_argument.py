"""`Source`: how a call takes its seed and offset. A plan has one source for all its calls."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from multisample.backends.system.cuda_driver import is_capturing

from .._arguments import describe
from .._libraries.jax import is_jax
from .._libraries.library import NOUNS, Device, Library
from .._tracing import is_of_torch, refuse_jax
from .generator import DEFAULT_GENERATOR, DeviceCounter, Generator, Key
from .seed_argument import advice_for_numpy

NOT_CAPTURED = (
    "generator: expected multisample.Generator(seed, graph_safe=True) while a CUDA graph is captured, for new numbers"
    " in each replay, got a generator whose offset would never change; or pass seed=, for the same numbers"
)


class Source(NamedTuple):
    """The source of seed and offset for calls without `seed`."""

    take: Callable[[Any], tuple[int, int]]
    """Takes seed and offset of one call from its `generator`."""
    put_back: Callable[[Any, int, int], None] | None
    """Undoes `take` after a failure, unless another call has taken an offset; None for PyTorch's generators."""
    check: Callable[[Any], None] | None
    """Raises unless `generator` is on the device; None if generators of this type have no device."""


def _take(generator: Generator | None) -> tuple[int, int]:
    refuse_jax()
    return (DEFAULT_GENERATOR if generator is None else generator)._take()


def _put_back(generator: Generator | None, seed: int, offset: int) -> None:
    (DEFAULT_GENERATOR if generator is None else generator)._put_back(seed, offset)


_OWN = Source(_take, _put_back, None)


def source_of(generator: Any, library: Library, device: Device) -> Source:
    """The source for calls with a generator like `generator`, which has been checked."""
    if isinstance(generator, Generator) or library.name != "torch":
        return _OWN
    return _source_of_torch(generator is None, library, device)


@functools.cache
def _source_of_torch(by_default: bool, library: Library, device: Device) -> Source:
    import torch

    from .torch_offsets import taker

    take_from_torch, where = taker(str(device)), torch.device(str(device))

    def take(generator: Any) -> tuple[int, int]:
        refuse_jax()
        return take_from_torch(generator)

    def check(generator: Any) -> None:
        if generator.device != where:
            check_generator(generator, library, device)

    return Source(take, None, None if by_default else check)


def check_generator(generator: Any, library: Library, device: Device, name: str = "generator") -> None:
    """TypeError or ValueError unless `generator` serves arrays of `library` on `device`; on meta devices, any does."""
    if generator is None or isinstance(generator, Generator):
        return
    if not is_of_torch(generator, "Generator"):
        is_seed = isinstance(generator, (Key, int, np.integer)) or is_jax(generator)
        raise TypeError(
            f"{name}: expected a multisample.Generator, or a torch.Generator with PyTorch tensors, got"
            f" {describe(generator)} of type {type(generator).__name__}"
            + ("; pass it as seed=" if is_seed else advice_for_numpy(generator))
        )
    if library.name != "torch":
        raise TypeError(f"{name}: expected a multisample.Generator with {NOUNS[library.name]}, got a torch.Generator")
    where = generator.device
    may_differ = where.type == "cpu" or device.kind == "meta"
    if not may_differ and (where.type != device.kind or (where.index or 0) != device.ordinal):
        raise ValueError(f"{name}: expected one on the CPU or the device of mu, {device}, got one on {where}")


def is_listed(generator: Any) -> bool:
    """Whether the argument `generator` is a sequence of generators. A Key is a tuple, passed by mistake."""
    return isinstance(generator, (list, tuple)) and not isinstance(generator, Key)


@contextlib.contextmanager
def keys_from(generators: Any, library: Library, device: Device) -> Iterator[list[Key]]:
    """One key from each of several generators, for arrays of `library`. An exception puts all offsets back.

    TypeError or ValueError unless each can give one.
    """
    for k, generator in enumerate(generators):
        name = f"generator[{k}]"
        if generator is None:
            raise TypeError(f"{name}: expected a generator, got None")
        check_generator(generator, library, device, name)
        if isinstance(generator, Generator) and generator.graph_safe:
            raise ValueError(f"{name}: expected one whose offset is on the host, got a graph-safe generator")

    refuse_jax()
    with contextlib.ExitStack() as undo:
        keys = []
        for generator in generators:
            if isinstance(generator, Generator):
                key = generator.take()
                undo.callback(generator._put_back, *key)
            else:
                from .torch_offsets import taker

                undo.callback(generator.set_state, generator.get_state())
                key = Key(*taker(str(generator.device))(generator))
            keys.append(key)
        yield keys
        undo.pop_all()


def captured_offset(generator: Any, library: Library, device: Device) -> tuple[int, Any]:
    """Seed and offset of a call that a CUDA graph captures. The offset is a tensor; each replay draws it anew."""
    if library.name != "torch" or isinstance(generator, Generator):
        raise RuntimeError(NOT_CAPTURED)
    from .torch_offsets import SEED, draw_offset

    try:
        return SEED, draw_offset(str(device), generator)
    except RuntimeError as error:  # PyTorch is not capturing the graph, or the generator is not registered with it.
        raise RuntimeError(f"{NOT_CAPTURED}; PyTorch's generator cannot draw here: {error}") from error


# Held while a graph-safe generator gets its counter. A fork needs no care: a forked child cannot call CUDA.
_COUNTER_LOCK = threading.Lock()


def counter_on(generator: Generator, library: Library, device: Device, stream: int) -> DeviceCounter:
    """The counter of a graph-safe generator; its first call puts it on `device`, unless `stream` is being captured."""
    if device.kind != "cuda":
        raise ValueError(f"generator: expected arrays on a CUDA device with graph_safe=True, got arrays on {device}")
    with _COUNTER_LOCK:
        if generator._counter is None:
            if is_capturing(stream):
                raise RuntimeError(
                    "generator: expected a graph-safe generator that has been used before, got a new one while a"
                    " CUDA graph is captured: its first call puts the offset on the device; draw once before"
                )
            generator._counter = DeviceCounter(generator.offset, device, library)
        counter = generator._counter
    if counter.device != device:
        raise ValueError(
            f"generator: expected arrays on {counter.device}, where this graph-safe generator keeps its offset, got"
            f" arrays on {device}; make one generator for each device"
        )
    return counter
