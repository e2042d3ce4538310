"""`perturb` of pytrees of JAX.

Parameters of one element type take one custom call of XLA. JAX's arrays are immutable, so the results of an eager
call are new arrays. In a traced call, results alias the buffers of the parameters, and XLA first copies a buffer
that it reads later.
"""

import collections
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multisample.backends.contract import HostArray
from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.launch import Operation
from multisample.backends.memory.host import rounded

from ..._arguments import DTYPES, check_flag, describe
from ..._backends import check_name
from ..._checks.coefficients import Coefficients, check_coefficients, read_coefficients
from ..._libraries import is_number
from ..._libraries.jax import JAX, is_jax, is_on_host
from ..._model_parameters.populations import decays_of, factor_of, members_of, population_of
from ..._model_parameters.spans import steps_of
from ..._model_parameters.structures import Structure, entries_of, ids_of, names_of, one_array
from ..._operations import COLUMNS
from ..._plan import PLANS
from ..._randomness.generator import Key
from ..._randomness.seed_argument import check_offset, key_words
from ..._tracing import is_symbol, is_traced_by_jax
from . import as_array
from .keys import Words, batch_length, halves_of, is_key, key_vector, operands_of, word_of, words_of, words_of_members
from .partitioning import with_offsets
from .primitives import bind, varying
from .programs import program_of
from .static import Parameter, Static


def perturb_jax(
    parameters: Any, coefficients: Any, *, seed: Any, member: Any, decay: Any, out: Any, fast_math: bool, ids: Any,
    backend: str,
) -> Any:  # fmt: skip
    """`multisample.perturb` with an array or a key of JAX."""
    check_flag("fast_math", fast_math)
    check_name(backend)
    if out is not None:
        raise TypeError(
            "out: expected None with JAX, whose arrays are immutable; a function under jax.jit works in place on"
            " parameters that it may overwrite: see donate_argnums"
        )
    values = _coefficients(coefficients)
    words, (size, has_own_keys) = _words(seed, member, values)
    given = coefficients if values.on_host is None else values.on_host
    leaves, tree = jax.tree_util.tree_flatten(parameters)
    offsets = words.offsets if isinstance(words.offsets, tuple) else (words.offsets,)
    traced = is_traced_by_jax() or any(isinstance(x, jax.core.Tracer) for x in (given, words.seed, *offsets))
    key = groups = None
    if not traced and ids is None:
        try:
            key = tree, fast_math, backend, size, has_own_keys, *[(x.aval, x.sharding, x.committed) for x in leaves]
            groups = PLANS.get(key)
        except (AttributeError, TypeError):  # For example, an array is not JAX's.
            key = None
    if groups is not None and type(decay) is int and decay == 0:
        return tree.unflatten(_run(groups, leaves, words, given, None))
    structure = _structure(parameters)
    labels = structure.labels("parameters")
    arrays = [_parameter(name, x) for name, x in zip(labels, structure.arrays, strict=True)]
    numbers = ids_of(structure.names, labels, ids, range(len(arrays)))
    every = [Parameter(number, x.shape, steps_of(x.shape)) for number, x in zip(numbers, arrays, strict=True)]
    static = Static(
        backend, "float32", shared_noise=has_own_keys, fast_math=bool(fast_math), parameters=tuple(every),
        operation=Operation.perturb, n=1, seeds=size,
    )  # fmt: skip
    factors = _factors(decay, structure, arrays)
    if traced or any(isinstance(x, jax.core.Tracer) for x in (*arrays, *([] if factors is None else factors))):
        return structure.rebuild(_perturbed(static._replace(in_place=True), words, given, factors, *arrays))
    if groups is None:
        groups = _groups(arrays, static)
    results = _run(groups, arrays, words, given, factors)
    if key is not None:
        PLANS.put(key, groups)
    return structure.rebuild(results)


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
    x = as_array(name, x)
    if x.dtype.name not in DTYPES:
        raise TypeError(f"{name}: expected elements of type {', '.join(DTYPES)}, got {x.dtype.name}")
    JAX.check_dtype(x.dtype.name, name)
    if any(map(is_symbol, x.shape)):
        raise TypeError(f"{name}: expected a shape that is known while JAX traces, got {x.shape}")
    if math.prod(x.shape) > COLUMNS:
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


