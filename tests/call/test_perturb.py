"""`perturb` and `multisample.torch.perturb_`: bits, structures, ids, shared memory and errors."""

import contextlib
import itertools
import weakref
import zlib
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tables import slow_but
from torch._subclasses import FakeTensorMode

import multisample
from multisample import Key, perturb
from multisample._checks.coefficients import read_coefficients
from multisample._checks.operands import check_unwritten, ranges_of
from multisample._libraries import Device, Operand
from multisample._libraries.torch import TORCH
from multisample._reading import coefficients_reader
from multisample.backends.element_types import MATRIX_TYPES
from multisample.torch import perturb_

# torch.compile imports modules of PyTorch that PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:::torch")

LAUNCHES = 3  # The calls make a plan, check it, and use it.
SLOW = pytest.mark.slow


def exact_fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding."""
    if c.dtype == np.float32:  # In float64, the product is exact, and so is the rounding error of the sum.
        product, high = a.astype(np.float64) * b, c.astype(np.float64)
        total = product + high
        rest = (product - (total - (total - product))) + (high - (total - product))
        # Round to odd, then to nearest: one rounding in all.
        bits = total.view(np.int64)
        inexact = (rest != 0) & (bits & 1 == 0)
        bits += np.where(inexact, np.where((rest > 0) == (total > 0), 1, -1), 0)
        return total.astype(np.float32)
    triples = zip(*(map(Fraction, x.tolist()) for x in (a, b, c)), strict=True)
    return np.array([float(x * y + z) for x, y, z in triples])


def expected(p: Any, coefficients: Any, seed: int = 7, offset: int = 0, number: int = 0, member: int = 0) -> Any:
    """The result for one tensor, from the definition."""
    dtype = str(p.dtype).removeprefix("torch.")
    real = MATRIX_TYPES[dtype].computing
    values = np.atleast_1d(np.asarray(coefficients, np.float64)).astype(real)
    key = Key(seed, offset + (number << 32))
    x = p.to(getattr(torch, real)).numpy().reshape(-1).astype(real)
    noise = multisample.sample(np.zeros_like(values), 1.0, x.size, seed=key, dim_offset=member)
    for c, z in zip(values, noise, strict=True):
        x = exact_fma(np.full(x.size, c), z, x)
    return torch.from_numpy(x).to(p.dtype).reshape(p.shape)


def same(a: Any, b: Any) -> bool:
    return bool(torch.equal(torch.as_tensor(a).cpu(), torch.as_tensor(b).cpu()))


def views(p: Any) -> list[Any]:
    return [p, p.transpose(0, 2), p[:, ::2], p[1:, 3:, 1:4], p[..., 2], p[0, 0, 0], p[:0]]


@pytest.mark.parametrize("dtype", MATRIX_TYPES)
@pytest.mark.parametrize("coefficients", [0.5, -3, [0.1, -2.0, 3.0], [1e-3] * 9])
def test_results_have_the_bits_of_the_definition(everywhere: Any, dtype: str, coefficients: Any) -> None:
    base = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(3)).to(getattr(torch, dtype))
    options: dict[str, Any] = {"seed": Key(7, 2**32 - 1), "member": 2**32 - 9, "backend": everywhere.backend}
    on_device = torch.tensor(coefficients, dtype=torch.float64, device=everywhere.device)
    for p, own in zip(views(base), views(base.to(everywhere.device)), strict=True):
        right = expected(p, coefficients, offset=2**32 - 1, member=2**32 - 9)
        for given in (coefficients, on_device) if isinstance(coefficients, list) else (coefficients,):
            for _ in range(LAUNCHES):
                assert same(perturb(own, given, **options), right)
                written = everywhere.put(p)
                assert perturb_(written, given, **options) is written
                assert same(written, right)
                out = torch.full(p.shape[::-1], 9.0, dtype=p.dtype, device=everywhere.device)
                out = out.permute(tuple(reversed(range(p.dim()))))
                assert perturb(own, given, out=out, **options) is out
                assert same(out, right)


def test_numpy_arrays_of_any_strides(host: str) -> None:
    p = np.random.default_rng(1).normal(size=(6, 9)).astype(np.float32)
    for x in (p, p[::-1], p[:, ::-2], p.T, p.astype(">f4"), p[2], p[2, 3]):
        right = expected(torch.from_numpy(np.array(x, "f4")), [0.5, 2.0])
        assert same(perturb(x, [0.5, 2.0], seed=7, backend=host), right)
    turned = p[::-1, ::-1]
    right = expected(torch.from_numpy(turned.copy()), 0.5)
    assert perturb(turned, 0.5, seed=7, out=turned, backend=host) is turned
    assert same(turned.copy(), right)
    turned.flags.writeable = False
    with pytest.raises(ValueError, match=r"^out: expected a writable array"):
        perturb(turned, 0.5, seed=7, out=turned, backend=host)
    assert same(turned.copy(), right)


@pytest.mark.parametrize("size", [1, 3, 4, 1023, 1024, 1025, (1 << 15) + 5, (1 << 17) + 3])
def test_lengths_and_threads(host: str, size: int) -> None:
    p = torch.linspace(-1, 1, size)
    right = expected(p, [0.5, 0.25])
    assert same(perturb(p, [0.5, 0.25], seed=7, backend=host), right)
    pieces = torch.zeros(size + 9)[1:]
    for begin in (0, 1, 2, 3, 5):
        own = pieces[begin : begin + size].copy_(p)
        assert same(perturb_(own, [0.5, 0.25], seed=7, backend=host), right)


def test_many_small_tensors(host: str) -> None:
    sizes = np.random.default_rng(2).integers(0, 60, 700)
    tensors = [torch.zeros(int(size)) for size in sizes]
    results = perturb(tensors, 0.5, seed=7, backend=host)
    for number, (p, result) in enumerate(zip(tensors, results, strict=True)):
        assert same(result, expected(p, 0.5, number=number))


def test_seeds_and_coefficients_of_any_kind(host: str) -> None:
    p = torch.linspace(0, 1, 9)
    for seed in (7, np.uint64(7), Key(7, 0), np.array([0, 7], np.uint32), np.array([[7, 0]]), np.array([[0, 7]], "u4")):
        assert same(perturb(p, 0.5, seed=seed, backend=host), expected(p, 0.5))
    right = expected(p, [0.5, 1e-3])
    for coefficients in (
        [0.5, 1e-3], (0.5, 1e-3), np.array([0.5, 1e-3]), np.array([0.5, 9, 1e-3])[::2],
        torch.tensor([0.5, 1e-3], dtype=torch.float64),
    ):  # fmt: skip
        assert same(perturb(p, coefficients, seed=7, backend=host), right)
    one = expected(p, 2)
    for coefficient in (2, 2.0, np.float32(2), np.int64(2), torch.tensor(2.0), torch.tensor([2]), [2]):
        assert same(perturb(p, coefficient, seed=7, backend=host), one)
    assert same(perturb(p, [], seed=7, backend=host), p)


def test_structures_and_their_ids() -> None:
    a, b = np.zeros(3, np.float32), np.ones((2, 2), np.float32)
    first, second = expected(torch.from_numpy(a), 0.5), expected(torch.from_numpy(b), 0.5, number=1)
    for kind in (list, tuple):
        results = perturb(kind([a, b]), 0.5, seed=7)
        assert type(results) is kind
        assert same(results[0], first)
        assert same(results[1], second)
    results = perturb({"one": a, "two": b}, 0.5, seed=7)
    assert list(results) == ["one", "two"]
    assert same(results["two"], expected(torch.from_numpy(b), 0.5, number=zlib.crc32(b"two")))
    results = perturb({"one": a, "two": b}, 0.5, seed=7, ids={"two": 1})
    assert same(results["two"], second)
    assert same(perturb([b, a], 0.5, seed=7, ids=[1, 0])[0], second)
    assert same(perturb(b, 0.5, seed=7, ids=[1]), second)
    assert perturb([], 0.5, seed=7) == [] and perturb({}, 0.5, seed=7) == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_plan_knows_no_ids_but_integers() -> None:
    a, changing = [np.zeros(3, np.float32)], torch.tensor(1)
    one = perturb(a, 0.5, seed=7, ids=[1])[0]
    for wrong in (1.0, True):
        with pytest.raises(TypeError, match=r"^ids"):
            perturb(a, 0.5, seed=7, ids=[wrong])
    assert same(perturb(a, 0.5, seed=7, ids=[changing])[0], one)
    changing += 5
    assert same(perturb(a, 0.5, seed=7, ids=[changing])[0], perturb(a, 0.5, seed=7, ids=[6])[0])


class Tied(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.output = torch.nn.Linear(4, 4, bias=False)
        self.embedding = torch.nn.Embedding(4, 4)
        self.embedding.weight = self.output.weight
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))


def test_modules(host: str) -> None:
    module = Tied()
    before = {name: x.detach().clone() for name, x in module.named_parameters()}
    number = zlib.crc32(b"embedding.weight")  # The first of its two names.
    right = expected(before["output.weight"], 0.5, number=number)
    with torch.no_grad():
        results = perturb(module, 0.5, seed=7, backend=host)
    assert set(results) == {"output.weight", "embedding.weight", "scale"}
    assert results["output.weight"] is results["embedding.weight"] and same(results["output.weight"], right)
    assert not results["scale"].requires_grad
    torch.func.functional_call(module.output, {"weight": right}, (right,))
    versions = [x._version for x in module.parameters()]
    assert perturb_(module, 0.5, seed=7, backend=host) is module
    assert same(module.output.weight.detach(), right)
    assert same(module.scale.detach(), expected(before["scale"], 0.5, number=zlib.crc32(b"scale")))
    assert same(module.frozen, before["frozen"])
    assert [x._version > v for x, v in zip(module.parameters(), versions, strict=True)] == [False, True, True]
    base = Tied()
    for name, x in base.named_parameters():
        x.data.copy_(before[name])
    assert perturb(base, 0.5, seed=7, out=module, backend=host) is module
    assert same(module.output.weight.detach(), right)


def test_a_call_sees_what_changed_since_the_last(host: str) -> None:
    p = torch.arange(6.0).reshape(2, 3)
    others = [torch.arange(4.0), torch.arange(5.0)]
    for _ in range(3):
        assert same(perturb(p, 0.5, seed=7, backend=host), expected(p, 0.5))
        perturb(others, 0.5, seed=7, backend=host)
    p.data = p.data.T
    assert same(perturb(p, 0.5, seed=7, backend=host), expected(p, 0.5))
    p.data = torch.arange(3.0)
    others[1].data = torch.arange(10.0)[::2]
    for _ in range(3):
        assert same(perturb(p, 0.25, seed=7, backend=host), expected(p, 0.25))
        results = perturb(others, 0.5, seed=7, backend=host)
        assert same(results[1], expected(others[1], 0.5, number=1))
    others[0].data = torch._neg_view(torch.arange(4.0))
    assert same(perturb(others, 0.5, seed=7, backend=host)[0], expected(others[0].resolve_neg(), 0.5))
    weight = torch.nn.Parameter(torch.zeros(3))
    for _ in range(3):
        perturb_(weight, 0.5, seed=7, backend=host)
    with torch.no_grad():
        weight.data.zero_()
    made = torch.zeros(3)
    for _ in range(3):
        perturb_(made, 0.5, seed=7, backend=host)
    made += weight
    with pytest.raises(ValueError, match=r"^out: expected a leaf"):
        perturb_(made, 0.5, seed=7, backend=host)
    with torch.inference_mode():
        inference = torch.zeros(3)
        for _ in range(3):
            perturb_(inference, 0.5, seed=7, backend=host)
    kept = inference.clone()
    with pytest.raises(ValueError, match=r"^out: expected a writable tensor, got an inference tensor"):
        perturb_(inference, 0.5, seed=7, backend=host)
    assert same(inference, kept)


def test_repeated_calls_perturb_the_right_arrays(host: str) -> None:
    """Calls that differ in addresses, types, names, ids, destinations or coefficients."""
    models = [[torch.randn(3), torch.randn(4, 5)[:, ::2]] for _ in range(7)]
    models += [[torch.randn(3).double(), torch.randn(4, 3)], [torch.randn(3).half(), torch.randn(4, 3).bfloat16()]]
    coefficients = [0.5, [0.5, 0.25], np.array([0.5, 0.25], np.float32), torch.tensor([0.5, 0.25])]
    for _ in range(3):
        for model in models:
            for given in coefficients:
                rights = [expected(p, given, number=number) for number, p in enumerate(model)]
                outs = [torch.zeros_like(p) for p in model]
                for found in (
                    perturb(model, given, seed=7, backend=host),
                    perturb(model, given, seed=7, out=outs, backend=host),
                    perturb_([p.clone() for p in model], given, seed=7, backend=host),
                    perturb(model[::-1], given, seed=7, ids=[1, 0], backend=host)[::-1],
                ):
                    assert all(map(same, found, rights))


def test_plans_of_one_call_in_and_outside_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, right = [torch.zeros(3), torch.zeros(4)], expected(torch.zeros(4), 0.5, number=1)
    for _ in range(2):
        for mode in (torch.inference_mode(), torch.no_grad()):
            with mode:
                assert same(perturb(tensors, 0.5, seed=7)[1], right)
    # Calls seen before do not come here.
    monkeypatch.setattr("multisample._model_parameters.perturb_plan._run_first", None)
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode:
            assert same(perturb(tensors, 0.5, seed=7)[1], right)


def test_plans_keep_no_tensor_alive(host: str) -> None:
    tensors = [torch.zeros(3) for _ in range(3)]
    for _ in range(3):
        perturb_(tensors, 0.5, seed=7, backend=host)
        perturb(tensors, 0.5, seed=7, backend=host)
    kept = weakref.ref(tensors[0])
    del tensors
    assert kept() is None  # No cycle holds it.


def _compiled(f: Any) -> Any:
    torch._dynamo.reset()  # Compilations of other tests count against a limit.
    return torch.compile(f, fullgraph=True, backend="aot_eager")


VECTOR, KEYS = torch.tensor([0.5, 0.25]), torch.tensor([[7, 3]])
PAIRS = [([0.5, 0.25], Key(7, 3)), (0.5, KEYS), (VECTOR, 2**64 - 1), (VECTOR, KEYS)]


@pytest.mark.parametrize(("coefficients", "seed"), [*PAIRS[:2], *(pytest.param(*x, marks=SLOW) for x in PAIRS[2:])])
def test_compiled_calls_have_the_bits_of_eager_calls(coefficients: Any, seed: Any) -> None:
    def f(x: Any, y: Any) -> Any:
        named = perturb({"b": x + 1, "a": y.T}, coefficients, seed=seed, member=3, ids={"b": 9})
        perturb_([x, y], coefficients, seed=seed)
        perturb({"a": x}, coefficients, seed=seed, out={"a": named["b"]})
        return named["a"] * 2, named["b"], x

    x, y = torch.randn(3), torch.randn(4, 5)
    others = x.clone(), y.clone()
    assert all(map(same, f(x, y), _compiled(f)(*others)))
    assert same(y, others[1])


def test_a_compiled_loop_takes_new_numbers_without_a_graph_break() -> None:
    def f(x: Any, c: float, t: int) -> Any:
        perturb_([x], c, seed=Key(7, t), member=t)
        return x * 2

    x, other, compiled = torch.zeros(5), torch.zeros(5), _compiled(f)
    for t in range(4):
        assert same(f(x, 0.5 / (t + 1), t), compiled(other, 0.5 / (t + 1), t))
    assert same(x, other)


def test_a_compiled_call_perturbs_a_module_in_place() -> None:
    def f(module: Any, x: Any) -> Any:
        perturb_(module, 0.5, seed=7)
        return module.output(x)

    module, other, x = Tied(), Tied(), torch.randn(2, 4)
    other.load_state_dict(module.state_dict())
    versions = [p._version for p in other.parameters()]
    assert same(f(module, x), _compiled(f)(other, x))
    assert all(map(same, module.parameters(), other.parameters()))
    trainable = [p._version > v for p, v in zip(other.parameters(), versions, strict=True) if p.requires_grad]
    assert all(trainable) and all(p.is_leaf for p in other.parameters())


def test_the_operator_fulfills_the_contract_of_pytorch() -> None:
    torch.compile(lambda x: perturb(x, 0.5, seed=7), backend="eager")(torch.zeros(3))  # Registers the operator.
    options = {"seed": 7, "offset": 3, "member": 1, "decays": [0.0, 0.25], "fast_math": False, "backend": "auto"}
    options |= {"names": ["a", "b"], "id_names": ["b"], "ids": [5]}
    tensors = [torch.zeros(3), torch.zeros(4, 5).T]
    for sources, vector in (([], None), ([torch.ones(3), torch.ones(5, 4)], torch.tensor([0.5, 2.0]))):
        arguments = (tensors, sources, 0.5, vector, None, None)
        torch.library.opcheck(torch.ops.multisample.perturb_.default, arguments, options)
    members = torch.tensor([3, 4, 5])
    for size, values in ((None, (0.5, None, None, None)), (3, (0.5, None, None, members))):
        arguments = ([x.clone().requires_grad_() for x in tensors], *values)
        torch.library.opcheck(torch.ops.multisample.perturbed.default, arguments, {"size": size, **options})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: perturb_(x * 2, 0.5, seed=7), Exception, "out: expected a leaf, or a tensor that does not require"),
        (lambda x: perturb(x.detach(), 0.5, seed=Key(7, 2**32)), ValueError, "^seed: expected a Key with an offset"),
        pytest.param(lambda x: perturb(x.int(), 0.5, seed=7), TypeError, "got int32$", marks=SLOW),
        pytest.param(lambda x: perturb(x.detach(), x, seed=7), Exception, "coefficients: require grad", marks=SLOW),
    ],
    ids=["leaf", "offset", "int32", "gradient of coefficients"],
)
def test_compiled_calls_raise_the_errors_of_eager_calls(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        _compiled(call)(torch.zeros(2, requires_grad=True))


FEW: list[dict[str, Any]] = [{"seed": -1}, {"fast_math": 1}, {"ids": [True]}]
MORE = [{"seed": 2**64}, {"seed": Key(-1, 0)}, {"member": 1.5}, {"member": True}, {"ids": {"a": 1}}]


@pytest.mark.parametrize("options", slow_but(FEW, [*FEW, *MORE]), ids=str)
def test_compiled_calls_check_numbers_and_flags_as_eager_calls_do(options: dict[str, Any]) -> None:
    p, given = torch.zeros(3), {"seed": 7, **options}

    def f(x: Any) -> Any:
        return perturb([x], 0.5, **given)

    with pytest.raises((TypeError, ValueError)) as eager:
        f(p)
    torch._dynamo.reset()
    with pytest.raises(eager.type) as compiled:
        torch.compile(f, backend="eager")(p)
    assert str(compiled.value) == str(eager.value)


@pytest.mark.parametrize(("coefficients", "seed"), [(np.array([0.5]), 7), (0.5, [7])])
def test_other_arguments_break_the_graph(coefficients: Any, seed: Any) -> None:
    def f(x: Any) -> Any:
        return perturb(x + 1, coefficients, seed=seed) * 2

    p = torch.zeros(5)
    assert same(torch.compile(f, backend="eager")(p), f(p))


_P = np.zeros(4, np.float32)
_BUFFER = np.zeros(10, np.float32)
_HALF = torch.zeros(4, dtype=torch.float16)


@pytest.mark.parametrize(("arguments", "options", "error", "message"), [
    ((3.0, 0.5), {}, TypeError, r"^parameters: expected an array, .*, got 3\.0 of type float$"),
    (({"c": np.zeros(3, complex)}, 0.5), {}, TypeError, r"^parameters\['c'\]: .*, float64, got complex128$"),
    ((_P, True), {}, TypeError, "^coefficients: expected .* got True of type bool$"),
    ((_P, np.zeros(2, complex)), {}, TypeError, "^coefficients: .* got complex128$"),
    ((_P, 1e39), {}, ValueError, r"^coefficients: .* computing type, got 1e\+39 for float32$"),
    ((_P, [0.5, -1e200]), {}, ValueError, r"^coefficients: .* computing type, got .* for float32$"),
    ((_P, 0.5), {"seed": multisample.Generator(7)}, TypeError, r"^seed: .* next Key, generator\.take\(\)$"),
    ((_P, 0.5), {"seed": None}, TypeError, "^seed: expected an integer, got None"),
    ((_P, 0.5), {"out": [_P]}, ValueError, "^out: expected one array, as parameters are, got 1 arrays in a seq"),
    (([_P], 0.5), {"out": _P}, ValueError, "^out: expected 1 arrays in a sequence, as .* are, got one array$"),
    (([_P], 0.5), {"out": [_P, _P]}, ValueError, "^out: expected 1 arrays in a sequence, as .* are, got 2 arrays"),
    (([_P], 0.5), {"out": [torch.zeros(4)]}, TypeError, r"^out\[0\]: expected a NumPy array, as .* got a PyTorch"),
    (([_P, torch.zeros(3)], 0.5), {}, TypeError, r"^parameters\[1\]: expected a NumPy array, as .* is, got"),
    ((_P, [[0.5]]), {}, ValueError, r"^coefficients: expected a number or shape \(K,\), got \(1, 1\)$"),
    ((_P, float("nan")), {}, ValueError, "^coefficients: expected finite numbers, got nan$"),
    ((_P, [1.0, float("inf")]), {}, ValueError, "^coefficients: expected finite numbers"),
    ((_P, 10**400), {}, ValueError, "^coefficients: expected finite numbers"),
    ((_P, 0.5), {"seed": "x"}, TypeError, "^seed: expected an integer"),
    ((_P, 0.5), {"seed": Key(7, 2**32)}, ValueError, r"^seed: expected a Key .* as Generator\.take gives, got 429"),
    ((_P, [0.5] * 3), {"seed": [7, 8]}, ValueError, "^seed: expected one seed, or one for each of 3 .* got 2$"),
    ((_P, 0.5), {"seed": [7, -8]}, ValueError, r"^seed\[1\]: expected 0 <= seed"),
    ((_P, 0.5), {"seed": [7, Key(1, 2**32)]}, ValueError, r"^seed\[1\]: expected a Key .* got 4294967296$"),
    ((_P, 0.5), {"seed": [7, 8], "member": [1, 2]}, ValueError, "^seed, member: expected a vector for one of"),
    ((_P, [0.5, 1]), {"member": [1, 2]}, ValueError, "^member: expected an integer with a vector of coefficients"),
    ((_P, 0.5), {"member": [1, 0.5]}, TypeError, r"^member\[1\]: expected an integer, got 0.5"),
    ((_P, 0.5), {"member": np.array([1, -5])}, ValueError, r"^member\[1\]: expected 0 <= member"),
    ((_P, 0.5), {"member": [1, 2**32]}, ValueError, r"^member: expected member \+ K <= 2\*\*32"),
    ((_P, 0.5), {"member": np.ones(2)}, TypeError, "^member: expected integers, got a NumPy array of type float64"),
    ((_P, 0.5), {"member": np.ones(2, ">i8")}, ValueError, "^member: expected native byte order, got swapped bytes"),
    ((_P, 0.5), {"member": np.ones((2, 2), int)}, ValueError, r"^member: .* vector of shape \(K,\), got \(2, 2\)"),
    ((_P, 0.5), {"decay": 1.5}, ValueError, "^decay: expected 0 <= decay <= 1, got 1.5$"),
    ((_P, 0.5), {"decay": float("nan")}, ValueError, "^decay: expected 0 <= decay <= 1, got nan$"),
    ((_P, 0.5), {"decay": "x"}, TypeError, "^decay: expected a number, got 'x' of type str$"),
    ((_P, 0.5), {"decay": {"a": 0.5}}, TypeError, "^decay: expected a number, as parameters have no names"),
    (({"a": _P}, 0.5), {"decay": {"b": 0.5}}, ValueError, "^decay: expected names of parameters, got 'b'$"),
    (({"a": _P}, 0.5), {"decay": {"a": -1}}, ValueError, r"^decay\['a'\]: expected 0 <= decay <= 1, got -1$"),
    ((_P, 0.5), {"member": -1}, ValueError, "^member: expected 0 <= member"),
    ((_P, [0.5, 0.5]), {"member": 2**32 - 1}, ValueError, r"^member: expected member \+ K <= 2\*\*32"),
    ((_P, 0.5), {"fast_math": 0}, TypeError, "^fast_math: expected True or False"),
    (([_P, _P.copy()], 0.5), {"ids": [5, 5]}, ValueError, r"^ids: .* got 5 for both parameters\[0\] and"),
    (([_P], 0.5), {"ids": [1, 2]}, TypeError, "^ids: expected a sequence of 1 integers"),
    (({"a": _P}, 0.5), {"ids": {"b": 1}}, ValueError, "^ids: expected names of parameters, got 'b'$"),
    (({"a": _P}, 0.5), {"ids": {"a": 2**32}}, ValueError, r"^ids\['a'\]: expected 0 <= "),
    (({"a": _P}, 0.5), {"out": [_P]}, ValueError, "^out: expected 1 arrays with names, as parameters are, got"),
    (({"a": _P}, 0.5), {"out": {"b": _P}}, ValueError, "^out: expected the names of .* none called 'a'$"),
    (([_P], 0.5), {"out": [np.zeros(5, "f4")]}, ValueError, r"^out\[0\]: expected shape \(4,\), as .* has"),
    (([_P], 0.5), {"out": [np.zeros(4)]}, ValueError, r"^out\[0\]: expected dtype float32, .* got float64$"),
    ((_P, 0.5), {"out": np.broadcast_to(_P[:1], 4)}, ValueError, "^out: expected"),
    ((_P, 0.5), {"out": np.ma.array(_P, mask=_P > 0)}, TypeError, "^out: expected an array without"),
    (([_BUFFER[:6], _BUFFER[4:]], 0.5), {}, ValueError, "^parameters: expected memory of its own"),
    (([_HALF, _HALF.view(torch.bfloat16)], 0.5), {}, ValueError, "^parameters: expected memory of its own"),
    ((torch.nn.ReLU(), 0.5), {}, ValueError, r"^parameters: .* dict\(module\.named_parameters\(\)\) has all of"),
    ((_BUFFER[:6], 0.5), {"out": _BUFFER[1:7]}, ValueError, "^out: expected memory of its own for each parameter"),
    (([_BUFFER[:3], _BUFFER[3:6]], 0.5), {"out": [_BUFFER[3:6], _BUFFER[:3]]}, ValueError, "^out: expected memory"),
])  # fmt: skip
def test_wrong_arguments(arguments: Any, options: dict[str, Any], error: Any, message: str) -> None:
    before = _P.copy(), _BUFFER.copy()
    for _ in range(2):  # The second call comes after calls that have plans.
        with pytest.raises(error, match=message):
            perturb(*arguments, **{"seed": 7, **options})
        for plain in (_P, [_P], {"a": _P}):
            perturb(plain, 0.5, seed=7)
            perturb(plain, [0.5, 0.5], seed=7)
    assert (before[0] == _P).all() and (before[1] == _BUFFER).all()


def test_interleaved_arrays_do_not_overlap() -> None:
    both = np.zeros((4, 6), np.float32)
    left, right = both[:, ::2], both[:, 1::2]
    rights = perturb([left.copy(), right.copy()], 0.5, seed=7)
    perturb([left, right], 0.5, seed=7, out=[left, right])
    assert same(left.copy(), rights[0]) and same(right.copy(), rights[1])


def test_equal_ids_of_names_name_a_remedy() -> None:
    parameters = {name: np.zeros(2, np.float32) for name in ("plumless", "buckeroo")}  # Their CRC-32 is equal.
    with pytest.raises(ValueError, match=r"^ids: expected a different id .* pass ids=\{.*\}$") as raised:
        perturb(parameters, 0.5, seed=7)
    ids = eval(str(raised.value).rpartition("ids=")[2])  # The message is Python code.
    assert not same(*perturb(parameters, 0.5, seed=7, ids=ids).values())


_PLAIN = torch.zeros(3)
_FLATTENED = torch.nn.Parameter(torch.zeros(3))
_FLATTENED._fsdp_flattened = True  # FSDP1 marks its parameters so.
_OUTSIDE = r"^parameters: expected plain arrays outside PyTorch's transformations"
_KINDS: dict[str, tuple[Any, str]] = {
    "nested": (lambda: torch.nested.nested_tensor([_PLAIN, _PLAIN]), "expected a strided tensor, got a nested tensor"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "expected a strided tensor, got layout torch.sparse_coo"),
    "quantized": (lambda: torch.quantize_per_tensor(_PLAIN, 1.0, 0, torch.qint8), "expected a strided tensor, got a q"),
}

_CALLS: dict[str, tuple[Any, str]] = {
    **{name: (lambda f=f: perturb(f(), 0.5, seed=7), f"^parameters: {text}") for name, (f, text) in _KINDS.items()},
    **{
        f"{name} in a list": (lambda f=f: perturb([_PLAIN, f()], 0.5, seed=7), rf"^parameters\[1\]: {text}")
        for name, (f, text) in _KINDS.items()
    },
    "meta vector": (lambda: perturb_(_PLAIN, _PLAIN.to("meta"), seed=7), "^coefficients: .*, got them on meta"),
    "FSDP1": (lambda: perturb([_PLAIN, _FLATTENED], 0.5, seed=7), r"^parameters\[1\]: .* \(FSDP1\) has flat"),
    "no leaf": (
        lambda: perturb_({"a": _PLAIN, "b": torch.zeros(3, requires_grad=True) * 2}, 0.5, seed=7),
        r"^out\['b'\]: expected a leaf, or a tensor that does not require grad, got the result of an operation",
    ),
    "meta in a list": (
        lambda: perturb([_PLAIN, torch.zeros(3, device="meta")], 0.5, seed=7),
        r"^parameters\[1\]: expected elements in memory, got an array without memory",
    ),
    "fake in a list": (lambda: perturb([_PLAIN, FakeTensorMode().from_tensor(_PLAIN)], 0.5, seed=7), _OUTSIDE),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*quantiz")
@pytest.mark.parametrize("name", _CALLS)
def test_tensors_that_perturb_refuses(name: str) -> None:
    call, message = _CALLS[name]
    for _ in range(2):  # The second call comes after calls that have plans.
        with pytest.raises((TypeError, ValueError), match=message):
            call()
        assert not _PLAIN.any()
        for _ in range(2):
            perturb(_PLAIN, 0.5, seed=7)
            perturb([_PLAIN, torch.zeros(3)], 0.5, seed=7)


class Subclass(torch.Tensor):
    """A plan for a subclass compares signatures in Python, without PyTorch's guards."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_after_calls_with_a_subclass() -> None:
    own = torch.zeros(3).as_subclass(Subclass)
    for other in (_PLAIN, np.zeros(3, np.float32), _KINDS["nested"][0]()):
        if other is _PLAIN:
            for _ in range(2):
                perturb([own, other], 0.5, seed=7)
        else:
            with pytest.raises(TypeError, match=r"^parameters\[1\]: "):
                perturb([own, other], 0.5, seed=7)


