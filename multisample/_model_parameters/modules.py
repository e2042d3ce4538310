"""Parameters of PyTorch's modules, by the names that they have without wrappers; imported with the first module."""

import functools
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from .._libraries.torch import TORCH
from .structures import WRAPPERS, check_distinct, names_of


def trainable_parameters(argument: str, module: Any) -> tuple[tuple[str, ...], tuple[str, ...], list[Any]]:
    """Paths, names and tensors of the parameters that require grad, a shared one under each of its names.

    The path of a parameter is its name in ``module.named_parameters()``. ValueError if two parameters have one name.

    Names depend on the types of all modules (a wrapper is known by its type), and on the names of their children and
    parameters, in order. `TORCH.tree` reads these in each call, and they are the key of cached names. So every change
    of a module is noticed. The plan compares the memory, shape, type and device of each parameter.
    """
    if type(module).named_parameters is not torch.nn.Module.named_parameters and inserted_by(type(module)) is None:
        named = {path: x for path, x in module.named_parameters(remove_duplicate=False) if x.requires_grad}
        return tuple(named), names_of(argument, tuple(named)), list(named.values())
    tree, tensors = TORCH.tree(module)
    paths, names = _names_in(argument, tree)
    trainable = [x.requires_grad for x in tensors]
    if not all(trainable):
        paths, names = (tuple(itertools.compress(x, trainable)) for x in (paths, names))
        tensors = list(itertools.compress(tensors, trainable))
    return paths, names, tensors


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _names_in(argument: str, tree: tuple[Any, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return _cached_names(argument, tree)


@functools.lru_cache(64)
def _cached_names(argument: str, tree: tuple[Any, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The paths and names of all parameters in a tree of `tree_of`."""
    pairs = list(_read_tree(iter(tree), "", ""))
    paths, names = tuple(path for path, _ in pairs), tuple(name for _, name in pairs)
    check_distinct(argument, paths, names)
    return paths, names


def _read_tree(items: Iterator[Any], path: str, name: str) -> Iterator[tuple[str, str]]:
    inserted = inserted_by(next(items))
    for part in iter(items.__next__, None):
        yield path + part, name + part
    for part in iter(items.__next__, None):
        yield from _read_tree(items, f"{path}{part}.", name if part == inserted else f"{name}{part}.")


def inserted_by(kind: type) -> str | None:
    """The name under which modules of this type hold the module that they wrap; None if the type is no wrapper."""
    for module, name, inserted in WRAPPERS:
        wrapper = getattr(sys.modules.get(module), name, None)
        if wrapper is not None and issubclass(kind, wrapper):
            return inserted
    return None
