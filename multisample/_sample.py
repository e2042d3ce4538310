"""The one call. It reads top to bottom: check, choose, look at the arrays, allocate, launch, hand over."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy import empty, ndarray

from multisample.backends.contract import HostArray, Layout

from ._arguments import check_choice, check_flag, checked_integer, describe, dtype_name
from ._cuda_driver import is_capturing
from ._dispatch import choose, on_registration
from ._generator import DEFAULT_GENERATOR, WORD_64, Generator, take_from_torch, take_from_torch_default
from ._libraries import Device, Library, library_called, library_of
from ._operands import adopted, check_inputs, checked_out, common_library, is_number, look_at, transposed
from ._order import after_launch, before_launch
from ._tracing import traced_as

__all__ = ["sample"]

ROWS = 2**32
COLUMNS = 2**34


def sample(
    mu: Any,
    sigma: Any,
    n: int,
    *,
    backend: str = "auto",
    seed: int | None = None,
    generator: Any = None,
    noise: Literal["independent", "shared"] = "independent",
    dtype: Any = None,
    out: Any = None,
    fast_math: bool = False,
    dim_offset: int = 0,
    sample_offset: int = 0,
    validate: bool = False,
    layout: Literal["dn", "nd"] = "dn",
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
    seed : int, optional
        ``0 <= seed < 2**64``. The same seed and arguments give the same samples, whatever was drawn before.
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
    if (
        type(mu) is type(sigma)
        and dtype is None
        and (layout is _DN or layout is _ND)
        and validate is antithetic is False
        and dim_offset is sample_offset is _ZERO
    ):
        result = None
        if type(mu) is ndarray:
            if noise is _INDEPENDENT and fast_math is False:
                result = _sample_small(mu, sigma, n, backend, seed, generator, layout, out)
        elif layout is _DN:
            result = _sample_plain(mu, sigma, n, backend, seed, generator, noise, fast_math, out)
        if result is not None:
            return result
    is_compiling = _is_compiling()
    dtensor = None if is_compiling else getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if dtensor is not None and (isinstance(mu, dtensor) or isinstance(sigma, dtensor) or isinstance(out, dtensor)):
        from .torch._sharded import sample_dtensor

        return sample_dtensor(
            mu, sigma, n, out, layout, dim_offset, sample_offset, seed, generator, validate,
            backend=backend, noise=noise, dtype=dtype, fast_math=fast_math, antithetic=antithetic,
        )  # fmt: skip
    n, dim_offset, sample_offset = checked_window(n, dim_offset, sample_offset)
    check_choice("noise", noise, ("independent", "shared"))
    check_choice("layout", layout, ("dn", "nd"))
    for name, flag in (("fast_math", fast_math), ("validate", validate), ("antithetic", antithetic)):
        check_flag(name, flag)
    if dtype is not None:
        dtype = dtype_name(dtype)
    if seed is not None:
        if generator is not None:
            raise TypeError("seed, generator: expected one of the two, got both")
        seed = checked_integer("seed", seed, 0, WORD_64)

    if is_compiling:
        from .torch._compiled import sample_compiled

        return sample_compiled(
            mu, sigma, n, backend=backend, seed=seed, generator=generator, noise=noise, dtype=dtype, out=out,
            fast_math=fast_math, dim_offset=dim_offset, sample_offset=sample_offset, validate=validate, layout=layout,
            antithetic=antithetic,
        )  # fmt: skip

    caller = common_library(mu, sigma, out)
    vector_name, vector = ("sigma", sigma) if is_number(mu) else ("mu", mu)
    device = caller.device(vector_name, vector)
    check_generator(generator, caller, device)
    chosen = choose(backend, caller.name, device.kind)
    is_recorded = False
    if caller.name == "torch":
        is_transformed = caller.is_transformed(mu, sigma, out)
        is_recorded = not is_transformed and caller.records_gradient(mu, sigma, out)
        if is_transformed or is_recorded:
            _check_operator(chosen.name, is_transformed, mu, sigma, out)
        if is_transformed:
            from .torch._dispatched import sample_transformed

            return sample_transformed(
                mu, sigma, n, seed=seed, generator=generator, noise=noise, dtype=dtype, out=out, fast_math=fast_math,
                dim_offset=dim_offset, sample_offset=sample_offset, validate=validate, layout=layout,
                antithetic=antithetic,
            )  # fmt: skip

    # Arrays of a library that we know only by its protocols are seen through one that we know well.
    library, target = caller, out
    given = [x for x in (mu, sigma, out) if not (x is None or is_number(x))]
    if caller.foreign:
        library = caller.host if device.kind == "cpu" else library_called(chosen.host_library)
        adopt = caller.as_numpy if device.kind == "cpu" else chosen.adopt
        mu, sigma, target = (
            x if x is None or is_number(x) else adopted(name, x, caller, device, adopt)
            for name, x in (("mu", mu), ("sigma", sigma), ("out", out))
        )
    inputs = look_at(library, mu, sigma, dtype)
    array = sigma if is_number(mu) else mu
    stream = library.stream(inputs.device, array)
    seen = [x for x in (mu, sigma, target) if not (x is None or is_number(x))]
    others = before_launch(caller, library, given, seen, inputs.device, stream)
    dtype = inputs.dtype
    d = inputs.d
    if dim_offset + d > ROWS:
        raise ValueError(f"dim_offset: expected dim_offset + d <= 2**32, got {dim_offset} + {d}")
    caller.check_dtype(dtype)
    check_inputs(inputs, library, mu, sigma, validate)
    if caller.name == "numpy" and chosen.host_library != "numpy":
        if out is not None:
            raise ValueError(f"out: backend {chosen.name!r} writes {chosen.host_library} arrays, got host memory")
        library = library_called(chosen.host_library)
        mu = mu if is_number(mu) else chosen.adopt(np.ascontiguousarray(inputs.mu))
        sigma = sigma if is_number(sigma) else chosen.adopt(np.ascontiguousarray(inputs.sigma))
        inputs = look_at(library, mu, sigma, dtype)
        array = sigma if is_number(mu) else mu
        stream = library.stream(inputs.device, array)

    if is_recorded:
        from .torch._dispatched import sample_recorded

        return sample_recorded(
            mu, sigma, n, seed=seed, generator=generator, noise=noise, dtype=dtype, fast_math=fast_math,
            dim_offset=dim_offset, sample_offset=sample_offset, layout=layout, antithetic=antithetic,
            backend=chosen, device=inputs.device, stream=stream,
        )  # fmt: skip
    shape = (d, n) if layout == "dn" else (n, d)
    if out is None:
        result = target = library.empty(*shape, dtype, inputs.device, array)
        raw_result = library.operand("out", target).raw
    else:
        result = out
        raw_result = checked_out(library, target, inputs, shape)
    raw_out = raw_result if layout == "dn" else transposed(raw_result)

    def launch(seed: int, offset: int, counter: int) -> None:
        if d > 0 and n > 0:
            chosen.launch(
                inputs.mu, inputs.sigma, raw_out, dtype, seed, offset, counter, dim_offset, sample_offset,
                noise == "shared", bool(antithetic), bool(fast_math), inputs.device.ordinal, stream,
            )  # fmt: skip

    # Last of all, so that a call that raises has taken nothing.
    if isinstance(generator, Generator) and generator.graph_safe:
        counter = generator._counter_on(inputs.device, library, stream)
        with counter.lock:
            launch(generator.seed, 0, counter.address)
            chosen.advance(counter.address, inputs.device.ordinal, stream)
    elif seed is None and is_capturing(stream):
        seed, offset = captured_offset(generator, caller, device)
        launch(seed, 0, offset.data_ptr())
    else:
        launch(*seed_and_offset(seed, generator, caller, device), 0)
    after_launch(caller.foreign, (given, seen), others, inputs.device, stream)
    if out is not None:
        caller.was_written(out)
        return out
    return caller.hand_over(result, raw_result, inputs.device, stream)


def checked_window(n: Any, dim_offset: Any, sample_offset: Any) -> tuple[int, int, int]:
    """The three as ints in their ranges; TypeError or ValueError otherwise."""
    n = checked_integer("n", n, 0, COLUMNS + 1)
    dim_offset = checked_integer("dim_offset", dim_offset, 0, ROWS + 1)
    sample_offset = checked_integer("sample_offset", sample_offset, 0, COLUMNS + 1)
    if sample_offset + n > COLUMNS:
        raise ValueError(f"n: expected sample_offset + n <= 2**34, got {sample_offset} + {n}")
    return n, dim_offset, sample_offset


@traced_as(lambda: True)
def _is_compiling() -> bool:
    """Whether PyTorch traces the call, with or without torch.compile."""
    compiler = sys.modules.get("torch.compiler")
    return compiler is not None and bool(compiler.is_compiling())


def _check_operator(backend: str, is_transformed: bool, mu: Any, sigma: Any, out: Any) -> None:
    """ValueError if there is no operator for a call that PyTorch has to see, which is one of torch_ext's."""
    if is_transformed:
        if backend != "torch_ext":
            raise ValueError(
                "backend: expected torch_ext where PyTorch transforms the call (torch.func, torch.autograd.forward_ad,"
                f" a dispatch mode or a tensor subclass), got {backend!r}"
            )
        return
    name = next((name for name, x in (("mu", mu), ("sigma", sigma)) if getattr(x, "requires_grad", False)), "out")
    if out is None and backend == "torch_ext":
        return
    reason = f"backend {backend!r} records no gradient, torch_ext does" if out is None else "out= takes no gradient"
    raise ValueError(f"{name}: requires grad, and {reason}; detach it, or call sample under torch.no_grad()")


