"""Arrays of every library: the result has the library of the inputs, and the bits of the NumPy call.

A stand-in for CuPy, in host memory, shows that addresses, strides, devices and streams follow the backend contract.
"""

import functools
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from cuda_memory import ExportedByDlpack
from fake_backend import FakeBackend
from tables import DTYPES

import multisample
from multisample import _libraries, _plan, _stream_order, sample, weighted_moments
from multisample.backends import registry
from multisample.backends.launch import HOST, ElementType, Launch, Operation

Array = np.ndarray[Any, Any]

MU = np.array([0.0, 10.0, -5.0], np.float32)
SIGMA = np.array([1.0, 0.5, 2.0], np.float32)
N = 7


@functools.cache
def reference() -> Array:
    return sample(MU, SIGMA, N, seed=1)


def bits(array: Any) -> Array:
    """Bit patterns, for exact comparisons."""
    if isinstance(array, torch.Tensor):
        array = torch.Tensor.as_subclass(array, torch.Tensor)
        array = array.view(getattr(torch, f"int{8 * array.element_size()}")).numpy()
    array = np.asarray(array)
    return np.asarray(array.view(f"u{array.dtype.itemsize}"))


def check_same(array: Any, expected: Any) -> None:
    assert str(array.dtype).removeprefix("torch.") == str(expected.dtype).removeprefix("torch.")
    np.testing.assert_array_equal(bits(array), bits(expected))


class ArrayOnly:
    def __init__(self, array: Array) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self._array


class Subclass(np.ndarray[Any, Any]):
    pass


class Lying(np.ndarray[Any, Any]):
    """A subclass whose attributes differ from those of its memory."""

    shape = property(lambda self: (30, 70), lambda self, shape: None)  # type: ignore[assignment]
    strides = property(lambda self: (400, 8))  # type: ignore[assignment]
    dtype = property(lambda self: np.dtype("float64"))  # type: ignore[assignment]
    T = property(lambda self: np.broadcast_to(np.float32(0), (30, 70)))  # type: ignore[assignment]
    ctypes = flags = base = None  # type: ignore[assignment]

    def __array_finalize__(self, other: Any) -> None:
        pass

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise KeyError("__array__")


class LyingTensor(torch.Tensor):
    """The same for PyTorch."""

    shape = property(lambda self: torch.Size((30, 70)))  # type: ignore[assignment]
    device = property(lambda self: torch.device("meta"))  # type: ignore[assignment]
    size = stride = numel = data_ptr = dim = as_subclass = numpy = None  # type: ignore[assignment]


def lying_array(array: Array) -> Array:
    return array.view(Lying)


def lying_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return torch.Tensor.as_subclass(tensor, LyingTensor)


def strided(array: Array) -> Array:
    wide = np.full((2 * array.size, 3), 77, array.dtype)
    wide[::2, 1] = array
    return wide[::2, 1]


# tests/stream has vectors of other strides and types.
FORMS: dict[str, Callable[[Array], Any]] = {
    "array": lambda x: x, "column": lambda x: x[:, None], "list": lambda x: x.tolist(),
    "tuple": lambda x: tuple(x.tolist()), "list of NumPy numbers": list, "nested list": lambda x: x[:, None].tolist(),
    "strided column": lambda x: strided(x)[:, None], "subclass": lambda x: x.view(Subclass),
    "matrix": lambda x: x[:, None].view(np.matrix), "__array__": ArrayOnly,
    "__array_interface__": lambda x: SimpleNamespace(__array_interface__=x.__array_interface__, owner=x),
}  # fmt: skip

TENSORS: dict[str, Callable[[Array], Any]] = {
    "tensor": torch.tensor,
    "column tensor": lambda x: torch.tensor(x)[:, None],
    "strided tensor": lambda x: torch.from_numpy(strided(x)),
    "expanded": lambda x: torch.tensor(x)[:, None].expand(-1, 4)[:, 2],
    "parameter": lambda x: torch.nn.Parameter(torch.tensor(x), requires_grad=False),
    "detached": lambda x: torch.tensor(x, requires_grad=True).detach(),
    "computed": lambda x: torch.tensor(x) + 0,
    "read as imaginary": lambda x: torch.complex(torch.zeros(x.size), -torch.tensor(x)).conj().imag,
}


@pytest.mark.parametrize("form", [*FORMS, *TENSORS])
def test_every_form_of_a_host_vector_gives_the_same_bits_and_is_not_modified(form: str) -> None:
    forms, kind = (FORMS, np.ndarray) if form in FORMS else (TENSORS, torch.Tensor)
    for other in forms.values():
        mu, sigma = MU.copy(), SIGMA.copy()
        x = sample(forms[form](mu), other(sigma), N, seed=1, dtype="float32")
        assert type(x) is kind
        assert x.strides == (4 * N, 4) if kind is np.ndarray else x.is_contiguous() and not x.requires_grad
        check_same(x, reference())
        sample(forms[form](mu), other(sigma), 30_000, seed=1)
        np.testing.assert_array_equal((mu, sigma), (MU, SIGMA))


