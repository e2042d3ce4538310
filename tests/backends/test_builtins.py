"""The builtin functions of torch_ext agree with the Python functions that they replace."""

import collections
import itertools
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launches
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import multisample
from multisample._libraries.torch import TORCH, tree_of
from multisample.backends import registry
from multisample.backends.launch import pack
from multisample.backends.torch_ext import builtins

BACKEND: Any = registry.find("torch_ext")


@pytest.fixture(autouse=True, scope="module")
def loaded() -> Iterator[None]:
    reasons = BACKEND.status().reasons
    if reasons:
        pytest.skip("; ".join(reasons))
    BACKEND.prepare("cpu")
    TORCH.compile_key(BACKEND)
    yield


class Subclass(torch.Tensor):
    """A tensor subclass that overrides nothing."""


def vectors() -> dict[str, Any]:
    base = torch.arange(12, dtype=torch.float32)
    return {
        "vector": base[:4], "equal": torch.ones(4), "longer": base[:5], "strided": base[::3], "column": base[:4, None],
        "row": base[None, :4], "double": torch.ones(4, dtype=torch.float64),
        "integers": torch.ones(4, dtype=torch.int32), "requires grad": torch.ones(4, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(4)),
        "frozen parameter": torch.nn.Parameter(torch.ones(4), requires_grad=False),
        "negative": torch.ones(4, dtype=torch.complex64).conj().imag, "strided alike": torch.ones(4, 2)[:, 0],
        "meta": torch.ones(4, device="meta"), "empty": torch.ones(0), "zero strides": torch.ones(1).expand(4),
        "scalar": torch.ones(()), "sparse": torch.ones(4).to_sparse(), "subclass": torch.ones(4).as_subclass(Subclass),
        "float": 1.0, "other float": math.inf, "int": 1, "bool": True,
    }  # fmt: skip


def key_of(function: Any, *arguments: Any, n: Any = 3, **changes: Any) -> Any:
    mu, sigma, out, seed, generator = (*arguments, *(None,) * 5)[:5]
    try:
        return function(mu, sigma, out, seed, generator, 0, 0, n, "auto", "independent", None, *changes.values())
    except Exception as error:
        return type(error), str(error)


def python_key(mu: Any, sigma: Any, out: Any, *rest: Any) -> Any:
    return (
        *(None if type(x) in (int, float) else TORCH.signature(x) for x in (mu, sigma)),
        None if out is None else TORCH.target_signature(out), *map(type, (mu, sigma, out, *rest[:4])),
        *rest[4:], *map(type, rest[4:]),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*Sparse.*")
def test_keys_differ_if_python_keys_differ() -> None:
    builtin = TORCH.key
    cases = vectors()
    calls = [(cases[name], 1.0) for name in cases] + [(0.0, cases[name]) for name in cases]
    calls += [(cases["vector"], cases["vector"], x) for x in cases.values() if isinstance(x, torch.Tensor)]
    keys = [(key_of(builtin, *call), key_of(python_key, *call)) for call in calls]
    assert any(type(key[1][0]) is not type for key in keys)
    for (a, other_a), (b, other_b) in itertools.combinations_with_replacement(keys, 2):
        assert (a == b) == (other_a == other_b)
    for made, expected in keys:
        if isinstance(expected[0], type) and issubclass(expected[0], Exception):
            assert made == expected


def test_keys_have_values_of_options_and_types_of_all_arguments() -> None:
    builtin = TORCH.key
    vector = torch.ones(4)

    def key(**changes: Any) -> Any:
        values = {"out": None, "seed": 1, "generator": None, "row": 0, "column": 0, "n": 3, "flag": True} | changes
        return builtin(vector, vector, *values.values())

    same = ({"seed": 2}, {"row": 5}, {"column": 7})
    other = ({"seed": True}, {"seed": None}, {"generator": multisample.Generator(1)}, {"row": 0.0}, {"column": False})
    other += ({"n": 4}, {"n": 3.0}, {"flag": False}, {"flag": 1}, {"flag": 1.0}, {"out": torch.ones(4, 3)})
    for changes in same:
        assert key(**changes) == key()
    for changes in other:
        assert key(**changes) != key()
    with pytest.raises(TypeError, match="unhashable"):
        hash(key(n=[]))
    modes: tuple[Any, ...] = (torch.no_grad, torch.autograd.profiler.profile, Refusing, lambda: torch.device("cpu"))
    for mode in modes:
        with mode():
            assert builtin(1.0, 1.0, None, 1, None, 0, 0)[-1] == TORCH.state()
    with FlopCounterMode(display=False):
        assert key() is TORCH.state() is None


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "float64", "layout": "nd"}, {"noise": "shared"}, {"antithetic": True}]
)
@pytest.mark.parametrize("mu", [2.0, torch.arange(5.0)])
@pytest.mark.parametrize("sigma", [3, torch.arange(10.0)[::2]])
def test_builtin_calls_draw_the_bits_of_python_calls(options: dict[str, Any], mu: Any, sigma: Any) -> None:
    if not any(isinstance(x, torch.Tensor) for x in (mu, sigma)):
        mu = torch.full((5,), mu)

    def drawn() -> list[Any]:
        own, theirs = multisample.Generator(2**64 - 1), torch.Generator().manual_seed(1)
        sources = [{"seed": 2**64 - 1}, {"seed": multisample.Key(1, 2**64 - 1)}, *({"generator": own},) * 3]
        sources += [{"generator": theirs}] * 3
        window = {"dim_offset": 2**32 - 5, "sample_offset": 2**34 - 9}
        calls = [source | extra for source in sources for extra in ({}, window)]
        return [multisample.sample(mu, sigma, 9, backend="torch_ext", **call, **options) for call in calls]

    with launches.without_builtins():
        expected = drawn()
    for found, wanted in zip(drawn(), expected, strict=True):
        assert torch.equal(found, wanted)


