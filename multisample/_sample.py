"""`sample`: a key made of the arguments finds a plan, and the plan draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from multisample.backends.launch import Operation

from ._libraries import BY_SEED, BY_TYPE, NUMBERS
from ._operations import Call
from ._plan import PLANS
from ._randomness.generator import Key
from ._randomness.seed_argument import SINGLE_SEEDS, is_in_array, signature_of
from ._routes import run_first
from ._tracing import is_traced

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._typing import (
        AnyArray,
        Count,
        Generators,
        HostArray,
        HostOptions,
        HostVector,
        Layout,
        Noise,
        Number,
        Options,
        OwnArray,
        Seed,
        T,
        Tensor,
    )  # fmt: skip


# The overloads overlap in calls with two numbers, which raise.
@overload
def sample(  # type: ignore[overload-overlap]
    mu: OwnArray | Number, sigma: OwnArray | Number, n: Count, **options: Unpack[Options[OwnArray]]
) -> OwnArray: ...
@overload
def sample(  # type: ignore[overload-overlap]
    mu: Tensor[T] | Number, sigma: Tensor[T] | Number, n: Count, **options: Unpack[Options[T]]
) -> T: ...
@overload
def sample(
    mu: HostVector | Number, sigma: HostVector | Number, n: Count, **options: Unpack[HostOptions]
) -> HostArray: ...
@overload
def sample(mu: AnyArray | Number, sigma: AnyArray | Number, n: Count, **options: Unpack[Options[Any]]) -> Any: ...
def sample(
    mu: Any,
    sigma: Any,
    n: Count,
    *,
    backend: str = "auto",
    seed: Seed | None = None,
    generator: Generators | None = None,
    noise: Noise = "independent",
    dtype: Any = None,
    out: Any = None,
    fast_math: bool = False,
    dim_offset: SupportsIndex = 0,
    sample_offset: SupportsIndex = 0,
    validate: bool = False,
    layout: Layout = "dn",
    antithetic: bool = False,
) -> Any:
    """Draw `n` vectors from a normal distribution with independent components.

    Computes ``x[i, j] = mu[i] + sigma[i] * z[i, j]``. Each standard normal ``z[i, j]`` is a function of the seed, the
    call's offset, `i` and `j` only. The same seed gives the same bits from every backend, for any split of the work.

    Parameters
    ----------
    mu, sigma : array, shape (d,) or (d, 1), or shapes broadcast to S; with B seeds (B, d), ``(B, *S)`` or (d,)
        Means, and standard deviations of at least 0, with any strides. Lists, or arrays of NumPy, PyTorch, CuPy,
        Numba, JAX or any library with ``__dlpack__`` or ``__cuda_array_interface__``. Both arrays must belong to one
        library and one device. One of the two may be a number, a NumPy scalar or a 0-d array, which applies to every
        dimension. DTensors must be replicated or sharded over dimensions; each rank draws its part (see
        `multisample.torch.sample_sharded`).
    n : int or tuple of int
        Number of samples, at least 0; ``sample_offset + n <= 2**34``. A tuple is their shape: ``(*S, *n)``, or with
        layout "nd" ``(*n, *S)``. Offsets and antithetic pairs count in row-major order.
    backend : str, default "auto"
        A name from `list_backends`, or "auto" for the first available backend that supports the arrays. A named backend
        runs or raises. The numbers do not depend on the backend.
    seed : int or Key, or a vector of B of them, optional
        ``0 <= seed < 2**64``, or a `Key` from `Generator.take`. The same seed and arguments give the same samples,
        whatever was drawn before. A vector is a sequence or an integer array, shape (B,), or (B, 2) for seeds and
        offsets. The array is NumPy's, or has the library and device of `mu`. uint32 arrays are key data, high words
        first: (2,) and (4,) are one key, (B, 2) and (B, 4) a vector. With JAX also keys of 64 bits; all forms may be
        traced. Seeds in device memory stay there, so a captured graph reads them in each replay. Integers of arrays on
        a device, and of arrays that PyTorch or JAX traces or transforms, are read modulo ``2**bits`` of their type. A
        negative integer on the host raises.
    generator : Generator or torch.Generator, or a list of B of them, optional
        Source of a seed and an offset. Each call takes the next offset, and so draws new samples. A torch.Generator
        requires torch tensors, and is on their device or on the CPU. A list gives one key each, as B seeds. Without
        `seed` and `generator`, torch tensors use the generator that ``torch.manual_seed`` seeds, and other arrays the
        generator that `manual_seed` seeds. The capture of a CUDA graph requires a `seed`, a `graph_safe` Generator or,
        for torch tensors, a generator that PyTorch has registered with the graph, such as the default generator.
    noise : {"independent", "shared"}, default "independent"
        "independent" draws separate noise for every element. "shared" uses one row of noise for all dimensions
        (common random numbers), so that all samples lie on one line.
    dtype : {"float16", "bfloat16", "float32", "float64"}, optional
        Type of the result: a name, or a dtype of NumPy, ml_dtypes, PyTorch or JAX. By default, NumPy's
        promotion combines the types of `mu` and `sigma`. Numbers are ignored; lists and integer arrays are float32. A
        NumPy scalar or a 0-d array counts as the other argument's library counts it: PyTorch ignores its type beside
        floating-point tensors, NumPy does not, and JAX narrows a NumPy float64 without `jax_enable_x64`.
        float64 refines the float32 draw of the same seed; float16 and bfloat16 round it.
    out : array of the result's shape, optional
        Destination: a mutable array with the library, device and type of the result. Its elements must not overlap
        each other, `mu`, `sigma`, or seeds in device memory; any other strides are accepted.
    fast_math : bool, default False
        Use a faster, less exact transform on CUDA devices for float32 and narrower types. It differs from the portable
        transform by at most 1e-3. Its bits are the same on one GPU model only. No effect on a CPU or on float64.
    dim_offset, sample_offset : int, default 0
        First row and column of the drawn window of the endless sample matrix:
        ``sample(mu[a:b], sigma[a:b], q - p, dim_offset=a, sample_offset=p)`` equals ``sample(mu, sigma, q)[a:b, p:]``,
        bit for bit. At least 0; ``dim_offset + d <= 2**32``.
    validate : bool, default False
        Also check the values of `mu` and `sigma` in device memory, which waits for the device. Values in host memory
        are always checked. For DTensors, also check that all ranks are about to draw the same matrix.
    layout : {"dn", "nd"}, default "dn"
        "dn" returns one row per dimension; "nd" returns the transpose, one row per sample, with the same bits.
    antithetic : bool, default False
        Draw pairs of samples, for Monte Carlo estimates with less variance: sample ``2 k + 1`` is sample ``2 k``
        mirrored in the mean. Offsets count samples, so a window may cut a pair.

    Returns
    -------
    array, shape (d, n), or (n, d) with layout "nd"
        With `mu` or `sigma` of rank 2 and more, not (d, 1), the result has shape ``(*S, n)`` or ``(n, *S)``, the
        numbers of the flattened ones. With B seeds (B, d, n) or (B, n, d): element b equals ``sample(mu[b], sigma[b],
        n, seed=seed[b], ...)``, bit for bit, in one launch. The array has the library and device of `mu` and `sigma`,
        and is ready on that library's current stream. It is C-contiguous unless it is `out`. Lists and NumPy arrays
        give an array of the backend's library, which is NumPy for "auto" and "cpu"; for other arrays see
        _libraries/README.md, beside this module. DTensors give a DTensor with their sharding.

    Raises
    ------
    TypeError
        If `n`, `seed` or an offset is not an integer, a flag is not a bool, or `dtype` is not a floating type. If
        `mu`, `sigma` or `out` is not an array, or the arrays belong to different libraries. If both `seed` and
        `generator` are passed.
    ValueError
        If a shape, range, device or choice differs from the above. If `out` overlaps itself or an input. If a
        mean is not finite, or a standard deviation is negative or not finite. If a tensor requires grad while
        gradients are recorded, and `out` is passed or the backend is not torch_ext.
    UnknownBackendError
        If no backend is called `backend`.
    BackendUnavailableError
        If the named backend, or every backend that "auto" may take, cannot run here.
    RuntimeError
        If a CUDA graph captures a call with a `Generator`, unless it is `graph_safe` and was used before the capture.

        After an error, `out` is unchanged and no generator has advanced.

    Notes
    -----
    The random words are Philox4x32-10 [1]_ at counter ``(j // 4, i, offset)``. The normals are their Box-Muller
    transform, computed with IEEE 754 operations only. STREAM.md, beside this module, specifies both to the last bit.

    With torch tensors and torch_ext, gradients flow to `mu` and `sigma`, ``torch.func`` transforms a call, and
    ``torch.compile`` traces it without a graph break: see torch/README.md, beside this module. Such calls do not check
    the values of tensors. Without `seed`, a compiled or batched call uses the seed 0x636F6D70696C6564 and an offset
    that PyTorch's generator draws on the device.

    With a JAX array, a JAX key or a traced value among `mu`, `sigma`, `seed` and the offsets, the call is one custom
    call of XLA, which JAX's transformations differentiate, batch and partition. While JAX traces, `seed` is required.

    References
    ----------
    .. [1] J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11,
       doi:10.1145/2063384.2063405.

    Examples
    --------
    >>> import numpy as np
    >>> import multisample
    >>> mu = np.array([0.0, 10.0], dtype=np.float32)
    >>> sigma = np.array([1.0, 0.5], dtype=np.float32)
    >>> x = multisample.sample(mu, sigma, 4, seed=7)
    >>> x
    array([[-0.5921452 ,  0.45188266,  1.1550102 , -0.70147896],
           [11.08586   , 10.008893  ,  9.259448  , 10.709126  ]],
          dtype=float32)

    A vector of seeds draws a matrix for each seed:

    >>> batch = multisample.sample(mu, sigma, 4, seed=[7, 8])
    >>> batch.shape, bool((batch[0] == x).all())
    ((2, 2, 4), True)

    Another process can draw a window of `x`:

    >>> part = multisample.sample(mu[1:], sigma[1:], 2, seed=7, dim_offset=1, sample_offset=2)
    >>> bool((part == x[1:, 2:]).all())
    True
    """
    key = plan = library = None
    if not is_traced():  # The library that draws: its state is part of the key.
        library = BY_SEED.get(type(seed)) or BY_TYPE.get(type(sigma) if type(mu) in NUMBERS else type(mu))
    if library is not None:
        try:
            # The key has exact types, since True == 1 == 1.0, but no values of numbers, seeds and windows. It is None
            # if PyTorch or JAX transforms the call, which has no plan.
            if library.key is not None:
                key = library.key(
                    mu, sigma, out, seed, generator, dim_offset, sample_offset, n, backend, noise, dtype, layout,
                    fast_math, validate, antithetic,
                )  # fmt: skip
            elif (state := library.state()) is not None:
                signature = library.signature
                key = (
                    None if type(mu) in NUMBERS else signature(mu),
                    None if type(sigma) in NUMBERS else signature(sigma),
                    None if out is None else library.target_signature(out), state, type(mu), type(sigma), n, type(n),
                    backend, noise, dtype, layout, fast_math, type(fast_math), validate, type(validate), antithetic,
                    type(antithetic), type(seed), type(generator), type(dim_offset), type(sample_offset),
                )  # fmt: skip
            if key is not None:
                kind = type(seed)
                if type(n) is tuple:
                    key = key, *map(type, n)
                if kind is list:  # The next branch, inlined.
                    key = key, len(seed)  # type: ignore[arg-type]
                elif not (kind in SINGLE_SEEDS or kind is library.keyed_seed) and is_in_array(seed):
                    key = key, signature_of(seed)
                plan = PLANS.get(key)
        except Exception:  # A wrong argument may raise anything here; `run_first` reports the error.
            key = None
    # A Key whose parts are JAX arrays makes the call JAX's.
    if plan is not None and (type(seed) is not Key or (type(seed[0]) is int and type(seed[1]) is int)):
        return plan.run(mu, sigma, None, out, seed, generator, dim_offset, sample_offset)[0]
    call = Call(
        Operation.sample, mu, sigma, n, backend, seed, noise, dtype, fast_math, dim_offset, sample_offset, antithetic,
        generator, out, validate, layout,
    )  # fmt: skip
    return run_first(call, key, sample)
