"""Keys and generators: the seed and the offset of a call.

A 64-bit seed selects a stream, and a 64-bit offset selects a call's part of the stream. A generator only counts, so it
is cheap to share between threads, to save, and to split for workers.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, TypedDict, overload

import numpy as np

from multisample.backends.contract import HostArray
from multisample.backends.system.cuda_driver import synchronize

from .._arguments import check_flag, checked_integer
from .._libraries.library import Device, Library

WORD_64 = 2**64
USED_UP = "generator: all offsets of this seed are used up; make one with another seed"
_WORD = 2**32 - 1


class Key(NamedTuple):
    """The seed and the offset of one call. `Generator.take` returns a Key, and `sample` takes it as ``seed=``.

    An integer `s` as seed is ``Key(s, 0)``: the first call of a fresh ``Generator(s)``. JSON turns a Key into a list of
    two integers, which `sample` would take as two seeds: ``Key(*pair)`` makes it a Key again.

    Attributes
    ----------
    seed, offset : int
        Each in ``0 <= ... < 2**64``.

    Examples
    --------
    >>> import multisample
    >>> key = multisample.Generator(7).take()
    >>> key
    Key(seed=7, offset=0)
    >>> a = multisample.sample([0.0], [1.0], 3, seed=key)
    >>> bool((a == multisample.sample([0.0], [1.0], 3, seed=7)).all())
    True
    >>> import json
    >>> multisample.Key(*json.loads(json.dumps(key))) == key
    True
    """

    seed: int
    offset: int


class GeneratorState(TypedDict):
    """The state of a `Generator`: plain integers, which any checkpoint format can store."""

    seed: int
    offset: int
    spawned: int


class _Counts:
    """Seed, offsets and children of a generator, for calls from threads, signal handlers, destructors and fork hooks.

    There is no lock. A signal handler would wait forever for the call that it interrupts, and a forked child for a
    thread that it does not have. Instead, a caller takes a number by one atomic operation on an iterator or a list.
    """

    __slots__ = ("children", "offsets", "returned", "seed")

    def __init__(self, seed: int, offset: int, spawned: int) -> None:
        self.seed = seed
        self.offsets: Any = iter(range(offset, WORD_64))
        self.children: Any = iter(range(spawned, WORD_64))
        # Offsets that failed calls have put back, descending.
        self.returned: list[int] = []

    @property
    def offset(self) -> int:
        """The offset that the next call takes."""
        after, returned = WORD_64 - self.offsets.__length_hint__(), self.returned[:]
        # Report a put-back offset only if no later offset is in use. Otherwise, a restored generator would take that
        # later offset again.
        return returned[-1] if returned and returned[-1] + len(returned) == after else after

    def consecutive(self, k: int) -> int:
        """Take `k` consecutive offsets, at least one, and return the first; after an error, none is taken.

        If another call takes an offset between those that failed calls have put back, drop these.
        """
        while True:
            if k > self.offsets.__length_hint__() + len(self.returned):
                raise OverflowError(USED_UP)
            returned: list[int] = []
            try:
                while len(returned) < k:
                    returned.append(self.returned.pop())
            except IndexError:
                pass
            last = _skipped(self.offsets, k - len(returned)) if len(returned) < k else returned[-1]
            if last is not None and returned == list(range(last - k + 1, last - k + 1 + len(returned))):
                return last - k + 1

    @property
    def spawned(self) -> int:
        return WORD_64 - int(self.children.__length_hint__())


def _skipped(numbers: Any, k: int) -> int | None:
    """The last of the next `k` numbers, at least one; None if there are fewer. No other thread runs in between."""
    last: int | None = next(itertools.islice(numbers, k - 1, k), None)
    return last


# Counters whose address a graph has captured. A counter must outlive its generator, since replays write to it.
_captured: list[Any] = []


class DeviceCounter:
    """The offset of a graph-safe generator: an unsigned 64-bit counter on `device`, in an array of `library`.

    Calls read the counter and add 1 in the order of their stream, so each replay of a CUDA graph takes the next offset.
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
        if not self._is_captured:
            self._is_captured = True
            _captured.append(self.array)


