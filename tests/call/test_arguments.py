"""Wrong arguments. On every route of a call, the error names the argument, its value and the accepted values."""

import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch

import multisample
from multisample import Generator, UnknownBackendError, sample
from multisample._plan import PLANS

D = 3
SMALL_N = 4
# Large enough that the cpu backend uses several threads.
SENTINEL = 123.0

Call = dict[str, Any]
as_strided = np.lib.stride_tricks.as_strided


class Base(NamedTuple):
    """How vectors are passed, which determines the route of the call."""

    vector: Callable[[list[Any]], Any]
    matrix: Callable[[int], Any]
    n: int = SMALL_N
    layout: str = "dn"


BASES = {
    "small float32": Base(lambda x: np.array(x, np.float32), lambda n: np.full((D, n), SENTINEL, np.float32)),
    "small float64": Base(lambda x: np.array(x, np.float64), lambda n: np.full((D, n), SENTINEL)),
    "small nd": Base(lambda x: np.array(x, np.float32), lambda n: np.full((n, D), SENTINEL, np.float32), layout="nd"),
    "big": Base(lambda x: np.array(x, np.float32), lambda n: np.full((D, n), SENTINEL, np.float32), 30_000),
    "lists": Base(list, lambda n: np.full((D, n), SENTINEL, np.float32)),
    "torch": Base(lambda x: torch.tensor(x, dtype=torch.float32), lambda n: torch.full((D, n), SENTINEL)),
}
ALL = tuple(BASES)
NUMPY = ("small float32", "small float64", "small nd", "big")
HOST = (*NUMPY, "lists")


class Of(NamedTuple):
    """An argument that `make` makes anew for each call, from the base of the call."""

    make: Callable[[Base], Any]


class Bad(NamedTuple):
    """A mistake, and the expected error: its type, and patterns in its message."""

    change: Call
    error: type[Exception]
    argument: str
    came: str
    accepted: str
    bases: tuple[str, ...] = ALL


def each(name: str, values: Any, error: type[Exception], accepted: str, bases: tuple[str, ...] = ALL) -> list[Bad]:
    """One mistake for each value. A dict has values by their patterns in messages; the default is the repr."""
    if not isinstance(values, dict):
        values = {re.escape(repr(value)[:30]): value for value in values}
    return [Bad({name: value}, error, name, came, accepted, bases) for came, value in values.items()]


def vector(values: list[Any]) -> Of:
    return Of(lambda base: base.vector(values))