@pytest.mark.parametrize("by", ["numpy", "cpu", "torch_ext"])
@pytest.mark.parametrize("layout", ["dn", "nd"])
def test_calls_read_the_memory_of_a_subclass_and_ignore_its_attributes(by: str, layout: Any) -> None:
    place, lie = (np.array, lying_array) if by == "numpy" else (torch.tensor, lying_tensor)
    mu, sigma, expected = place(MU), place(SIGMA), sample(MU, SIGMA, N, seed=1, layout=layout)
    call: dict[str, Any] = {"n": N, "seed": 1, "layout": layout, "backend": "cpu" if by == "numpy" else by}
    for _ in range(2):
        memory = place(np.full(100, 5, np.float32))
        out = lie(memory[50 : 50 + 3 * N].reshape(expected.shape))
        version = getattr(out, "_version", -1)
        assert sample(lie(mu), lie(sigma), out=out, **call) is out
        assert getattr(out, "_version", 0) > version
        check_same(memory[50 : 50 + 3 * N], expected.reshape(-1))
        assert (memory[:50] == 5).all() and (memory[50 + 3 * N :] == 5).all()
        with pytest.raises(ValueError, match=r"^out: expected shape .*, got \(4, 5\)"):
            sample(mu, sigma, out=lie(memory[:20].reshape(4, 5)), **call)
        with pytest.raises(ValueError, match=r"^out: expected memory of its own, got memory that mu also uses"):
            sample(lie(memory[50:53]), sigma, out=out, **call)
    if by == "torch_ext":
        leaf = lying_tensor(mu).requires_grad_()
        sample(leaf, 1.0, **call).sum().backward()
        assert leaf.grad is not None
        assert torch.Tensor.tolist(leaf.grad) == [N] * 3


@pytest.mark.parametrize(("lie", "place"), [(lying_array, np.array), (lying_tensor, torch.tensor)])
def test_seeds_weights_and_parameters_are_read_from_the_memory_of_a_subclass(lie: Any, place: Any) -> None:
    def moments(lie: Any = lambda x: x) -> Any:
        return multisample.weighted_moments(*(lie(place(x)) for x in (MU, MU, SIGMA)), seed=lie(place([1, 2])))

    def perturbed(lie: Any, out: Any = None) -> Any:
        parameters = {"a": lie(place(MU)), "b": place(SIGMA)}
        out = parameters if out == "in place" else out
        coefficients, seed = lie(place([0.5, 2.0])), lie(place([[7, 9]]))
        return multisample.perturb(parameters, coefficients, seed=seed, out=out)

    for found, expected in zip(moments(lie), moments(), strict=True):
        check_same(found, expected)
    expected = perturbed(lambda x: x)
    for _ in range(2):
        memory = place(np.full((30,), 5, np.float32))
        out = {"a": lie(memory[10:13]), "b": place(SIGMA)}
        for result in (perturbed(lie), perturbed(lie, "in place"), perturbed(lie, out)):
            assert [bits(result[name]).tolist() for name in "ab"] == [bits(expected[name]).tolist() for name in "ab"]
        assert result is out
        assert (memory[:10] == 5).all() and (memory[13:] == 5).all()
    a = lie(place(MU))
    multisample.perturb(a, 0.5, seed=7, out=a)
    check_same(bits(a), bits(multisample.perturb(place(MU), 0.5, seed=7)))


def test_arrays_of_subclasses_on_a_device_become_their_base_class() -> None:
    cupy, devicearray = pytest.importorskip("cupy"), pytest.importorskip("numba.cuda.cudadrv.devicearray")
    wrong = property(lambda self: (30,), lambda self, value: None)
    memory = cupy.cuda.UnownedMemory(MU.ctypes.data, MU.nbytes, MU, device_id=0)
    context = SimpleNamespace(device=SimpleNamespace(id=0))
    numba_memory = SimpleNamespace(device_pointer=MU.ctypes.data, context=context)
    of_numba = devicearray.DeviceNDArray, ((3,), (4,), MU.dtype, 0, numba_memory)
    for base, arguments in ((cupy.ndarray, ((3,), MU.dtype, cupy.cuda.MemoryPointer(memory, 0))), of_numba):
        array = type("Lying", (base,), {"shape": wrong, "strides": wrong})(*arguments)
        plain = _libraries.as_base_class("mu", array)
        library = _libraries.library_of("mu", array)
        assert type(plain) is base
        assert library.signature(plain) == (MU.dtype, (3,), (4,), 0)
        assert library.address(plain) == MU.ctypes.data


def test_an_out_that_only_claims_to_be_a_subclass_raises() -> None:
    claiming = type("Claiming", (ArrayOnly,), {"__class__": np.ndarray})
    with pytest.raises(TypeError, match=r"^out: expected a NumPy array, got .* of type Claiming"):
        sample(MU, SIGMA, N, seed=1, out=claiming(np.empty((3, N), np.float32)))


NUMBERS = (2, 2.0, np.float32(2), np.float64(2), np.int8(2), np.array(2), np.array(2.0), ml_dtypes.bfloat16(2))


