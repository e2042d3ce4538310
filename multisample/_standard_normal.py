"""`standard_normal`: normals of any shape. They are one row of the sample matrix, with a mean of 0."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

import numpy as np

from multisample.backends.launch import Operation
from multisample.backends.system.cuda_driver import synchronize

from ._arguments import DTYPES, UNCHECKED, checked_integer, describe, dtype_name, is_constant
from ._checks.window_and_options import checked_lengths
from ._libraries import HOST, Library, described, library_of
from ._libraries.jax import is_jax
from ._libraries.numpy import cached_dtype
from ._operations import COLUMNS, Call
from ._plan import PLANS
from ._randomness.generator import Key
from ._randomness.generator_argument import is_listed
from ._randomness.seed_argument import SINGLE_SEEDS, batch_of, is_in_array, signature_of
from ._routes import run_first
from ._tracing import is_traced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._randomness.generator import Generator
    from ._typing import DType, Seed


def standard_normal(
    size: SupportsIndex | Sequence[SupportsIndex],
    *,
    seed: Seed | None = None,
    generator: Generator | Sequence[Generator] | None = None,
    dtype: DType | None = None,
    out: Any = None,
    start: SupportsIndex = 0,
) -> Any:
    """Draw standard normals of any shape, as NumPy's ``Generator.standard_normal`` does.

    Element e, counted in row-major order, is the normal ``z[0, start + e]`` of `multisample.sample`. So the numbers do
    not depend on the shape.

    Parameters
    ----------
    size : int or tuple of int
        Shape of the result. With B seeds, the first length is B, and element b is ``standard_normal(size[1:],
        seed=seed[b])``: all are drawn in one launch.
    seed, generator : optional
        As for `multisample.sample`. A list of B generators gives one key for each element, as B seeds do. For a key of
        JAX, call `multisample.jax.normal`.
    dtype : {"float16", "bfloat16", "float32", "float64"}, optional
        Type of the result; float64 by default, or that of `out`.
    out : array of shape `size`, optional
        Destination: an array of NumPy, PyTorch, CuPy or Numba, whose axes flatten without a copy; returned.
    start : int, default 0
        The first element of the window: ``standard_normal(b - a, seed=s, start=a)`` equals
        ``standard_normal(b, seed=s)[a:]``, bit for bit. ``start`` plus the number of elements is at most 2**34.

    Returns
    -------
    array of shape `size`
        `out`, or a NumPy array.

    Raises
    ------
    TypeError
        If `size`, `seed` or `start` is no integer, or `dtype` or `out` is not accepted.
    ValueError
        If a value is out of range, if the first length is not the number of seeds or generators, or if `out` does not
        fit.

    Notes
    -----
    The numbers equal row 0 of `multisample.sample`, and the normals that `multisample.perturb` adds to its parameter 0
    as member 0, for the same key. Take a key for each use: ``seed=generator.take()``.

    Examples
    --------
    >>> import multisample
    >>> z = multisample.standard_normal((2, 3), seed=7, dtype="float32")
    >>> bool((z.reshape(-1) == multisample.sample([0.0], [1.0], 6, seed=7)[0]).all())
    True
    >>> batch = multisample.standard_normal((2, 2, 3), seed=[7, 8], dtype="float32")
    >>> bool((batch[0] == z).all())
    True
    """
    library = HOST if out is None or type(out) is np.ndarray else library_of("out", out)
    if library is HOST:
        try:
            kind, pair = _HOST_PAIRS[dtype if dtype is not None or out is None else out.dtype]
        except (AttributeError, KeyError, TypeError):
            kind, pair = _host_pair(dtype, out)
        return normals(HOST, (), kind, pair, size, seed, generator, out, start)
    device = library.device("out", out)
    if library.foreign or not (device.kind == "cuda" or library.name == "torch"):
        raise TypeError(f"out: expected an array of NumPy, PyTorch, CuPy or Numba, got {described(out)}")
    kind = library.describe("out", out).dtype if dtype is None else dtype_name(dtype), device
    on_device = _DEVICE_PAIRS.get((library.name, device))
    if on_device is None:
        zero, one = (library.to_device(np.array([x]), device) for x in (0, 1))
        if device.kind == "cuda":  # Other streams will read the pair.
            synchronize(device.ordinal)
        on_device = _DEVICE_PAIRS[library.name, device] = zero, one
    return normals(library, library.state(), kind, on_device, size, seed, generator, out, start)


Pair: TypeAlias = tuple[Any, Any]
"""A mean of 0 and a standard deviation of 1, arrays of shape (1,)."""

_HOST_PAIRS: dict[Any, tuple[Hashable, Pair]] = {}
_DEVICE_PAIRS: dict[Hashable, Pair] = {}


def _host_pair(dtype: Any, out: Any) -> tuple[Hashable, Pair]:
    """The kind and the pair for NumPy arrays of type `dtype`, or that of `out`."""
    found = dtype
    if dtype is None:
        found = out.dtype if getattr(getattr(out, "dtype", None), "name", None) in DTYPES else np.dtype(np.float64)
    name = dtype_name(found)
    made = (name,), (np.zeros(1, cached_dtype(name)), np.ones(1, cached_dtype(name)))
    if is_constant(found):
        _HOST_PAIRS[found if dtype is not None or out is not None else None] = made
    return made


def normals(
    library: Library, state: Any, kind: Any, pair: Pair, size: Any, seed: Any, generator: Any, out: Any, start: Any
) -> Any:  # fmt: skip
    """Standard normals from arrays `pair` of `library` in `state`; `kind` is the name of the type, and the device."""
    key: Any = None
    plan = None
    if state is not None:  # See the key of `sample`.
        try:
            key = (
                "normals", library, kind, size, type(size), state, type(seed), type(generator), type(start),
                None if out is None else library.target_signature(out),
            )  # fmt: skip
            if type(size) is tuple:
                key = key, *map(type, size)
            if type(seed) not in SINGLE_SEEDS and is_in_array(seed):
                key = key, signature_of(seed)
            plan = PLANS.get(key)
        except Exception:  # A wrong argument may raise anything here; `_first` reports the error.
            key = None
    if plan is not None:
        try:
            return plan.run(*pair, None, out, seed, generator, 0, start)[0]
        except ValueError:  # `_first` names the arguments of this function.
            key = None
    return _first(key, kind[0], pair, size, seed, generator, out, start)


def _first(key: Any, dtype: str, pair: Pair, size: Any, seed: Any, generator: Any, out: Any, start: Any) -> Any:
    """A call without a plan."""
    shape = checked_lengths("size", size)
    if type(start) is not int or isinstance(size, list) or is_listed(generator):
        key = None  # Plans take Python's integers only, and one generator.
    start = checked_integer("start", start, 0, COLUMNS + 1)
    if not is_traced() and any(map(is_jax, seed if isinstance(seed, Key) else (seed,))):
        raise TypeError(f"seed: expected no key or array of JAX, got {describe(seed)}; use multisample.jax.normal")
    batch, noun = (len(generator), "generators") if is_listed(generator) else (batch_of(seed), "seeds")
    lengths = shape
    if batch is not None:
        if not shape or shape[0] != batch:
            raise ValueError(f"size: expected the first length to be the number of {noun}, {batch}, got {shape}")
        lengths = shape[1:]
    count = math.prod(lengths)
    if start + count > COLUMNS:
        raise ValueError(f"size: expected start + elements <= 2**34, got {start} + {count}")
    call = Call(
        Operation.sample, *pair, count, "auto", seed, "independent", dtype, False, 0, start, False, generator, out,
        UNCHECKED, shape=shape,
    )  # fmt: skip
    return run_first(call, key, _repeated)


def _repeated(
    mu: Any, sigma: Any, *, seed: Any, generator: Any, dtype: Any, out: Any, sample_offset: Any, shape: Any
) -> Any:  # fmt: skip
    """A call of `_first` with some arguments replaced."""
    library, kind = library_of("mu", mu), (dtype, getattr(mu, "device", None))
    return normals(library, library.state(), kind, (mu, sigma), shape, seed, generator, out, sample_offset)