def gradients_of(grads: list[torch.Tensor], **options: Any) -> list[Any]:
    """Gradients for all of `grads`, in an order that tries the plan of each with the others."""
    mu, sigma = torch.zeros(5, requires_grad=True), torch.ones(5, requires_grad=True)
    results = []
    for grad in grads * 2 + grads[::-1]:
        x = multisample.sample(mu, sigma, 5, seed=multisample.Key(3, 4), backend="torch_ext", **options)
        results += torch.autograd.grad(x, (mu, sigma), grad)
    return results


@pytest.mark.parametrize("options", [{}, {"layout": "nd", "antithetic": True}, {"dim_offset": 3, "sample_offset": 2}])
def test_builtin_gradients_of_every_matrix_equal_those_of_python(options: dict[str, Any]) -> None:
    square = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    negative = torch.complex(torch.zeros(5, 5), -square).conj().imag
    assert negative.is_neg()
    grads = [square, square, square.T, square[:1].expand(5, 5), torch.stack((square, square), 2)[..., 0], negative]
    grads += [torch._efficientzerotensor((5, 5)), square.clone()]
    found = gradients_of(grads, **options)
    with launches.without_builtins():
        expected = gradients_of(grads, **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_compiled_plans_leave_uncommon_calls_and_errors_to_python() -> None:
    mu, sigma, n = torch.zeros(5), torch.ones(5), 3
    generator = torch.Generator().manual_seed(1)
    state = generator.get_state()
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (mu, {"seed": -1}), (mu, {"seed": 2**64}), (mu, {"seed": multisample.Key(-1, 0)}),
        (mu, {"dim_offset": 2**32 - 4}), (mu, {"sample_offset": -1}), (mu / 0, {"generator": generator}),
        (mu, {"generator": generator, "sample_offset": 2**34}),
    ]  # fmt: skip

    def outcomes() -> list[str]:
        texts = []
        for first, options in wrong:
            # A call with these types and right values has the same plan.
            right = {name: 1 if type(x) is int else multisample.Key(1, 1) for name, x in options.items()}
            right |= {"generator": torch.Generator()} if "generator" in options else {}
            for _ in range(2):
                multisample.sample(mu, sigma, n, backend="torch_ext", **right)
            with pytest.raises((ValueError, TypeError, OverflowError)) as caught:
                multisample.sample(first, sigma, n, backend="torch_ext", **options)
            texts.append(f"{caught.type.__name__} {caught.value}")
        return texts

    found = outcomes()
    assert torch.equal(generator.get_state(), state)
    with launches.without_builtins():
        assert outcomes() == found