class NotAnArray:
    """An object that cannot be printed."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


UNPRINTABLE = {"got <NotAnArray>": NotAnArray()}


def integers(name: str, limit: str) -> Iterator[Bad]:
    for value in (1.5, "3", None, 3.0, [3], np.float32(3), np.array([3, 4]), 1j, torch.tensor(1.5)):
        if name == "seed" and (value is None or np.ndim(value)):  # A vector of seeds.
            continue
        yield Bad({name: value}, TypeError, name, re.escape(type(value).__name__), "integer")
    for flag in (True, False, np.True_):
        yield Bad({name: flag}, TypeError, name, f"bool.*{flag}", "integer")
    for value in (-1, np.int64(-1), -(2**70), 10**400):
        yield Bad({name: value}, ValueError, name, re.escape(str(value)[:20]), limit)
    # Python cannot print integers of this size.
    yield Bad({name: 10**5000}, ValueError, name, "a very large int", limit)
    yield from each(name, UNPRINTABLE, TypeError, "integer")


SEED_RANGE, N_RANGE = r"0 <= seed < 2\*\*64", r"0 <= n <= 2\*\*34,"
GENERATOR, KEY = r"multisample\.Generator", multisample.Key(7, 1)
OF_NUMPY = np.random.default_rng(1)
PLAIN = [
    *integers("n", N_RANGE), *integers("seed", SEED_RANGE), *integers("dim_offset", r"0 <= dim_offset <= 2\*\*32,"),
    *integers("sample_offset", r"0 <= sample_offset <= 2\*\*34,"),
    Bad({"n": 2**34 + 1}, ValueError, "n", str(2**34 + 1), N_RANGE),
    Bad({"n": 2**34, "sample_offset": 1}, ValueError, "n", r"1 \+ 17179869184", r"sample_offset \+ n <= 2\*\*34"),
    *each("seed", {str(2**64): 2**64, "-3": np.int8(-3)}, ValueError, SEED_RANGE),
    Bad({"dim_offset": 2**32 - D + 1}, ValueError, "dim_offset", rf"4294967294 \+ {D}", r"dim_offset \+ d <= 2\*\*32"),
    *each("dim_offset", [2**70], ValueError, r"2\*\*32"), *each("sample_offset", [2**34 + 1], ValueError, r"2\*\*34"),
    *(
        Bad({"seed": 1, "generator": generator}, TypeError, "seed, generator", "both", "one of the two")
        for generator in (Generator(1), torch.Generator())
    ),
    *(
        Bad({"generator": x}, TypeError, "generator", re.escape(type(x).__name__), rf"{GENERATOR}.*torch\.Generator")
        for x in (OF_NUMPY, np.random.RandomState(1), 7, "7", Generator, np.zeros(2), torch.tensor(3), torch.float32)
    ),
    *each("generator", {"arrays on cpu": Generator(1, graph_safe=True)}, ValueError, "a CUDA device with graph_safe=T"),
    *each("generator", (KEY, 7, np.int64(7)), TypeError, rf"{GENERATOR}, .*; pass it as seed=$"),
    *each("generator", {"Generator": OF_NUMPY}, TypeError, rf"{GENERATOR}, .*: seed=rng\.integers\(2\*\*63\)$"),
    *each("generator", {r"torch\.Generator": torch.Generator()}, TypeError, rf"{GENERATOR} with a NumPy array", HOST),
    *(
        Bad({"seed": generator}, TypeError, "seed", "Generator|RandomState", f"an integer, .*{advice}$")
        for generator, advice in (
            (Generator(1), r"; pass it as generator=, or its next Key as seed=generator\.take\(\)"),
            (torch.Generator(), "; pass it as generator="), (OF_NUMPY, r": seed=rng\.integers\(2\*\*63\)"),
            (np.random.RandomState(1), r": seed=rng\.tomaxint\(\)"),
        )
    ),
    *each("dtype", (
        "int32", "float31", "", "complex64", object, np.int32, bool, complex, np.longdouble, torch.int32,
        torch.complex64, ml_dtypes.float8_e4m3fn, 3, 32.0, [], {}, "(1,2", ("f4", -1),
    ), TypeError, "float16, bfloat16, float32, float64"),
    *each("noise", ("Shared", "", None, 3, True, ["shared"], np.zeros(2)), ValueError, "'independent' or 'shared'"),
    *each("layout", ("Nd", "DN", None, 0, np.zeros(2)), ValueError, "'dn' or 'nd'"),
    *(
        bad for name in ("fast_math", "validate", "antithetic")
        for bad in each(name, (0, 1, None, "yes", 1.0, np.zeros(2)), TypeError, "True or False")
    ),
    *each("backend", ("CPU", "gpu", "auto ", ""), UnknownBackendError, "'auto', .*'cpu'$"),
    *each("backend", (None, 3, ["cpu"], np.zeros(2)), TypeError, "name"),
    *(
        bad for name in ("backend", "generator", "noise", "dtype", "validate")
        for bad in each(name, UNPRINTABLE, ValueError if name == "noise" else TypeError, "expected")
    ),
]  # fmt: skip


def quietly(make: Callable[[], Any]) -> Of:
    """What ``make()`` returns, without PyTorch's warnings about prototypes."""

    def made(base: Base) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return Of(made)


