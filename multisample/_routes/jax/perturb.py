"""`perturb` of pytrees of JAX.

Parameters of one element type take one custom call of XLA. JAX's arrays are immutable, so the results of an eager
call are new arrays. In a traced call, results alias the buffers of the parameters, and XLA first copies a buffer
that it reads later.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multisample.backends.contract import HostArray
from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.launch import Operation
from multisample.backends.memory.host import rounded

from ..._arguments import DTYPES, check_flag, describe
from ..._checks.coefficients import Coefficients, check_coefficients, read_coefficients
from ..._checks.window_and_options import check_members
from ..._libraries import HOST, is_number, library_of
from ..._libraries.jax import JAX, is_jax, is_on_host
from ..._libraries.library import NOUNS
from ..._model_parameters.spans import steps_of
from ..._model_parameters.structures import Structure, ids_of, names_of, one_array
from ..._model_parameters.ties import MOST_ELEMENTS
from ..._plan import PlanCache
from ..._randomness.generator import Key
from ..._randomness.seed_argument import MOST_OFFSETS
from ..._tracing import is_symbol, is_traced_by_jax
from .keys import Words, batch_length, key_vector, operands_of, words_of
from .primitives import bind, varying
from .programs import Program
from .static import Parameter, Static


def perturb_jax(
    parameters: Any, coefficients: Any, *, seed: Any, member: Any, out: Any, fast_math: bool, ids: Any, backend: str
) -> Any:  # fmt: skip
    """`multisample.perturb` with an array or a key of JAX."""
    check_flag("fast_math", fast_math)
    if not isinstance(backend, str):
        raise TypeError(f"backend: expected a name, got {describe(backend)} of type {type(backend).__name__}")
    if out is not None:
        raise TypeError(
            "out: expected None with JAX, whose arrays are immutable; a function under jax.jit works in place on"
            " parameters that it may overwrite: see donate_argnums"
        )
    values = _coefficients(coefficients)
    words = _words(seed, member, values.length)
    given = coefficients if values.on_host is None else values.on_host
    leaves, tree = jax.tree_util.tree_flatten(parameters)
    offsets = words.offsets if isinstance(words.offsets, tuple) else (words.offsets,)
    traced = is_traced_by_jax() or any(isinstance(x, jax.core.Tracer) for x in (given, words.seed, *offsets))
    key = None if traced or ids is not None else _key(leaves, tree, bool(fast_math), backend)
    groups = None if key is None else _PLANS.get(key)
    if groups is not None:
        return tree.unflatten(_run(groups, words, given, leaves))
    structure = _structure(parameters)
    labels = structure.labels("parameters")
    arrays = [_parameter(name, x) for name, x in zip(labels, structure.arrays, strict=True)]
    numbers = ids_of(structure.names, labels, ids, range(len(arrays)))
    static = Static(backend, "float32", fast_math=bool(fast_math), operation=Operation.perturb, n=1)
    if traced or any(isinstance(x, jax.core.Tracer) for x in arrays):
        return structure.rebuild(_traced(words, given, arrays, numbers, static._replace(in_place=True)))
    groups = _groups(arrays, numbers, static)
    results = _run(groups, words, given, arrays)
    if key is not None:
        _PLANS.put(key, groups)
    return structure.rebuild(results)


# --- Checks ---------------------------------------------------------------------------------------


def _structure(parameters: Any) -> Structure:
    """The arrays of a pytree. They have positions in a flat sequence, and otherwise the names of their paths."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(parameters)
    arrays = [x for _, x in leaves]
    if _is_leaf(tree):
        return Structure(None, arrays, one_array)
    if isinstance(parameters, (list, tuple)) and all(map(_is_leaf, tree.children())):
        return Structure(None, arrays, tree.unflatten)
    paths = tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
    return Structure(names_of("parameters", paths), arrays, tree.unflatten, paths)


def _is_leaf(tree: Any) -> bool:
    return bool(tree.num_nodes == tree.num_leaves == 1)  # None is no leaf.


def _parameter(name: str, x: Any) -> Any:
    """A parameter that `perturb` can read; TypeError or ValueError if it cannot."""
    if is_number(x):
        raise TypeError(f"{name}: expected an array, got the number {describe(x)}")
    if not is_jax(x):
        library = library_of(name, x)
        if library is not HOST:
            raise TypeError(
                f"{name}: expected an array of JAX or NumPy where others are JAX's, got {NOUNS[library.name]}"
            )
        x = HOST.normalized(name, x)
    if x.dtype.name not in DTYPES:
        raise TypeError(f"{name}: expected elements of type {', '.join(DTYPES)}, got {x.dtype.name}")
    try:
        JAX.check_dtype(x.dtype.name)
    except TypeError as error:
        raise TypeError(str(error).replace("dtype:", f"{name}:", 1)) from None
    if any(map(is_symbol, x.shape)):
        raise TypeError(f"{name}: expected a shape that is known while JAX traces, got {x.shape}")
    if math.prod(x.shape) > MOST_ELEMENTS:
        raise ValueError(f"{name}: expected at most 2**34 elements, got shape {x.shape}")
    return x