_NOT_CAPTURED = (
    "generator: expected multisample.Generator(seed, graph_safe=True) while a CUDA graph is captured, which draws new"
    " numbers in each replay, got one whose offset would never change; or pass seed=, for the same in each replay"
)
# Told apart by identity, which is quick; an equal object that is another one only takes the longer way.
_INDEPENDENT, _SHARED, _DN, _ND, _ZERO = "independent", "shared", "dn", "nd", 0
# Normals that take no longer to draw than a call's arguments to check in full.
_SMALL = 1 << 14
# By layout, backend and dtype.
_small_kernels: dict[str, dict[str, dict[Any, Callable[..., bool] | None]]] = {}


@traced_as(lambda *_: None)
def _sample_small(
    mu: HostArray, sigma: HostArray, n: Any, backend: Any, seed: Any, generator: Any, layout: Layout, out: Any
) -> HostArray | None:
    """The plain small call, recognised in half a microsecond; None for every other, right or wrong."""
    shape, real = mu.shape, mu.dtype
    if type(n) is not int or sigma.shape != shape or sigma.dtype is not real:
        return None
    try:
        (d,) = shape
        kernel = _small_kernels[layout][backend][real] if 0 < d * n <= _SMALL else None
    except (KeyError, TypeError, ValueError):
        kernel = _find_small_kernel(backend, real, layout) if len(shape) == 1 else None
    if kernel is None:
        return None
    shape = (d, n) if layout is _DN else (n, d)
    if not (out is None or _is_plain_target(out, shape, mu, sigma)):
        return None
    if seed is None:
        if generator is None:
            generator = DEFAULT_GENERATOR
        elif type(generator) is not Generator or generator.graph_safe:
            return None
        seed, offset = generator._take()
    elif type(seed) is int and generator is None:
        offset = 0
    else:
        return None
    result = empty(shape, real) if out is None else out
    try:
        if kernel(mu, sigma, result, seed, offset):
            return result
    except OverflowError:  # A seed that is no 64-bit number.
        return None
    if generator is not None:
        generator._put_back(seed, offset)
    return None