TENSORS: dict[str, Any] = {
    "a nested tensor": quietly(lambda: torch.nested.as_nested_tensor([torch.ones(D), torch.ones(2)])),
    "a nested tensor$": quietly(lambda: torch.nested.as_nested_tensor([torch.ones(D)] * 2, layout=torch.jagged)),
    r"a quantized tensor \(qint8\)": quietly(lambda: torch.quantize_per_tensor(torch.ones(D), 1, 0, torch.qint8)),
    r"layout torch\._mkldnn": quietly(lambda: torch.ones(D).to_mkldnn()),
    r"layout torch\.sparse_csr": quietly(lambda: torch.ones(D, 1).to_sparse_csr()),
    "sparse_coo": quietly(lambda: torch.ones(D).to_sparse()),
    "a masked tensor": quietly(lambda: torch.masked.masked_tensor(torch.ones(D), torch.ones(D) > 0)),
    "an uninitialized parameter": quietly(torch.nn.UninitializedBuffer),
}
ELEMENTS = "float16, bfloat16, float32, float64 or an integer type"
VECTORS = [
    bad
    for name in ("mu", "sigma")
    for bad in (
        *each(name, (None, "abc", "1", b"ab", {}, {1: 2}, {1.0}, range(3), 1j, True), TypeError, "array"),
        *each(name, UNPRINTABLE | {"False": False, "ndarray": np.ndarray}, TypeError, "array"),
        *each(name, ([[1, 2], [3]], [[0.0], 1.0, 2.0]), TypeError, "number|array", HOST),
        *each(name, {
            "bool": [True, False, True], "complex": [1j, 2, 3], "strings": ["1", "2", "3"],
            "Python objects": [1.0, None, 3.0],
        }, TypeError, ELEMENTS, HOST),
        *each(name, {"masked": np.ma.masked_array(np.zeros(D), mask=True)}, TypeError, "fill it first", HOST),
        *each(name, {came: np.zeros(D, dtype) for dtype, came in {
            "bool": "bool", "complex64": "complex64", "complex128": "complex128", "object": "got Python objects",
            "U3": r"got strings \(<U3\)", "S3": r"got bytes \(\|S3\)", "f4,i4": "got structured elements",
            "M8[s]": "datetime64", "m8[s]": "timedelta64", "longdouble": r"got longdouble \(",
            "clongdouble": r"got clongdouble \(",
        }.items()}, TypeError, ELEMENTS, HOST),
        *each(name, {
            kind: torch.zeros(D, dtype=getattr(torch, kind))
            for kind in ("bool", "complex64", "complex128", "float8_e4m3fn")
        }, TypeError, ELEMENTS, ("torch",)),
        *(
            Bad({name: vector(np.ones(shape).tolist())}, ValueError, "mu, sigma", re.escape(str(shape)), "broadcast")
            for shape in ((D, 2), (2, D, 2), (D, 0))
        ),
        *(
            Bad({name: vector([1.0] * length)}, ValueError, "sigma", str(length), "as many elements as mu")
            for length in (0, 1, D + 1)
        ),
        # Of two bad values, the error names the first.
        *each(name, {
            rf"{name}\[1\] = {value}": vector([1.0, value, value]) for value in (math.nan, math.inf, -math.inf)
        }, ValueError, r"finite .*\(2 of 3 values\)$"),
        *each(name, {
            "nan": math.nan, "inf": math.inf, "10{9}|inf": 10**400, "-10{9}|-inf": -(10**400),
            "a very large int": 10**5000,
        }, ValueError, "finite"),
        Bad({name: 1e39, "dtype": "float32"}, ValueError, name, "inf|1e.?39", "finite"),
        *(
            Bad({name: values, "dtype": dtype}, ValueError, name, rf"{name}\[1\] = (inf|1e.?39)", "finite", bases)
            for values, dtype, bases in (
                (np.array([1.0, 1e39, 1e39]), "float32", HOST),
                (torch.tensor([1.0, 1e39, 1e39], dtype=torch.float64), "float16", ("torch",)),
            )
        ),
        *(
            Bad({name: value}, TypeError, "mu, sigma", f"{came} as {name}", "one library" + advice, bases)
            for came, value, advice, bases in (
                ("a PyTorch tensor", torch.ones(D), "", HOST), ("a NumPy array", np.ones(D), "", ("torch",)),
                ("a list", [1.0] * D, rf", .*; convert {name}: torch\.as_tensor\({name}, device=", ("torch",)),
                ("a tuple", (1.0,) * D, "", ("torch",)),
            )
        ),
        *each(name, TENSORS, TypeError, "strided", ("torch",)),
        Bad({name: torch.ones(D, requires_grad=True), "backend": "cpu"}, ValueError, name, "requires grad", "detach",
            ("torch",)),
    )
] + [
    Bad({"sigma": vector(np.eye(D).tolist())}, ValueError, "sigma", rf"{D}, {D}", r"Cholesky .* COMMON_TASKS\.md"),
    *each("sigma", {
        r"sigma\[1\] = -1.0": vector([1.0, -1.0, -1.0]), r"sigma\[1\] = -1": vector([1.0, -1e-45, -1e-45]),
        "-0.5": -0.5, "-2": -2,
    }, ValueError, "at least 0"),
    *each("sigma", {r"sigma\[1\] = -2": np.array([1, -2, 3])}, ValueError, "at least 0", HOST),
    Bad({"n": 0, "sigma": vector([1.0, -1.0, 1.0])}, ValueError, "sigma", r"sigma\[1\] = -1.0", "at least 0"),
    Bad({"mu": vector([1.0, 2.0, math.nan]), "sigma": vector([-1.0] * D)}, ValueError, "mu", "nan", "finite means"),
    Bad({"mu": 0.0, "sigma": 1.5}, TypeError, "mu, sigma", "0.0 and 1.5", "at least one array"),
    Bad({"mu": torch.zeros(D, device="meta"), "seed": 1}, ValueError, "sigma", "cpu", "device of mu, meta", ("torch",)),
    *each("sigma", {"meta": torch.ones(D, device="meta")}, ValueError, "device of .*, cpu", ("torch",)),
]  # fmt: skip