def _coefficients(given: Any) -> Coefficients:
    """The coefficients. Those of JAX have `on_host` None; their values are checked if they are in host memory."""
    if not is_jax(given):
        coefficients = read_coefficients(given)
        if coefficients.on_host is not None:
            check_coefficients(coefficients.on_host, given)
        return coefficients
    if not jnp.issubdtype(given.dtype, jnp.floating) and not jnp.issubdtype(given.dtype, jnp.integer):
        raise TypeError(f"coefficients: expected real numbers, got elements of type {given.dtype}")
    if len(given.shape) > 1:
        raise ValueError(f"coefficients: expected a number or shape (K,), got {given.shape}")
    if not isinstance(given, jax.core.Tracer) and is_on_host(given):
        check_coefficients(rounded(np.atleast_1d(given), np.float64), given)
    return Coefficients(math.prod(given.shape), None, None, given)


def _words(seed: Any, member: Any, count: int) -> Words:
    """Seed, offset and member of the call."""
    batch = batch_length(seed)
    if batch is not None:
        if batch != 1:
            raise ValueError(f"seed: expected one seed, got a vector of {batch}")
        seed = key_vector(seed)[0]
    if is_jax(seed) and not isinstance(seed, jax.core.Tracer) and seed.shape == (4,) and is_on_host(seed):
        seed = np.asarray(seed)
    words = words_of(seed, member, 0, "member")
    offset = seed.offset if isinstance(seed, Key) else 0
    if isinstance(seed, np.ndarray) and seed.shape == (4,):
        offset = int(seed[2]) << 32 | int(seed[3])
    if isinstance(offset, int) and offset >= MOST_OFFSETS:
        raise ValueError(f"seed: expected a Key with an offset below 2**32, as Generator.take gives, got {offset}")
    if not isinstance(member, jax.core.Tracer):
        check_members(int(member), count)
    return words


# --- Programs -------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """Parameters on one set of devices. Their program takes coefficients, seed and member as operands."""

    members: list[int]
    reals: set[str]
    """The computing types."""
    program: Program


def _groups(arrays: list[Any], ids: list[int], static: Static) -> list[_Group]:
    """The plan of eager calls."""
    of_devices: dict[Hashable, list[int]] = collections.defaultdict(list)
    for k, x in enumerate(arrays):
        of_devices[frozenset(x.devices()) if is_jax(x) and x.committed else None].append(k)
    free = of_devices.pop(None, [])
    every = list(of_devices.values()) or [[]]
    every[0] += free
    groups = []
    for members in every:
        own = [arrays[k] for k in members]
        program = Program(
            _perturbed, static, tuple(ids[k] for k in members), types=tuple((x.shape, x.dtype) for x in own)
        )
        groups.append(_Group(members, _computing_types(own), program))
    return groups


def _perturbed(static: Static, ids: tuple[int, ...], words: Words, coefficients: Any, *arrays: Any) -> list[Any]:
    return _traced(words, coefficients, arrays, ids, static)


def _computing_types(arrays: Sequence[Any]) -> set[str]:
    return {MATRIX_TYPES[x.dtype.name].computing for x in arrays}


def _run(groups: list[_Group], words: Words, coefficients: Any, arrays: Sequence[Any]) -> list[Any]:
    if len(groups) > 1:
        for name, value in (("coefficients", coefficients), ("seed", words.seed)):
            if is_jax(value) and value.committed:
                raise ValueError(f"{name}: expected values on the host, as parameters are on several devices")
    results: list[Any] = list(arrays)
    for members, reals, program in groups:
        made = program(words, _rounded(coefficients, reals), *(arrays[k] for k in members))
        for k, x in zip(members, made, strict=True):
            results[k] = x
    return results


_PLANS: PlanCache[list[_Group]] = PlanCache(256)


def _key(arrays: list[Any], *options: Hashable) -> Hashable:
    """The key of a plan; None if the call has none, for example because an array is not JAX's."""
    try:
        key = (*options, *[(x.aval, x.sharding, x.committed) for x in arrays])
        hash(key)
    except (AttributeError, TypeError):
        return None
    return key


def _rounded(coefficients: Any, reals: set[str]) -> Any:
    """Coefficients on the host as arguments of a program, rounded to each of the computing types."""
    if is_jax(coefficients) or isinstance(coefficients, dict):
        return coefficients
    values: HostArray = np.atleast_1d(np.asarray(coefficients, np.float64))
    return {real: rounded(values, real) for real in reals}


def _traced(words: Words, coefficients: Any, arrays: Sequence[Any], ids: Sequence[int], static: Static) -> list[Any]:
    """The results in the program that is being traced."""
    results = [jnp.asarray(x) for x in arrays]
    groups: dict[tuple[str, Hashable], list[int]] = collections.defaultdict(list)
    for k, x in enumerate(results):
        if x.size:
            groups[x.dtype.name, varying(x)].append(k)  # In jax.shard_map, results vary as operands do.
    if not groups or np.shape(coefficients) == (0,):
        return results
    coefficients, of_words = _rounded(coefficients, _computing_types(results)), operands_of(words)
    for (dtype, _), group in groups.items():
        parameters = tuple(Parameter(ids[k], results[k].shape, steps_of(results[k].shape)) for k in group)
        own = static._replace(dtype=dtype, parameters=parameters)
        real = own.computing_type
        weights = coefficients[real.name] if isinstance(coefficients, dict) else coefficients
        weights = jnp.atleast_1d(jnp.asarray(weights)).astype(real)
        for k, x in zip(group, bind(own, *(results[k] for k in group), weights, *of_words), strict=True):
            results[k] = x
    return results