def _check_offset(offset: int) -> None:
    if offset == WORD_64:
        raise OverflowError(USED_UP)


def _as_int64(value: int) -> Any:
    return np.array([value], np.uint64).view(np.int64)


class Generator:
    """Seed and call counter of one stream of samples.

    Each `sample` call with this generator takes one offset: the first takes 0, the next 1. Calls from several threads
    take different offsets. ``sample(..., seed=s)`` equals the first call with a fresh ``Generator(s)``.

    Parameters
    ----------
    seed : int, optional
        ``0 <= seed < 2**64``. By default the operating system chooses the seed.
    graph_safe : bool, default False
        Keep the offset in the memory of a CUDA device, where each call reads it and adds 1 in the order of its stream.
        Each replay of a CUDA graph that has captured a call then takes the next offset.

    Raises
    ------
    TypeError
        If `seed` is not an integer, or `graph_safe` is not a bool.
    ValueError
        If `seed` is out of range.

    Notes
    -----
    Generators can be pickled, copied, and saved through `state`. A copy continues from the original's state, so a
    worker process with a pickled or inherited generator repeats the numbers of the others: give each worker its own
    generator, from `spawn`. `torch.load` accepts generators and keys after ``import multisample.torch``.

    The last offset is ``2**64 - 1``. After it `offset` is ``2**64``, and the next call raises OverflowError.

    A graph-safe generator works with arrays of one CUDA device. Its first call puts the offset on that device, and so
    cannot be captured. `offset`, `state`, copying and pickling wait for the device. The offset in `state` can be
    assigned between replays. The seed can be assigned only until a graph captures a call, since the graph keeps the
    seed. An offset that a graph has captured is never freed, since the graph may outlive the generator. On the device
    the offset wraps to 0 after ``2**64 - 1``. The program must order calls and replays on several streams, as for any
    shared memory: two that run at once may draw the same numbers.

    Examples
    --------
    >>> import multisample
    >>> g = multisample.Generator(7)
    >>> a = multisample.sample([0.0], [1.0], 3, generator=g)
    >>> b = multisample.sample([0.0], [1.0], 3, generator=g)
    >>> g.offset
    2
    >>> bool((a == multisample.sample([0.0], [1.0], 3, seed=7)).all())
    True
    """

    __slots__ = ("__weakref__", "_counter", "_counts", "_graph_safe")

    def __init__(self, seed: SupportsIndex | None = None, *, graph_safe: bool = False) -> None:
        check_flag("graph_safe", graph_safe)
        self._counts = _Counts(_entropy() if seed is None else checked_integer("seed", seed, 0, WORD_64), 0, 0)
        self._graph_safe = bool(graph_safe)
        self._counter: DeviceCounter | None = None

    @property
    def seed(self) -> int:
        """The seed of the stream."""
        return self._counts.seed

    @property
    def offset(self) -> int:
        """The offset that the next call takes."""
        counter = self._counter
        return self._counts.offset if counter is None else counter.value

    @property
    def graph_safe(self) -> bool:
        """Whether the offset is kept on a device."""
        return self._graph_safe

    @property
    def state(self) -> GeneratorState:
        """The state, for checkpoints: ``{"seed": ..., "offset": ..., "spawned": ...}``; can be assigned.

        Examples
        --------
        >>> import multisample
        >>> g = multisample.Generator(7)
        >>> checkpoint = g.state
        >>> checkpoint
        {'seed': 7, 'offset': 0, 'spawned': 0}
        >>> import json
        >>> restored = multisample.Generator()
        >>> restored.state = json.loads(json.dumps(checkpoint))
        >>> restored
        Generator(seed=7, offset=0)
        """
        counts = self._counts
        offset = self.offset if self._graph_safe else counts.offset
        return {"seed": counts.seed, "offset": offset, "spawned": counts.spawned}

    @state.setter
    def state(self, state: GeneratorState) -> None:
        if not isinstance(state, dict) or state.keys() != GeneratorState.__annotations__.keys():
            names = ", ".join(GeneratorState.__annotations__)
            raise TypeError(f"state: expected a dict with keys {names}, got {state!r}")
        checked = {
            name: checked_integer(f"state[{name!r}]", value, 0, WORD_64 + (name != "seed"))
            for name, value in state.items()
        }
        counter = self._counter
        if counter is not None:
            counter.check(checked["seed"], checked["offset"], self._counts.seed)
        self._counts = _Counts(checked["seed"], checked["offset"], checked["spawned"])
        if counter is not None:
            counter.value = checked["offset"]

    @overload
    def take(self, k: None = None) -> Key: ...
    @overload
    def take(self, k: SupportsIndex) -> HostArray: ...
    def take(self, k: SupportsIndex | None = None) -> Key | HostArray:
        """Take one offset, as a call of `sample` does, or `k` consecutive offsets for a batch.

        Parameters
        ----------
        k : int, optional
            How many; at least 0.

        Returns
        -------
        Key, or numpy.ndarray of uint64, shape (k, 2)
            The array has a key in each row, seed and offset. `sample` takes it as ``seed=`` of a batch.

        Raises
        ------
        TypeError
            If `k` is not an integer.
        ValueError
            If `k` is out of range, or the generator is `graph_safe`, since its offset is in device memory.
        OverflowError
            If fewer than `k` of the 2**64 offsets are left.

        Examples
        --------
        >>> import multisample
        >>> generator = multisample.Generator(7)
        >>> generator.take(), generator.take()
        (Key(seed=7, offset=0), Key(seed=7, offset=1))
        >>> generator.take(3).tolist()
        [[7, 2], [7, 3], [7, 4]]
        """
        if self._graph_safe:
            raise ValueError(
                "generator: a graph-safe generator keeps its offset on the device, where only sample can take it"
            )
        if k is None:
            # Not `Key(...)`, which needs more stack than `_take`, and would fail after it.
            return tuple.__new__(Key, self._take())
        # An array of 2**59 keys is larger than any address space.
        counts, count = self._counts, checked_integer("k", k, 0, 2**59)
        keys = np.full((count, 2), counts.seed, np.uint64)
        offsets = keys[:, 1]
        offsets[:] = np.arange(count, dtype=np.uint64)
        if count:  # Nothing after this can fail.
            offsets += np.uint64(counts.consecutive(count))
        return keys

    def _take(self) -> tuple[int, int]:
        counts = self._counts
        if counts.returned:
            try:
                return counts.seed, counts.returned.pop()
            except IndexError:  # Another call has taken the last.
                pass
        for offset in counts.offsets:
            return counts.seed, offset
        raise OverflowError(USED_UP)

    def _put_back(self, seed: int, offset: int) -> None:
        """Undo a `_take` whose call failed, unless another call has taken the next offset since."""
        counts = self._counts
        if (counts.seed, counts.offset) == (seed, offset + 1):
            counts.returned.append(offset)

    def spawn(self, n_children: int) -> list[Generator]:
        """Generators for `n_children` workers, with different seeds that depend on this generator's seed only.

        Parameters
        ----------
        n_children : int
            At least 0.

        Returns
        -------
        list of Generator
            Children are counted over the life of this generator: ``spawn(2)`` and then ``spawn(3)`` give the same five
            children as ``spawn(5)``. STREAM.md specifies their seeds.

        Raises
        ------
        TypeError
            If `n_children` is not an integer.
        ValueError
            If `n_children` is out of range.
        OverflowError
            After 2**64 children.

        Examples
        --------
        >>> import multisample
        >>> [child.offset for child in multisample.Generator(7).spawn(2)]
        [0, 0]
        """
        count = checked_integer("n_children", n_children, 0, WORD_64)
        counts = self._counts
        first = counts.spawned
        if first + count > WORD_64:
            raise OverflowError("n_children: the children of this generator are used up")
        key = ((counts.seed & _WORD) ^ 0x73706177, (counts.seed >> 32) ^ 0x6E6B6579)

        def children(first: int) -> list[Generator]:
            seeds = (_philox_word_pair(child, key) for child in range(first, first + count))
            return [Generator(seed, graph_safe=self._graph_safe) for seed in seeds]

        made = children(first)
        # Count the children last, since an error must leave the count as it was.
        last = _skipped(counts.children, count) if count else first - 1
        if last == first + count - 1:
            return made
        return self.spawn(count) if last is None else children(last - count + 1)  # Another thread has spawned.

    def __reduce__(self) -> tuple[Any, ...]:
        # `torch.load` calls classes only.
        return Generator, (self.seed,), {**self.state, "graph_safe": self._graph_safe}

    def __setstate__(self, state: Any) -> None:
        self._graph_safe = bool(state.pop("graph_safe", self._graph_safe))
        self.state = state

    if not TYPE_CHECKING:  # A type checker that sees __getattr__ accepts every name.

        def __getattr__(self, name: str) -> Any:
            advice = _ELSEWHERE.get(name)
            end = f"; use {advice} with generator=" if advice else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{end}", name=name, obj=self)

    def __repr__(self) -> str:
        if self._graph_safe:  # Reading the offset would wait for the device.
            return f"Generator(seed={self.seed}, graph_safe=True)"
        return f"Generator(seed={self.seed}, offset={self.offset})"