def test_mu_or_sigma_may_be_a_number() -> None:
    twos = np.full(3, 2, np.float32)
    by_sigma, by_mu = sample(MU, twos, N, seed=1), sample(twos, SIGMA, N, seed=1)
    for number in NUMBERS:
        check_same(sample(MU, number, N, seed=1, dtype="float32"), by_sigma)
        check_same(sample(number, SIGMA, N, seed=1, dtype="float32"), by_mu)
        check_same(sample(MU[:, None], number, N, seed=1, dtype="float32"), by_sigma)
    for number in (np.float64(2), np.array(2.0)):  # NumPy's numbers take part in the promotion.
        assert sample(MU, number, N).dtype == np.float64
        assert sample(MU.astype(np.float16), number.astype(np.float16), N).dtype == np.float16
    for number in (*NUMBERS, torch.tensor(2), torch.tensor(2.0), torch.tensor(2.0, dtype=torch.float64)):
        check_same(sample(torch.tensor(MU), number, N, seed=1), by_sigma)
        check_same(sample(number, torch.tensor(SIGMA), N, seed=1), by_mu)


@pytest.mark.parametrize("vector", ["float16", "bfloat16", "float32", "float64", "int64"])
def test_scalars_promote_as_in_pytorch(vector: str) -> None:
    mu, one = torch.ones(3, dtype=getattr(torch, vector)), np.ones(1, np.float32)
    kinds = ("float32", "float64") if vector == "int64" else ("float16", "float32", "float64", "int64")
    for kind in kinds:
        scalar: Any
        for scalar in (np.dtype(kind).type(2), torch.tensor(2, dtype=getattr(torch, kind))):
            expected = (mu * scalar).dtype
            assert sample(mu, scalar, N).dtype is sample(scalar, mu, N).dtype is expected
            assert torch.func.vmap(lambda mu: sample(mu, scalar, N, seed=1))(mu[None]).dtype is expected  # noqa: B023
            assert weighted_moments(torch.from_numpy(one), mu, scalar, seed=1)[0].dtype is expected


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_have_the_precision_of_the_result(dtype: Any) -> None:
    for number in (0.1, 1 / 3, 123456789, 2**70):
        vector = np.full(3, number, dtype)
        check_same(sample(number, SIGMA.astype(dtype), N, seed=1), sample(vector, SIGMA.astype(dtype), N, seed=1))
        check_same(sample(MU.astype(dtype), number, N, seed=1), sample(MU.astype(dtype), vector, N, seed=1))


@pytest.mark.parametrize("integer", [f"{sign}int{width}" for sign in ("", "u") for width in (8, 16, 32, 64)])
def test_integer_vectors_count_as_float32(integer: str) -> None:
    mu, sigma = np.array([0, 10, 5], integer), np.array([1, 3, 2], integer)
    expected = sample(mu.astype(np.float32), sigma.astype(np.float32), N, seed=1)
    check_same(sample(mu, sigma, N, seed=1), expected)
    check_same(sample(torch.from_numpy(mu), torch.from_numpy(sigma), N, seed=1), expected)


def test_the_largest_integers_are_rounded_once() -> None:
    large = np.array([2**63 - 1, 2**53 + 1, 2**24 + 1])
    check_same(sample(large, 0, 1, seed=1)[:, 0], large.astype(np.float32))
    check_same(sample(large, 0, 1, seed=1, dtype="float64")[:, 0], large.astype(np.float64))
    # The doubles nearest to the first two lie half-way between numbers of float32.
    for number in (2**54 + 2**30 + 1, 1 - 2**62 - 2**38, 2**53 + 1, 2**63 - 1):
        for dtype in DTYPES:
            draw = functools.partial(sample, number, n=1, seed=1, dtype=dtype)
            expected = sample(np.array([number]), 0.0, 1, seed=1, dtype=dtype)
            check_same(draw(np.zeros(1, np.float32)), expected)
            check_same(draw(torch.zeros(1)), expected)
            check_same(torch.func.vmap(draw)(torch.zeros(1, 1))[0], expected)
    largest = 2**128 - 2**103 - 1  # The nearest double rounds to infinity.
    check_same(sample(largest, [0.0], 1, seed=1)[:, 0], np.full(1, np.finfo(np.float32).max))
    with pytest.raises(ValueError, match=r"^mu: expected finite means, got inf as float32"):
        sample(largest + 1, [0.0], 1, seed=1)


LIST, INTEGER, NUMBER = "list", "integer", "number"
# In row r, entry k is the result type of kind r with the k-th key of this table.
PROMOTED = {
    "float64": "float64",
    "float32": "float64 float32",
    "bfloat16": "float64 float32 bfloat16",
    "float16": "float64 float32 float32 float16",
    LIST: "float64 float32 float32 float32 float32",
    INTEGER: "float64 float32 float32 float32 float32 float32",
    NUMBER: "float64 float32 bfloat16 float16 float32 float32",
}
TYPES = list(PROMOTED)
PROMOTION = {(TYPES[k], other): x for other, row in PROMOTED.items() for k, x in enumerate(row.split())}


