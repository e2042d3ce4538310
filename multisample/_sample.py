"""The one call. It reads top to bottom: check, choose, look at the arrays, allocate, launch, hand over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy import empty, ndarray

from multisample.backends.contract import DeviceArray, HostArray, RawArray

from ._arguments import ITEMSIZES, check_choice, check_flag, checked_integer, describe, dtype_name
from ._dispatch import choose
from ._generator import DEFAULT_GENERATOR, WORD_64, Generator, take_from_torch
from ._libraries import Device, Library, Operand, library_called, library_of
from ._values import check_values

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
    layout: Literal["dn"] = "dn",
    antithetic: Literal[False] = False,
) -> Any:
    """@DOC"""
    if (
        type(mu) is type(sigma) is ndarray
        and out is dtype is None
        and noise is _INDEPENDENT
        and layout is _DN
        and fast_math is validate is antithetic is False
        and dim_offset is sample_offset is _ZERO
    ):
        result = _sample_small(mu, sigma, n, backend, seed, generator)
        if result is not None:
            return result
    n = checked_integer("n", n, 0, COLUMNS + 1)
    dim_offset = checked_integer("dim_offset", dim_offset, 0, ROWS + 1)
    sample_offset = checked_integer("sample_offset", sample_offset, 0, COLUMNS + 1)
    if sample_offset + n > COLUMNS:
        raise ValueError(f"n: expected sample_offset + n <= 2**34, got {sample_offset} + {n}")
    check_choice("noise", noise, ("independent", "shared"))
    check_choice("layout", layout, ("dn",), " in this version")
    for name, flag in (("fast_math", fast_math), ("validate", validate), ("antithetic", antithetic)):
        check_flag(name, flag)
    check_choice("antithetic", antithetic, (False,), " in this version")
    if dtype is not None:
        dtype = dtype_name(dtype)
    if seed is not None:
        if generator is not None:
            raise TypeError("seed, generator: expected one of the two, got both")
        seed = checked_integer("seed", seed, 0, WORD_64)

    caller = _common_library(mu, sigma, out)
    name, vector = ("sigma", sigma) if _is_number(mu) else ("mu", mu)
    device = caller.device(name, vector)
    _check_generator(generator, caller, device)
    chosen = choose(backend, caller.name, device.kind)

    # Memory is the caller's library's, unless that has none which the backend could use.
    library = caller
    if caller.foreign or (caller.name == "numpy" and chosen.host_library != "numpy"):
        if caller.name == "numpy" and out is not None:
            raise ValueError(
                f"out: backend {chosen.name!r} writes {chosen.host_library} arrays, got a NumPy array"
            )
        library = library_called(chosen.host_library)
        mu, sigma = (x if _is_number(x) else chosen.adopt(x) for x in (mu, sigma))

    operands = {
        name: library.operand(name, x)
        for name, x in (("mu", mu), ("sigma", sigma))
        if not _is_number(x)
    }
    d = _dimensions(operands)
    if dim_offset + d > ROWS:
        raise ValueError(f"dim_offset: expected dim_offset + d <= 2**32, got {dim_offset} + {d}")
    if dtype is None:
        dtype = _promoted([operand.counts_as for operand in operands.values()])
    caller.check_dtype(dtype)
    device = _common_device(operands)
    raw_mu, raw_sigma = (
        _raw_vector(x, operands.get(name), d, device, dtype)
        for name, x in (("mu", mu), ("sigma", sigma))
    )
    _check_values(raw_mu, raw_sigma, library, mu, sigma, validate)

    if out is None:
        result = library.empty(d, n, dtype, device)
        raw_out = library.operand("out", result).raw
    else:
        result = out
        target = library.operand("out", chosen.adopt(out) if caller.foreign else out)
        _check_out(target, operands, d, n, dtype, device)
        raw_out = target.raw

    # Last of all, so that a call that raises has taken nothing.
    seed, offset = _seed_and_offset(seed, generator, caller, device)
    if d > 0 and n > 0:
        chosen.launch(
            raw_mu, raw_sigma, raw_out, dtype, seed, offset, dim_offset, sample_offset,
            noise == "shared", bool(fast_math),
            device.index, library.stream(device, sigma if _is_number(mu) else mu),
        )  # fmt: skip
    return result if out is not None else caller.hand_over(result)


# Told apart by identity, which is quick; an equal object that is another one only takes the longer way.
_INDEPENDENT, _DN, _ZERO = "independent", "dn", 0
# Normals that take no longer to draw than a call's arguments to check in full.
_SMALL = 1 << 14
_small_kernels: dict[str, dict[Any, Callable[..., bool] | None]] = {}


def _sample_small(
    mu: HostArray, sigma: HostArray, n: Any, backend: Any, seed: Any, generator: Any
) -> HostArray | None:
    """The plain small call, recognised in half a microsecond; None for every other, right or wrong."""
    shape, real = mu.shape, mu.dtype
    if type(n) is not int or sigma.shape != shape or sigma.dtype is not real:
        return None
    try:
        (d,) = shape
        kernel = _small_kernels[backend][real] if 0 < d * n <= _SMALL else None
    except (KeyError, TypeError, ValueError):
        kernel = _find_small_kernel(backend, real) if len(shape) == 1 else None
    if kernel is None:
        return None
    if seed is None:
        if generator is None:
            generator = DEFAULT_GENERATOR
        elif type(generator) is not Generator:
            return None
        seed, offset = generator.take()
    elif type(seed) is int and 0 <= seed < WORD_64 and generator is None:
        offset = 0
    else:
        return None
    result = empty((d, n), real)
    if kernel(mu, sigma, result, seed, offset):
        return result
    if generator is not None:
        generator.put_back(offset)
    return None


def _find_small_kernel(backend: Any, dtype: np.dtype[Any]) -> Callable[..., bool] | None:
    chosen = choose(backend, "numpy", "cpu")
    kernel = None
    if chosen.host_library == "numpy" and dtype.isnative and dtype.name in ("float32", "float64"):
        kernel = chosen.small_kernel(dtype.name)
    _small_kernels.setdefault(backend, {})[dtype] = kernel
    return kernel


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, (bool, np.generic))


def _common_library(mu: Any, sigma: Any, out: Any) -> Library:
    arrays = {name: x for name, x in (("mu", mu), ("sigma", sigma)) if not _is_number(x)}
    if not arrays:
        raise TypeError(
            f"mu, sigma: expected at least one array of shape (d,), got the numbers {mu} and {sigma}"
        )
    if out is not None:
        arrays["out"] = out
    libraries = {name: library_of(name, x) for name, x in arrays.items()}
    first = next(iter(libraries.values()))
    if any(library is not first for library in libraries.values()):
        raise TypeError(
            f"{', '.join(libraries)}: expected arrays of one library, got "
            + ", ".join(f"{name} of {library.name}" for name, library in libraries.items())
        )
    return first


def _check_generator(generator: Any, library: Library, device: Device) -> None:
    if generator is None or isinstance(generator, Generator):
        return
    if type(generator).__module__.partition(".")[0] != "torch":
        raise TypeError(
            "generator: expected a multisample.Generator, or a torch.Generator with torch tensors,"
            f" got {describe(generator)} of type {type(generator).__name__}"
        )
    if library.name != "torch":
        raise TypeError(
            f"generator: expected a multisample.Generator with {library.name} arrays, got a torch.Generator"
        )
    if generator.device.type != device.kind or (generator.device.index or 0) != device.index:
        raise ValueError(
            f"generator: expected one on the device of mu, {device}, got one on {generator.device}"
        )


def _dimensions(operands: dict[str, Operand]) -> int:
    """The common length of the vectors."""
    lengths: dict[str, int] = {}
    for name, operand in operands.items():
        shape = operand.shape
        if len(shape) == 1 or (len(shape) == 2 and shape[1] == 1):
            lengths[name] = shape[0]
        elif shape:
            raise ValueError(f"{name}: expected shape (d,) or (d, 1), got {shape}")
    if not lengths:
        raise ValueError("mu, sigma: expected at least one of shape (d,), got no dimension in either")
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"sigma: expected as many elements as mu, {lengths['mu']}, got {lengths['sigma']}"
        )
    return next(iter(lengths.values()))


def _promoted(dtypes: list[str]) -> str:
    """NumPy's promotion among the floating types."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return "float64" if "float64" in dtypes else "float32"