def _words(seed: Any, member: Any, coefficients: Coefficients) -> tuple[Words, tuple[int | None, bool]]:
    """The words of seed, offset and member, and `population_of` the call."""
    seed, seeds = _keys(seed)
    on_host, length = coefficients.on_host, coefficients.length
    member, members = _members(member, length if seeds is None else 1)
    is_number = isinstance(on_host, float) or (on_host is None and np.shape(coefficients.given) == ())
    count = None if members is None else len(members)
    population = population_of(None if is_number else length, seeds, count)
    if seeds == 1 and not is_number and is_jax(seed):  # A vector of one seed, for a vector of one coefficient.
        seed = key_vector(seed)[0]
    return words_of(seed, member, 0, "member") if members is None else words_of_members(seed, members), population


def _keys(seed: Any) -> tuple[Any, int | None]:
    """One key and None, or a vector of keys and its length. Offsets on the host are checked."""
    if isinstance(seed, (int, Key)):
        if isinstance(seed, Key) and isinstance(offset := word_of("seed.offset", _on_host(seed.offset)), int):
            check_offset("seed", offset)
        return seed, None
    # An array of JAX's keys has no offsets.
    if is_jax(seed) and seed.shape[-1:] == ((4,) if seed.dtype == np.uint32 else (2,)) and not is_key(seed):
        seed = _on_host(seed)
    if is_jax(seed):
        count = batch_length(seed)
        if count == 1 and len(seed.shape) > 1:  # One key.
            return _keys(key_vector(seed)[0])
        return seed, count
    words, form, word, offset, count = key_words(seed)
    if form is None:
        return Key(word, offset), count
    if form != "words":
        raise TypeError(f"seed: expected integers, keys, or an array of JAX or NumPy, got {describe(seed)}")
    return words, count


def _on_host(x: Any) -> Any:
    """An array of JAX in host memory as NumPy's, if its values are known; else `x`."""
    return np.asarray(x) if is_jax(x) and not isinstance(x, jax.core.Tracer) and is_on_host(x) else x


def _members(member: Any, length: int) -> tuple[Any, Any]:
    """One member and None, or None and a vector of members as uint32[K, 2], high halves first.

    A call has `length` rows from each member on. Members on the host are checked.
    """
    if is_jax(member):
        if not jnp.issubdtype(member.dtype, jnp.integer):
            raise TypeError(f"member: expected integers, got elements of type {member.dtype}")
        if len(member.shape) > 1:
            raise ValueError(f"member: expected an integer or a vector of shape (K,), got {member.shape}")
        is_traced = isinstance(member, jax.core.Tracer)
        if member.shape and (is_traced or not is_on_host(member)):
            return None, halves_of(member.astype(f"uint{8 * member.dtype.itemsize}"))
        if is_traced:
            return member, None
        member = np.asarray(member)
    found, _, count = members_of(member, length)
    return (found, None) if count is None else (None, halves_of(np.atleast_1d(np.asarray(found, np.uint64))))


def _factors(decay: Any, structure: Structure, arrays: list[Any]) -> list[Any] | None:
    """``1 - decay`` of each parameter, or None if every decay is 0.

    Factors that are known are rounded once, to the computing type of the parameter; others are traced.
    """
    if type(decay) is int and not decay:
        return None
    reals = [MATRIX_TYPES[x.dtype.name].computing for x in arrays]
    given = decay if isinstance(decay, Mapping) else {None: decay}
    # The values of traced decays are not checked.
    tracers = {key: x for key, x in given.items() if isinstance(x, jax.core.Tracer)}
    for key, x in tracers.items():
        if x.shape != () or not jnp.issubdtype(x.dtype, jnp.floating):
            label = "decay" if key is None else f"decay[{key!r}]"
            raise TypeError(f"{label}: expected a number, got a traced {x.dtype}{list(x.shape)}")
    known = {key: 0.5 if key in tracers else x.item() if is_jax(x) and x.shape == () else x for key, x in given.items()}
    decays = decays_of(known if given is decay else known[None], structure)
    if decays is None:
        return None
    traced: dict[Any, Any] = dict.fromkeys(range(len(arrays)), decay) if None in tracers else {}
    if tracers and not traced:
        traced = {k: x for k, _, x in entries_of("decay", tracers, structure.names or ())}
    return [
        1 - traced[k].astype(real) if k in traced else np.array(factor_of(x, real), real)
        for k, (x, real) in enumerate(zip(decays, reals, strict=True))
    ]


