"""`perturb`: normal noise added to model parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, overload

from multisample.backends.kernels.cpu.floating_point import has_default_floats, with_default_floats

from ._checks.coefficients import TransformedError
from ._libraries import BY_TYPE
from ._libraries.jax import any_of_jax
from ._model_parameters.perturb_plan import perturbed
from ._model_parameters.structures import Structure, listed, matching, structure_of
from ._tracing import is_traced

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._typing import AnyArray, NamedTensors, Number, PerturbOptions, PerturbOutOptions, T, Tensor

Given = TypeVar("Given")


@overload
def perturb(
    parameters: NamedTensors[T], coefficients: AnyArray | Number, **options: Unpack[PerturbOptions]
) -> dict[str, T]: ...
@overload
def perturb(parameters: Tensor[T], coefficients: AnyArray | Number, **options: Unpack[PerturbOptions]) -> T: ...
@overload
def perturb(  # type: ignore[overload-overlap]
    parameters: tuple[Tensor[T], ...], coefficients: AnyArray | Number, **options: Unpack[PerturbOptions]
) -> tuple[T, ...]: ...
@overload
def perturb(
    parameters: Iterator[Tensor[T]] | Sequence[Tensor[T]], coefficients: AnyArray | Number,
    **options: Unpack[PerturbOptions],
) -> list[T]: ...  # fmt: skip
@overload
def perturb(parameters: Given, coefficients: AnyArray | Number, **options: Unpack[PerturbOptions]) -> Given: ...
@overload
def perturb(
    parameters: Any, coefficients: AnyArray | Number, *, out: Given, **options: Unpack[PerturbOutOptions]
) -> Given: ...
def perturb(
    parameters: Any,
    coefficients: Any,
    *,
    seed: Any,
    member: Any = 0,
    decay: Any = 0,
    out: Any = None,
    fast_math: bool = False,
    ids: Mapping[str, SupportsIndex] | Sequence[SupportsIndex] | None = None,
    backend: str = "auto",
) -> Any:
    """Add normal noise to model parameters. The kernel generates the noise and never stores it.

    Computes ``(1 - decay) * p + sum_k coefficients[k] * z[member + k]`` for every parameter p. Row i of the noise z of
    a parameter belongs to member i of a population, and column e to element e of the parameter. So any process can draw
    the noise of any member, parameter and element again, from the seed alone.

    Parameters
    ----------
    parameters : array, torch.nn.Module, or sequence, mapping, pairs or iterator of arrays
        Arrays of one library (NumPy, PyTorch, CuPy, Numba or JAX) of type float16, bfloat16, float32 or float64, with
        any shapes and strides, at most 2**34 elements each, on any devices. For a module, its trainable parameters are
        perturbed. Sequences and mappings may be nested, and arrays of JAX may be in any pytree; names are then paths,
        such as "layer.weight". An iterator of arrays is a list, and one of (name, array) pairs a dict. DTensors may be
        sharded in any way. Parameters that share memory are one parameter if they have equal shapes and strides, and
        raise otherwise. PyTorch's meta and fake tensors give shapes and types.
    coefficients : float, or vector of shape (K,)
        One number for one member. A vector is a sum, such as the update of an evolution strategy: of the members from
        `member` on, or with K seeds of row `member` of each seed. A vector is on the host, or on the device of all
        parameters. With PyTorch, it must not require grad.
    seed : int, Key, key data or JAX key, or a vector of K of them
        As for `sample`, with offsets below 2**32. With a number as the coefficient, K seeds make a population. An array
        on the device of all parameters is read there, also by each replay of a CUDA graph. An array with two axes and
        one row, such as (1, 2), is one key.
    member : int or vector of K ints, default 0
        The row of the first coefficient, with ``member + K <= 2**32``. With one seed and a number as the coefficient, K
        members make a population. In device memory, members have 64 bits.
    decay : float or mapping of names to float, default 0
        The part of a parameter that is removed, from 0 to 1: learning rate times weight decay. Names that are absent
        from a mapping have 0. The factor ``1 - decay`` and its product with the parameter are each rounded once to the
        computing type, before the first sum.
    out : like `parameters`, optional, not for JAX
        Destination: arrays with the same structure, names, shapes, types and devices, or a module; `parameters` itself
        to work in place; no iterator. For a population, each has the axis K in front. The noise is added to
        `parameters`, never to the former values of `out`. Coefficients, seeds and members in device memory must not
        overlap `out`.
    fast_math, backend : various
        As for `sample`.
    ids : mapping of names to int, or sequence of int, optional
        Ids of parameters, ``0 <= id < 2**32``. A mapping has the ids of some names, and a sequence those of all arrays
        of a sequence. The default is 0 for a single array, positions in a sequence, and the CRC-32 of names otherwise.
        With names, added, frozen or reordered parameters change nothing for the others. A parameter with several names
        has the id of the first of them in lexicographical order. Wrappers such as `DistributedDataParallel` do not
        change names: PARAMETERS.md lists them.

    Returns
    -------
    array, list, tuple, dict or pytree
        New arrays in the structure of `parameters`, a list or dict for an iterator, a dict for pairs or a module; or
        `out`. In a population, each array has a leading axis K, and element k equals the result for ``seed[k]`` or
        ``member[k]``. Under `jax.jit`, donated parameters are written in place. Where PyTorch records gradients, new
        tensors require grad if their parameters do, with the derivative ``1 - decay``; with `out`, nothing is recorded.

    Raises
    ------
    TypeError
        If a parameter is no array of floating-point numbers, the arrays belong to different libraries, or a
        coefficient, the seed or `member` has a wrong type. If a parameter is one that FSDP1 has flattened.
    ValueError
        If a shape, range or device differs from the above, a coefficient is not finite, two parameters have one id or
        one name, or arrays overlap. If `out` has another structure, or has a tensor that autograd has recorded as the
        result of an operation. If seed and member are both vectors, or have other lengths than the coefficients. If a
        gradient of coefficients or decay is needed. If PyTorch transforms a call with `out`.
    UnknownBackendError, BackendUnavailableError
        As for `sample`.
    RuntimeError
        If a CUDA graph is captured, and a vector of coefficients, seeds or members is on the host.

        After an error, nothing has been written.

    Notes
    -----
    Element e of a parameter, in row-major order, gets ``z[i, e]`` of the stream of ``Key(seed, offset + 2**32 * id)``:
    ``sample(np.zeros(K), 1.0, size, seed=Key(seed, offset + 2**32 * id), dim_offset=member)`` has this noise. Sums are
    fused multiply-adds in the computing type, in the order of the members, with one rounding to the parameter's type at
    the end. So results have the same bits on every backend.

    Adding and then subtracting the same noise does not restore a parameter: each result is rounded. With `out`, the
    original parameters can stay unchanged.

    `jax.vmap` and `torch.func.vmap` over seed, member, coefficients or parameters make a population too. A population
    takes one launch for each device and type.

    Examples
    --------
    Another process draws the noise of one array again. PARAMETERS.md, beside this module, has an evolution strategy.

    >>> import numpy as np
    >>> import multisample
    >>> parameters = {"weight": np.zeros((4, 3), np.float32), "bias": np.zeros(3, np.float32)}
    >>> tried = multisample.perturb(parameters, 0.1, seed=7, member=5)
    >>> again = multisample.perturb({"bias": parameters["bias"]}, 0.1, seed=7, member=5)
    >>> np.array_equal(tried["bias"], again["bias"])
    True
    """
    in_graph, is_array = is_traced(), type(parameters) in BY_TYPE
    if not (in_graph or is_array):
        parameters = listed(parameters)
    if in_graph or not has_default_floats() or any_of_jax((parameters, coefficients, seed, member)):
        options: dict[str, Any] = {
            "seed": seed, "member": member, "decay": decay, "out": out, "fast_math": fast_math, "ids": ids,
            "backend": backend,
        }  # fmt: skip
        if in_graph:
            from ._routes.torch_compile_perturb import perturb_in_graph

            return perturb_in_graph(perturb, parameters, coefficients, **options)
        if not has_default_floats():
            return with_default_floats(perturb)(parameters, coefficients, **options)
        from ._routes.jax.perturb import perturb_jax

        return perturb_jax(parameters, coefficients, **options)
    structure = structure_of("parameters", parameters)
    targets: Structure | None = structure
    if out is not parameters:
        targets = None if out is None else matching(structure_of("out", out), structure)
    call = structure, targets, out, coefficients, seed, member, decay, fast_math, ids, backend
    distributed = None if is_array else sys.modules.get("torch.distributed.tensor")
    if distributed is not None and any(issubclass(x, distributed.DTensor) for x in set(map(type, structure.arrays))):
        from ._routes.dtensor import perturb_dtensors

        return perturb_dtensors(*call)
    try:
        return perturbed(*call)
    except TransformedError:
        pass
    from ._routes.torch_perturb import perturb_transformed

    return perturb_transformed(*call)
