"""The way of a call of `perturb`, and the plan of calls with the same structure.

A plan is a function in `PLANS`. It has everything that does not depend on addresses, values of coefficients, seed or
member: ids, ties, spans, launchers. The key has names and options; a guard compares the arrays.
"""

import collections
import contextlib
import functools
import struct
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from multisample.backends import generic, registry
from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.launch import HOST as ON_HOST
from multisample.backends.launch import ElementType, Launch, Operation

from .._arguments import check_flag
from .._backends import choose
from .._checks.coefficients import TRANSFORMED, Coefficients, TransformedError, check_coefficients, read_coefficients
from .._checks.operands import check_alignment, check_unwritten, ranges_of
from .._libraries import Device, Library, Operand, as_base_class, described, library_of
from .._libraries.library import NOUNS
from .._libraries.numpy import cached_dtype
from .._operations import ROWS
from .._plan import guarded_plans, put_guarded
from .._randomness.generator import WORD_64, Key
from .._randomness.seed_argument import MOST_OFFSETS, key_words, keys_in
from .._reading import coefficients_reader
from .._stream_order import order_after, order_before, scratch_allocator
from .._tracing import is_of_torch
from .populations import DECAYED, PLAIN, Variant, decays_of, factors_of, members_of, population_of, words_reader
from .spans import Block, Shards, one_of, packer_of, spans_of, steps_of
from .structures import ACCEPTED, Structure, ids_of
from .ties import Memory, Ties, memory_of, ties_of


class Request(NamedTuple):
    """The arguments of a call without a plan."""

    parameters: Structure
    out: Structure | None
    library: Library
    coefficients: Coefficients
    seed: Any
    member: Any
    fast_math: bool
    ids: Any
    backend: str
    shards: Shards | None
    variant: Variant


def perturbed(
    parameters: Structure, out: Structure | None, given_out: Any, given: Any, seed: Any, member: Any, decay: Any,
    fast_math: Any, ids: Any, backend: Any, shards: Shards | None = None, batch: Variant | None = None,
) -> Any:  # fmt: skip
    """The result of a call whose arrays are of one library. TypeError or ValueError if an argument is wrong.

    `out` is `parameters` itself in place. `given_out` is the argument `out`, and `given` the argument `coefficients`.
    `shards` says which elements the arrays have, if they are parts of parameters. If PyTorch's vmap made one call of
    several, `batch` says which arguments have the axis of the population.
    """
    if type(fast_math) is not bool:
        check_flag("fast_math", fast_math)
        fast_math = bool(fast_math)
    # `read_coefficients` and `key_words`, inlined for the usual types. The plan checks that coefficients are finite.
    length, values, vector = 1, given, None
    if type(given) is not float:
        length, values, vector, given = read_coefficients(given, batch is not None and batch.has_coefficients)
        if batch is not None and batch.has_coefficients:
            length //= max(batch.size or 0, 1)
            values = None if values is None else values.reshape(batch.size, length)
    word, offset, decays, variant = seed, 0, None, None
    if type(seed) is Key and type(seed[1]) is int and 0 <= seed[1] < MOST_OFFSETS:
        word, offset = seed
    is_usual = (
        type(word) is int and 0 <= word < WORD_64 and type(member) is int and 0 <= member < ROWS - length
        and batch is None
    )  # fmt: skip
    if is_usual and type(decay) is float and 0 < decay <= 1:
        decays, variant = [decay] * len(parameters.arrays), DECAYED
    elif not is_usual or type(decay) is not int or decay:
        is_number = type(values) is float or (vector is not None and not vector.shape)
        seed, word, offset, member, decays, variant = _varied(
            length, is_number, seed, member, decays_of(decay, parameters), batch
        )
    arrays: Any = parameters.arrays
    count = len(arrays)
    if count == 0:
        return parameters.rebuild(()) if out is None else given_out
    key: Hashable = None
    if type(backend) is str and (ids is None or _are_integers(ids)):
        try:
            # Calls with one array come in many shapes, so the key has its shape; for more arrays, their number.
            key = (
                "perturb", parameters.names, count if count > 1 else arrays[0].shape, out is None, out is parameters,
                None if type(values) is float else vector or length, variant, fast_math,
                None if ids is None else tuple(ids.items() if type(ids) is dict else ids), backend, shards,
            )  # fmt: skip
        except Exception:  # A nested tensor has no shape, and a foreign object may raise anything.
            key = None
    read, written = () if out is parameters else arrays, () if out is None else out.arrays
    for guard, run in guarded_plans(key):
        addresses = guard(read, written)
        if addresses is not None:
            results = run(addresses, parameters, out, values, given, seed, word, offset, member, decays)
            if results is not None:
                break
    else:
        library = _checked_library(parameters, out)
        plain = _in_base_classes("parameters", parameters, library)
        plain_out = plain if out is parameters else None if out is None else _in_base_classes("out", out, library)
        if plain is not parameters or plain_out is not out:  # A plan may exist.
            return perturbed(
                plain, plain_out, given_out, given, seed if variant and variant.seed else Key(word, offset), member,
                decay, fast_math, ids, backend, shards, batch,
            )  # fmt: skip
        coefficients = Coefficients(length, values, vector, given)
        request = Request(
            parameters, out, library, coefficients, seed, member, fast_math, ids, backend, shards, variant or PLAIN
        )
        results = _run_first(key, request, word, offset, member, decays)
    return parameters.rebuild(results) if out is None else given_out