# Methods of NumPy's generator, and the functions here.
_ELSEWHERE = {"normal": "multisample.sample(mu, sigma, n)", "standard_normal": "multisample.standard_normal(size)"}


def _entropy() -> int:
    return int.from_bytes(os.urandom(8), "little")


def _philox_word_pair(child: int, key: tuple[int, int]) -> int:
    """Words 0 (low) and 1 (high) of Philox4x32-10, in Python, so that `spawn` does not wait for a compiler."""
    c0, c1, c2, c3 = child & _WORD, child >> 32, 0, 0
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c1 << 32 | c0


DEFAULT_GENERATOR = Generator()


def manual_seed(seed: SupportsIndex) -> Generator:
    """Restart the process-wide default generator.

    Calls without `seed` and `generator` use the default generator, unless their arrays are PyTorch tensors, which
    follow ``torch.manual_seed``.

    Parameters
    ----------
    seed : int
        ``0 <= seed < 2**64``.

    Returns
    -------
    Generator
        The default generator.

    Raises
    ------
    TypeError
        If `seed` is not an integer.
    ValueError
        If `seed` is out of range.

    Notes
    -----
    A forked child does not keep this seed. The operating system reseeds its default generator, so that workers never
    repeat each other.

    Examples
    --------
    >>> import multisample
    >>> _ = multisample.manual_seed(7)
    >>> a = multisample.sample([0.0], [1.0], 3)
    >>> bool((a == multisample.sample([0.0], [1.0], 3, seed=7)).all())
    True
    """
    DEFAULT_GENERATOR.state = {"seed": checked_integer("seed", seed, 0, WORD_64), "offset": 0, "spawned": 0}
    return DEFAULT_GENERATOR


os.register_at_fork(after_in_child=lambda: manual_seed(_entropy()))


def register_in_torch() -> None:
    """Make ``torch.load`` accept keys and generators, if PyTorch is imported."""
    register = getattr(sys.modules.get("torch.serialization"), "add_safe_globals", None)
    if register is not None:
        register([Key, Generator])


register_in_torch()