def test_a_wrong_number_raises_before_the_launch() -> None:
    launched: list[Any] = []
    launch = BACKEND.builtins.launch(pack(launches.a_launch()), BACKEND._cpu.multisample_run_cpu, launched.append, int)
    for wrong in (-1, 2**64, 1.5, "1", None):
        with pytest.raises((OverflowError, TypeError)):
            launch(None, 0.0, 1.0, 0, 0, 0, 0, wrong, 0, 0, 0, 0, 0, 0)
    assert launched == []


def test_builtin_functions_keep_only_their_references_alive() -> None:
    class Function:
        def __call__(self, *arguments: Any) -> Any:
            return None

    functions = {name: Function() for name in ("allocate", "take", "check_generator", "run_in_python", "limit")}
    before = {name: sys.getrefcount(x) for name, x in functions.items()}
    run = plan_of_a_fake_device(**{name: x for name, x in functions.items() if name != "limit"}, stream=None)
    launch = BACKEND.builtins.launch(
        pack(launches.a_launch()), BACKEND._cpu.multisample_run_cpu, print, functions["limit"]
    )
    assert {name: sys.getrefcount(x) for name, x in functions.items()} == {name: n + 1 for name, n in before.items()}
    assert run(1, 2, None, None, "no seed", None, 0, 0) is None  # `run_in_python` returns None.
    del launch, run
    assert {name: sys.getrefcount(x) for name, x in functions.items()} == before


def plan_of_a_fake_device(of_list: bool = False, batch: dict[str, int] | None = None, **functions: Any) -> Any:
    """A compiled plan whose kernels run on the CPU. Python functions stand in for PyTorch's streams and graphs."""
    launch = launches.a_launch(5, 3, mu=torch.zeros(5).numpy(), sigma=torch.ones(5).numpy(), **batch or {})
    usual: dict[str, Any] = {
        "allocate": lambda like: torch.empty(5, 3), "take": None, "check_generator": None,
        "run_in_python": lambda *arguments: "python", "stream": lambda like: 77, "is_capturing": None, "scratch": None,
    }  # fmt: skip
    return BACKEND.compiled_plan(launch, 3, of_list, True, None, tuple((usual | functions).values()))


def test_compiled_plans_of_a_device_read_the_stream_and_get_scratch_memory() -> None:
    mu, sigma, calls, state = torch.zeros(5), torch.ones(5), list[Any](), {"capturing": False}

    def called(name: str, argument: Any, result: Any) -> Any:
        calls.append((name, argument))
        return result

    run = plan_of_a_fake_device(
        take=lambda generator: (7, 1), stream=lambda like: called("stream", like, 77),
        is_capturing=lambda stream: called("is_capturing", stream, state["capturing"]),
        scratch=lambda offset: called("scratch", offset, torch.empty(4, dtype=torch.float64)),
    )  # fmt: skip
    assert run(mu, sigma, None, None, 7, None, 0, 2)[1:] == (7, 0, None)
    assert calls == [("stream", None), ("scratch", 2)]
    assert run(mu, sigma, None, None, None, None, 0, 0)[1:] == (7, 1, None)
    assert calls[2:] == [("stream", None), ("is_capturing", 77), ("scratch", 0)]
    state["capturing"] = True
    assert run(mu, sigma, None, None, None, None, 0, 0) == "python"  # The graph's offset is in device memory.
    assert isinstance(run(mu, sigma, None, None, 7, None, 0, 0), tuple)
    unaligned = torch.zeros(24, dtype=torch.uint8)[1:21].view(torch.uint8)
    assert run(unaligned, sigma, None, None, 7, None, 0, 0) == "python"
    # Plan.run raises for a list of one seed during a capture: a replay would repeat its seed.
    for is_capturing in (False, True):
        run = plan_of_a_fake_device(True, is_capturing=lambda stream, answer=is_capturing: answer)
        assert (run(mu, sigma, None, None, [7], None, 0, 0) == "python") is is_capturing