def _common_device(operands: dict[str, Operand]) -> Device:
    first, *others = operands.items()
    for name, operand in others:
        if operand.device != first[1].device:
            raise ValueError(
                f"{name}: expected it on the device of {first[0]}, {first[1].device}, got {operand.device}"
            )
    return first[1].device


def _raw_vector(
    x: Any, operand: Operand | None, d: int, device: Device, dtype: str
) -> RawArray | float:
    """Argument `x`, shape (d,), as `Backend.launch` takes it."""
    if operand is not None and isinstance(operand.raw, DeviceArray):
        strides = operand.raw.strides[:1] or (0,)
        return operand.raw._replace(shape=(d,), strides=strides)
    if device.kind != "cpu":
        return float(x)
    real = np.float64 if dtype == "float64" else np.float32
    values: HostArray = np.asarray(x) if operand is None else operand.raw
    if operand is not None and operand.dtype == "float16":
        values = values.view(np.float16)
    elif operand is not None and operand.dtype == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if values.dtype != real:
        with np.errstate(over="ignore"):  # What overflows here is reported as not finite.
            values = values.astype(real)
    if values.ndim == 2:
        values = values[:, 0]
    return values if values.ndim == 1 else np.broadcast_to(values, (d,))


def _check_values(
    raw_mu: Any, raw_sigma: Any, library: Library, mu: Any, sigma: Any, validate: bool
) -> None:
    """Host values always; device values only when asked to, since reading them means waiting for the device."""
    on_host = isinstance(raw_mu, np.ndarray)
    vectors = []
    for raw, x in ((raw_mu, mu), (raw_sigma, sigma)):
        if on_host:
            vectors.append(raw)
        elif isinstance(raw, float):
            vectors.append(np.full(1, raw))
        elif validate:
            vectors.append(library.to_host(x).astype(np.float64).reshape(-1))
        else:
            vectors.append(np.zeros(0))
    check_values(*vectors)