_plain_calls: dict[Any, tuple[Library, Callable[..., None]] | None] = {}
on_registration.extend((_small_kernels.clear, _plain_calls.clear))


@traced_as(lambda *_: None)
def _sample_plain(
    mu: Any, sigma: Any, n: Any, backend: Any, seed: Any, generator: Any, noise: Any, fast_math: Any, out: Any
) -> Any:
    """The plain call with device arrays, recognised in two microseconds; None for every other, right or wrong."""
    try:
        plain_call = _plain_calls[backend, type(mu)]
    except (KeyError, TypeError):
        plain_call = _find_plain_call(backend, mu)
    if (
        plain_call is None
        or type(n) is not int
        or not 0 < n <= COLUMNS
        or type(fast_math) is not bool
        or not (noise is _INDEPENDENT or noise is _SHARED)
        or not (seed is None or (type(seed) is int and 0 <= seed < WORD_64 and generator is None))
        or not (generator is None or (type(generator) is Generator and not generator.graph_safe))
    ):
        return None
    library, launch = plain_call
    try:
        plain = library.plain(mu, sigma, n, out)
    except RuntimeError:  # A sparse tensor, say, which has no address; or no memory. The longer way says it.
        return None
    if plain is None:
        return None
    result, mu_at, sigma_at, out_at, d, dtype, device, stream = plain
    if not 0 < d <= ROWS:
        return None
    if seed is not None:
        offset = 0
    elif is_capturing(stream):
        return None
    elif generator is None and library.name == "torch":
        seed, offset = take_from_torch_default(device)
    else:
        seed, offset = (generator or DEFAULT_GENERATOR)._take()
    launch(mu_at, sigma_at, out_at, d, n, dtype, seed, offset, noise is _SHARED, fast_math, device, stream)
    if out is not None:
        library.was_written(out)
    return result


