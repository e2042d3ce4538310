"""Checks that the shapes, types, strides, devices and memory of the arrays of a call match."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from multisample.backends.contract import HostArray
from multisample.backends.element_types import SIZES
from multisample.backends.launch import Operation

from .._arguments import describe
from .._libraries import HOST, Device, Library, Operand, check_memory, described, is_number, library_of
from .._libraries.library import INTEGER_SIZES
from .._operations import Call, vectors_of
from .._randomness.seed_argument import batch_of
from .._tracing import is_one, is_symbol
from .values import in_turn
from .window_and_options import check_rows, checked_window, count_of

ITEM_SIZES = SIZES | INTEGER_SIZES


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
    shape: tuple[int, ...] = ()
    """Shape of the sample."""
    dims: tuple[int, ...] = ()
    """Shape of the dimensions."""
    reshaped: frozenset[str] = frozenset()
    """The operands whose arrays have other shapes than the operands."""


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
    if is_number(call.mu) and is_number(call.sigma):
        raise TypeError(
            f"mu, sigma: expected at least one array, of shape (d,) or S, got the numbers {call.mu} and {call.sigma}"
        )
    if is_number(call.weights):
        raise TypeError(f"weights: expected an array of shape (n,), got the number {describe(call.weights)}")


def common_library(call: Call) -> Library:
    """The library of all arrays of a call; TypeError if there are several libraries, or no array."""
    vectors = vectors_of(call)
    check_arrays(call)
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
    """Check the operands of a call, arrays of `library` or numbers, and its window. A `dtype` of None promotes."""
    if call.grad is not None:
        matrix = library.describe("grad", call.grad)
        *batches, d, n = matrix.shape
        d, n = (n, d) if call.layout == "nd" else (d, n)
        return Inputs({"matrix": matrix}, d, n, matrix.dtype, matrix.device, batches[0] if batches else None)
    operands = {name: library.describe(name, x) for name, x in vectors_of(call).items() if not is_number(x)}
    for name, operand in operands.items():
        check_alignment(name, operand, 0)
    rows = {name: operand for name, operand in operands.items() if name != "weights"}
    batch = batch_of(call.seed)
    shapes = {name: operand.shape for name, operand in rows.items()}
    n, reshaped = 0, frozenset[str]()
    dims: tuple[int, ...] = ()
    if call.operation == Operation.sample:
        n, dims = count_of(call.n), common_shape(shapes, batch)
        d = math.prod(dims)
        operands = {name: _flattened(x, dims, batch, library) for name, x in operands.items()}
        reshaped = frozenset(name for name, x in operands.items() if x.shape != shapes[name])
    else:
        d = common_length(shapes, batch)
    dtype = promoted([rows[name].counts_as for name in library.counted(rows)]) if call.dtype is None else call.dtype
    if "weights" in operands:
        n = count_weights(operands["weights"].shape, batch)
        checked_window(n, call.dim_offset, call.sample_offset)
    check_devices(operands)
    check_rows(call.dim_offset, d)
    if (batch or 0) * d * n >= 2**63:
        raise ValueError(f"seed: expected B d n < 2**63 elements, got B = {batch}, d = {d}, n = {n}")
    device = next(iter(operands.values())).device
    return Inputs(operands, d, n, dtype, device, batch, result_shape(dims, call, batch), dims, reshaped)


def check_devices(operands: dict[str, Any]) -> None:
    """ValueError unless the operands, or tensors, have the device of the first."""
    (first, model), *rest = operands.items()
    for name, operand in rest:
        if operand.device != model.device:
            raise ValueError(f"{name}: expected it on the device of {first}, {model.device}, got {operand.device}")


def count_weights(shape: tuple[int, ...], batch: int | None) -> int:
    if batch is not None and len(shape) == 2 and shape[0] == batch:
        shape = shape[1:]
    if len(shape) != 1 or shape[0] == 0:
        accepted = "(n,)" if batch is None else f"(n,) or (B, n), B being {batch} seeds,"
        raise ValueError(f"weights: expected shape {accepted}, n being at least 1, got {shape}")
    return shape[0]


# --- Shapes -------------------------------------------------------------------------------------------------------


def _is_vector(shape: tuple[int, ...]) -> bool:
    """Whether `shape` is (d,) or (d, 1)."""
    return len(shape) == 1 or (len(shape) == 2 and is_one(shape[1]))


def common_shape(shapes: dict[str, tuple[int, ...]], batch: int | None = None) -> tuple[int, ...]:
    """The shape S of the dimensions of a sample whose `mu` and `sigma` have these shapes; ValueError if there is none.

    With `batch` seeds, S is the shape of one element. Shapes (d,) and (d, 1) give (d,). Other shapes broadcast.
    """
    own = {name: shape[lead_axes(name, shape, batch) :] for name, shape in shapes.items()}
    arrays = [shape for shape in own.values() if shape]
    if arrays and all(map(_is_vector, arrays)):
        lengths = {name: shape[0] for name, shape in own.items() if shape}
        d = arrays[0][0]
        if _differ(arrays[-1][0], d):
            raise ValueError(f"sigma: expected as many elements as mu, {lengths['mu']}, got {lengths['sigma']}")
        return (d,)
    mu, sigma = own.get("mu", ()), own.get("sigma", ())
    is_square = len(sigma) == 2 and not any(map(is_symbol, (*mu, *sigma))) and sigma[0] == sigma[1]
    if is_square and mu == sigma[:1]:
        raise ValueError(
            f"sigma: expected shape (d,) or (d, 1) as mu is (d,), got {shapes['sigma']}; for a covariance matrix,"
            " multiply standard normals by its Cholesky factor, as COMMON_TASKS.md (A full covariance) does"
        )
    common: tuple[int, ...] = ()
    for axis in itertools.zip_longest(*[shape[::-1] for shape in arrays], fillvalue=1):
        longer = [length for length in axis if not is_one(length)]
        if len(longer) == 2 and _differ(*longer):
            raise ValueError(f"mu, sigma: expected shapes that broadcast, got {shapes['mu']} and {shapes['sigma']}")
        common = longer[0] if longer else 1, *common
    return common


def lead_axes(name: str, shape: tuple[int, ...], batch: int | None) -> int:
    """1 if the first axis of `shape` counts the `batch` seeds, else 0."""
    if batch is None or len(shape) < 2:
        return 0
    if _differ(shape[0], batch):
        raise ValueError(f"{name}: expected shape (B, *S) or (d,), B being {batch} seeds, got {shape}")
    return 1


def result_shape(dims: tuple[int, ...], call: Call, batch: int | None) -> tuple[int, ...]:
    """The shape of the sample of a call whose dimensions have the shape `dims`, with `batch` seeds."""
    if call.shape is not None:
        shape: tuple[int, ...] = call.shape
        return shape
    columns = tuple(call.n) if isinstance(call.n, tuple) else (call.n,)
    batches = () if batch is None else (batch,)
    return (*batches, *columns, *dims) if call.layout == "nd" else (*batches, *dims, *columns)


def matrix_shape(inputs: Inputs, layout: str) -> tuple[int, ...]:
    """The shape of the matrix that the kernel writes, or with a vector of seeds of the matrices."""
    batches = () if inputs.batch is None else (inputs.batch,)
    return (*batches, inputs.n, inputs.d) if layout == "nd" else (*batches, inputs.d, inputs.n)


def single_stride(shape: tuple[int, ...], strides: tuple[int, ...], default: int) -> int | None:
    """The stride of an array's elements in row-major order; `default` for less than two, None if there is no stride."""
    if 0 in shape:
        return default
    axes = [axis for axis in zip(shape, strides, strict=True) if axis[0] != 1]
    if any(outer != length * stride for (_, outer), (length, stride) in itertools.pairwise(axes)):
        return None
    return axes[-1][1] if axes else default