class _Group(NamedTuple):
    """The parameters on one set of devices, and the program that perturbs these parameters."""

    members: list[int]
    reals: set[str]
    """Their computing types."""
    program: Callable[..., list[Any]]
    """``program(words, coefficients, factors, *parameters)``."""


def _groups(arrays: list[Any], static: Static) -> list[_Group]:
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
        part = static._replace(parameters=tuple(static.parameters[k] for k in members))
        groups.append(_Group(members, _reals(own), program_of(_perturbed, part)))
    return groups


def _run(groups: list[_Group], arrays: Sequence[Any], words: Words, coefficients: Any, factors: Any) -> list[Any]:
    if len(groups) > 1:
        for name, value in (("coefficients", coefficients), ("seed", words.seed)):
            if is_jax(value) and value.committed:
                raise ValueError(f"{name}: expected values on the host, as parameters are on several devices")
    results: list[Any] = list(arrays)
    for members, reals, program in groups:
        own = None if factors is None else [factors[k] for k in members]
        made = program(words, _rounded(coefficients, reals), own, *(arrays[k] for k in members))
        for k, x in zip(members, made, strict=True):
            results[k] = x
    return results


def _reals(arrays: Sequence[Any]) -> set[str]:
    return {MATRIX_TYPES[x.dtype.name].computing for x in arrays}


def _rounded(coefficients: Any, reals: set[str]) -> Any:
    """Coefficients on the host as arguments of a program, rounded to each of the computing types."""
    if is_jax(coefficients) or isinstance(coefficients, dict):
        return coefficients
    values: HostArray = np.atleast_1d(np.asarray(coefficients, np.float64))
    return {real: rounded(values, real) for real in reals}


def _perturbed(static: Static, words: Words, coefficients: Any, factors: Any, *parameters: Any) -> list[Any]:
    """The results in the program that is being traced."""
    arrays, of_words = [jnp.asarray(x) for x in parameters], operands_of(words)
    if static.has_row_keys:
        seeds, offsets = with_offsets(of_words)
        of_words = seeds[None], jnp.broadcast_to(offsets, (1, len(seeds), 6))
    batch = () if static.seeds is None else (static.seeds,)
    results = [jnp.broadcast_to(x, batch + x.shape) for x in arrays]
    groups: dict[tuple[str, Hashable], list[int]] = collections.defaultdict(list)
    for k, x in enumerate(arrays):
        if x.size:
            groups[x.dtype.name, varying(x)].append(k)  # In jax.shard_map, results vary as operands do.
    if not groups or (np.shape(coefficients) == (0,) and factors is None):
        return results
    coefficients = _rounded(coefficients, _reals(arrays))
    for (dtype, _), group in groups.items():
        blocks = tuple(static.parameters[k] for k in group)
        own = static._replace(dtype=dtype, parameters=blocks, has_factors=factors is not None)
        real = own.computing_type
        weights = coefficients[real.name] if isinstance(coefficients, dict) else coefficients
        weights = [jnp.atleast_1d(jnp.asarray(weights)).astype(real)]
        if factors is not None:
            weights.append(jnp.stack([jnp.asarray(factors[k], real) for k in group]))
        operands = (jnp.expand_dims(x, 0) for x in (*(arrays[k] for k in group), *weights))
        for k, x in zip(group, bind(own, *operands, *of_words), strict=True):
            results[k] = x if batch else jnp.squeeze(x, 0)
    return results