def as_kind(values: list[float], kind: str) -> Any:
    if kind == LIST:
        return values
    if kind == NUMBER:
        return values[0]
    return np.array(values, np.int64 if kind == INTEGER else DTYPES[kind])


def as_tensor(values: list[float], kind: str) -> Any:
    if kind == NUMBER:
        return values[0]
    return torch.tensor(values, dtype=torch.int64 if kind == INTEGER else getattr(torch, kind))


@pytest.mark.parametrize(("one", "other"), PROMOTION)
def test_result_types_follow_the_promotion_table(one: str, other: str) -> None:
    for kinds in itertools.permutations((one, other)):
        for convert in (as_kind, as_tensor) if LIST not in kinds else (as_kind,):
            x = sample(*(convert([1.0, 2.0], kind) for kind in kinds), 3, seed=1)
            assert str(x.dtype).removeprefix("torch.") == PROMOTION[one, other]


SPELLINGS: dict[str, list[Any]] = {
    "float16": ["float16", "half", "f2", np.float16, np.dtype(np.float16), torch.float16],
    "bfloat16": ["bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), torch.bfloat16],
    "float32": ["float32", "f4", np.float32, np.dtype(np.float32), torch.float32],
    "float64": ["float64", "f8", float, np.float64, np.dtype(np.float64), torch.float64],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_dtype_accepts_the_names_and_types_of_every_library(name: str) -> None:
    for spelling in SPELLINGS[name]:
        x = sample(MU, SIGMA, N, seed=1, dtype=spelling)
        assert x.dtype == DTYPES[name]
        y = sample(torch.from_numpy(MU), torch.from_numpy(SIGMA), N, seed=1, dtype=spelling)
        assert y.dtype is getattr(torch, name)
        check_same(y, x)


def test_values_behind_dlpack_are_checked() -> None:
    out = np.full((3, N), 7, np.float32)
    for mu, message in ((MU * np.nan, r"^mu: .*mu\[0\] = nan"), (MU[:2], r"^sigma: .*as mu, 2, got 3")):
        with pytest.raises(ValueError, match=message):
            sample(ExportedByDlpack(mu), ExportedByDlpack(SIGMA), N, out=ExportedByDlpack(out))
    with pytest.raises(TypeError, match=r"^mu: .*float32.*got complex64"):
        sample(ExportedByDlpack(MU.astype(np.complex64)), ExportedByDlpack(SIGMA), N, out=ExportedByDlpack(out))
    with pytest.raises(TypeError, match=r"^mu, sigma: .*one library, got .* ExportedByDlpack as mu, a NumPy array as"):
        sample(ExportedByDlpack(MU), SIGMA, N)
    assert (out == 7).all()
    with pytest.raises((TypeError, ValueError), match=r"^sigma: "):  # NumPy cannot export it.
        sample(ExportedByDlpack(MU), ExportedByDlpack(SIGMA.astype(SIGMA.dtype.newbyteorder())), N)


def test_arrays_with_a_namespace_give_arrays_of_that_namespace() -> None:
    class Strict(ExportedByDlpack):
        def __array_namespace__(self, api_version: str | None = None) -> Any:
            return types.SimpleNamespace(from_dlpack=from_dlpack)

    def from_dlpack(array: Array) -> Strict:
        if array.dtype not in (np.float32, np.float64):
            raise TypeError("no such type")
        return Strict(np.from_dlpack(array))

    x, wide, narrow = (sample(Strict(MU), np.float64(2), N, seed=1, dtype=t) for t in (None, "float64", "float16"))
    assert type(x) is type(wide) is Strict
    check_same(np.from_dlpack(x), sample(MU, 2, N, seed=1))
    check_same(narrow, sample(MU, 2, N, seed=1, dtype="float16"))
    moments = weighted_moments(Strict(np.ones(N, np.float32)), Strict(MU), 1.0, seed=1)
    assert [type(x) for x in moments] == [Strict, Strict]


@pytest.mark.parametrize("kind", [4, 7, 8, 10, 14])
def test_the_error_names_memory_that_no_backend_serves(kind: int) -> None:
    class Elsewhere(ExportedByDlpack):
        def __dlpack_device__(self) -> Any:
            return kind, 0

    with pytest.raises(ValueError, match=rf"^mu, sigma: no backend serves .*{kind}"):
        sample(Elsewhere(MU), 1.0, N)
    with pytest.raises(ValueError, match=r"^backend: 'cpu' serves cpu memory, got"):
        sample(Elsewhere(MU), 1.0, N, backend="cpu")


FLOAT32, FLOAT64 = ElementType.float32, ElementType.float64


def input_of(launch: Launch, name: str) -> tuple[float, int, int]:
    """Address or number, stride and type of an input."""
    return getattr(launch, name), getattr(launch, f"{name}_stride"), getattr(launch, f"{name}_type")


def test_every_argument_reaches_the_backend(registered: Callable[[Any], Any]) -> None:
    launched: list[Launch] = []
    registered(FakeBackend("recording")).launch = launched.append  # Draws nothing, so that no kernel is compiled.
    generator = multisample.Generator(2**64 - 1)
    generator._take()
    memory = np.zeros((6, 2 * N), np.float64)
    out = memory[::2, ::2]
    x = sample(
        2, SIGMA[::-1].astype(np.float16), np.int64(N), backend="recording", generator=generator, noise="shared",
        dtype=float, out=out, fast_math=np.True_, dim_offset=np.uint8(4), sample_offset=2**33, antithetic=np.True_,
    )  # fmt: skip
    assert x is out
    (draw,) = launched
    assert (draw.mu, draw.mu_type) == (2.0, ElementType.number)
    assert (draw.sigma_stride, draw.sigma_type) == (2, ElementType.float16)
    assert (draw.matrix, draw.row_stride, draw.column_stride) == (out.ctypes.data, *out.strides)
    assert (draw.rows, draw.columns) == (3, N)
    words = draw.seed, draw.offset, draw.first_row, draw.first_column
    assert words == (2**64 - 1, 1, 4, 2**33) and {type(word) for word in words} == {int}
    assert not (draw.seed_at or draw.offset_at or draw.first_row_at or draw.first_column_at)
    assert (draw.type, draw.operation, draw.device) == (FLOAT64, Operation.sample, HOST)
    flags = draw.shared_noise, draw.antithetic, draw.fast_math
    assert flags == (True, True, True) and {type(flag) for flag in flags} == {bool}


def test_a_third_party_launcher_is_made_once_per_plan(registered: Callable[[Any], Any]) -> None:
    made = []

    class WithLauncher(FakeBackend):
        def launcher(self, draw: Launch) -> Any:
            made.append(draw)
            cpu: Any = registry.find("cpu")
            return cpu.launcher(draw)

    backend = registered(WithLauncher("recording"))
    generator = multisample.Generator(1)
    for _ in range(2):
        check_same(sample(MU, SIGMA, N, seed=1, backend="recording"), reference())
        check_same(sample(MU, SIGMA, N, seed=1, backend="recording", layout="nd"), reference().T)
    check_same(sample(MU, SIGMA, N, generator=generator, backend="recording"), reference())
    out = np.zeros((N, 3), np.float32)
    assert sample(MU, SIGMA, N, generator=generator, backend="recording", layout="nd", out=out) is out
    assert (len(made), backend.launched, generator.offset) == (4, [], 2)
    generator = multisample.Generator(1)
    for layout in ("dn", "nd"):
        with pytest.raises(ValueError, match=r"^sigma: .*sigma\[2\] = -1"):
            sample(MU, np.array([1, 2, -1], np.float32), N, generator=generator, backend="recording", layout=layout)
    assert (backend.launched, generator.offset) == ([], 0)


def test_a_torch_backend_without_cuda_gives_tensors_for_host_inputs(registered: Callable[[Any], Any]) -> None:
    class OfTorch(FakeBackend):
        host_library = "torch"

        def adopt(self, array: Any) -> Any:
            return torch.tensor(np.ascontiguousarray(array))

    registered(OfTorch("recording"))
    torch.manual_seed(1)
    state, default = torch.get_rng_state(), multisample.manual_seed(1)
    x = sample(MU, SIGMA.tolist(), N, backend="recording")
    assert type(x) is torch.Tensor
    check_same(x, reference())
    assert torch.get_rng_state().equal(state)
    assert default.offset == 1


def make_cupy() -> Any:
    """A stand-in for the parts of CuPy that multisample uses, in host memory."""
    cupy = types.ModuleType("cupy")

    class ndarray:  # noqa: N801
        def __init__(self, host: Array | tuple[int, int], device_or_dtype: Any = 0) -> None:
            device = device_or_dtype
            if isinstance(host, tuple):
                host, device = np.full(host, 77, device_or_dtype), cupy.devices[-1]
            self.host = host
            self.device = types.SimpleNamespace(id=device)
            self.data = types.SimpleNamespace(ptr=host.ctypes.data, device_id=device)
            self.dtype, self.shape, self.strides = host.dtype, host.shape, host.strides

        def get(self) -> Array:
            cupy.waited += 1
            return self.host.copy()

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, self.device.id

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {"data": (self.host.ctypes.data, False), "shape": self.shape, "version": 3}

    class Device:
        def __init__(self, ordinal: int) -> None:
            self.ordinal = ordinal

        def __enter__(self) -> None:
            cupy.devices.append(self.ordinal)

        def __exit__(self, *error: object) -> None:
            cupy.devices.pop()

    ndarray.__module__ = "cupy"
    cupy.waited, cupy.devices = 0, [0]
    cupy.ndarray, cupy.array = ndarray, lambda host: ndarray(host.copy(), cupy.devices[-1])
    runtime = types.SimpleNamespace(getDevice=lambda: cupy.devices[-1])
    cupy.cuda = types.SimpleNamespace(Device=Device, runtime=runtime)
    cupy.cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=1000 + cupy.devices[-1])
    return cupy


class OnDevice:
    """An array of an unknown library, in device memory."""

    def __init__(self, host: Array, stream: int | None = None, **more: Any) -> None:
        self.host = host
        self.__cuda_array_interface__ = {
            "data": (host.ctypes.data, False), "shape": host.shape, "typestr": host.dtype.str,
            "strides": None if host.flags.c_contiguous else host.strides, "version": 3, "stream": stream,
        }  # fmt: skip


class OnDeviceByDlpack(ExportedByDlpack):
    def __init__(self, host: Array, device: int = 0, kind: int = 2) -> None:
        self.array, self.host, self.device, self.kind = host, host, device, kind

    def __dlpack_device__(self) -> Any:
        return self.kind, self.device


class RecordingCuda(FakeBackend):
    """A backend for device memory whose library is the stand-in for CuPy."""

    device_kinds = ("cuda",)
    host_library = "cupy"

    def __init__(self, cupy: Any) -> None:
        super().__init__("recording_cuda")
        self.cupy = cupy
        self.adopted: list[Any] = []
        self.ordered: list[tuple[int, int, int]] = []

    def adopt(self, array: Any) -> Any:
        self.adopted.append(array)
        if isinstance(array, np.ndarray):
            return self.cupy.ndarray(array.copy(), self.cupy.devices[-1])
        assert isinstance(array, (OnDevice, OnDeviceByDlpack))
        return self.cupy.ndarray(array.host, getattr(array, "device", 0))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module, ours = make_cupy(), "multisample._libraries.cupy"
    monkeypatch.setitem(sys.modules, "cupy", module)
    # Import our module for CuPy again, with the stand-in. The first one returns after the test.
    before = sys.modules.pop(ours, None)
    yield module
    sys.modules.pop(ours, None)
    if before is not None:
        sys.modules[ours] = before


@pytest.fixture
def cuda(cupy: Any, registered: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> RecordingCuda:
    backend: RecordingCuda = registered(RecordingCuda(cupy))
    # A real driver would not recognize these streams.
    monkeypatch.setattr(_stream_order, "order", lambda *streams: backend.ordered.append(streams))
    for module in (_stream_order, _plan, _libraries.library):
        monkeypatch.setattr(module, "is_capturing", lambda stream: False)
    monkeypatch.setattr(_stream_order, "Event", lambda stream, device: SimpleNamespace(is_done=lambda: True))
    monkeypatch.setattr(_stream_order, "_kept", type(_stream_order._kept)())
    return backend


def draw(*args: Any, **call: Any) -> Any:
    return sample(*args, backend="recording_cuda", **call)


@pytest.mark.parametrize("dtype", [*DTYPES, "int8", "uint16", "int32", "uint64"])
def test_device_arrays_reach_the_backend_as_addresses(cuda: RecordingCuda, cupy: Any, dtype: str) -> None:
    host = [np.array(x, DTYPES.get(dtype, dtype)) for x in ([0, 10, 5], [1, 3, 2])]
    mu, sigma = cupy.ndarray(strided(host[0]), 1), cupy.ndarray(host[1][::-1].copy()[::-1], 1)
    x = draw(mu, sigma, N, seed=1)
    assert type(x) is cupy.ndarray
    assert x.device.id == 1
    check_same(x.host, sample(*host, N, seed=1))
    (launched,) = cuda.launched
    assert input_of(launched, "mu") == (mu.data.ptr, 6 * mu.dtype.itemsize, ElementType[dtype])
    assert input_of(launched, "sigma") == (sigma.data.ptr, -sigma.dtype.itemsize, ElementType[dtype])
    size = x.dtype.itemsize
    assert (launched.matrix, launched.row_stride, launched.column_stride) == (x.data.ptr, size * N, size)
    assert (launched.rows, launched.columns) == (3, N)
    kind = ElementType[dtype if dtype in DTYPES else "float32"]
    assert (launched.type, launched.device, launched.stream) == (kind, 1, 1001)
    assert cuda.adopted == []


def test_host_seeds_are_copied_to_the_device_without_waiting(cuda: RecordingCuda, cupy: Any) -> None:
    for seeds in ([3, 5], np.array([[3, 4], [5, 6]])):
        x = draw(cupy.ndarray(MU, 1), cupy.ndarray(SIGMA, 1), N, seed=seeds)  # The stand-in cannot wait.
        assert (x.device.id, cupy.devices, cupy.waited) == (1, [0], 0)
        check_same(x.host, sample(MU, SIGMA, N, seed=seeds))


def test_device_columns_and_numbers_reach_the_backend(cuda: RecordingCuda, cupy: Any) -> None:
    column, scalar = cupy.ndarray(MU[:, None]), cupy.ndarray(np.array(2, np.float32))
    expected = sample(MU, np.full(3, 2, np.float32), N, seed=1)
    for mu, sigma in ((column, scalar), (column, 2), (column, 2.0)):
        check_same(draw(mu, sigma, N, seed=1).host, expected)
    assert {input_of(launched, "mu") for launched in cuda.launched} == {(column.data.ptr, 4, FLOAT32)}
    sigmas, number = [input_of(launched, "sigma") for launched in cuda.launched], (2.0, 0, ElementType.number)
    assert sigmas == [(scalar.data.ptr, 0, FLOAT32), number, number]
    assert [type(sigma[0]) for sigma in sigmas[1:]] == [float, float]
    check_same(draw(3, cupy.ndarray(SIGMA), N, seed=1).host, sample(np.full(3, 3, np.float32), SIGMA, N, seed=1))
    for number in NUMBERS:  # NumPy's promotion.
        check_same(draw(cupy.ndarray(MU), number, N, seed=1).host, sample(MU, number, N, seed=1))
        narrow = SIGMA.astype(np.float16)
        check_same(draw(number, cupy.ndarray(narrow), N, seed=1).host, sample(number, narrow, N, seed=1))


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda memory: memory[:3, :N],
    "strided": lambda memory: memory[1:7:2, 2 : 2 + 3 * N : 3],
    "transposed": lambda memory: memory[:N, :3].T,
    "both backwards": lambda memory: memory[6:0:-2, 30 : 30 - 3 * N : -3],
    "rows closer than columns": lambda memory: memory[:N, 3:0:-1].T,
}


def test_out_on_a_device_is_written_through_its_strides(cuda: RecordingCuda, cupy: Any) -> None:
    memory = np.zeros((30, 40), np.float32)
    for view in LAYOUTS.values():
        out = cupy.ndarray(view(memory), 1)
        assert draw(cupy.ndarray(MU, 1), cupy.ndarray(SIGMA, 1), N, seed=1, out=out) is out
        check_same(np.ascontiguousarray(out.host), reference())
        launched = cuda.launched[-1]
        assert (launched.matrix, launched.row_stride, launched.column_stride) == (out.data.ptr, *out.host.strides)
        assert (launched.rows, launched.columns) == (3, N)


def test_a_bad_device_out_raises(cuda: RecordingCuda, cupy: Any) -> None:
    memory = np.full((3, N + 1), 7, np.float32)
    one_row = np.lib.stride_tricks.as_strided(memory, (3, N), (0, 4))
    mu, sigma, generator = cupy.ndarray(MU), cupy.ndarray(SIGMA), multisample.Generator(1)
    for out, message in (
        (cupy.ndarray(memory), rf"expected shape \(3, {N}\), got \(3, {N + 1}\)"),
        (cupy.ndarray(memory[:, :N].astype(np.float64)), "expected dtype float32, got float64"),
        (cupy.ndarray(memory[:, :N], 1), "expected it on the device of mu and sigma, cuda:0, got cuda:1"),
        (cupy.ndarray(one_row), r"strides \(0, 4\)"),
    ):
        with pytest.raises(ValueError, match=f"^out: .*{message}"):
            draw(mu, sigma, N, out=out, generator=generator)
    for name, vectors in {"mu": (memory[:, 0], SIGMA), "sigma": (MU, memory[::-1, 3])}.items():
        with pytest.raises(ValueError, match=rf"^out: .*memory that {name} also uses"):
            draw(*map(cupy.ndarray, vectors), N, out=cupy.ndarray(memory[:, :N]), generator=generator)
    assert (memory == 7).all()
    assert (cuda.launched, generator.offset, cupy.devices) == ([], 0, [0])


def test_device_values_are_checked_only_with_validate(cuda: RecordingCuda, cupy: Any) -> None:
    negative = np.array([1, -1, -1], np.float32)
    assert draw(cupy.ndarray(MU), cupy.ndarray(negative), N, seed=1).shape == (3, N)
    assert (cupy.waited, len(cuda.launched)) == (0, 1)
    generator = multisample.Generator(1)
    for mu, sigma, message in (
        (MU, negative, r"^sigma: .*sigma\[1\] = -1.0"),
        (np.array([0, 0, np.nan], np.float32), SIGMA, r"^mu: .*mu\[2\] = nan"),
        (MU[:, None], negative[:, None], r"^sigma: .*sigma\[1\] = -1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            draw(cupy.ndarray(mu), cupy.ndarray(sigma), N, validate=True, generator=generator)
    assert (len(cuda.launched), generator.offset) == (1, 0)
    check_same(draw(cupy.ndarray(MU), cupy.ndarray(SIGMA), N, seed=1, validate=True).host, reference())
    # In the computing type.
    wide, one = cupy.ndarray(np.array([0.0, 1e39])), cupy.ndarray(np.ones(2))
    assert draw(wide, one, 3, seed=1, validate=True).shape == (2, 3)
    with pytest.raises(ValueError, match=r"^mu: .*mu\[1\] = inf as float32"):
        draw(wide, one, 3, seed=1, validate=True, dtype="float32")


def test_numbers_beside_device_arrays_are_always_checked(cuda: RecordingCuda, cupy: Any) -> None:
    for number, came in ((-1.0, "-1"), (math.nan, "nan"), (math.inf, "inf"), (10**400, ""), (1e39, r"(inf|1e\+?39)")):
        with pytest.raises(ValueError, match=f"^sigma: .*{came}"):
            draw(cupy.ndarray(MU), number, N)
    assert cuda.launched == []


def test_host_inputs_are_adopted_by_the_backend(cuda: RecordingCuda, cupy: Any) -> None:
    for mu, sigma in (
        (MU, SIGMA), (MU.tolist(), SIGMA.tolist()), (strided(MU), SIGMA[:, None]), (MU, 2.0), (1, tuple(SIGMA)),
        (ArrayOnly(MU), SIGMA), (MU.astype(np.float64), SIGMA), (MU.astype(np.float16), [1, 2, 3]),
        (MU.astype(np.int32), 2), (MU, np.float64(2)), (MU.astype(ml_dtypes.bfloat16), 1.0),
    ):  # fmt: skip
        x = draw(mu, sigma, N, seed=1)
        assert type(x) is cupy.ndarray
        check_same(x.host, sample(mu, sigma, N, seed=1))
    # By the contract, `adopt` takes a NumPy array, or an object with __dlpack__ or __cuda_array_interface__.
    assert {type(array) for array in cuda.adopted} == {np.ndarray}


def test_host_inputs_are_checked_before_adoption(cuda: RecordingCuda) -> None:
    generator, out = multisample.Generator(1), np.full((3, N), 7, np.float32)
    for mu, sigma, changes, error, message in (
        (MU, np.array([1, -1, 1], np.float32), {}, ValueError, r"^sigma: .*sigma\[1\] = -1.0"),
        ([0.0, float("nan"), 0.0], [1.0, 1.0, 1.0], {}, ValueError, r"^mu: .*mu\[1\] = nan"),
        (MU.astype(complex), SIGMA, {}, TypeError, r"^mu: .*got complex128"),
        (MU, SIGMA, {"out": out}, ValueError, r"^out: backend 'recording_cuda' writes cupy arrays, got"),
    ):
        with pytest.raises(error, match=message):
            draw(mu, sigma, N, generator=generator, **changes)
    assert (out == 7).all()
    assert (cuda.launched, cuda.adopted, generator.offset) == ([], [], 0)


def test_device_arrays_use_our_generators_only(cuda: RecordingCuda, cupy: Any) -> None:
    default = multisample.manual_seed(1)
    check_same(draw(cupy.ndarray(MU), cupy.ndarray(SIGMA), N).host, reference())
    assert default.offset == 1
    expected = r"^generator: expected a multisample.Generator with a CuPy array, got a torch.Generator"
    with pytest.raises(TypeError, match=expected):
        draw(cupy.ndarray(MU), cupy.ndarray(SIGMA), N, generator=torch.Generator())


def test_an_array_with_only_the_cuda_array_interface_is_adopted(cuda: RecordingCuda, cupy: Any) -> None:
    mu, sigma = OnDevice(strided(MU), stream=5), OnDevice(SIGMA)
    x = draw(mu, sigma, N, seed=1)
    assert type(x) is cupy.ndarray
    check_same(x.host, reference())
    assert cuda.adopted == [mu, sigma]
    assert input_of(cuda.launched[0], "mu") == (mu.host.ctypes.data, 24, FLOAT32)
    assert cuda.launched[0].stream == 1000
    # The kernel waits for the stream that the array names, which then waits for the kernel.
    assert cuda.ordered == [(5, 1000, 0), (1000, 5, 0)]
    out = OnDevice(np.zeros((3, N), np.float32), stream=6)
    assert draw(sigma, 1.0, N, seed=1, out=out) is out
    check_same(out.host, sample(SIGMA, 1.0, N, seed=1))
    assert cuda.ordered[2:] == [(6, 1000, 0), (1000, 6, 0)]


@pytest.mark.parametrize("kind", [2, 13])
def test_a_dlpack_array_has_the_device_of_its_protocol(cuda: RecordingCuda, kind: int) -> None:
    mu, sigma = OnDeviceByDlpack(MU, 1, kind), OnDeviceByDlpack(SIGMA, 1, kind)
    check_same(draw(mu, sigma, N, seed=1).host, reference())
    assert (cuda.launched[0].device, cuda.launched[0].stream) == (1, 1001)
    with pytest.raises(ValueError, match=r"^sigma: expected it on the device of .*, cuda:1, got cuda:0"):
        draw(mu, OnDeviceByDlpack(SIGMA, 0, kind), N)


def test_arrays_of_two_libraries_or_devices_raise(cuda: RecordingCuda, cupy: Any) -> None:
    ours, foreign = "a CuPy array as mu", "an object of type OnDevice as"
    for mu, sigma, message in (
        (cupy.ndarray(MU), OnDevice(SIGMA), f"{ours}, {foreign} sigma"),
        (cupy.ndarray(MU), SIGMA, f"{ours}, a NumPy array as sigma"),
        (OnDevice(MU), SIGMA, f"{foreign} mu, a NumPy array as sigma"),
    ):
        with pytest.raises(TypeError, match=rf"^mu, sigma: expected arrays of one library, got {message}"):
            draw(mu, sigma, N)
    with pytest.raises(ValueError, match=r"^sigma: expected it on the device of .*, cuda:0, got cuda:1"):
        draw(cupy.ndarray(MU, 0), cupy.ndarray(SIGMA, 1), N)
    with pytest.raises(TypeError, match=r"^mu, sigma, out: .*one library, .*a NumPy array as out"):
        draw(cupy.ndarray(MU), cupy.ndarray(SIGMA), N, out=np.empty((3, N), np.float32))
    assert cuda.launched == []
