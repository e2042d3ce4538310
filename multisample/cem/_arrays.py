"""The few operations of the method whose names or arguments differ between array libraries.

All other operations have NumPy's names in CuPy, JAX and PyTorch too, and are called on `Arrays.xp`.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from multisample.backends.contract import HostArray
from multisample.backends.memory.host import quiet, rounded

from .._arguments import describe
from .._libraries import CPU, Device, described, library_of
from .._libraries.numpy import check_plain


def _type_name(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


class Arrays:
    """Operations of one library, for one device and one dtype. This class is for NumPy and the base of the others."""

    module = "numpy"
    mutable = True
    most_summed = 2**34
    """Length of the sums that the library computes; `sum` folds longer axes."""

    def __init__(self, dtype_name: str, device: Device) -> None:
        self.xp: Any = importlib.import_module(self.module)
        self.dtype_name = dtype_name
        self.device = device
        self.real = "float64"
        """The widest floating type of the library, for scores."""

    def __reduce__(self) -> Any:
        """Pickles refer to the library by its name, and to the same device of the other process."""
        return type(self), (self.dtype_name, self.device)

    def scope(self) -> Any:
        """The context in which the operations run. Infinities are checked later."""
        return quiet()

    def put(self, array: HostArray, dtype: str = "") -> Any:
        """A copy of a host array, on the device."""
        return self.adopt(np.array(rounded(array, dtype or self.dtype_name)))

    def adopt(self, array: Any) -> Any:
        """Convert an array of any library to this library and device."""
        return as_numpy("array", array)

    def saved(self, array: HostArray) -> Any:
        """A host array of this library, for checkpoints, if the library has any; else `array`."""
        return array

    def cast(self, array: Any, dtype: str = "") -> Any:
        return array.astype(dtype or self.dtype_name)

    def lowest(self, scores: Any, count: int) -> Any:
        """Indices of the `count` lowest scores of each search, in an order that other searches do not change."""
        return self.xp.argpartition(scores, count - 1)[..., :count]

    def sum(self, array: Any) -> Any:
        """Sums over the last axis, in an order that depends on its length only, not on the number of searches.

        On a device, the order of the library's own `sum` depends on the shape of the whole array. So the halves of the
        axis are added to each other, until at most `most_summed` columns are left. NumPy and PyTorch add rows in
        another order if they are not contiguous.
        """
        array = self.contiguous(array)
        while (n := array.shape[-1]) > self.most_summed:
            half = 1 << (n - 1).bit_length() - 1
            folded = array[..., : n - half] + array[..., half:]
            rest = array[..., n - half : half]
            array = folded if n == 2 * half else self.xp.concatenate([folded, rest], -1)
        return array.sum(-1)

    def contiguous(self, array: Any) -> Any:
        return self.xp.ascontiguousarray(array)

    def quotient(self, array: Any, divisors: Any) -> Any:
        """`array` divided by one divisor for each search; with the same bits for one search as for several."""
        return array / divisors

    def at(self, array: Any, which: Any) -> Any:
        """The elements at the indices `which` of each row of a vector or a matrix."""
        return array[self._places(which)]

    def columns(self, samples: Any, which: Any) -> Any:
        if which.ndim == 1:
            return self.xp.take(samples, which, axis=1)
        return self.xp.take_along_axis(samples, which[:, None], -1)

    def scattered(self, zeros: Any, which: Any, values: Any) -> Any:
        """A copy of `zeros` with `values` at the indices `which` of each row."""
        array = zeros + 0
        array[self._places(which)] = values
        return array

    def _places(self, which: Any) -> tuple[Any, ...]:
        return (which,) if which.ndim == 1 else (self.xp.arange(len(which))[:, None], which)

    def clipped(self, samples: Any, low: Any, high: Any) -> Any:
        """`samples` clipped to bounds; in place if the arrays are mutable."""
        return self.xp.clip(samples, low, high, out=samples)

    def score(self, f: Callable[[Any], Any], samples: Any, redraw: Callable[[], Any], copy: Any = None) -> Any:
        """Returns ``f(samples)``, the samples as drawn, and the copy that `f` may overwrite, or None.

        `copy` is the copy of an earlier call, whose memory is used again; ``redraw()`` draws the samples again.
        """
        if not self.mutable:
            return f(samples), samples, None
        if copy is None:
            copy = self.xp.empty_like(samples)
        self.xp.copyto(copy, samples)
        return f(copy), samples, copy

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, compiled if the library is JAX; its first argument, the settings, is static."""
        return function


class _CupyArrays(Arrays):
    module = "cupy"
    most_summed = 1

    def scope(self) -> Any:
        return self.xp.cuda.Device(self.device.ordinal)

    def adopt(self, array: Any) -> Any:
        return self.xp.asarray(array)

    def lowest(self, scores: Any, count: int) -> Any:
        # CuPy's argpartition sorts too, and waits for the device. argsort does not wait from CuPy 14 on.
        return self.xp.argsort(scores)[..., :count]