def _varied(
    length: int, is_number: bool, seed: Any, member: Any, decays: list[float] | None, batch: Variant | None
) -> tuple[Any, int, int, Any, list[float] | None, Variant | None]:
    """Seed, its words, member and decays as a plan takes them, and the variant of the call; None if it is plain."""
    for x in (seed, member):
        if is_of_torch(x, "Tensor") and library_of("seed", x).is_transformed((x,)):
            raise TransformedError(TRANSFORMED)
    seed, form, word, offset, seeds = key_words(seed)
    member, member_form, members = members_of(member, length if seeds is None else 1)
    if batch is None and form is None and decays is None and seeds is None and members is None:
        return seed, word, offset, member, None, None
    if batch is not None:
        variant = batch._replace(seed=form, member=member_form, has_decay=decays is not None)
    else:
        size, has_own_keys = population_of(None if is_number else length, seeds, members)
        variant = Variant(form, member_form, size, has_own_keys, decays is not None)
    return seed, word, offset, member, decays, variant


def _are_integers(ids: Any) -> bool:
    """Whether `ids` is a common container of integers, which a key can have."""
    return type(ids) in (dict, list, tuple) and set(map(type, ids.values() if type(ids) is dict else ids)) == {int}


def _in_base_classes(argument: str, structure: Structure, library: Library) -> Structure:
    """`structure` with arrays of `Library.types` in place of others; itself if it has no others."""
    if all(type(x) in library.types for x in structure.arrays):
        return structure
    # Autograd would record views of arrays that the kernel writes.
    with sys.modules["torch"].no_grad() if library.name == "torch" else contextlib.nullcontext():
        arrays = list(map(as_base_class, structure.labels(argument), structure.arrays))
    changed = any(x is not y for x, y in zip(arrays, structure.arrays, strict=True))
    return structure._replace(arrays=arrays) if changed else structure


def _run_first(key: Hashable, request: Request, *values_of_call: Any) -> Sequence[Any]:
    """The results of a call without a plan. Runs all checks, and stores a plan under `key`, unless that is None."""
    parameters, out, library, (_, values, _, given) = request[:4]
    if values is not None:
        check_coefficients(values, given)
    memory = memory_of(parameters, out, library, request.variant)
    if all(map(library.lacks_values, parameters.arrays)):
        return _results_without_values(request)
    read, written = () if out is parameters else parameters.arrays, () if out is None else out.arrays
    addresses = library.addresses((*read, *written))
    ties = ties_of(parameters, out, memory, list(memoryview(addresses).cast("q")))
    run = _planned(request, memory, ties)
    results = run(addresses, parameters, out, values, given, request.seed, *values_of_call)
    assert results is not None
    if key is not None:
        put_guarded(key, library.guard(read, written), run)
    return results


def _results_without_values(request: Request) -> Sequence[Any]:
    """The results for tensors that have a shape and a type only: such tensors, or `out` itself."""
    parameters, out = request.parameters, request.out
    if request.backend != "auto":
        registry.find(request.backend)
    first: dict[int, int] = {}
    owners = [first.setdefault(id(x), k) for k, x in enumerate(parameters.arrays)]
    ids_of(parameters.names, parameters.labels("parameters"), request.ids, owners)
    if out is not None:
        return out.arrays
    arrays, variant = parameters.arrays, request.variant
    made = {k: arrays[k].new_empty(variant.shape_of(k, arrays[k].shape)) for k in set(owners)}
    results, record = [made[k] for k in owners], request.library.recorder(arrays)
    return results if record is None else record(results, arrays, None, variant.size)


