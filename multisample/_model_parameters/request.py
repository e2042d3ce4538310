"""The arguments of a call of `perturb`: structures of arrays, coefficients, ids and members, and their checks.

A structure is an array, a sequence, a mapping of names, or a module of PyTorch.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._arguments import checked_integer, describe
from .._checks.operands import check_alignment
from .._libraries import BY_TYPE, Operand, as_base_class, described, is_number, library_of
from .._operations import ROWS
from .spans import Block

# --- Structures ---------------------------------------------------------------------------------------------------


class Structure(NamedTuple):
    """Arrays, by name or by position."""

    names: tuple[str, ...] | None
    """The name of each array; None if arrays have positions."""
    arrays: Sequence[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    """``rebuild(arrays)``: the same structure with other arrays."""


def structure_of(argument: str, given: Any) -> Structure:
    """The structure of `parameters` or `out`; TypeError or ValueError if it has none.

    A module gives its trainable parameters, a shared one under each of its names.
    """
    if type(given) in BY_TYPE:
        return Structure(None, (given,), one_array)
    if isinstance(given, Mapping):
        names = tuple(given)
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"{argument}: expected names of type str, got {describe(name)}")
        return Structure(names, list(given.values()), lambda arrays: dict(zip(names, arrays, strict=True)))
    if isinstance(given, (list, tuple)):
        kind = type(given)
        if hasattr(kind, "_make"):
            return Structure(None, given, kind._make)
        return Structure(None, given, tuple if isinstance(given, tuple) else list)
    if _is_module(given):
        trainable = {
            name: x for name, x in given.named_parameters(remove_duplicate=False) if x.requires_grad
        }  # fmt: skip
        if not trainable:
            raise ValueError(
                f"{argument}: expected a module with trainable parameters, got {type(given).__name__} without;"
                " dict(module.named_parameters()) has all of them"
            )
        return structure_of(argument, trainable)
    return Structure(None, (given,), one_array)


def matching(out: Structure, parameters: Structure) -> Structure:
    """`out` with its arrays in the order of `parameters`; ValueError if it has another structure."""
    if _kind(out) != _kind(parameters):
        raise ValueError(f"out: expected {_phrase(parameters)}, as parameters are, got {_phrase(out)}")
    if out.names is None or parameters.names is None or out.names == parameters.names:
        return out
    arrays = dict(zip(out.names, out.arrays, strict=True))
    missing = next((name for name in parameters.names if name not in arrays), None)
    if missing is not None:
        raise ValueError(f"out: expected the names of parameters, got none called {missing!r}")
    return Structure(parameters.names, [arrays[name] for name in parameters.names], out.rebuild)


def _kind(structure: Structure) -> tuple[bool, bool, int]:
    return structure.names is None, structure.rebuild is one_array, len(structure.arrays)


def _phrase(structure: Structure) -> str:
    count = len(structure.arrays)
    if structure.rebuild is one_array:
        return "one array"
    return f"{count} arrays" + (" with names" if structure.names is not None else " in a sequence")


def one_array(arrays: Sequence[Any]) -> Any:
    return arrays[0]


def _is_module(given: Any) -> bool:
    modules = sys.modules.get("torch.nn")
    return modules is not None and isinstance(given, modules.Module)


def label(argument: str, structure: Structure, k: int) -> str:
    """The name of array `k` in error messages."""
    if structure.names is not None:
        return f"{argument}[{structure.names[k]!r}]"
    return argument if structure.rebuild is one_array else f"{argument}[{k}]"


def ids_of(structure: Structure, given: Any, owners: Sequence[int]) -> list[int]:
    """The id of each array: its position, or the CRC-32 of its name, or what the argument `ids` says.

    ``owners[k]`` is the index of the array that owns the memory of array k, usually k. TypeError or
    ValueError if `ids` has a wrong entry, or if two arrays have the same id.
    """
    count, names = len(structure.arrays), structure.names
    if names is None:
        ids = list(range(count))
        if given is not None:
            if not isinstance(given, Sequence) or isinstance(given, (str, bytes)) or len(given) != count:
                raise TypeError(f"ids: expected a sequence of {count} integers, got {describe(given)}")
            ids = [checked_integer(f"ids[{k}]", x, 0, 2**32) for k, x in enumerate(given)]
    else:
        ids = [zlib.crc32(name.encode()) for name in names]
        if given is not None:
            if not isinstance(given, Mapping):
                raise TypeError(f"ids: expected a mapping of names to integers, got {describe(given)}")
            places = {name: k for k, name in enumerate(names)}
            for name, x in given.items():
                if name not in places:
                    raise ValueError(f"ids: expected names of parameters, got {describe(name)}")
                ids[places[name]] = checked_integer(f"ids[{name!r}]", x, 0, 2**32)
    found: dict[int, int] = {}
    for k, number in enumerate(ids):
        if owners[k] == k and found.setdefault(number, k) != k:
            _raise_equal_ids(structure, ids, found[number], k)
    return ids


def _raise_equal_ids(structure: Structure, ids: list[int], first: int, second: int) -> None:
    free, taken = ids[second], set(ids)
    while free in taken:
        free = (free + 1) % 2**32
    remedy = "different numbers"
    if structure.names is not None:
        remedy = repr({structure.names[second]: free})
    raise ValueError(
        f"ids: expected a different id for each parameter, got {ids[first]} for both"
        f" {label('parameters', structure, first)} and {label('parameters', structure, second)}; pass ids={remedy}"
    )


# --- Requests -----------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """The arguments of a call of `perturb`."""

    parameters: Structure
    out: Structure | None
    given_out: Any
    """The argument `out` itself."""
    coefficients: Any
    seed: Any
    member: Any
    fast_math: bool
    ids: Any
    backend: str
    blocks: tuple[tuple[Block, ...], ...] | None = None
    """The blocks of each parameter, if arrays hold parts of parameters."""


class Coefficients(NamedTuple):
    """The coefficients of a call."""

    length: int
    on_host: Any
    """A float, or an array of float64; None if the coefficients are on a device."""
    on_device: Operand | None


def read_coefficients(given: Any) -> Coefficients:
    """The argument `coefficients`; TypeError or ValueError if it is neither number nor vector, or not finite."""
    if type(given) is float or is_number(given):
        try:
            number = float(given)
        except OverflowError:
            number = float("inf")
        if not abs(number) < float("inf"):
            raise ValueError(f"coefficients: expected finite numbers, got {describe(given)}")
        return Coefficients(1, number, None)
    library = library_of("coefficients", given)
    if library.foreign or library.is_opaque(given):
        raise TypeError(
            "coefficients: expected a number, a list, a NumPy array, or an array of the parameters' library, got"
            f" {described(given)}"
        )
    array = as_base_class("coefficients", given)
    operand = library.describe("coefficients", array)
    if len(operand.shape) > 1:
        raise ValueError(f"coefficients: expected a number or shape (K,), got {operand.shape}")
    count = operand.shape[0] if operand.shape else 1
    if operand.device.kind not in ("cpu", "cuda"):
        raise ValueError(f"coefficients: expected values in memory of the host or a GPU, got them on {operand.device}")
    if operand.device.kind == "cuda":
        check_alignment("coefficients", operand, library.address(array))
        return Coefficients(count, None, operand)
    values = np.ascontiguousarray(np.atleast_1d(library.to_host(array)), np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"coefficients: expected finite numbers, got {describe(values)}")
    return Coefficients(count, values if operand.shape else float(values[0]), None)


def check_members(member: int, count: int) -> None:
    """ValueError if `count` members from `member` on go beyond the last row."""
    if member + count > ROWS:
        raise ValueError(f"member: expected member + K <= 2**32, got {member} + {count}")
