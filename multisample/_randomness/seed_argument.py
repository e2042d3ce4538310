"""The argument `seed`: checks of one key, and plans for keys in arrays, such as vectors of seeds.

Key data, in arrays of uint32, has the high half of each word first: ``(..., 2)`` is a seed, ``(..., 4)`` a seed and an
offset. Other integer arrays have seeds, ``(B,)``, or seeds and offsets, ``(B, 2)``.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from multisample.backends.contract import HostArray
from multisample.backends.launch import WordFormat

from .._arguments import checked_integer
from .._libraries import CPU, HOST, Device, Library, Operand, as_base_class, described, library_of
from .._libraries.library import NOUNS
from .._libraries.numpy import check_plain
from .._tracing import is_of_torch
from .generator import WORD_64, Generator, Key

MOST_OFFSETS = 2**32
"""Offsets of the keys of `perturb` are smaller: ids of parameters take the high bits."""

# --- One key ----------------------------------------------------------------------------------------------------------


def checked_seed(name: str, seed: Any) -> int:
    """`seed` as an int of 64 bits; TypeError or ValueError otherwise."""
    return checked_integer(name, seed, 0, WORD_64, _advice_for_seed)


def checked_key(seed: Any) -> tuple[int, int]:
    """Seed and offset from an integer, a `Key`, or data of one key on the host; TypeError or ValueError otherwise."""
    if isinstance(seed, Key):
        number, offset = seed
        if type(number) is type(offset) is int and 0 <= number < WORD_64 and 0 <= offset < WORD_64:
            return seed
        return checked_seed("seed.seed", number), checked_seed("seed.offset", offset)
    if isinstance(seed, (int, np.integer)):
        return checked_seed("seed", seed), 0
    if is_in_array(seed) and batch_of(seed) is None:
        words = host_words(np.asarray(seed)).reshape(-1).tolist()
        return words[0], (*words, 0)[1]
    return checked_seed("seed", seed), 0


class KeyWords(NamedTuple):
    """The argument `seed` of `perturb`: one key, or a vector of them."""

    given: Any
    """The argument in its base class. For a vector of several keys on the host, their words as uint64[length, 2]."""
    form: Hashable
    """What a plan depends on; None for a key whose words are `word` and `offset`."""
    word: int
    """The seed; 0 for keys in an array that a kernel reads."""
    offset: int
    length: int | None
    """The number of keys in a vector; None for one key."""


def key_words(seed: Any) -> KeyWords:
    """The words of `seed`; TypeError or ValueError if it is neither a key nor a vector of keys.

    Offsets that are not 0 on the host must be below 2**32. An array with two axes and one row is one key.
    """
    given, count = seed, None
    if is_in_array(seed):
        if not isinstance(seed, (list, tuple)):
            given = seed = as_base_class("seed", seed)
        count = batch_of(seed)
        if count == 1 and not isinstance(seed, (list, tuple)) and len(seed.shape) > 1:
            count = None
        owner = HOST if isinstance(seed, (list, tuple)) else library_of("seed", seed)
        if owner.device("seed", seed) != CPU:
            return KeyWords(given, signature_of(seed), 0, 0, count)
        words = host_words(seed if owner is HOST else owner.host_array(seed))
        if words.shape[1] == 1:
            words = np.column_stack([words, np.zeros_like(words)])
        if count is not None:
            large = words[:, 1] >= MOST_OFFSETS
            if large.any():
                check_offset(f"seed[{int(large.argmax())}]", int(words[large.argmax(), 1]))
            if count != 1:
                return KeyWords(words, "words", 0, 0, count)
        seed = Key(*words[0].tolist())
    if isinstance(seed, Generator):
        raise TypeError(
            f"seed: expected an integer, a Key or key data, got {seed}; pass its next Key, generator.take()"
        )
    word, offset = checked_key(seed)
    check_offset("seed", offset)
    return KeyWords(given, None, word, offset, count)


def check_offset(name: str, offset: int) -> None:
    if offset >= MOST_OFFSETS:
        raise ValueError(f"{name}: expected a Key with an offset below 2**32, as Generator.take gives, got {offset}")


def _advice_for_seed(seed: Any) -> str:
    if isinstance(seed, Generator):
        return "; pass it as generator=, or its next Key as seed=generator.take()"
    if is_of_torch(seed, "Generator"):
        return "; pass it as generator="
    return advice_for_numpy(seed)


def advice_for_numpy(generator: Any) -> str:
    method = {np.random.Generator: "integers(2**63)", np.random.RandomState: "tomaxint()"}.get(type(generator))
    return f"; draw a seed from a generator of NumPy: seed=rng.{method}" if method else ""


# --- Keys in arrays ---------------------------------------------------------------------------------------------------


class Keys(NamedTuple):
    """How the kernel reads the keys of a plan's calls from memory of the plan's device."""

    batch: int
    """The number of keys; 1 without a vector."""
    fields: dict[str, int]
    """The fields of the launch that say how the words are stored."""
    offset_at: int
    """Bytes from the first seed to its offset; 0 if offsets are 0."""
    read: Callable[[Any], tuple[int, Any]]
    """``read(seed)``: the address of the first seed, and the object that owns the memory."""
    is_on_device: bool
    """Whether the argument `seed` itself is in device memory."""


SINGLE_SEEDS = frozenset((int, type(None), Key))
"""The exact types of most single seeds, for keys of plans."""


def is_in_array(seed: Any) -> bool:
    """Whether the argument `seed` is a sequence or an array, not one number or one `Key`."""
    if type(seed) is list:
        return True
    if isinstance(seed, (int, np.integer, Key)) or seed is None:
        return False
    try:
        shape = getattr(seed, "shape", None)
    except Exception:  # A foreign class may raise anything; the check of a single seed reports it.
        shape = None
    return isinstance(seed, (list, tuple)) or (isinstance(shape, tuple) and len(shape) > 0)


def signature_of(seed: Any) -> Hashable:
    """The properties on which a plan depends, of a `seed` with `is_in_array(seed)`."""
    if isinstance(seed, (list, tuple)):
        return type(seed), len(seed)
    return type(seed), library_of("seed", seed).signature(seed)


def batch_of(seed: Any) -> int | None:
    """B for a vector of B keys; None for one key; TypeError or ValueError for arrays that are no keys."""
    if not is_in_array(seed):
        return None
    if isinstance(seed, (list, tuple)):
        return len(seed)
    shape = tuple(seed.shape)
    if integer_type("seed", seed) == "uint32":
        if shape in ((2,), (4,)):
            return None
        if len(shape) == 2 and shape[1] in (2, 4):
            return int(shape[0])
        raise ValueError(
            "seed: expected key data of shape (2,) or (4,) for one key, (B, 2) or (B, 4) for B keys in an array of"
            f" uint32, got shape {shape}; convert seeds of 32 bits to 64 bits"
        )
    if len(shape) == 1 or (len(shape) == 2 and shape[1] == 2):
        return int(shape[0])
    raise ValueError(f"seed: expected an array of B seeds, (B,), or of B seeds and offsets, (B, 2), got shape {shape}")


def integer_type(name: str, array: Any) -> str:
    """The element type of the argument `name`; TypeError or ValueError if it is no array of integers."""
    check_plain(name, array)
    found = str(getattr(array, "dtype", None)).removeprefix("torch.")
    if not found.removeprefix("u").startswith("int"):
        raise TypeError(f"{name}: expected integers, got {described(array)} of type {found}")
    return found


def keys_in(seed: Any, library: Library, device: Device) -> Keys | None:
    """How a kernel reads the keys in arguments like `seed`, for arrays of `library` on `device`.

    None for one key in host memory. `checked_key` reads a single key; `only_words` reads a vector of one. TypeError or
    ValueError if a kernel on the device cannot read the seeds.
    """
    batch = batch_of(seed)
    count = 1 if batch is None else batch
    owner = HOST if isinstance(seed, (list, tuple)) else library_of("seed", seed)
    if owner is not HOST and owner is not library:
        accepted = "" if library is HOST else f", or {NOUNS[library.name]} as mu and sigma are"
        raise TypeError(f"seed: expected integers, a sequence or a NumPy array{accepted}, got {described(seed)}")
    where = owner.device("seed", seed) if owner is not HOST else None
    if where is None or where.kind == "cpu":
        return None if count == 1 else _from_host(seed, owner, library, device, count)
    if where != device:
        raise ValueError(f"seed: expected it on the device of mu and sigma, {device}, or on the host, got {where}")
    operand = library.describe("seed", seed)
    fields, offset_at = _layout(operand, batch is None)
    address = library.address

    def read(seed: Any) -> tuple[int, Any]:
        return address(seed), seed

    return Keys(count, fields, offset_at, read, True)


_FORMATS = {"64": WordFormat.whole, "32": WordFormat.bits_32, "16": WordFormat.bits_16, "8": WordFormat.bits_8}


def _layout(operand: Operand, is_one: bool) -> tuple[dict[str, int], int]:
    """`Keys.fields` and `Keys.offset_at` of an array in device memory."""
    *steps, last = operand.strides
    step, width = (0 if is_one else operand.strides[0]), operand.shape[-1]
    if operand.read is not None:
        raise ValueError("seed: expected an array that a kernel can read, got one that would be converted first")
    if operand.dtype == "uint32":
        if last != 4 and operand.shape[0]:  # The strides of an empty array mean nothing.
            raise ValueError(
                f"seed: expected key data whose words are neighbours in memory, got strides {(*steps, last)}"
            )
        form, offset_at = WordFormat.high_first, 8 if width == 4 else 0
    else:
        form, offset_at = _FORMATS[operand.dtype.removeprefix("u").removeprefix("int")], last if steps else 0
    return {"seed_step": step, "offset_step": step if offset_at else 0, "word_formats": form | form << 8}, offset_at


def _from_host(seed: Any, owner: Library, library: Library, device: Device, count: int) -> Keys:
    on_host, listed = device.kind == "cpu", isinstance(seed, (list, tuple))
    no_offsets = array.array("Q", bytes(8 * count))

    def read(seed: Any) -> tuple[int, Any]:
        if not listed:
            words = array.array("Q", host_words(seed if owner is HOST else owner.host_array(seed)).tobytes())
        else:
            found = _integers(seed)
            words = array.array("Q", host_words(seed).T.tobytes()) if found is None else found + no_offsets
        if on_host:  # An array of the standard library tells its address faster than NumPy's.
            return words.buffer_info()[0], words
        on_device = library.to_device(np.frombuffer(words, np.int64), device)
        return library.address(on_device), on_device

    # Sequences: all seeds, then all offsets. Arrays: as they are.
    if listed:
        return Keys(count, {"seed_step": 8, "offset_step": 8, "word_formats": 0}, 8 * count, read, False)
    width = 1 if len(seed.shape) == 1 else seed.shape[1] // 2 if integer_type("seed", seed) == "uint32" else 2
    fields = {"seed_step": 8 * width, "offset_step": 8 * width if width == 2 else 0, "word_formats": 0}
    return Keys(count, fields, 8 if width == 2 else 0, read, False)


def only_words(seed: Any) -> tuple[int, int, None]:
    """Seed and offset of the only key in a host vector; None in place of an offset in device memory."""
    first = (seed if isinstance(seed, (list, tuple)) else seed.tolist())[0]
    if type(first) is int and 0 <= first < WORD_64:  # Faster than the general way.
        return first, 0, None
    (words,) = host_words(seed if isinstance(seed, (list, tuple)) else np.asarray(seed)).tolist()
    return words[0], (*words, 0)[1], None


def _integers(seeds: list[Any] | tuple[Any, ...]) -> array.array[int] | None:
    """Seeds without offsets; None if one is a `Key`, a bool or out of range."""
    try:
        words = array.array("Q", seeds)
    except (OverflowError, TypeError):
        return None
    # `array.array` takes bools as 0 and 1, so check the types of the seeds with these values.
    small = (np.frombuffer(words, np.uint64) < 2).nonzero()[0].tolist()
    return None if bool in [type(seeds[k]) for k in small] else words


def host_words(seed: Any) -> HostArray:
    """The words of keys on the host: contiguous uint64 (B, 1), or (B, 2) with offsets. ValueError if negative."""
    if isinstance(seed, (list, tuple)):
        return np.array([key_at(k, x) for k, x in enumerate(seed)], np.uint64).reshape(len(seed), 2)
    if seed.dtype == np.uint32:
        halves = seed.astype(np.uint64)
        return np.ascontiguousarray(halves[..., 0::2] << 32 | halves[..., 1::2]).reshape(-1, seed.shape[-1] // 2)
    if seed.dtype.kind == "i" and seed.size and np.minimum.reduce(seed, axis=None) < 0:
        place = tuple(np.argwhere(seed < 0)[0].tolist())  # The first negative integer.
        checked_seed(f"seed[{', '.join(map(str, place))}]", seed[place])
    words: HostArray = np.ascontiguousarray(seed, np.uint64)
    return words.reshape(len(words), -1 if len(words) else words.ndim)


def key_at(k: int, seed: Any) -> tuple[int, int]:
    name = f"seed[{k}]"
    if isinstance(seed, Key):
        return checked_seed(f"{name}.seed", seed.seed), checked_seed(f"{name}.offset", seed.offset)
    return checked_seed(name, seed), 0