def read_only() -> np.ndarray[Any, Any]:
    out = np.ones((D, SMALL_N), np.float32)
    out.flags.writeable = False
    return out


class Copying:
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.zeros((D, SMALL_N))


def outs(makes: dict[str, Callable[[], Any]], error: type[Exception], accepted: str, *bases: str) -> list[Bad]:
    """A mistake for each `out`, made anew for each call, by the pattern in its message."""
    name = "mu, sigma, out" if accepted == "one library" else "out"
    return [
        Bad({"out": Of(lambda base, make=make: make())}, error, name, came, accepted, bases)  # type: ignore[misc]
        for came, make in makes.items()
    ]


WHOLE = (D, SMALL_N)
ARRAYS = "small float32", "lists"
OUTS = [
    *outs({
        f"got {re.escape(str(shape))}": lambda shape=shape: np.ones(shape, np.float32)
        for shape in ((4, 3), (3, 3), (12,), (3, 4, 1), (1, 3, 4), (), (0, 4), (3, 0))
    }, ValueError, r"expected shape \(3, 4\)", *ARRAYS),
    *outs({
        f"got {np.dtype(dtype).name}": lambda dtype=dtype: np.ones(WHOLE, dtype)
        for dtype in (np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.uint32)
    }, ValueError, "expected dtype float32", *ARRAYS),
    *outs({
        came: lambda dtype=dtype: np.ones(WHOLE, dtype)
        for dtype, came in ((bool, "bool"), (complex, "complex128"), (object, r"Python objects \(object\)"))
    }, TypeError, "float32", *ARRAYS),
    *outs({"got a read-only one": read_only}, ValueError, "expected a writable array", *ARRAYS),
    *outs({"swapped": lambda: np.ones(WHOLE, ">f4")}, ValueError, "expected native byte order", *ARRAYS),
    # All rows or all columns in one place, sliding rows, rows that meet, half an element between columns.
    *outs({
        re.escape(str(strides)): lambda strides=strides: as_strided(np.ones(99, np.float32)[40:], WHOLE, strides)
        for strides in ((0, 4), (4, 0), (4, 4), (12, 4), (-12, 4), (64, 2))
    }, ValueError, "strides", *ARRAYS),
    *outs({"a PyTorch tensor as out": lambda: torch.ones(WHOLE)}, TypeError, "one library", *ARRAYS),
    *outs({
        re.escape(repr(value)[:9]): lambda value=value: value
        for value in ("x", 3, 3.0, True, {}, np.ndarray, [[0.0] * 4] * 3, ((0.0,) * 4,) * 3)
    }, TypeError, "array", *ARRAYS),
    *outs({"Copying": Copying, "mask": lambda: np.ma.ones(WHOLE, np.float32)}, TypeError, "array", *ARRAYS),
    *outs({
        f"got {dtype}": lambda dtype=dtype: torch.ones(WHOLE, dtype=getattr(torch, dtype))
        for dtype in ("float64", "bfloat16", "int32")
    }, ValueError, "expected dtype float32", "torch"),
    *outs({"bool": lambda: torch.ones(WHOLE, dtype=torch.bool)}, TypeError, "float32", "torch"),
    *outs({
        r"expected shape .* got \(4, 3\)": lambda: torch.ones(4, 3),
        r"strides \(4, 0\)": lambda: torch.ones(3, 1).expand(WHOLE),
        "requires grad.*detach": lambda: torch.ones(WHOLE, requires_grad=True),
        "negative bit": lambda: torch.ones(WHOLE, dtype=torch.complex64).conj().imag,
        "device of .*, cpu, got meta": lambda: torch.ones(WHOLE, device="meta"),
    }, ValueError, "", "torch"),
    *outs({
        "sparse_coo": lambda: torch.ones(WHOLE).to_sparse(),
        "a nested tensor$": lambda: TENSORS["a nested tensor"].make(None),
    }, TypeError, "expected a strided tensor", "torch"),
    *outs({"a NumPy array as out": lambda: np.ones(WHOLE, np.float32)}, TypeError, "one library", "torch"),
]  # fmt: skip