def _find_plain_call(backend: Any, mu: Any) -> tuple[Library, Callable[..., None]] | None:
    """What serves such calls; looked for once for each backend and type of array."""
    if is_number(mu):
        return None
    library = library_of("mu", mu)
    if library.device("mu", mu).kind != "cuda":
        return None
    if not library.is_plain_type(type(mu)):
        _plain_calls[backend, type(mu)] = None
        return None
    launch = choose(backend, library.name, "cuda").plain_launch()
    plain_call = None if launch is None else (library, launch)
    _plain_calls[backend, type(mu)] = plain_call
    return plain_call


def _is_plain_target(out: Any, shape: tuple[int, int], mu: HostArray, sigma: HostArray) -> bool:
    if type(out) is not ndarray or out.dtype is not mu.dtype or out.shape != shape or out is mu or out is sigma:
        return False
    flags = out.flags
    # Arrays that own their memory do not share it.
    return bool(flags.carray and flags.owndata and mu.flags.owndata and sigma.flags.owndata)


def _find_small_kernel(backend: Any, dtype: np.dtype[Any], layout: Layout) -> Callable[..., bool] | None:
    chosen = choose(backend, "numpy", "cpu")
    kernel = None
    if chosen.host_library == "numpy" and dtype.isnative and dtype.name in ("float32", "float64"):
        kernel = chosen.small_kernel(dtype.name, layout)
    _small_kernels.setdefault(layout, {}).setdefault(backend, {})[dtype] = kernel
    return kernel


def check_generator(generator: Any, library: Library, device: Device) -> None:
    if generator is None or isinstance(generator, Generator):
        return
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(generator, torch.Generator):
        raise TypeError(
            "generator: expected a multisample.Generator, or a torch.Generator with torch tensors,"
            f" got {describe(generator)} of type {type(generator).__name__}"
        )
    if library.name != "torch":
        raise TypeError(
            f"generator: expected a multisample.Generator with {library.name} arrays, got a torch.Generator"
        )
    if generator.device.type != device.kind or (generator.device.index or 0) != device.ordinal:
        raise ValueError(f"generator: expected one on the device of mu, {device}, got one on {generator.device}")


def captured_offset(generator: Any, library: Library, device: Device) -> tuple[int, Any]:
    """Seed and offset of a call that is captured into a CUDA graph; each replay draws the offset, a tensor.

    Raises
    ------
    RuntimeError
        If it would be the same in each replay.
    """
    if library.name != "torch" or isinstance(generator, Generator):
        raise RuntimeError(_NOT_CAPTURED)
    from .torch._dispatched import SEED, draw_offset

    try:
        return SEED, draw_offset(str(device), generator)
    except RuntimeError as error:  # The graph is not PyTorch's, or it does not know the generator.
        raise RuntimeError(f"{_NOT_CAPTURED}; PyTorch's cannot be drawn from here: {error}") from error


def seed_and_offset(seed: int | None, generator: Any, library: Library, device: Device) -> tuple[int, int]:
    if seed is not None:
        return seed, 0
    if isinstance(generator, Generator):
        return generator._take()
    if library.name == "torch":
        return take_from_torch(generator, str(device))
    return DEFAULT_GENERATOR._take()