def test_compiled_plans_of_batches_pass_the_address_of_the_seeds() -> None:
    mu, sigma, seeds = torch.zeros(5), torch.ones(5), torch.tensor([7, 2**40])
    batch_of_2 = {"batch": 2, "seed_step": 8, "matrix_step": 60, "origin_in_memory": 1}
    run = plan_of_a_fake_device(batch=batch_of_2, allocate=lambda like: torch.empty(2, 5, 3))
    batch = run(mu, sigma, None, None, seeds, None, 1, 2)[0]
    for matrix, seed in zip(batch, seeds.tolist(), strict=True):
        assert torch.equal(matrix, multisample.sample(mu, sigma, 3, seed=seed, dim_offset=1, sample_offset=2))
    assert run(mu, sigma, None, None, torch.empty(0), None, 0, 0) == "python"


class Refusing(TorchFunctionMode):
    """PyTorch calls it also for attributes of tensors."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise KeyError("refused")


def test_trees_of_modules_are_those_of_python() -> None:
    tree, shared = BACKEND.builtins.tree(), torch.nn.Linear(3, 3, bias=False)
    model = torch.nn.ModuleDict({"a": torch.nn.Sequential(torch.nn.BatchNorm1d(3), shared), "b": shared})
    model.register_parameter("none", None)
    model.register_module("nothing", None)
    model.register_parameter("own", torch.nn.Parameter(torch.zeros(2), requires_grad=False))
    items, tensors = tree(model)
    expected_items, expected = tree_of(model)
    assert items == expected_items and len(tensors) == len(expected) == 5
    assert all(x is y for x, y in zip(tensors, expected, strict=True))
    model.a._modules = dict.fromkeys("01", shared) | {"_parameters": shared}
    assert tree(model)[0] == tree_of(model)[0] != items
    model.a._modules = collections.OrderedDict(model.a._modules)  # The builtin reads plain dicts only.
    assert tree(model) is None
    for wrong in (object(), 3):
        with pytest.raises(AttributeError, match="_parameters"):
            tree(wrong)


def test_reference_counts_do_not_change() -> None:
    builtin = TORCH.key
    tree, model = BACKEND.builtins.tree(), torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
    weight = model[0].weight
    vector, n, out, recorded = torch.ones(4), 10**9, torch.ones(4, 3), torch.ones(4, requires_grad=True)

    def call(count: int) -> None:
        for _ in range(count):
            hash(builtin(vector, 1.0, out, 1, None, 0, 0, n, torch.float32))
            tree(model)
            multisample.sample(vector, vector, 3, seed=1, backend="torch_ext")
            multisample.sample(vector, vector, 3, backend="torch_ext")
            multisample.sample(recorded, vector, 3, backend="torch_ext").backward(out)

    call(2)  # The first calls make plans and fill caches.
    things = vector, n, out, torch.Tensor, torch.float32, None, int, torch.nn.ReLU, weight
    counts = [sys.getrefcount(x) for x in things]
    call(1000)
    after = [sys.getrefcount(x) for x in things]
    # A leak adds 1000. Other threads change the counts of common objects a little.
    assert all(abs(a - b) < 500 for a, b in zip(after, counts, strict=True)), (counts, after)


def test_a_process_without_python_can_load_the_library(tmp_path: Any) -> None:
    """The library's references to Python are weak symbols: without Python they are null, and no code calls them."""
    path = BACKEND._cpu._name
    symbols = subprocess.run(["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True).stdout
    of_python = [line.split() for line in symbols.splitlines() if line.split()[-1].startswith(("Py", "_Py"))]
    assert len(of_python) > 15
    assert {kind for kind, _ in of_python} <= {"w", "v"}


def test_tensors_of_unknown_layout_have_no_builtins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins.ctypes, "string_at", lambda address, size: bytes(size))
    with pytest.raises(ValueError, match="one place"):
        builtins.Builtins(Path(BACKEND._cpu._name))