def bytes_of(out: Any) -> bytes:
    """The memory of an array, between its elements too."""
    if isinstance(out, torch.Tensor):
        plain = out.layout == torch.strided and not out.is_meta and not out.is_nested
        return bytes(out.detach().untyped_storage()) if plain else b""
    while isinstance(getattr(out, "base", None), np.ndarray):
        out = out.base
    return out.tobytes() if isinstance(out, np.ndarray) else b""


def good_call(base: Base) -> Call:
    mu, sigma = base.vector([0.0, 10.0, 20.0]), base.vector([1.0, 2.0, 3.0])
    return {"mu": mu, "sigma": sigma, "n": base.n, "layout": base.layout}


def check_refused(bad: Bad, call: Call) -> None:
    with pytest.raises(bad.error) as caught:
        sample(**call)
    assert caught.type is bad.error
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    message = str(caught.value)
    assert "\n" not in message
    # If two arguments do not match each other, the error may name either.
    name, _, _ = message.partition(":")
    assert name.split(", ")[: len(bad.argument.split(", "))] == bad.argument.split(", "), message
    for part in (bad.came, bad.accepted):
        assert re.search(part, message), message


def check_bad(bad: Bad, base: Base) -> None:
    default = multisample.manual_seed(5)
    torch.manual_seed(5)
    at_rest = default.state, torch.get_rng_state()
    ours, theirs = Generator(3), torch.Generator().manual_seed(3)
    state = theirs.get_state()
    extras: list[Call] = [{}, {"generator": ours, "out": base.matrix(base.n)}]
    if base is BASES["torch"]:
        extras.append({"generator": theirs})
    for extra in extras:
        PLANS.clear()
        for source in ({"seed": 1}, {"generator": Generator(1)}) if "out" in extra else ():  # They make plans.
            out = base.matrix(base.n)
            assert sample(**good_call(base), **source, out=out) is out
            assert not (out == SENTINEL).any()
        changes = {name: x.make(base) if isinstance(x, Of) else x for name, x in bad.change.items()}
        call = extra | good_call(base) | changes
        if "seed" in changes and "generator" not in changes:
            call.pop("generator", None)
        before = bytes_of(call.get("out"))
        check_refused(bad, call)
        assert bytes_of(call.get("out")) == before
    assert ours.state == {"seed": 3, "offset": 0, "spawned": 0}
    assert theirs.get_state().equal(state)
    assert default.state == at_rest[0]
    assert torch.get_rng_state().equal(at_rest[1])


GROUPS = sorted({(bad.argument, base) for bad in (*PLAIN, *VECTORS, *OUTS) for base in bad.bases})


@pytest.mark.parametrize(("argument", "base"), GROUPS)
def test_a_bad_argument_raises_and_changes_nothing(argument: str, base: str) -> None:
    for bad in (*PLAIN, *VECTORS, *OUTS):
        if bad.argument == argument and base in bad.bases:
            check_bad(bad, BASES[base])