# --- Plans --------------------------------------------------------------------------------------------------------


def _planned(request: Request, memory: Memory, ties: Ties) -> Callable[..., Sequence[Any] | None]:
    """The plan of calls like this one. A plan keeps no arrays alive.

    ``run(addresses, parameters, out, values, given, seed, word, offset, member, decays)`` takes the packed addresses of
    parameters and `out`, and the coefficients on the host and as given. It returns the results, or None if the arrays
    have other ties.
    """
    library, vector, variant = request.library, request.coefficients.on_device, request.variant
    is_fresh, in_place = request.out is None, request.out is request.parameters
    (sources, targets), owners = memory, ties.owners
    given_on_device = {
        "coefficients": vector,
        "seed": library.describe("seed", request.seed) if variant.seed not in (None, "words") else None,
        "member": library.describe("member", request.member) if variant.member not in (None, "rows") else None,
    }
    ranges, groups = ranges_of(targets), _groups(request, memory, ties, given_on_device)
    on_host = [name for name, form in (("seed", variant.seed), ("member", variant.member)) if form in ("words", "rows")]
    # Tied parameters share a result.
    makers = {k: library.allocator(targets[k].shape, sources[k].dtype, sources[k].device) for k in set(owners)}
    converts = any(x.read is not None for x in sources)
    notify = None if is_fresh else library.written
    record = library.recorder(request.parameters.arrays) if is_fresh else None
    packed_factors = factors_of([MATRIX_TYPES[x.dtype].computing for x in sources])
    last = [b""]  # The addresses of the last call, whose ties are known.

    def have_ties(packed: bytes, parameters: Structure, out: Structure | None) -> bool:
        if ties_of(parameters, out, memory, list(memoryview(packed).cast("q"))) != ties:
            return False
        last[0] = packed
        return True

    def run(
        packed: bytes, parameters: Structure, out: Any, values: Any, given: Any, seed: Any, word: int, offset: int,
        member: Any, decays: list[float] | None,
    ) -> Sequence[Any] | None:  # fmt: skip
        if vector is not None:
            check_alignment("coefficients", vector, library.address(given))
        elif not groups:
            check_coefficients(values, given)
        if packed != last[0] and not have_ties(packed, parameters, out):
            return None
        arrays, sources_at, targets_at = parameters.arrays, packed, packed
        if is_fresh:
            made = {k: make(arrays[k]) for k, make in makers.items()}
            results: Sequence[Any] = [made[k] for k in owners]
            targets_at = library.addresses(results)
        else:
            results = out.arrays
            if not in_place:
                sources_at, targets_at = packed[: len(packed) // 2], packed[len(packed) // 2 :]
            for (name, operand), x in zip(given_on_device.items(), (given, seed, member), strict=True):
                if operand is not None:  # A kernel on a device reads while it writes.
                    check_unwritten(name, operand, library.address(x), np.frombuffer(targets_at, np.int64), ranges)
        if converts:  # `_converted` keeps memory alive until the launch.
            reads = zip(arrays, sources, strict=True)
            _converted = [x if operand.read is None else operand.read(x) for x, operand in reads]
            sources_at = library.addresses(_converted)
        factors = () if decays is None else (packed_factors(tuple(decays)),)
        launches = []  # All that can fail precedes the first launch.
        words = word, offset, 0, 0, member, None
        for launch, geometry_of, none, stream_of, read, spans_at, device, indices, scratch_of, read_words in groups:
            stream, others = 0, None
            if stream_of is not None:
                stream = stream_of(arrays[indices[0]])
                if library.names_streams:
                    named = [library.named_stream(x[k]) for k in indices for x in (arrays, results)]
                    others = order_before(named, device, stream), device, stream
                if on_host and library.is_capturing(device)(stream):
                    raise RuntimeError(
                        f"{on_host[0]}: expected values in device memory while a CUDA graph is captured, for replays to"
                        " read, got a vector on the host"
                    )
            geometry = None if geometry_of is None else geometry_of(None, 0)
            weights, owner = read(values, given, stream)
            if read_words is not None:
                words = read_words(word, offset, seed, member)
            spans = spans_at(sources_at, targets_at, *factors)
            scratch = None if scratch_of is None else scratch_of(arrays[indices[0]], stream)
            launches.append((launch, geometry, none, weights, spans, words, stream, others, scratch, owner))
        for launch, geometry, none, weights, spans, words, stream, others, scratch, _owner in launches:
            word, offset, seed_at, offset_at, row, _owners = words
            scratch_at = 0 if scratch is None else library.address(scratch)
            launch(
                geometry, none, none, weights, spans, none, none, word, offset, seed_at, offset_at, row, 0, stream,
                scratch_at,
            )  # fmt: skip
            if others is not None:
                order_after(*others)
        if notify is not None:
            notify(results)
        if record is None:
            return results
        return record(results, arrays, np.frombuffer(*factors).tolist() if factors else None, variant.size)

    def run_one(
        packed: bytes, parameters: Structure, out: Any, values: Any, given: Any, seed: Any, word: int, offset: int,
        member: int, decays: list[float] | None,
    ) -> Sequence[Any] | None:  # fmt: skip
        """A faster `run` for one array."""
        if packed != last[0] and not have_ties(packed, parameters, out):
            return None
        results = arrays = parameters.arrays
        targets_at = packed
        if is_fresh:
            result = make(arrays[0])
            results, targets_at = (result,), pack(address(result))
        stream = 0 if stream_of is None else stream_of(arrays[0])
        geometry = None if geometry_of is None else geometry_of(None, 0)
        weights, _owner = read(values, given, stream)
        factors = () if decays is None else (packed_factors(tuple(decays)),)
        spans = spans_at(packed, targets_at, *factors)
        launch(geometry, none, none, weights, spans, none, none, word, offset, 0, 0, member, 0, stream, 0)
        if notify is not None:
            notify(results)
        if record is None:
            return results
        return record(results, arrays, np.frombuffer(*factors).tolist() if factors else None, None)

    if len(sources) != len(groups) or len(groups) > 1 or not (is_fresh or in_place) or library.names_streams:
        return run
    ((launch, geometry_of, none, stream_of, read, spans_at, _, _, scratch_of, _),) = groups
    if converts or vector is not None or scratch_of is not None or variant not in (PLAIN, DECAYED):
        return run
    make, pack, address = makers[0], struct.Struct("q").pack, library.address
    return run_one


class _Group(NamedTuple):
    """The arrays of one device and one type: one launch."""

    launch: Callable[..., None]
    geometry: Callable[[Any, int], Any] | None
    """`Launcher.geometry`; no backend uses its arguments for perturb."""
    none: int | None
    """The launcher's argument for an operand that perturb lacks."""
    stream: Callable[[Any], int] | None
    read: Callable[[Any, Any, int], tuple[Any, Any]]
    """See `coefficients_reader`."""
    spans_at: Callable[..., bytes]
    """See `packer_of`."""
    device: Device
    arrays: list[int]
    scratch: Callable[[Any, int], Any] | None
    """``scratch(like, stream)``: scratch memory for the launcher; None if it needs none."""
    read_words: Callable[[int, int, Any, Any], tuple[Any, ...]] | None
    """See `words_reader`; None if all words are integers."""


def _groups(
    request: Request, memory: Memory, ties: Ties, given_on_device: dict[str, Operand | None]
) -> list[_Group]:  # fmt: skip
    """The launches of a plan; TypeError or ValueError if ids, devices or the backend are wrong."""
    (sources, targets), (owners, written), library, variant = memory, ties, request.library, request.variant
    length, on_host, vector, _ = request.coefficients
    labels = request.parameters.labels("parameters")
    ids = ids_of(request.parameters.names, labels, request.ids, owners)
    moving = variant.parameters or [False] * len(sources)
    pairs = [
        (one_of(x, moves), one_of(y, variant.size is not None))
        for x, y, moves in zip(sources, targets, moving, strict=True)
    ]
    blocks: list[tuple[Block, ...]] = [  # By default, the block of a parameter is all of it.
        (Block((0,) * len(x.shape), x.shape, 0, steps_of(x.shape)),) for (x, _), _ in pairs
    ]
    for k, held in enumerate(() if request.shards is None else request.shards()):
        blocks[k], shape = blocks[k] if held is None else held, pairs[k][0][0].shape
        if any(b + n > size for x in blocks[k] for b, n, size in zip(x.begin, x.shape, shape, strict=True)):
            raise ValueError(f"{labels[k]}: expected a local tensor as large as its placements say, got shape {shape}")
    members: dict[tuple[Device, str], list[int]] = collections.defaultdict(list)
    for k in written:
        members[sources[k].device, sources[k].dtype].append(k)
    devices = {device for device, _ in members}
    if not members:  # All arrays are empty.
        return []
    for name, operand in given_on_device.items():
        if operand is not None and devices - {operand.device}:
            accepted = "the host" if len(devices) > 1 else f"the host or on {next(iter(devices))}"
            raise ValueError(f"{name}: expected values on {accepted}, got them on {operand.device}")
    fields: dict[str, Any] = {
        "rows": length, "fast_math": bool(request.fast_math), "batch": variant.size or 0,
        "shared_noise": variant.has_own_keys,
        "origin_in_memory": bool(variant.seed or variant.member or variant.size is not None),
    }  # fmt: skip
    if vector is not None:
        *steps, stride = vector.strides or (0,)
        if variant.has_coefficients and len(vector.shape) < 2:
            steps, stride = [stride], 0
        fields |= {
            "weights_type": ElementType[vector.dtype], "weights_stride": stride, "weights_step": (*steps, 0)[0]
        }  # fmt: skip
    if variant.member not in (None, "rows") and library_of("member", request.member) is not library:
        raise TypeError(
            f"member: expected integers on the host, or {NOUNS[library.name]}, got {described(request.member)}"
        )
    if variant.member:
        members_on_device = given_on_device["member"]
        fields["origin_step"] = 8 if members_on_device is None else members_on_device.strides[0]
    groups = []
    for (device, dtype), arrays in members.items():
        backend = choose(request.backend, library.name, device.kind, adopts=False)
        library.compile_key(backend)
        found = [(k, span) for k in arrays for block in blocks[k] for span in spans_of(pairs[k], block, ids[owners[k]])]
        if not found or variant.size == 0:  # A rank may hold no element.
            continue
        keys = keys_in(request.seed, library, device) if variant.seed else None
        words = {} if keys is None else dict(keys.fields)
        if keys is not None and key_words(request.seed).length is None:  # One key for all.
            words |= {"seed_step": 0, "offset_step": 0}
        on_device, real = device.kind == "cuda", cached_dtype(MATRIX_TYPES[dtype].computing)
        if vector is None and not isinstance(on_host, float):
            step = real.itemsize * length if variant.has_coefficients else 0
            words |= {"weights_type": ElementType[real.name], "weights_stride": real.itemsize, "weights_step": step}
        launch = Launch(
            **fields, **words, columns=sum(x.rows * x.width for _, x in found), spans=len(found),
            type=ElementType[dtype], operation=Operation.perturb, device=device.ordinal if on_device else ON_HOST,
        )  # fmt: skip
        launcher = generic.launcher(backend, launch)
        size = launcher.scratch_size
        read = coefficients_reader(library, device, real, launcher.takes_arrays, on_host, vector)
        groups.append(
            _Group(
                launcher.run, launcher.geometry, None if launcher.takes_arrays else 0,
                library.stream(device) if on_device else None, read, packer_of(found), device, arrays,
                size and functools.partial(scratch_allocator(library, device), size(0)),
                words_reader(keys, library, device, variant.member) if variant.seed or variant.member else None,
            )
        )  # fmt: skip
    return groups


def _checked_library(parameters: Structure, out: Structure | None) -> Library:
    """The library of all arrays of a call; TypeError or ValueError if there are several, or if it refuses an array."""
    library = None
    structures = {"parameters": parameters} | ({} if out is None else {"out": out})
    for argument, structure in structures.items():
        for k, array in enumerate(structure.arrays):
            name = structure.label(argument, k)
            accepted = ACCEPTED if name == argument else "an array"
            try:
                found = library_of(name, array)
            except TypeError as error:
                raise TypeError(str(error).replace("an array, a list or a number", accepted)) from None
            found.check(name, array)
            if found.foreign:
                raise TypeError(f"{name}: expected an array of NumPy, PyTorch, CuPy or Numba, got {described(array)}")
            library = found if library is None else library
            if found is not library:
                raise TypeError(
                    f"{name}: expected {NOUNS[library.name]}, as {parameters.label('parameters', 0)} is, got"
                    f" {described(array)}"
                )
    assert library is not None
    if library.is_transformed([x for structure in structures.values() for x in structure.arrays]):
        raise TransformedError(TRANSFORMED)
    if out is not None:
        for array in out.arrays:
            library.check_target(array)
        if library.name == "torch":
            check_leaves(out)
    return library


def check_leaves(out: Structure) -> None:
    """ValueError if autograd would have to record the result of a tensor that is no leaf."""
    for k, x in enumerate(out.arrays):
        if x.requires_grad and not x.is_leaf:
            raise ValueError(
                f"{out.label('out', k)}: expected a leaf, or a tensor that does not require grad, got the result of an"
                " operation that autograd recorded"
            )
