"""Checks that the shapes, types, strides, devices and memory of the arrays of a call match."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from multisample.backends.element_types import SIZES

from .._arguments import describe
from .._libraries import HOST, Device, Library, Operand, check_memory, described, is_number, library_of
from .._libraries.library import INTEGER_SIZES
from .._operations import Call, vectors_of
from .._randomness.seed_argument import batch_of
from .._tracing import is_symbol
from .window_and_options import check_rows, checked_window

_ITEM_SIZES = SIZES | INTEGER_SIZES


def item_size(dtype: str) -> int:
    """Bytes per element."""
    return _ITEM_SIZES[dtype]


class Inputs(NamedTuple):
    """The arrays that a call reads, and the properties of the results that follow from them."""

    operands: dict[str, Operand]
    """The arrays by name; numbers are left out."""
    d: int
    n: int
    dtype: str
    """Type of the sample, or of the moments."""
    device: Device
    batch: int | None = None
    """How many matrices; None without a vector of seeds."""


def with_scalars(call: Call) -> Call:
    """`call` with a Python number or a 0-d array in place of each NumPy scalar; `call` itself if nothing changes.

    NumPy and JAX promote 0-d arrays of NumPy. Beside arrays of other libraries, which cannot read these arrays, they
    become Python numbers too. CuPy and Numba promote as NumPy does; PyTorch and unknown libraries ignore the type.
    """
    scalars = {
        name: np.asarray(x)
        for name, x in (("mu", call.mu), ("sigma", call.sigma))
        if isinstance(x, np.generic) or (type(x) is np.ndarray and x.ndim == 0)
    }
    others = {name: x for name, x in vectors_of(call).items() if not (name in scalars or is_number(x))}
    if not (scalars and others):
        return call
    changed: dict[str, Any] = scalars
    library = library_of(*next(iter(others.items())))
    if library is not HOST and library.name != "jax":
        counts_as = [HOST.describe(name, x).counts_as for name, x in scalars.items()]
        changed = {name: (int if x.dtype.kind in "iu" else float)(x) for name, x in scalars.items()}
        if call.dtype is None and library.name in ("cupy", "numba"):
            counts_as += [library.describe(name, x).counts_as for name, x in others.items() if name != "weights"]
            changed["dtype"] = promoted(counts_as)
    elif not any(isinstance(getattr(call, name), np.generic) for name in scalars):
        return call
    return call._replace(**changed)


def check_arrays(call: Call) -> None:
    """TypeError if neither `mu` nor `sigma` is an array."""
    if is_number(call.mu) and is_number(call.sigma):
        raise TypeError(
            f"mu, sigma: expected at least one array of shape (d,), got the numbers {call.mu} and {call.sigma}"
        )


def common_library(call: Call) -> Library:
    """The library of all arrays of a call; TypeError if there are several libraries, or no array."""
    vectors = vectors_of(call)
    check_arrays(call)
    if is_number(vectors.get("weights")):
        raise TypeError(f"weights: expected an array of shape (n,), got the number {describe(call.weights)}")
    arrays = {name: x for name, x in vectors.items() if not is_number(x)}
    if call.out is not None:
        arrays["out"] = call.out
    libraries = {name: library_of(name, x) for name, x in arrays.items()}
    first = next(iter(libraries.values()))
    if any(library is not first for library in libraries.values()):
        raise TypeError(
            f"{', '.join(libraries)}: expected arrays of one library, got "
            + ", ".join(f"{described(x)} as {name}" for name, x in arrays.items())
            + _conversion(libraries)
        )
    if call.out is not None:
        first.check_target(call.out)
    return first


_CONVERSIONS = {
    "torch": "torch.as_tensor({}, device={}.device)", "cupy": "cupy.asarray({})", "numba": "numba.cuda.to_device({})",
}  # fmt: skip


def _conversion(libraries: dict[str, Library]) -> str:
    """Advice to convert the host arrays, if the other arrays are all of one library; empty otherwise."""
    other = {library.name: name for name, library in libraries.items() if library is not HOST}
    host = [name for name, library in libraries.items() if library is HOST]
    if len(other) != 1 or not other.keys() <= _CONVERSIONS.keys() or not host:
        return ""
    ((library, model),) = other.items()
    return "; convert " + " and ".join(f"{name}: {_CONVERSIONS[library].format(name, model)}" for name in host)


def inspect_inputs(library: Library, call: Call) -> Inputs:
    """Check the operands of a call, which are arrays of `library` or numbers, and its window.

    A `dtype` of None promotes the types of `mu` and `sigma`.
    """
    if call.grad is not None:
        matrix = library.describe("grad", call.grad)
        *batches, d, n = matrix.shape
        d, n = (n, d) if call.layout == "nd" else (d, n)
        return Inputs({"matrix": matrix}, d, n, matrix.dtype, matrix.device, *batches)
    operands = {name: library.describe(name, x) for name, x in vectors_of(call).items() if not is_number(x)}
    for name, operand in operands.items():
        check_alignment(name, operand, 0)
    rows = {name: operand for name, operand in operands.items() if name != "weights"}
    batch = batch_of(call.seed)
    d, n = common_length({name: operand.shape for name, operand in rows.items()}, batch), call.n
    dtype = promoted([rows[name].counts_as for name in library.counted(rows)]) if call.dtype is None else call.dtype
    if "weights" in operands:
        n = count_weights(operands["weights"].shape, batch)
        checked_window(n, call.dim_offset, call.sample_offset)
    (first, model), *rest = operands.items()
    for name, operand in rest:
        if operand.device != model.device:
            raise ValueError(f"{name}: expected it on the device of {first}, {model.device}, got {operand.device}")
    check_rows(call.dim_offset, d)
    if (batch or 0) * d * n >= 2**63:
        raise ValueError(f"seed: expected B d n < 2**63 elements, got B = {batch}, d = {d}, n = {n}")
    return Inputs(operands, d, n, dtype, model.device, batch)


def count_weights(shape: tuple[int, ...], batch: int | None) -> int:
    if batch is not None and len(shape) == 2 and shape[0] == batch:
        shape = shape[1:]
    if len(shape) != 1 or shape[0] == 0:
        accepted = "(n,)" if batch is None else f"(n,) or (B, n), B being {batch} seeds,"
        raise ValueError(f"weights: expected shape {accepted}, n being at least 1, got {shape}")
    return shape[0]


_OTHERWISE = ", pass a vector of seeds, or use multisample.torch.Normal"


def common_length(shapes: dict[str, tuple[int, ...]], batch: int | None = None, hint: str = _OTHERWISE) -> int:
    """The number of dimensions d of vectors with these shapes, for `batch` seeds; ValueError if they have no common d.

    Without a batch, a vector may have shape (d, 1).
    """
    lengths: dict[str, int] = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            lengths[name] = shape[0]
        elif len(shape) == 2 and batch is not None:
            if _differ(shape[0], batch):
                raise ValueError(f"{name}: expected shape (B, d) or (d,), B being {batch} seeds, got {shape}")
            lengths[name] = shape[1]
        elif len(shape) == 2 and not is_symbol(shape[1]) and shape[1] == 1:
            lengths[name] = shape[0]
        elif shape and batch is not None:
            raise ValueError(f"{name}: expected shape (B, d) or (d,), B being {batch} seeds, got {shape}")
        elif shape:
            advice = f"for several distributions flatten them{hint}"
            if name == "sigma" and len(shape) == 2 and shape[0] == shape[1]:
                advice = (
                    "for a covariance matrix, multiply standard normals by its Cholesky factor, as WHEN_NOT.md (Other"
                    f" distributions) does; {advice}"
                )
            raise ValueError(f"{name}: expected shape (d,) or (d, 1), got {shape}; {advice}")
    if not lengths:
        raise ValueError("mu, sigma: expected at least one of shape (d,), got only scalars")
    d = next(iter(lengths.values()))
    if any(_differ(length, d) for length in lengths.values()):
        raise ValueError(f"sigma: expected as many elements as mu, {lengths['mu']}, got {lengths['sigma']}")
    return d


def _differ(a: Any, b: Any) -> bool:
    """Whether two lengths are known to differ."""
    return not (is_symbol(a) or is_symbol(b)) and bool(a != b)


def promoted(dtypes: list[str]) -> str:
    """NumPy's promotion of floating types."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return "float64" if "float64" in dtypes else "float32"


