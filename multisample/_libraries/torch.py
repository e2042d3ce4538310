"""PyTorch; imported by the first call with a tensor."""

import contextlib
import functools
import math
import operator
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad, profiler
from torch.utils._device import DeviceContext

from multisample.backends.contract import HostArray
from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.memory.host import LARGE, use_huge_pages
from multisample.backends.system.cuda_driver import is_capturing as driver_is_capturing

from .._tracing import traced_as
from .library import CPU, Device, Guard, Library, Operand, Shape, check_memory, counted_as
from .numpy import HOST

_layer, _modes = torch._C._functorch.peek_interpreter_stack, torch._C._len_torch_dispatch_stack
_is_jit_tracing, _function_modes = torch._C._is_tracing, torch._C._len_torch_function_stack
_is_grad_enabled = torch.is_grad_enabled
_guards: Any = torch._C._dynamo.guards
# The allocation functions of PyTorch's compiled graphs. They bypass the dispatcher, which has nothing to do in calls
# with a plan, and take a third of the time of torch.empty.
_empty_cpu, _empty_cuda = _guards._empty_strided_cpu, _guards._empty_strided_cuda


@functools.cache
def name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> Any:
    return getattr(torch, name)


_STORED = {dtype_of(name): dtype_of(row.stored) for name, row in MATRIX_TYPES.items() if row.stored != name}
"""The unsigned integers of the same size, for types that NumPy may lack."""


def is_transforming() -> bool:
    """Whether a call must not skip PyTorch's dispatcher.

    True inside torch.func, dispatch modes, forward-mode AD and torch.jit.trace. torch.compile and torch.export, which
    trace, also set a dispatch mode, or replace `is_traced`.
    """
    return _layer() is not None or _modes() > 0 or _is_jit_tracing() or _has_tangents()


def _has_tangents() -> bool:
    """Whether operations see tangents of forward-mode AD. Those in an autograd function's `forward` see none."""
    return forward_ad._current_level >= 0 and bool(torch._C._is_fwd_grad_enabled())


def has_function_mode() -> bool:
    """Whether a TorchFunctionMode is active, other than that of a default device."""
    modes = map(torch._C._get_function_stack_at, range(_function_modes()))
    return any(type(mode) is not DeviceContext for mode in modes)


