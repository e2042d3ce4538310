"""The one call: a key of its arguments finds a plan, and the plan draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from ._libraries import BY_TYPE
from ._plan import PLANS, Call
from ._randomness.generator import Key
from ._routes import draw_first
from ._tracing import is_traced

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._randomness.generator import Generator
    from ._typing import (
        AnyArray,
        HostArray,
        HostOptions,
        HostVector,
        Layout,
        Noise,
        Number,
        Options,
        OwnArray,
        T,
        Tensor,
        TorchGenerator,
    )  # fmt: skip

__all__ = ["sample"]


# The overloads overlap in calls with two numbers, which raise.
@overload
def sample(  # type: ignore[overload-overlap]
    mu: OwnArray | float, sigma: OwnArray | float, n: SupportsIndex, **options: Unpack[Options[OwnArray]]
) -> OwnArray: ...
@overload
def sample(  # type: ignore[overload-overlap]
    mu: Tensor[T] | float, sigma: Tensor[T] | float, n: SupportsIndex, **options: Unpack[Options[T]]
) -> T: ...
@overload
def sample(
    mu: HostVector | Number, sigma: HostVector | Number, n: SupportsIndex, **options: Unpack[HostOptions]
) -> HostArray: ...
@overload
def sample(
    mu: AnyArray | Number, sigma: AnyArray | Number, n: SupportsIndex, **options: Unpack[Options[Any]]
) -> Any: ...
def sample(
    mu: Any,
    sigma: Any,
    n: SupportsIndex,
    *,
    backend: str = "auto",
    seed: SupportsIndex | Key | None = None,
    generator: Generator | TorchGenerator | None = None,
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

    ``x[i, j] = mu[i] + sigma[i] * z[i, j]``, where the ``z[i, j]`` are standard normal and each is a function of the
    seed, the call's offset, `i` and `j` alone. So the same seed gives the same bits from every backend, however the
    work is split.

    Parameters
    ----------
    mu, sigma : array, shape (d,) or (d, 1)
        Means, and standard deviations of at least 0. NumPy arrays or lists, or arrays of PyTorch, CuPy, Numba, JAX or
        any library with ``__dlpack__`` or ``__cuda_array_interface__``; both of the same library, on the same device,
        with any strides. One of the two may be a number, and stands for a vector of it. DTensors, replicated or
        sharded over dimensions: each rank draws its part of one matrix, as `multisample.torch.sample_sharded` tells.
    n : int
        Number of samples, at least 0; ``sample_offset + n <= 2**34``.
    backend : str, default "auto"
        A name from `backends`. A backend that is named runs or raises. "auto" takes the first that is available of
        those that suit the arrays. The numbers do not depend on it.
    seed : int or Key, optional
        ``0 <= seed < 2**64``, or a `Key`, as `Generator.take` returns it. The same seed and arguments give the same
        samples, whatever was drawn before. With JAX also a key of 64 bits, its data as ``uint32[2]``, or ``uint32[4]``,
        a seed and an offset; high words come first, and any of it may be traced.
    generator : Generator or torch.Generator, optional
        Where to take a seed and an offset from: each call takes the next offset, and so gives new samples. A
        torch.Generator serves torch tensors on its device. With neither `seed` nor `generator`, torch tensors follow
        ``torch.manual_seed`` and everything else follows `manual_seed`. While a CUDA graph is captured, only a
        `seed`, a Generator that is `graph_safe`, or for torch tensors a generator of PyTorch's that the graph knows.
    noise : {"independent", "shared"}, default "independent"
        Whether every component has noise of its own, or all dimensions use one row of noise ("common random
        numbers"): then all samples lie on one line.
    dtype : {"float16", "bfloat16", "float32", "float64"}, optional
        Type of the result, by name or as NumPy's, ml_dtypes', PyTorch's or JAX's object. By default NumPy's promotion
        of the types of `mu` and `sigma`, in which numbers do not count, and lists and integers count as float32.
        float64 refines the float32 draw of the same seed; float16 and bfloat16 round it.
    out : array, shape (d, n), or (n, d) with layout "nd", optional
        Where to put the result: a mutable array of the library, device and type of the result, with any strides with
        which no two elements overlap, and apart from `mu` and `sigma`.
    fast_math : bool, default False
        Take a faster, less exact transform on CUDA devices, for float32 and narrower types: it differs from the
        portable one by at most 1e-3, and has the same bits on one GPU only. No effect on a CPU or on float64.
    dim_offset, sample_offset : int, default 0
        Draw the window of the endless sample matrix that starts at this row and column:
        ``sample(mu[a:b], sigma[a:b], q - p, dim_offset=a, sample_offset=p)`` equals ``sample(mu, sigma, q)[a:b, p:]``,
        bit for bit. At least 0; ``dim_offset + d <= 2**32``.
    validate : bool, default False
        Look at the values of `mu` and `sigma` in device memory too, which waits for the device. Values in host memory
        are always looked at. Of DTensors, also make sure that all ranks are about to draw the same matrix.
    layout : {"dn", "nd"}, default "dn"
        One row for each dimension, or the transpose, one row for each sample: the same bits.
    antithetic : bool, default False
        Draw the samples in pairs, for Monte Carlo estimates of less variance: sample ``2 k + 1`` is sample ``2 k``
        mirrored in the mean. Offsets count samples, and so may cut a pair.

    Returns
    -------
    array, shape (d, n), or (n, d) with layout "nd"
        Of the library and on the device of `mu` and `sigma`, ready on that library's current stream; C-contiguous
        unless it is `out`. From lists and NumPy arrays, a NumPy array, or an array of the library of the CUDA backend
        that was named; from objects known by their protocol alone, a NumPy array or one of the backend's library;
        from DTensors, a DTensor placed as they are.

    Raises
    ------
    TypeError
        If `n`, `seed` or an offset is not an integer, a flag not a bool, `dtype` not a floating type, `mu`, `sigma` or
        `out` not an array or of different libraries, or if both `seed` and `generator` are given.
    ValueError
        If a shape, a range, a device or a choice is not as above; if `out` overlaps itself, `mu` or `sigma`; if a mean
        is not finite, or a standard deviation negative or not finite; if a tensor requires grad where gradients are
        recorded, and there is an `out`, or the backend is not torch_ext.
    UnknownBackendError
        If there is no backend called `backend`.
    BackendUnavailableError
        If the backend that was named, or every one that "auto" could take, cannot run here.
    RuntimeError
        If a CUDA graph is captured, and the generator is not `graph_safe`, or has not been used before.

        When an error is raised, `out` is as it was and no generator has advanced.

    Notes
    -----
    The words are Philox4x32-10's [1]_ at counter ``(j // 4, i, offset)``, and the normals their Box-Muller transform,
    made of IEEE 754 operations only; STREAM.md beside this module specifies both to the last bit.

    With torch tensors and torch_ext, gradients go to `mu` and `sigma`, ``torch.func`` transforms a call, and
    ``torch.compile`` takes it into its graph. There values are not looked at, and new numbers come from an offset that
    PyTorch's generator draws on the device, with seed 0x636F6D70696C6564. In ``torch.func.vmap`` they are as its
    ``randomness`` says, and with `seed` each element of a batch has the same noise.

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

    A window of it, as another process might draw it:

    >>> part = multisample.sample(mu[1:], sigma[1:], 2, seed=7, dim_offset=1, sample_offset=2)
    >>> bool((part == x[1:, 2:]).all())
    True
    """
    library = None if is_traced() else BY_TYPE.get(type(sigma) if type(mu) in _NUMBERS else type(mu))
    key = plan = None
    if library is not None:
        try:
            signature, state = library.signature, library.state()
            # With exact types, since True == 1 == 1.0; without the values of numbers, seeds and windows.
            if state is None:  # The library has to see the call.
                pass
            elif library.key is not None:
                key = library.key(
                    mu, sigma, out, seed, generator, dim_offset, sample_offset, n, backend, noise, dtype, layout,
                    fast_math, validate, antithetic, state,
                )  # fmt: skip
            else:
                key = (
                    None if type(mu) in _NUMBERS else signature(mu),
                    None if type(sigma) in _NUMBERS else signature(sigma),
                    None if out is None else library.target_signature(out), state, type(mu), type(sigma), n, type(n),
                    backend, noise, dtype, layout, fast_math, type(fast_math), validate, type(validate), antithetic,
                    type(antithetic), type(seed), type(generator), type(dim_offset), type(sample_offset),
                )  # fmt: skip
            plan = PLANS.get(key)
        except Exception:  # A wrong argument may raise anything here; `draw_first` says what is wrong with it.
            key = None
    # The parts of a Key may be arrays of JAX, which has to see the call.
    if plan is not None and (type(seed) is not Key or (type(seed[0]) is int and type(seed[1]) is int)):
        return plan.run(mu, sigma, seed, generator, out, dim_offset, sample_offset)
    call = Call(
        mu, sigma, n, backend, seed, generator, noise, dtype, out, fast_math, dim_offset, sample_offset, validate,
        layout, antithetic,
    )  # fmt: skip
    return draw_first(call, key, sample)


_NUMBERS = frozenset((int, float))
