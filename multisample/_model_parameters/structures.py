"""Structures of arrays, which `perturb` takes as `parameters` and `out`: their arrays, names and ids."""

import functools
import itertools
import zlib
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import Any, NamedTuple

from .._arguments import checked_integer, describe
from .._libraries import BY_TYPE
from .._tracing import is_of_torch, traced_as

ACCEPTED = (
    "an array, a torch.nn.Module, or a sequence, a mapping, (name, array) pairs or an iterator of arrays (sequences and"
    " mappings may be nested)"
)
_READ_ONCE = Iterator, ValuesView, ItemsView
_NESTED = Mapping, list, tuple


class Structure(NamedTuple):
    """Arrays, by name or by position."""

    names: tuple[str, ...] | None
    """The name of each array, without wrappers; None if arrays have positions."""
    arrays: Sequence[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    """``rebuild(arrays)``: the same structure with other arrays."""
    paths: tuple[str, ...] | None = None
    """The names of arrays in the structure itself, with wrappers."""

    def label(self, argument: str, k: int) -> str:
        """The name of array `k` in error messages."""
        if self.names is not None:
            return f"{argument}[{(self.paths or self.names)[k]!r}]"
        return argument if self.rebuild is one_array else f"{argument}[{k}]"

    def labels(self, argument: str) -> list[str]:
        return [self.label(argument, k) for k in range(len(self.arrays))]


def structure_of(argument: str, given: Any) -> Structure:
    """The structure of `parameters` or `out`; TypeError or ValueError if it has none.

    A module gives its trainable parameters, a shared one under each of its names.
    """
    if type(given) in BY_TYPE:
        return tuple.__new__(Structure, (None, (given,), one_array, None))  # Twice as fast as `Structure(...)`.
    if is_of_torch(given, "Module", "torch.nn"):
        from .modules import trainable_parameters

        paths, names, arrays = trainable_parameters(argument, given)
        if not arrays:
            raise ValueError(
                f"{argument}: expected a module with trainable parameters, got {type(given).__name__} without;"
                " dict(module.named_parameters()) has all of them"
            )
        return Structure(names, arrays, lambda arrays: dict(zip(paths, arrays, strict=True)), paths)
    given = listed(given, argument)
    if isinstance(given, (list, tuple)):
        if not _has_nested(given):
            return Structure(None, given, _maker(given))
    elif isinstance(given, Mapping):
        paths, arrays = tuple(given), list(given.values())
        if not _has_nested(arrays):
            _check_keys(argument, paths)
            return Structure(
                names_of(argument, paths), arrays, lambda arrays: dict(zip(paths, arrays, strict=True)), paths
            )
    else:
        return Structure(None, (given,), one_array)
    entries: list[tuple[str, Any]] = []
    rebuild = _add(argument, given, "", entries)
    paths = tuple(path for path, _ in entries)
    return Structure(
        names_of(argument, paths), [x for _, x in entries], lambda arrays: rebuild(iter(arrays)), paths
    )  # fmt: skip


def listed(given: Any, argument: str = "parameters") -> Any:
    """`given`, but an iterator or a view of a dict as a list, and (name, array) pairs as a dict."""
    if isinstance(given, _READ_ONCE):
        if argument == "out":
            raise TypeError(
                f"out: expected a structure that can be read again, got {describe(given)}; make it a list or a dict"
            )
        given = list(given)
    if isinstance(given, (list, tuple)) and given and _is_pair(given[0]):
        for k, x in enumerate(given):
            if not _is_pair(x):
                raise TypeError(f"{argument}[{k}]: expected a pair of a name and an array, got {describe(x)}")
        names_of(argument, tuple(name for name, _ in given))  # A dict would drop one of two equal names.
        return dict(given)
    return given


def _is_pair(x: Any) -> bool:
    return type(x) is tuple and len(x) == 2 and isinstance(x[0], str)


def _has_nested(arrays: Sequence[Any]) -> bool:
    return any(issubclass(kind, _NESTED) for kind in set(map(type, arrays)))


def _check_keys(path: str, keys: Iterable[Any]) -> None:
    for key in keys:
        if not isinstance(key, str):
            raise TypeError(f"{path}: expected names of type str, got {describe(key)}")


def _add(argument: str, given: Any, path: str, entries: list[tuple[str, Any]]) -> Callable[[Iterator[Any]], Any]:
    """Add all arrays of a nested structure to `entries`. Returns a function that rebuilds it from other arrays."""
    if not isinstance(given, _NESTED):
        entries.append((path, given))
        return next
    label = f"{argument}[{path!r}]" if path else argument
    given = listed(given, label)
    if isinstance(given, Mapping):
        _check_keys(label, given)
        named, make = given, None
    else:  # A namedtuple has names, as in JAX's pytrees.
        named, make = dict(zip(getattr(given, "_fields", itertools.count()), given, strict=False)), _maker(given)
    parts = {key: _add(argument, x, f"{path}.{key}" if path else str(key), entries) for key, x in named.items()}
    if make is None:
        return lambda arrays: {key: part(arrays) for key, part in parts.items()}
    return lambda arrays: make([part(arrays) for part in parts.values()])


def _maker(given: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
    """A function that makes a sequence of the type of `given`."""
    if hasattr(type(given), "_make"):
        return type(given)._make  # type: ignore[attr-defined,no-any-return]
    return tuple if isinstance(given, tuple) else list


def matching(out: Structure, parameters: Structure) -> Structure:
    """`out` with its arrays in the order of `parameters`; ValueError if it has another structure."""
    expected, found = _phrase(parameters), _phrase(out)
    if expected != found:
        raise ValueError(f"out: expected {expected}, as parameters are, got {found}")
    if out.names is None or parameters.names is None or out.names == parameters.names:
        return out
    at = {name: k for k, name in enumerate(out.names)}
    missing = next((name for name in parameters.names if name not in at), None)
    if missing is not None:
        raise ValueError(f"out: expected the names of parameters, got none called {missing!r}")
    order, paths = [at[name] for name in parameters.names], out.paths or out.names
    return Structure(parameters.names, [out.arrays[k] for k in order], list, tuple(paths[k] for k in order))


def _phrase(structure: Structure) -> str:
    count = len(structure.arrays)
    if structure.rebuild is one_array:
        return "one array"
    return f"{count} arrays" + (" with names" if structure.names is not None else " in a sequence")


def one_array(arrays: Sequence[Any]) -> Any:
    return arrays[0]


# --- Names and ids ------------------------------------------------------------------------------------------------

# Wrappers: the module and name of the class, and the name under which an instance holds the module that it wraps.
WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn", "DataParallel", "module"),
    ("torch.nn.parallel", "DistributedDataParallel", "module"),
    ("torch.optim.swa_utils", "AveragedModel", "module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
)  # fmt: skip
# What wrappers insert into the keys of a state dict. We assume that no model has these names itself. A model may have
# the name "module", so that only `modules` removes it, by the type of the wrapper.
_INSERTED = frozenset(inserted for _, _, inserted in WRAPPERS) - {"module"}


def _names_of(argument: str, paths: tuple[str, ...]) -> tuple[str, ...]:
    """The names of arrays with these keys or paths; ValueError if two have one name."""
    names = tuple([".".join([part for part in path.split(".") if part not in _INSERTED]) for path in paths])
    check_distinct(argument, paths, names)
    return names


_cached_names = functools.lru_cache(64)(_names_of)  # Calls pass the same names again.


@traced_as(_names_of)
def names_of(argument: str, paths: tuple[str, ...]) -> tuple[str, ...]:
    return _cached_names(argument, paths)


def check_distinct(argument: str, paths: Sequence[str], names: Sequence[str]) -> None:
    """ValueError if two paths have one name."""
    found: dict[str, str] = {}
    for path, name in zip(paths, names, strict=True):
        if name in found:
            twice = f"two called {name!r}"
            if path != found[name]:
                twice = f"{found[name]!r} and {path!r}, both called {name!r} without wrappers"
            raise ValueError(f"{argument}: expected a different name for each array, got {twice}")
        found[name] = path


def entries_of(argument: str, given: Mapping[Any, Any], names: Sequence[str]) -> Iterator[tuple[int, str, Any]]:
    """The entries of a mapping by name: the position of each name, its label in errors, and its value."""
    places = {name: k for k, name in enumerate(names)}
    for key, name in zip(given, names_of(argument, tuple(map(str, given))), strict=True):
        if name not in places:
            raise ValueError(f"{argument}: expected names of parameters, got {describe(key)}")
        yield places[name], f"{argument}[{key!r}]", given[key]


def ids_of(names: Sequence[str] | None, labels: Sequence[str], given: Any, owners: Sequence[int]) -> list[int]:
    """The id of each array: its position, or the CRC-32 of its name, or what the argument `ids` says.

    ``owners[k]`` is the index of the array that owns the memory of array k, usually k. `labels` name arrays in errors.
    TypeError or ValueError if `ids` has a wrong entry, or if two arrays have the same id.
    """
    if names is None:
        ids = list(range(len(labels)))
        if given is not None:
            if not isinstance(given, Sequence) or isinstance(given, (str, bytes)) or len(given) != len(ids):
                raise TypeError(f"ids: expected a sequence of {len(ids)} integers, got {describe(given)}")
            ids = [checked_integer(f"ids[{k}]", x, 0, 2**32) for k, x in enumerate(given)]
    else:
        ids = [zlib.crc32(name.encode()) for name in names]
        if given is not None:
            if not isinstance(given, Mapping):
                raise TypeError(f"ids: expected a mapping of names to integers, got {describe(given)}")
            for k, label, x in entries_of("ids", given, names):
                ids[k] = checked_integer(label, x, 0, 2**32)
    found: dict[int, int] = {}
    for k, number in enumerate(ids):
        if owners[k] == k and (first := found.setdefault(number, k)) != k:
            free = next(number for number in range(number, number + 2**32) if number % 2**32 not in ids) % 2**32
            remedy = "different numbers" if names is None else repr({names[k]: free})
            raise ValueError(
                f"ids: expected a different id for each parameter, got {number} for both {labels[first]} and"
                f" {labels[k]}; pass ids={remedy}"
            )
    return ids