def check_alignment(name: str, operand: Operand, address: int) -> None:
    """ValueError unless device elements lie at multiples of their size. Host elements may lie anywhere."""
    itemsize = item_size(operand.dtype)
    if operand.device.kind == "cuda" and any(size % itemsize for size in (address, *operand.strides)):
        raise ValueError(
            f"{name}: expected elements at multiples of their size, {itemsize} bytes,"
            f" got address {address:#x} and strides {operand.strides}"
        )


def extent(operand: Operand) -> tuple[int, int]:
    """Begin and end of an array's bytes, relative to the address of its first element."""
    if 0 in operand.shape:
        return 0, 0
    low, high = 0, item_size(operand.dtype)
    for stride, length in zip(operand.strides, operand.shape, strict=True):
        if stride < 0:
            low += stride * (length - 1)
        else:
            high += stride * (length - 1)
    return low, high


# --- out ----------------------------------------------------------------------------------------------------------


def check_out(operand: Operand, inputs: Inputs, shape: tuple[int, ...]) -> None:
    """ValueError if `out` cannot hold the result."""
    if operand.shape != shape:
        raise ValueError(f"out: expected shape {shape}, got {operand.shape}")
    if operand.dtype != inputs.dtype:
        raise ValueError(f"out: expected dtype {inputs.dtype}, got {operand.dtype}")
    if operand.device != inputs.device:
        raise ValueError(f"out: expected it on the device of mu and sigma, {inputs.device}, got {operand.device}")
    if 0 in shape:
        return
    itemsize = item_size(operand.dtype)
    if any(stride % itemsize for stride in operand.strides):
        raise ValueError(f"out: expected strides of whole elements, {itemsize} bytes, got {operand.strides}")
    if _overlaps_itself(operand):
        raise ValueError(
            f"out: expected elements that do not overlap, got strides {operand.strides} under which they overlap"
        )


