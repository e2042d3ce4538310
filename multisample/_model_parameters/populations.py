"""The arguments of `perturb` that may be one value or several: seeds, members and decays."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from multisample.backends.contract import HostArray

from .._arguments import checked_integer, describe, rounded_once
from .._checks.window_and_options import check_members
from .._libraries import CPU, HOST, Device, Library, as_base_class, library_of
from .._operations import ROWS
from .._randomness.seed_argument import Keys, integer_type
from .structures import Structure, entries_of


class Variant(NamedTuple):
    """How a call differs from one with one seed, one member and no decay; part of the key of its plan."""

    seed: Hashable = None
    """`KeyWords.form`."""
    member: Hashable = None
    """The signature of a vector of members in device memory; "rows" for one on the host; None for one member."""
    size: int | None = None
    """The length of the population, the leading axis of each result; None without that axis."""
    has_own_keys: bool = False
    """Whether each coefficient has a key of its own."""
    has_decay: bool = False
    parameters: tuple[bool, ...] = ()
    """Whether each parameter has the axis of the population; empty if none has it."""
    has_coefficients: bool = False
    """Whether coefficients have the axis of the population."""

    def shape_of(self, k: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of result k, for a parameter of this shape."""
        if self.size is None or (self.parameters and self.parameters[k]):
            return shape
        return self.size, *shape


PLAIN, DECAYED = Variant(), Variant(has_decay=True)


def population_of(length: int | None, seeds: int | None, members: int | None) -> tuple[int | None, bool]:
    """`Variant.size` and `Variant.has_own_keys` of a call; ValueError if lengths differ.

    `length` is the number of coefficients in a vector, or None for a number; `seeds` and `members` likewise.
    """
    if seeds is not None and members is not None:
        raise ValueError(f"seed, member: expected a vector for one of the two, got {seeds} seeds and {members} members")
    if length is None:
        return members if seeds is None else seeds, False
    if members is not None:
        raise ValueError(
            "member: expected an integer with a vector of coefficients, which belong to the members from this one on,"
            f" got a vector of {members}"
        )
    if seeds is not None and seeds != length:
        raise ValueError(f"seed: expected one seed, or one for each of {length} coefficients, got {seeds}")
    return None, seeds is not None and seeds != 1


# --- Members ------------------------------------------------------------------------------------------------------


def members_of(member: Any, length: int) -> tuple[Any, Hashable, int | None]:
    """The argument `member`, what a plan depends on, and the length of a vector; TypeError or ValueError if wrong.

    A vector on the host, and one member of it, are checked and become uint64. A call has `length` rows from each on.
    """
    if isinstance(member, range):
        member = list(member)
    shape: Any = getattr(member, "shape", ())
    if not isinstance(member, (list, tuple)) and not (isinstance(shape, tuple) and len(shape) > 0):
        number = checked_integer("member", member, 0, ROWS + 1)
        check_members(number, length)
        return number, None, None
    if isinstance(member, (list, tuple)):
        members = [checked_integer(f"member[{k}]", x, 0, ROWS + 1) for k, x in enumerate(member)]
        return *_on_host(np.array(members, np.uint64), length), len(members)
    member = as_base_class("member", member)
    library = library_of("member", member)
    kind = integer_type("member", member)
    if len(shape) != 1:
        raise ValueError(f"member: expected an integer or a vector of shape (K,), got {tuple(shape)}")
    if library.device("member", member) == CPU:
        on_host: HostArray = np.asarray(member if library is HOST else library.host_array(member))
        if on_host.dtype.kind == "i" and on_host.size and on_host.min() < 0:
            k = int(on_host.argmin())
            checked_integer(f"member[{k}]", int(on_host[k]), 0, ROWS + 1)
        return *_on_host(on_host.astype(np.uint64), length), int(shape[0])
    if kind not in ("int64", "uint64"):
        raise TypeError(f"member: expected integers of 64 bits in device memory, got {kind}")
    return member, library.signature(member), int(shape[0])


def _on_host(members: HostArray, length: int) -> tuple[Any, Hashable]:
    if members.size:
        check_members(int(members.max()), length)
    return (int(members[0]), None) if members.size == 1 else (members, "rows")


def words_reader(
    keys: Keys | None, library: Library, device: Device, member_form: Hashable
) -> Callable[[int, int, Any, Any], tuple[Any, ...]]:  # fmt: skip
    """``read(word, offset, seed, member)``: what a launcher takes for keys and members in arrays.

    It returns seed, offset, the addresses of both, the row (for several members the address of their rows), and the
    objects that own this memory.
    """
    on_device = device.kind != "cpu"

    def read(word: int, offset: int, seed: Any, member: Any) -> tuple[Any, ...]:
        seed_at = offset_at = 0
        owner = None
        if keys is not None:
            seed_at, owner = keys.read(seed)
            offset_at = seed_at + keys.offset_at if keys.offset_at else 0
        if member_form is None:
            return word, offset, seed_at, offset_at, member, owner
        if member_form == "rows" and on_device:
            member = library.to_device(member.view(np.int64), device)
        address = HOST.address(member) if member_form == "rows" and not on_device else library.address(member)
        return word, offset, seed_at, offset_at, address, (owner, member)

    return read


# --- Decays -------------------------------------------------------------------------------------------------------


class Decays(list[float]):
    """The decay of each array, checked, in place of the argument."""


def decays_of(decay: Any, structure: Structure) -> list[float] | None:
    """The decay of each array; None if all are 0. TypeError or ValueError if `decay` is wrong."""
    count = len(structure.arrays)
    if isinstance(decay, Decays):
        return decay
    if not isinstance(decay, Mapping):
        number = _decay("decay", decay)
        return [number] * count if number else None
    if structure.names is None:
        raise TypeError(f"decay: expected a number, as parameters have no names, got {describe(decay)}")
    decays = [0.0] * count
    for k, label, x in entries_of("decay", decay, structure.names):
        decays[k] = _decay(label, x)
    return decays if any(decays) else None


def _decay(name: str, x: Any) -> float:
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: expected a number, got {describe(x)} of type {type(x).__name__}")
    if not 0 <= x <= 1:
        raise ValueError(f"{name}: expected 0 <= decay <= 1, got {describe(x)}")
    return float(x)


@functools.lru_cache(1024)
def factor_of(decay: float, real: str) -> float:
    """``1 - decay``, rounded once to the type `real`."""
    if real == "float64" or decay < 2.0**-60:
        return 1.0 - decay
    numerator, denominator = decay.as_integer_ratio()
    return float(np.float32(rounded_once(denominator - numerator, real) / denominator))


def factors_of(reals: Sequence[str]) -> Callable[[tuple[float, ...]], bytes]:
    """``pack(decays)``: packed fields `Span.factor`, for parameters with the computing types `reals`.

    The factor of a parameter is ``1 - decay``, rounded to the computing type.
    """

    def pack(decays: tuple[float, ...]) -> bytes:
        return np.array([factor_of(decay, real) for decay, real in zip(decays, reals, strict=True)]).tobytes()

    return functools.lru_cache(8)(pack)