@pytest.mark.parametrize("host", ["numpy", "torch"])
def test_coefficients_on_the_host_are_read_before_they_are_written(host: str) -> None:
    parts = slice(50), slice(0, 100, 2), slice(2, 3)
    for dtype, part, backend in itertools.product(("float32", "float64"), parts, ("cpu", "torch_ext")):
        p = np.linspace(-1, 1, 3000).astype(dtype)
        exact = perturb(p, p[part].tolist(), seed=7)
        for _ in range(3):
            q = p.copy() if host == "numpy" else torch.from_numpy(p.copy())
            assert perturb(q, q[part], seed=7, out=q, backend=backend) is q
            np.testing.assert_array_equal(np.asarray(q), exact)


def test_memory_that_a_kernel_on_a_device_reads_is_not_written() -> None:
    """Addresses alone decide, so a device is not needed."""
    device = Device("cuda", 0)
    read = Operand((3,), (-8,), "float64", "float64", device)  # The bytes from -16 to 8.
    written = [Operand(shape, (4,), "float32", "float32", device) for shape in ((10,), (0,))]
    targets, ranges = np.array([1000, 5000]), ranges_of(written)
    for address, is_written in ((992, False), (996, True), (1055, True), (1056, False), (5000, False)):
        expected = pytest.raises(ValueError, match=r"^coefficients: expected memory that is not written, got memory")
        with expected if is_written else contextlib.nullcontext():
            check_unwritten("coefficients", read, address, targets, ranges)
        check_unwritten("coefficients", read._replace(shape=(0,)), address, targets, ranges)


def test_coefficients_that_a_device_copies_later_are_in_memory_of_their_own() -> None:
    """A fake device: a copy from pinned memory runs after the call has returned, when the caller may write to it."""
    given, copied = np.ones(3), list[Any]()
    library: Any = SimpleNamespace(address=lambda array: 0, is_capturing=lambda device: bool)
    library.to_device = lambda array, device: copied.append(array)
    values = read_coefficients(given).on_host
    coefficients_reader(library, Device("cuda", 0), np.dtype("f8"), False, values, None)(values, given, 0)
    assert [x.view(np.float64).tolist() for x in copied] == [given.tolist()]
    assert not any(np.shares_memory(x, given) for x in copied)


def test_coefficients_on_a_device_with_a_negative_bit_are_negated() -> None:
    """A fake device, in memory of the host."""
    given = torch.ones(2, dtype=torch.complex64).mul(1j).conj().imag
    assert given.is_neg()
    vector = TORCH.describe("coefficients", given)
    read = coefficients_reader(TORCH, Device("cuda", 0), np.dtype("f4"), False, None, vector)
    address, owner = read(None, given, 0)
    assert (address, owner.is_neg(), owner.tolist()) == (owner.data_ptr(), False, [-1.0, -1.0])