def _check_out(
    out: Operand, inputs: dict[str, Operand], d: int, n: int, dtype: str, device: Device
) -> None:
    if out.shape != (d, n):
        raise ValueError(f"out: expected shape {(d, n)}, got {out.shape}")
    if out.dtype != dtype:
        raise ValueError(f"out: expected dtype {dtype}, got {out.dtype}")
    if out.device != device:
        raise ValueError(f"out: expected it on the device of mu and sigma, {device}, got {out.device}")
    if _overlaps_itself(out.raw):
        raise ValueError(
            f"out: expected an element of memory for every sample, got strides {out.raw.strides}"
            f" with which samples overlap"
        )
    for name, operand in inputs.items():
        if _overlap(out.raw, operand.raw):
            raise ValueError(f"out: expected memory of its own, got memory that {name} also uses")


def _itemsize(raw: RawArray) -> int:
    return raw.itemsize if isinstance(raw, np.ndarray) else ITEMSIZES[raw.dtype]


def _overlaps_itself(raw: RawArray) -> bool:
    # Nested dimensions: each steps over all that lies within the one below.
    extent = _itemsize(raw)
    for stride, length in sorted(zip(map(abs, raw.strides), raw.shape, strict=True)):
        if length > 1:
            if stride < extent:
                return True
            extent += stride * (length - 1)
    return False


def _overlap(a: RawArray, b: RawArray) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.may_share_memory(a, b) and np.shares_memory(a, b)
    (a_low, a_high), (b_low, b_high) = _bounds(a), _bounds(b)
    return a_low < b_high and b_low < a_high


def _bounds(raw: Any) -> tuple[int, int]:
    if 0 in raw.shape:
        return 0, 0
    steps = [stride * (length - 1) for stride, length in zip(raw.strides, raw.shape, strict=True)]
    low = raw.pointer + sum(step for step in steps if step < 0)
    return low, raw.pointer + sum(step for step in steps if step > 0) + _itemsize(raw)


def _seed_and_offset(
    seed: int | None, generator: Any, library: Library, device: Device
) -> tuple[int, int]:
    if seed is not None:
        return seed, 0
    if isinstance(generator, Generator):
        return generator.take()
    if library.name == "torch":
        return take_from_torch(generator, str(device))
    return DEFAULT_GENERATOR.take()