def test_a_dask_array_raises_and_changes_nothing() -> None:
    array = pytest.importorskip("dask.array").ones(D, chunks=2)
    for base in BASES.values():
        for bad in each("mu", {r"dask\.array<": array}, TypeError, r"in memory, .*multisample\.dask\.sample$"):
            check_bad(bad, base)


def test_a_torch_generator_of_another_device_raises() -> None:
    class Elsewhere(torch.Generator):
        device = torch.device("cuda", 1)

    Elsewhere.__module__ = "torch"
    out = torch.full((2, 3), SENTINEL)
    with pytest.raises(ValueError, match=r"^generator: expected one on the CPU or the device of .*, got one on cuda:1"):
        sample(torch.zeros(2), torch.ones(2), 3, generator=Elsewhere(), out=out)
    assert (out == SENTINEL).all()


# test_plans.py has inputs that the kernel reads in place.
def test_out_may_not_overlap_an_input_that_is_converted() -> None:
    memory, tensor = np.zeros((3, 6)), torch.zeros(3, 6)
    words, generator = memory.view(np.float32), Generator(1)
    for argument, mu, sigma, out, dtype in (
        ("mu", memory[:, 0], 1.0, memory[:, :4], "float64"), ("sigma", 0.0, memory[:, 1], words[:, 2:6], "float32"),
        ("mu", words[1:2, 1].reshape(()), np.ones(3, np.float32), words[:, 1:5], None),
        ("mu", tensor[:, 1], torch.ones(3), tensor[:, :4], None),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"^out: .*{argument} also uses"):
            sample(mu, sigma, 4, out=out, dtype=dtype, generator=generator)
    assert not memory.any() and not tensor.any() and generator.offset == 0


def test_out_may_lie_between_the_elements_of_an_input() -> None:
    memory = np.zeros((3, 6), np.float32)
    memory[:, 5] = 2
    mu, sigma, out = memory[:, 0], memory[:, 5], memory[:, 1:5]
    assert sample(mu, sigma, 4, seed=1, out=out) is out
    np.testing.assert_array_equal(out, sample(np.zeros(3, np.float32), np.full(3, 2, np.float32), 4, seed=1))
    assert (memory[:, 0] == 0).all()
    assert (memory[:, 5] == 2).all()


MU, SIGMA = np.array([0.0, 5.0, -3.0], np.float32), np.array([1.0, 0.5, 2.0], np.float32)


def test_numbers_flags_and_names_of_numpy_are_accepted() -> None:
    expected = sample(MU, SIGMA, 7, seed=9, dim_offset=2, sample_offset=5)
    others: Call = {"fast_math": np.True_, "validate": np.True_, "antithetic": np.False_}
    others |= {"noise": np.str_("independent"), "backend": np.str_("cpu")}
    for integer in (np.int8, np.uint16, np.int64, np.uint64):
        call: Call = {"seed": integer(9), "dim_offset": integer(2), "sample_offset": integer(5), **others}
        np.testing.assert_array_equal(sample(MU, SIGMA, integer(7), **call), expected)


def test_the_largest_n_and_offsets_are_accepted() -> None:
    last = np.uint64(2**64 - 1)
    np.testing.assert_array_equal(sample(MU, SIGMA, 2, seed=2**64 - 1), sample(MU, SIGMA, 2, seed=last))
    assert sample(MU, SIGMA, 4, seed=1, dim_offset=2**32 - 3).shape == (3, 4)
    assert sample(MU, SIGMA, 4, seed=1, sample_offset=2**34 - 4).shape == (3, 4)
    assert sample(MU, SIGMA, 0, seed=1, sample_offset=2**34).shape == (3, 0)
    assert sample(MU[:0], SIGMA[:0], 4, seed=1, dim_offset=2**32).shape == (0, 4)
    assert sample(MU[:0], SIGMA[:0], 2**34, seed=1).shape == (0, 2**34)


def test_values_that_fit_the_computing_type_are_accepted() -> None:
    for sigma in ([1.0, 1e300], 1e300):
        assert np.isfinite(sample([1e300, 0.0], sigma, 2, seed=1, dtype="float64")).all()
