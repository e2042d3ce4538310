"""`perturb` in a function that torch.compile traces: one operator, which writes to a list of tensors.

A call becomes a call of ``torch.ops.multisample.perturb_`` without a graph break. The operator runs `perturb` on the
tensors of each run of the graph, so that all checks of memory and ids are those of eager calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from multisample.backends.kernels.cpu.floating_point import with_default_floats

from .._checks.coefficients import TRANSFORMED
from .._libraries import is_number
from .._model_parameters.perturb_plan import check_leaves, perturbed
from .._model_parameters.structures import Structure, matching, structure_of
from .._randomness.generator import WORD_64, Key
from .torch_transforms import as_int64


@torch.library.custom_op(
    "multisample::perturb_",
    mutates_args=("targets",),
    # Without sources, targets are perturbed in place. Without names, `ids` has an entry for each tensor.
    schema=(
        "(Tensor(a!)[] targets, Tensor[] sources, float number, Tensor? vector, Tensor? key, *, SymInt seed, "
        "SymInt offset, SymInt member, str[] names, str[] id_names, SymInt[] ids, bool fast_math, str backend) -> ()"
    ),
)
def _perturb(
    targets: list[Any], sources: list[Any], number: float, vector: Any, key: Any, *, seed: int, offset: int,
    member: int, names: list[str], id_names: list[str], ids: list[int], fast_math: bool, backend: str,
) -> None:  # fmt: skip
    coefficients = number if vector is None else vector
    given_seed = Key(seed % WORD_64, offset) if key is None else key
    given_ids = dict(zip(id_names, ids, strict=True)) if names else ids
    out = Structure(tuple(names) or None, targets, list)
    parameters = out._replace(arrays=sources) if sources else out
    with_default_floats(perturbed)(
        parameters, out, targets, coefficients, given_seed, member, fast_math, given_ids or None, backend
    )


@_perturb.register_fake
def _(*arguments: Any, **options: Any) -> None:
    """The operator returns nothing."""


def perturb_in_graph(
    function: Callable[..., Any], parameters: Any, coefficients: Any, *, seed: Any, member: Any, out: Any,
    fast_math: Any, ids: Any, backend: Any,
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
    key, word, offset = None, seed, 0
    if isinstance(seed, Key):
        word, offset = seed.seed, seed.offset
    elif isinstance(seed, torch.Tensor):
        key, word = seed, 0
    ids_are_known = ids is None or (
        isinstance(ids, Mapping) and sources.names is not None and all(name in sources.names for name in ids)
    ) or (isinstance(ids, Sequence) and sources.names is None and len(ids) == len(arrays))  # fmt: skip
    given_ids = [] if ids is None or not ids_are_known else list(ids.values() if isinstance(ids, Mapping) else ids)
    tensors = [*arrays, *written] if vector is None else [*arrays, *written, vector]
    # The operator would convert arguments of other types, and take a seed modulo 2**64.
    are_usual = (
        all(map(_is_integer, (word, offset, member, *given_ids))) and 0 <= word < WORD_64
        and isinstance(fast_math, bool) and isinstance(backend, str)
    )  # fmt: skip
    if not (
        arrays and ids_are_known and are_usual and all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors)
    ):
        return _outside_graph(
            function, parameters, coefficients, seed=seed, member=member, out=out, fast_math=fast_math, ids=ids,
            backend=backend,
        )  # fmt: skip
    if _is_in_functorch():
        raise ValueError(TRANSFORMED)
    # A tensor with several names is passed once, since a graph may copy what an operator writes to.
    owners: dict[Any, int] = {}
    names = sources.names
    for k in range(len(arrays)) if names is None else sorted(range(len(arrays)), key=lambda k: names[k]):
        owners.setdefault((arrays[k], written[k]), k)
    kept = sorted(owners.values())
    if targets is None:
        made = {k: torch.empty(arrays[k].shape, dtype=arrays[k].dtype, device=arrays[k].device) for k in kept}
        results = [made[owners[x, x]] for x in arrays]
        to = [made[k] for k in kept]
    else:
        check_leaves(targets)
        results, to = [], [written[k] for k in kept]
    if names is None:
        numbers = [k if ids is None else ids[k] for k in kept]
        listed: list[str] = []
    else:
        listed = [] if ids is None else [name for k, name in enumerate(names) if k in kept and name in ids]
        numbers = [ids[name] for name in listed]
    with torch.no_grad():
        torch.ops.multisample.perturb_(
            to, [] if targets is sources else [arrays[k] for k in kept], number, vector, key, seed=as_int64(word),
            offset=offset, member=member, names=[] if names is None else [names[k] for k in kept], id_names=listed,
            ids=numbers, fast_math=fast_math, backend=backend,
        )  # fmt: skip
    return sources.rebuild(results) if out is None else out


@torch.compiler.disable(reason="perturb can be part of a graph only with plain PyTorch tensors and one seed")
def _outside_graph(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options)


def _is_integer(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


@torch.compiler.assume_constant_result
def _is_in_functorch() -> bool:
    """Whether torch.func transforms the call."""
    return torch._C._functorch.peek_interpreter_stack() is not None