class _JaxArrays(Arrays):
    """JAX's operations. Arrays that JAX traces, or that are on several devices, stay where they are."""

    module = "jax.numpy"
    mutable = False
    most_summed = 1  # XLA chooses the order of a sum by the shape of the whole array, on a CPU too.

    def __init__(self, dtype_name: str, device: Device, where: Any, real: str) -> None:
        super().__init__(dtype_name, device)
        self.jax = sys.modules["jax"]
        self.where = where
        self.real = real

    def scope(self) -> Any:
        return super().scope() if self.where is None else self.jax.default_device(self.where)

    def adopt(self, array: Any) -> Any:
        array = self.xp.asarray(array)
        return array if self.where is None else self.jax.device_put(array, self.where)

    def contiguous(self, array: Any) -> Any:
        return array

    def quotient(self, array: Any, divisors: Any) -> Any:
        # XLA replaces a division by a scalar with a product, but keeps a division by a vector.
        return array / self.jax.lax.optimization_barrier(self.xp.broadcast_to(divisors, array.shape))

    def scattered(self, zeros: Any, which: Any, values: Any) -> Any:
        return zeros.at[self._places(which)].set(values)

    def clipped(self, samples: Any, low: Any, high: Any) -> Any:
        return self.xp.clip(samples, low, high)

    def compiled(self, function: Callable[..., Any]) -> Any:
        return _jitted(function)


@functools.cache
def _jitted(function: Callable[..., Any]) -> Any:
    return sys.modules["jax"].jit(function, static_argnums=0)


class _TorchArrays(Arrays):
    module = "torch"

    def __init__(self, dtype_name: str, device: Device) -> None:
        super().__init__(dtype_name, device)
        # On a CPU, PyTorch splits a longer sum among threads if it is the only sum.
        self.most_summed = 2**14 if device.kind == "cpu" else 1

    def scope(self) -> Any:
        return self.xp.no_grad()

    def adopt(self, array: Any) -> Any:
        return self.xp.as_tensor(array, device=str(self.device)).detach()

    def saved(self, array: HostArray) -> Any:
        return self.xp.from_numpy(array)

    def score(self, f: Callable[[Any], Any], samples: Any, redraw: Callable[[], Any], copy: Any = None) -> Any:
        if samples.is_inference():  # Inference tensors have no version.
            return f(samples.clone()), samples, None
        version = samples._version
        scores = f(samples)
        return scores, samples if samples._version == version else redraw(), None

    def cast(self, array: Any, dtype: str = "") -> Any:
        return array.to(getattr(self.xp, dtype or self.dtype_name))

    def lowest(self, scores: Any, count: int) -> Any:
        if self.device.kind == "cpu":
            return self.xp.topk(scores, count, largest=False, sorted=False).indices
        # On a device, topk has several algorithms, which treat equal scores differently.
        return self.xp.sort(scores, stable=True).indices[..., :count]

    def contiguous(self, array: Any) -> Any:
        return array.contiguous()

    def at(self, array: Any, which: Any) -> Any:
        return array.gather(-1, which)

    def columns(self, samples: Any, which: Any) -> Any:
        return samples.index_select(1, which) if which.ndim == 1 else samples.take_along_dim(which[:, None], -1)

    def scattered(self, zeros: Any, which: Any, values: Any) -> Any:
        return zeros.scatter(-1, which, values)


_KNOWN: dict[str, Callable[..., Arrays]] = {"numpy": Arrays, "cupy": _CupyArrays, "torch": _TorchArrays}
# Compiled functions have these operations as a static argument: equal arguments give the same object.
_jax_arrays = functools.cache(_JaxArrays)


def arrays_like(array: Any) -> Arrays:
    """Operations for the library, device and dtype of `array`, a result of `sample`; TypeError if not supported."""
    library = library_of("mu", array)
    if library.name not in ("jax", *_KNOWN):
        raise TypeError(f"mu: expected an array of NumPy, PyTorch, CuPy or JAX, got {described(array)}")
    if (dtype_name := _type_name(array)) not in ("float32", "float64"):
        raise TypeError(f"mu: expected float32 or float64, got {dtype_name}")
    if library.name != "jax":
        return _KNOWN[library.name](dtype_name, library.device("mu", array))
    jax = sys.modules["jax"]
    devices = () if isinstance(array, jax.core.Tracer) else tuple(array.devices())
    where, device = (devices[0], library.device("mu", array)) if len(devices) == 1 else (None, CPU)
    return _jax_arrays(dtype_name, device, where, str(jax.numpy.result_type(float)))


def as_numpy(name: str, array: Any) -> HostArray:
    """Convert any library's array, or a sequence, to a NumPy array; waits for the device."""
    try:
        return np.asarray(array)
    except (TypeError, RuntimeError):  # The array is on another device, or requires grad.
        library = library_of(name, array)
        if library.foreign:
            raise
        return library.to_host(array)


def adopted(arrays: Arrays, name: str, array: Any, *shapes: tuple[int, ...]) -> Any:
    """Argument `name` as a floating-point array on the device, of one of `shapes` if there are any; else an error."""
    check_plain(name, array)
    try:
        adopted = arrays.adopt(array)
    except MemoryError:
        raise
    except Exception as error:  # ``__array__`` of a foreign class may raise anything.
        raise TypeError(f"{name}: expected numbers, got {describe(array)} ({error})") from error
    kind = _type_name(adopted)
    if kind.startswith(("int", "uint", "bool")):
        adopted = arrays.cast(adopted, arrays.real)
    elif not kind.startswith(("float", "bfloat")):
        raise TypeError(f"{name}: expected numbers, got {describe(array)} of type {type(array).__name__}, of {kind}")
    if shapes and tuple(adopted.shape) not in shapes:
        raise ValueError(f"{name}: expected shape {either(*shapes)}, got {tuple(adopted.shape)}")
    return adopted


def either(*shapes: tuple[int, ...]) -> str:
    """The different `shapes` for an error message."""
    return " or ".join(map(str, dict.fromkeys(shapes)))