def _flattened(operand: Operand, dims: tuple[int, ...], batch: int | None, library: Library) -> Operand:
    """`operand` as a vector, or in a batch as (B, d). An array without a single stride is copied by each call."""
    lead = lead_axes("mu", operand.shape, batch)
    batches, own = operand.shape[:lead], operand.shape[lead:]
    if not own or (dims == own[:1] and len(operand.shape) < 3):
        return operand
    if not lead and math.prod(own) == 1:
        return operand._replace(shape=(), strides=())
    d, size = math.prod(dims), ITEM_SIZES[operand.dtype]
    stride = single_stride(own, operand.strides[lead:], size)
    if stride is not None and math.prod(own) == d:
        return operand._replace(shape=(*batches, d), strides=(*operand.strides[:lead], stride))
    aligned = (*batches, *(1,) * (len(dims) - len(own)), *own)
    flatten = library.flattener(aligned, (*batches, *dims), (*batches, d))
    read = flatten if operand.read is None else in_turn([operand.read, flatten])
    return operand._replace(shape=(*batches, d), strides=(d * size, size)[1 - lead :], read=read)


def common_length(shapes: dict[str, tuple[int, ...]], batch: int | None = None) -> int:
    """The common length d of shapes (d,) and (d, 1), or with `batch` seeds (d,) and (B, d); ValueError otherwise."""
    own = {name: shape[batch is not None and len(shape) == 2 :] for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if batch is None and own[name] and not _is_vector(own[name]):
            raise ValueError(f"{name}: expected shape (d,) or (d, 1), got {shape}; flatten it")
        if batch is not None and (len(shape) > 2 or (len(shape) == 2 and _differ(shape[0], batch))):
            raise ValueError(f"{name}: expected shape (B, d) or (d,), B being {batch} seeds, got {shape}")
    if not any(own.values()):
        raise ValueError("mu, sigma: expected at least one of shape (d,), got only scalars")
    return common_shape(own)[0]


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
    itemsize = ITEM_SIZES[operand.dtype]
    if operand.device.kind == "cuda" and any(size % itemsize for size in (address, *operand.strides)):
        raise ValueError(
            f"{name}: expected elements at multiples of their size, {itemsize} bytes,"
            f" got address {address:#x} and strides {operand.strides}"
        )


def extent(operand: Operand) -> tuple[int, int]:
    """Begin and end of an array's bytes, relative to the address of its first element."""
    if 0 in operand.shape:
        return 0, -(2**62)  # An empty range: it ends before any other begins.
    steps = [stride * (length - 1) for stride, length in zip(operand.strides, operand.shape, strict=True)]
    return sum(min(step, 0) for step in steps), ITEM_SIZES[operand.dtype] + sum(max(step, 0) for step in steps)


def ranges_of(operands: Sequence[Operand]) -> HostArray:
    """Begin and end of the bytes of each array, relative to its address; shape (2, number of arrays)."""
    table: HostArray = np.array([extent(operand) for operand in operands], np.int64).reshape(-1, 2).T
    return table


def check_unwritten(name: str, operand: Operand, address: int, targets: HostArray, ranges: HostArray) -> None:
    """ValueError if a kernel that writes arrays at `targets` would also write the array `name`, which it reads.

    `ranges` are the `ranges_of` the written arrays. As for `sample` on a device, overlapping ranges count as overlap.
    """
    low, high = extent(operand)
    begins, ends = targets + ranges
    if ((begins < address + high) & (address + low < ends)).any():
        raise ValueError(f"{name}: expected memory that is not written, got memory that out also uses")


# --- out ----------------------------------------------------------------------------------------------------------


def checked_out(operand: Operand, inputs: Inputs, layout: str) -> Operand:
    """`out` as a matrix, or in a batch as matrices; ValueError if `out` cannot hold the result."""
    shape = inputs.shape
    if operand.shape != shape:
        raise ValueError(f"out: expected shape {shape}, got {operand.shape}")
    if operand.dtype != inputs.dtype:
        raise ValueError(f"out: expected dtype {inputs.dtype}, got {operand.dtype}")
    if operand.device != inputs.device:
        raise ValueError(f"out: expected it on the device of mu and sigma, {inputs.device}, got {operand.device}")
    operand = _as_matrix(operand, inputs, layout)
    if 0 in shape:
        return operand
    itemsize = ITEM_SIZES[operand.dtype]
    if any(stride % itemsize for stride in operand.strides):
        raise ValueError(f"out: expected strides of whole elements, {itemsize} bytes, got {operand.strides}")
    if _overlaps_itself(operand):
        raise ValueError(
            f"out: expected elements that do not overlap, got strides {operand.strides} under which they overlap"
        )
    return operand


def no_matrix(shape: tuple[int, ...], strides: tuple[int, ...], matrix: tuple[int, ...]) -> str:
    """The error for an `out` that is no view of shape `matrix`."""
    return (
        f"out: expected strides under which its axes flatten without a copy to shape {matrix}, got shape {shape} and"
        f" strides {strides}"
    )


def _as_matrix(out: Operand, inputs: Inputs, layout: str) -> Operand:
    lengths, size = matrix_shape(inputs, layout), ITEM_SIZES[out.dtype]
    if out.shape == lengths:
        return out
    lead = len(lengths) - 2
    # The axes of the rows are those with `lengths[-2]` elements; any axes of length 1 at the border may be of both.
    split = lead
    while math.prod(out.shape[lead:split]) != lengths[-2] or math.prod(out.shape[split:]) != lengths[-1]:
        split += 1
    columns = single_stride(out.shape[split:], out.strides[split:], size)
    rows = single_stride(out.shape[lead:split], out.strides[lead:split], lengths[-1] * size)
    if rows is None or columns is None:
        raise ValueError(no_matrix(out.shape, out.strides, lengths))
    return out._replace(shape=lengths, strides=(*out.strides[:lead], rows, columns))


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
    on_device, (low, high) = out.device.kind == "cuda", extent(out)
    share_memory = None if on_device else library.share_memory
    mask = ITEM_SIZES[out.dtype] - 1 if on_device else 0
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
            if share_memory is None or share_memory(out, read[k]):
                raise ValueError(f"out: expected memory of its own, got memory that {name} also uses")

    return check
