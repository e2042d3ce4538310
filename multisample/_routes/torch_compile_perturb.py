"""`perturb` in a function that torch.compile traces: one operator, which writes to a list of tensors.

A call becomes a call of ``torch.ops.multisample.perturb_`` without a graph break. The operator runs `perturb` on the
tensors of each run of the graph, so that all checks of memory and ids are those of eager calls.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from multisample.backends.kernels.cpu.floating_point import with_default_floats

from .._checks.coefficients import TRANSFORMED, WITH_GRADIENT
from .._libraries import is_number
from .._libraries.torch import owners_of, scaled
from .._model_parameters.perturb_plan import check_leaves, perturbed
from .._model_parameters.populations import Decays, decays_of, population_of
from .._model_parameters.structures import Structure, matching, structure_of
from .._randomness.generator import WORD_64, Key
from .._randomness.seed_argument import batch_of
from .torch_perturb import factors_like
from .torch_transforms import as_int64, keys_of

_VALUES = "Tensor[] sources, float number, Tensor? vector, Tensor? key, Tensor? members"
_OPTIONS = (
    "SymInt seed, SymInt offset, SymInt member, float[] decays, str[] names, str[] id_names, SymInt[] ids,"
    " bool fast_math, str backend"
)


@torch.library.custom_op(
    "multisample::perturb_",
    mutates_args=("targets",),
    # Without sources, targets are perturbed in place. Without names, `ids` has an entry for each tensor. Without
    # decays, all are 0.
    schema=f"(Tensor(a!)[] targets, {_VALUES}, *, {_OPTIONS}) -> ()",
)
def _perturb_to(targets: list[Any], sources: list[Any], *values: Any, **options: Any) -> None:
    _run(sources or targets, targets, *values, **options)


@torch.library.custom_op(
    "multisample::perturbed", mutates_args=(), schema=f"({_VALUES}, *, SymInt? size, {_OPTIONS}) -> Tensor[]"
)
def _perturbed(sources: list[Any], *values: Any, size: int | None, **options: Any) -> list[Any]:
    results: list[Any] = _run(sources, None, *values, **options)
    return results


@_perturbed.register_fake
def _(sources: list[Any], *values: Any, size: int | None, **options: Any) -> list[Any]:
    return [_empty(x, size) for x in sources]


def _run(
    sources: list[Any], targets: list[Any] | None, number: float, vector: Any, key: Any, members: Any, *, seed: int,
    offset: int, member: int, decays: list[float], names: list[str], id_names: list[str], ids: list[int],
    fast_math: bool, backend: str,
) -> Any:  # fmt: skip
    coefficients = number if vector is None else vector
    given_seed = Key(seed % WORD_64, offset) if key is None else key
    given_ids = dict(zip(id_names, ids, strict=True)) if names else ids
    parameters = Structure(tuple(names) or None, sources, list)
    out = parameters if targets is sources else None if targets is None else parameters._replace(arrays=targets)
    return with_default_floats(perturbed)(
        parameters, out, targets, coefficients, given_seed, member if members is None else members,
        Decays(decays) if decays else 0, fast_math, given_ids or None, backend,
    )  # fmt: skip


def _empty(x: Any, size: int | None) -> Any:
    return torch.empty(x.shape if size is None else (size, *x.shape), dtype=x.dtype, device=x.device)


def _save_factors(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    sources, decays = inputs[0], keyword_only_inputs["decays"]
    ctx.size, ctx.factors = keyword_only_inputs["size"], factors_like(decays or None, sources)


def _backward(ctx: Any, gradients: list[Any]) -> Any:
    own = [scaled(g, factor, ctx.size, None) for g, factor in zip(gradients, ctx.factors, strict=True)]
    return own, None, None, None, None


_perturbed.register_autograd(_backward, setup_context=_save_factors)


def perturb_in_graph(
    function: Callable[..., Any], parameters: Any, coefficients: Any, *, seed: Any, member: Any, decay: Any,
    out: Any, fast_math: Any, ids: Any, backend: Any,
) -> Any:  # fmt: skip
    """Run a traced call of `function`, which is `perturb`."""
    sources = structure_of("parameters", parameters)
    targets = None if out is None else matching(structure_of("out", out), sources)
    if targets is not None and all(a is b for a, b in zip(targets.arrays, sources.arrays, strict=True)):
        targets = sources  # PyTorch 2.11 cannot trace `out is parameters`.
    arrays, written = sources.arrays, sources.arrays if targets is None else targets.arrays
    number, vector = (float(coefficients), None) if is_number(coefficients) else (0.0, coefficients)
    if isinstance(coefficients, (list, tuple)) and all(is_number(x) for x in coefficients):
        vector = torch.tensor([float(x) for x in coefficients], dtype=torch.float64, device="cpu")
    if vector is not None and isinstance(vector, torch.Tensor) and vector.requires_grad and torch.is_grad_enabled():
        raise ValueError(WITH_GRADIENT)
    key, word, offset, seeds = None, seed, 0, None
    if isinstance(seed, Key):
        word, offset = seed.seed, seed.offset
    elif isinstance(seed, (list, tuple)) and len(seed) != 1:  # A tensor with one row is one key.
        (key, seeds), word = keys_of(seed, "cpu"), 0
        key = key.view(torch.uint64)
    elif isinstance(seed, torch.Tensor):
        key, word, seeds = seed, 0, batch_of(seed)
        if seeds == 1 and seed.dim() > 1:
            seeds = None
    members, first_member, count = None, member, None
    if isinstance(member, (list, tuple, range)) and all(map(_is_integer, member)):
        members, first_member, count = torch.tensor(list(member), dtype=torch.int64), 0, len(member)
    elif isinstance(member, torch.Tensor) and member.dim() == 1:
        members, first_member, count = member, 0, member.shape[0]
    decays = None if _is_integer(decay) and decay == 0 else decays_of(decay, sources)
    length = None if vector is None else vector.shape[0] if isinstance(vector, torch.Tensor) and vector.dim() else None
    size, _ = population_of(length, seeds, count)
    ids_are_known = ids is None or (
        isinstance(ids, Mapping) and sources.names is not None and all(name in sources.names for name in ids)
    ) or (isinstance(ids, Sequence) and sources.names is None and len(ids) == len(arrays))  # fmt: skip
    given_ids = [] if ids is None or not ids_are_known else list(ids.values() if isinstance(ids, Mapping) else ids)
    tensors = [*arrays, *written] if vector is None else [*arrays, *written, vector]
    # The operator would convert arguments of other types, and take a seed modulo 2**64.
    are_usual = (
        all(map(_is_integer, (word, offset, first_member, *given_ids))) and 0 <= word < WORD_64
        and isinstance(fast_math, bool) and isinstance(backend, str)
    )  # fmt: skip
    if not (
        arrays and ids_are_known and are_usual and all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors)
    ):
        return _outside_graph(
            function, parameters, coefficients, seed=seed, member=member, decay=decay, out=out, fast_math=fast_math,
            ids=ids, backend=backend,
        )  # fmt: skip
    if _is_in_functorch():
        raise ValueError(TRANSFORMED)
    # A tensor with several names is passed once, since a graph may copy what an operator writes to.
    names, owners = sources.names, owners_of(list(zip(arrays, written, strict=True)), sources.names)
    kept = sorted(owners.values())
    if targets is not None:
        check_leaves(targets)
    if names is None:
        numbers = [k if ids is None else ids[k] for k in kept]
        listed: list[str] = []
    else:
        listed = [] if ids is None else [name for k, name in enumerate(names) if k in kept and name in ids]
        numbers = [ids[name] for name in listed]
    options = {
        "seed": as_int64(word), "offset": offset, "member": first_member,
        "decays": [] if decays is None else [decays[k] for k in kept],
        "names": [] if names is None else [names[k] for k in kept], "id_names": listed, "ids": numbers,
        "fast_math": fast_math, "backend": backend,
    }  # fmt: skip
    own, values = [arrays[k] for k in kept], (number, vector, key, members)
    if targets is not None:
        to = [written[k] for k in kept]
        with torch.no_grad():
            torch.ops.multisample.perturb_(to, [] if targets is sources else own, *values, **options)
        return out
    if torch.is_grad_enabled() and any(x.requires_grad for x in own):
        to = torch.ops.multisample.perturbed(own, *values, size=size, **options)
    else:  # A graph may reuse the memory of results.
        to = [_empty(x, size) for x in own]
        with torch.no_grad():
            torch.ops.multisample.perturb_(to, own, *values, **options)
    made = dict(zip(kept, to, strict=True))
    return sources.rebuild([made[owners[x, x]] for x in arrays])


@torch.compiler.disable(reason="perturb can be part of a graph only with plain PyTorch tensors and one seed")
def _outside_graph(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options)


def _is_integer(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


@torch.compiler.assume_constant_result
def _is_in_functorch() -> bool:
    """Whether torch.func transforms the call."""
    return torch._C._functorch.peek_interpreter_stack() is not None