def _overlaps_itself(operand: Operand) -> bool:
    *_, s, t = map(abs, operand.strides)
    *batch, _, _ = shape = operand.shape
    if batch and batch[0] > 1:  # Refuses interleaved matrices.
        low, high = extent(operand._replace(shape=shape[1:], strides=operand.strides[1:]))
        if abs(operand.strides[0]) < high - low:
            return True
    shape = shape[-2:]
    # Two elements share an address if `a` row strides equal `b` column strides: a * s == b * t.
    # Test the smallest such pair, a = t / gcd and b = s / gcd.
    common = math.gcd(s, t)
    if common == 0:
        return shape != (1, 1)
    return t // common < shape[0] and s // common < shape[1]


def target_checker(
    out: Operand, inputs: Inputs, names: Iterable[str], library: Library, takes_arrays: bool, is_empty: bool,
    seed: Operand | None = None,
) -> Callable[[Any, Any, tuple[Any, ...], tuple[Any, ...]], None]:  # fmt: skip
    """``check(out, at, read, addresses)``: ValueError if `out` has no memory, is misaligned, or shares memory.

    `read` is mu, sigma, weights and the seed; `names` are those of the vectors among them. `seed` describes a seed in
    device memory.
    """
    on_device, (low, high), share_memory = out.device.kind == "cuda", extent(out), library.share_memory
    mask = item_size(out.dtype) - 1 if on_device else 0
    arrays = [
        (k, name, *extent(operand), on_device or (operand.read is None and not takes_arrays))
        for k, name in enumerate(names)
        if (operand := inputs.operands.get(name)) is not None and not is_empty
    ]
    if seed is not None and not is_empty:
        arrays.append((3, "seed", *extent(seed), True))

    def check(out: Any, at: Any, read: tuple[Any, ...], addresses: tuple[Any, ...]) -> None:
        if not takes_arrays:
            if not (at or is_empty):
                check_memory(at)
            if at & mask:
                check_alignment("out", library.describe("out", out), at)
        for k, name, begin, end, has_address in arrays:
            if has_address and not (at + low < addresses[k] + end and addresses[k] + begin < at + high):
                continue
            # On a device, overlapping address ranges count as shared memory.
            if on_device or share_memory(out, read[k]):
                raise ValueError(f"out: expected memory of its own, got memory that {name} also uses")

    return check