@functools.cache
def _seeing() -> Any:
    """The dispatch keys whose kernels see an operation before the tensor's own does."""
    keys = torch._C.DispatchKey
    return functools.reduce(operator.or_, map(torch._C.DispatchKeySet, (
        keys.Python, keys.PythonTLSSnapshot, keys.FuncTorchDynamicLayerFrontMode, keys.FuncTorchDynamicLayerBackMode,
    )))  # fmt: skip


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Hide the operations inside from dispatch modes, function modes, torch.func and torch.jit.trace."""
    trace = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)
    try:
        with torch._C._ExcludeDispatchKeyGuard(_seeing()), torch._C.DisableTorchFunction():
            yield
    finally:
        torch._C._set_tracing_state(trace)


def is_profiled() -> bool:
    return bool(profiler._is_profiler_enabled)


def check_tensor(name: str, tensor: Any) -> None:
    """TypeError unless `tensor` is strided, unquantized and without a mask."""
    if tensor.is_nested:
        found = "a nested tensor"
    elif tensor.layout is not torch.strided:
        found = f"layout {tensor.layout}"
    elif tensor.is_quantized:
        found = f"a quantized tensor ({name_of(tensor.dtype)}); dequantize it first"
    elif type(tensor) is torch.Tensor:
        return
    elif isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        found = "an uninitialized parameter"
    elif isinstance(tensor, torch.masked.MaskedTensor):
        found = "a masked tensor; fill it first"
    else:
        return
    raise TypeError(f"{name}: expected a strided tensor, got {found}")


def tree_of(module: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """The tree of a module in the order of ``named_parameters()``, and its parameters.

    For each module, the tree has its type, the names of its parameters, None, then for each child its name and its
    tree, and None.
    """
    items: list[Any] = []
    tensors: list[Any] = []

    def add(module: Any) -> None:
        items.append(type(module))
        for name, x in module._parameters.items():
            if x is not None:
                items.append(name)
                tensors.append(x)
        items.append(None)
        for name, child in module._modules.items():
            if child is not None:
                items.append(name)
                add(child)
        items.append(None)

    add(module)
    return tuple(items), tensors


def _check_memory(tensor: Any) -> None:
    if tensor.numel() and tensor.is_cpu:
        check_memory(tensor.data_ptr())


def _is_frozen(tensor: Any) -> bool:
    return bool(tensor.is_inference()) and not torch.is_inference_mode_enabled()


class TorchLibrary(Library):
    name = "torch"
    types = (torch.Tensor, torch.nn.Parameter)
    questions = _layer, _modes, _is_jit_tracing, _function_modes
    flags = (vars(forward_ad), "_current_level", -1), (vars(profiler), "_is_profiler_enabled", False)
    """If each of the `questions` returns a false value, and each variable among the `flags` has this value, `state`
    returns whether gradients are enabled."""
    _addresses: Callable[[Any], Any] | None = None
    _tree: Callable[[Any], Any] | None = None

    def signature(self, array: Any) -> Hashable:
        return (
            array.dtype, array.shape, array.stride(), array.layout, array.device, array.requires_grad, array.is_neg(),
        )  # fmt: skip

    def target_signature(self, out: Any) -> Hashable:
        return type(out), self.signature(out), _is_frozen(out)

    def state(self) -> Hashable:
        # `is_transforming`, inlined.
        if _layer() is not None or _modes() > 0 or _is_jit_tracing() or forward_ad._current_level >= 0:
            return None
        grad = bool(_is_grad_enabled())
        if profiler._is_profiler_enabled or _function_modes():
            return grad, is_profiled(), has_function_mode()  # Calls that a profiler or a mode sees have other plans.
        return grad

    def compile_key(self, backend: Any) -> None:
        builtins = getattr(backend, "builtins", None)
        if builtins is not None and self.key is None:
            objects = (
                *self.types, self.signature, self.target_signature, torch.Tensor.is_neg, self.state, self.questions,
                self.flags,
            )  # fmt: skip
            self._addresses, self._tree = builtins.addresses(objects), builtins.tree()
            self.key = builtins.key(objects)
            self.state, self.keyed_seed = self.key, torch.Tensor  # type: ignore[method-assign]

    def addresses(self, arrays: Sequence[Any]) -> bytes:
        packed = None if self._addresses is None else self._addresses(arrays)
        return super().addresses(arrays) if packed is None else packed

    @traced_as(lambda self, module: tree_of(module))
    def tree(self, module: Any) -> tuple[tuple[Any, ...], list[Any]]:
        found = None if self._tree is None else self._tree(module)
        return tree_of(module) if found is None else found

    def guard(self, read: Sequence[Any], written: Sequence[Any]) -> Guard:
        every = *read, *written
        # `check` crashes the process with a nested tensor, and refuses a tensor that comes twice, as tied ones do.
        first: dict[int, int] = {}
        owners = [first.setdefault(id(x), k) for k, x in enumerate(every)]
        tied = [(k, owner) for k, owner in enumerate(owners) if owner != k]
        select = operator.itemgetter(*first.values()) if tied and len(first) > 1 else lambda every: every[:1]
        unique = select(every) if tied else every
        # The guards of PyTorch's compiled graphs compare type, shape, strides, dtype, device, `requires_grad` and
        # dispatch keys (negative bit, inference tensors, inference mode), in a fiftieth of the time of Python.
        check = _guards.TensorGuards(
            *unique, dynamic_dims_sizes=[list(x.shape) for x in unique],
            dynamic_dims_strides=[list(x.stride()) for x in unique],
        ).check  # fmt: skip
        # A parameter stays a leaf, in all but a contrived program, and reading `is_leaf` takes 80 ns.
        unsure = [k for k, x in enumerate(written) if x.requires_grad and type(x) is not torch.nn.Parameter]
        pack, address, types = struct.Struct(f"{len(owners)}q").pack, self.address, self.types

        def address_of_one(read: Sequence[Any], written: Sequence[Any]) -> bytes | None:
            (x,) = read or written
            is_like = not is_transforming() and type(x) in types and not x.is_nested and check(x)
            return pack(address(x)) if is_like and (not unsure or x.is_leaf) else None

        def addresses_of_many(read: Sequence[Any], written: Sequence[Any]) -> bytes | None:
            every, packed = (*read, *written), None
            if self._addresses is not None:
                packed = self._addresses(every)
            elif all(type(x) in types and not x.is_nested for x in every):
                packed = pack(*map(address, every))
            if packed is None or is_transforming() or any(every[k] is not every[owner] for k, owner in tied):
                return None
            is_like = check(*(every if not tied else select(every))) and all(written[k].is_leaf for k in unsure)
            return packed if is_like else None

        return address_of_one if len(owners) == 1 else addresses_of_many

    def is_opaque(self, array: Any) -> bool:
        return type(array).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__

    def lacks_values(self, array: Any) -> bool:
        return bool(array.is_meta) or isinstance(array, fake_tensor.FakeTensor)

    def is_transformed(self, arrays: Sequence[Any]) -> bool:
        if all(map(self.lacks_values, arrays)):  # The mode of fake tensors is a dispatch mode.
            recorder = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
            return bool(recorder or torch.compiler.is_compiling()) or _layer() is not None or _has_tangents()
        return is_transforming() or any(map(self.is_opaque, arrays))

    address = staticmethod(torch.Tensor.data_ptr)
    written = staticmethod(torch.autograd.graph.increment_version)

    def counted(self, vectors: Mapping[str, Any]) -> Iterable[str]:
        # PyTorch ignores the type of a 0-d tensor beside a vector of floats.
        types = {name: str(x.dtype).removeprefix("torch.") for name, x in vectors.items() if len(x.shape)}
        return types if any(dtype in MATRIX_TYPES for dtype in types.values()) else vectors

    def host_array(self, array: Any) -> HostArray:
        array = array.detach() if array.requires_grad else array
        _check_memory(array)
        stored = _STORED.get(array.dtype)
        host: HostArray = (array if stored is None else array.view(stored)).numpy()
        return host

    def share_memory(self, a: Any, b: Any) -> bool:
        b = torch._neg_view(b) if b.is_neg() else b  # NumPy has no negative bit.
        return HOST.share_memory(self.host_array(a), self.host_array(b))

    def normalized(self, name: str, array: Any) -> Any:
        if self.is_opaque(array):
            return array
        check_tensor(name, array)
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.as_subclass(array, torch.Tensor)

    def check(self, name: str, array: Any) -> None:
        check_tensor(name, array)
        if getattr(array, "_fsdp_flattened", False):
            raise TypeError(
                f"{name}: expected a parameter with its own shape, got one that FullyShardedDataParallel (FSDP1) has"
                " flattened; shard it with torch.distributed.fsdp.fully_shard"
            )

    def describe(self, name: str, array: Any) -> Operand:
        check_tensor(name, array)
        dtype = name_of(array.dtype)
        counts_as = counted_as(name, dtype)
        if array.is_neg() and name.startswith("out"):
            raise ValueError(f"{name}: expected a tensor without negative bit, got one with its negative bit set")
        if name.startswith("out") and _is_frozen(array):
            raise ValueError(f"{name}: expected a writable tensor, got an inference tensor outside inference mode")
        read = (lambda x: x.detach().resolve_neg()) if array.is_neg() else None
        size, memory = array.element_size(), array if read is None else read(array)
        strides = tuple(stride * size for stride in memory.stride())
        return Operand(tuple(array.shape), strides, dtype, counts_as, self.device(name, array), read)

    def flattener(self, aligned: Shape, shape: Shape, flat: Shape) -> Callable[[Any], Any]:
        return lambda x: x.detach().reshape(aligned).expand(shape).contiguous().view(flat)

    def device(self, name: str, array: Any) -> Device:
        return CPU if array.is_cpu else Device(array.device.type, array.device.index or 0)

    def allocator(self, shape: Shape, dtype: str, device: Device) -> Callable[[Any], Any]:
        element, where = dtype_of(dtype), torch.device(str(device))
        # PyTorch's strides of a contiguous tensor, in elements.
        strides = tuple(math.prod(max(length, 1) for length in shape[axis + 1 :]) for axis in range(len(shape)))
        if device.kind == "cpu" and math.prod(shape) * element.itemsize >= LARGE:

            def allocate(like: Any) -> Any:
                tensor = _empty_cpu(shape, strides, element)
                use_huge_pages(tensor.data_ptr(), tensor.nbytes)
                return tensor

            return allocate
        if device.kind == "cpu":
            return lambda like: _empty_cpu(shape, strides, element)
        empty, ordinal, current_device = torch.empty_strided, device.ordinal, torch._C._cuda_getDevice
        return lambda like: (
            _empty_cuda(shape, strides, element) if current_device() == ordinal
            else empty(shape, strides, dtype=element, device=where)
        )  # fmt: skip

    def stream(self, device: Device) -> Callable[[Any], int]:
        raw_stream, ordinal = torch._C._cuda_getCurrentRawStream, device.ordinal
        return lambda array: raw_stream(ordinal)

    def is_capturing(self, device: Device) -> Callable[[int], bool]:
        ordinal, current_device = device.ordinal, torch._C._cuda_getDevice
        capturing = torch._C._cuda_isCurrentStreamCapturing
        # PyTorch's function takes a fifth of the driver's time, but only queries the current device.
        return lambda stream: bool(capturing() if current_device() == ordinal else driver_is_capturing(stream))

    def recorder(self, arrays: Sequence[Any]) -> Callable[..., Sequence[Any]] | None:
        return _record if any(x.requires_grad for x in arrays) else None

    def to_host(self, array: Any) -> HostArray:
        _check_memory(array)
        array = array.detach().resolve_neg()
        return np.asarray((array.double() if array.is_floating_point() else array).cpu().numpy())

    def to_device(self, array: HostArray, device: Device) -> Any:
        # From pageable memory, the driver copies before it returns, and need not wait for the device.
        return torch.from_numpy(array).to(str(device), non_blocking=True)

    def overwrite(self, target: Any, array: HostArray) -> None:
        target.copy_(torch.from_numpy(array))


TORCH = TorchLibrary()


# --- Gradients of `perturb` -----------------------------------------------------------------------


def scaled(gradient: Any, factor: float, size: int | None, like: Any) -> Any:
    """The gradient of a parameter of `perturb`, whose result has the derivative ``1 - decay``, `factor`.

    `size` is the length of a population, or None for a single result. The first axis of `gradient` then counts the
    members, and the sum over that axis is the parameter's. `like` is the mesh and the placements of a DTensor.
    """
    if gradient is None:
        return None
    if size is not None:
        gradient = gradient.sum(0)
    if factor != 1:
        gradient = gradient * factor
    return gradient if like is None else gradient.redistribute(*like)


def owners_of(keys: Sequence[Any], names: Sequence[str] | None) -> dict[Any, int]:
    """The position of each key of a tensor; for a tied tensor, that of its lexicographically first name."""
    owners: dict[Any, int] = {}
    for k in range(len(keys)) if names is None else sorted(range(len(keys)), key=lambda k: names[k]):
        owners.setdefault(keys[k], k)
    return owners


class _Recorded(torch.autograd.Function):  # type: ignore[misc]
    """The identity of `results`, whose gradients flow to `parameters`."""

    @staticmethod
    def forward(ctx: Any, factors: list[float], size: int | None, results: list[Any], *parameters: Any) -> Any:
        ctx.factors, ctx.size = factors, size
        ctx.placements = [(x.device_mesh, x.placements) if hasattr(x, "device_mesh") else None for x in parameters]
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        every = zip(gradients, ctx.factors, ctx.placements, strict=True)
        return None, None, None, *[scaled(g, factor, ctx.size, like) for g, factor, like in every]


def _record(
    results: Sequence[Any], arrays: Sequence[Any], factors: Sequence[float] | None, size: int | None
) -> Sequence[Any]:  # fmt: skip
    """The results of `perturb`, with gradients. Tied parameters share memory, but each tensor object has a result."""
    if not torch.is_grad_enabled():
        return results
    owners = owners_of(list(map(id, arrays)), None)
    kept = [k for k in owners.values() if arrays[k].requires_grad]
    first: dict[int, int] = {}
    # `detach` makes another tensor of the same memory.
    own = [results[k] if first.setdefault(id(results[k]), k) == k else results[k].detach() for k in owners.values()]
    made = dict(zip(owners.values(), own, strict=True))
    recorded = _Recorded.apply(
        [1.0 if factors is None else factors[k] for k in kept], size, [made[k] for k in kept],
        *[arrays[k] for k in kept],
    )  # fmt: skip
    made.update(zip(kept, recorded, strict=True))
    return [made[owners[id(x)]] for x in arrays]
