"""Structures and names that `perturb` takes: modules that change between calls, wrappers, iterators, nested arrays."""

import collections
import copy
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

import multisample
from multisample import perturb
from multisample._libraries.torch import TORCH, tree_of
from multisample.torch import perturb_

# Some wrappers import modules of PyTorch that PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:::torch")


def same(a: Any, b: Any) -> bool:
    return bool(torch.equal(torch.as_tensor(a).cpu(), torch.as_tensor(b).cpu()))


def refuse(*arguments: Any) -> None:
    raise AssertionError("a call with a plan ran all checks")


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3, bias=False)
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.LayerNorm(3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = None


class Doubled(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return 2 * x


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a replaced parameter": lambda m: setattr(m, "scale", nn.Parameter(torch.tensor(2.5))),
    "a replaced parameter of another shape": lambda m: setattr(m, "scale", nn.Parameter(torch.zeros(5))),
    "a parameter written to the dict": lambda m: m.first._parameters.update(bias=nn.Parameter(torch.ones(4))),
    "a removed parameter": lambda m: m.first.register_parameter("bias", None),
    "a frozen parameter": lambda m: m.first.weight.requires_grad_(False),
    "a thawed parameter": lambda m: m.frozen.requires_grad_(),
    "load_state_dict(assign=True)": lambda m: m.load_state_dict(Model().state_dict(), assign=True),
    "an added layer": lambda m: m.layers.append(nn.Linear(3, 2)),
    "a removed layer": lambda m: delattr(m, "first"),
    "a replaced layer": lambda m: m.layers.__setitem__(0, nn.Linear(3, 3)),
    "a renamed layer": lambda m: m._modules.update(third=m._modules.pop("second")),
    "a wrapped layer": lambda m: m.layers.__setitem__(0, checkpoint_wrapper(m.layers[0])),
    "another type": lambda m: m.double(),
    "a parametrization": lambda m: parametrize.register_parametrization(m.first, "weight", Doubled()),
    "other memory": lambda m: setattr(m.scale, "data", torch.tensor(7.0)),
    "other strides": lambda m: setattr(m.first.weight, "data", torch.arange(12.0).reshape(3, 4).T),
    "a tie": lambda m: setattr(m.layers[0], "bias", m.layers[2].bias),
    "a shared layer": lambda m: setattr(m, "again", m.first),
}  # fmt: skip


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_module_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, compiled: bool) -> None:
    model = Model()
    perturb(model, 0.5, seed=7)  # Loads the compiled function.
    if not compiled:
        monkeypatch.setattr(TORCH, "_tree", None)

    def check() -> None:
        named = {key: x for key, x in model.named_parameters(remove_duplicate=False) if x.requires_grad}
        expected = perturb(named, 0.5, seed=7)
        found = perturb(model, 0.5, seed=7)
        assert list(found) == list(expected)
        assert all(same(found[key], expected[key]) for key in expected)
        written = copy.deepcopy(model)
        assert perturb_(written, 0.5, seed=7) is written
        for key, x in written.named_parameters(remove_duplicate=False):
            assert same(x, expected.get(key, x))

    for _ in range(3):
        check()
    CHANGES[name](model)
    for _ in range(3):
        check()


def test_a_module_with_names_of_its_own() -> None:
    class Partial(Model):
        def named_parameters(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, Any]]:
            every = super().named_parameters(*arguments, **options)
            return (("own." + name, x) for name, x in every if "first" in name)

    model = Partial()
    found = perturb(model, 0.5, seed=7)
    assert list(found) == ["own.first.weight", "own.first.bias"]
    name, right = perturb({"own.first.bias": model.first.bias.detach()}, 0.5, seed=7).popitem()
    assert same(found[name], right)


def test_modules_that_python_reads() -> None:
    scripted = torch.jit.script(nn.Linear(3, 2))
    assert list(perturb(scripted, 0.5, seed=7)) == ["weight", "bias"]
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module("itself", model)
    for read in (TORCH.tree, tree_of):
        with pytest.raises(RecursionError):
            read(model)


STRUCTURES: dict[str, Callable[[], Any]] = {
    "module": Model,
    "tied module": lambda: (m := Model(), CHANGES["a tie"](m), CHANGES["a shared layer"](m))[0],
    "mapping": lambda: dict(Model().named_parameters()),
    "tied mapping": lambda: {"a": (x := torch.zeros(3)), "b": x, "c": torch.zeros(2)},
    "tied list": lambda: [x := torch.zeros(3), x],
    "views": lambda: [(x := torch.zeros(6, 4))[:3], x[3:], torch.zeros(4, 3).T],
    "tied views": lambda: [(x := torch.zeros(6, 4))[:3], x[:3], x[3:]],
    "interleaved": lambda: [(x := torch.zeros(4, 6))[:, ::2], x[:, 1::2]],
    "types": lambda: {"a": torch.zeros(3), "b": torch.zeros(3).double(), "c": torch.zeros(2).half()},
    "nested": lambda: {"a": [torch.zeros(3), {"b": torch.zeros(2)}], "c": torch.zeros(2)},
    "NumPy": lambda: [(x := np.zeros((4, 6), np.float32))[:, ::2], x[:, ::2], x[:, 1::2]],
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_seen_before_has_a_plan(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    structure, other = STRUCTURES[name](), STRUCTURES[name]()
    calls: list[Callable[[float], Any]] = [
        lambda c: perturb(structure, c, seed=7), lambda c: perturb(structure, c, seed=7, out=structure),
        lambda c: perturb(structure, [c, 0.5], seed=7, out=other),
    ]  # fmt: skip
    for call in calls:
        call(0.25)
    monkeypatch.setattr("multisample._model_parameters.perturb_plan._run_first", refuse)
    monkeypatch.setattr("multisample._model_parameters.perturb_plan.ties_of", refuse)  # The addresses are the last.
    for call in calls:
        call(0.5)


def test_a_tie_costs_no_check_when_memory_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = perturb(STRUCTURES["tied list"](), 0.5, seed=7)
    monkeypatch.setattr("multisample._model_parameters.perturb_plan._run_first", refuse)
    for _ in range(3):
        tensors = STRUCTURES["tied list"]()
        first, second = perturb(tensors, 0.5, seed=7)
        assert first is second and same(first, expected[0])


def test_ties_come_and_go_and_another_tensor_takes_the_place_of_a_tied_one() -> None:
    x, y = torch.zeros(3), torch.zeros(3)
    for data, is_tied in ((y.data, False), (x.data, True), (x.data.clone(), False), (x.data, True)):
        y.data = data
        for _ in range(3):
            first, second = perturb([x, y], 0.5, seed=7)
            assert (first is second) == same(first, second) == is_tied
    for _ in range(2):
        first, second = perturb([x, x], 0.5, seed=7)
        assert first is second
    assert not same(*perturb([x, torch.zeros(3)], 0.5, seed=7))
    assert perturb([x, torch.zeros(2)], 0.5, seed=7)[1].shape == (2,)
    with pytest.raises(ValueError, match=r"^parameters: .* own .*\[0\] and parameters\[1\], which overlap"):
        perturb_([x, x[:2]], 0.5, seed=7)
    assert not x.any()


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def plain() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def of_layer(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def wrapped(model: Any) -> Any:
        model[0] = wrap(model[0])
        return model

    return wrapped


def flattened(model: Any) -> Any:
    """FSDP1 without its constructor, which needs a GPU."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper._modules["_fsdp_wrapped_module"], wrapper.training_state = model, None
    return wrapper


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "torch.compile": torch.compile, "a compiled layer": of_layer(torch.compile),
    "DistributedDataParallel": nn.parallel.DistributedDataParallel, "DataParallel": nn.DataParallel,
    "checkpoint_wrapper": checkpoint_wrapper, "checkpoint_wrapper of a layer": of_layer(checkpoint_wrapper),
    "AveragedModel": lambda model: AveragedModel(model).requires_grad_(True), "FSDP1": flattened,
    "several": lambda m: torch.compile(nn.DataParallel(of_layer(lambda x: checkpoint_wrapper(torch.compile(x)))(m))),
}  # fmt: skip


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_do_not_change_names(name: str) -> None:
    model = plain()
    expected = perturb(model, 0.5, seed=7)
    wrapped = WRAPPERS[name](plain())
    found = perturb(wrapped, 0.5, seed=7)
    # The keys are those of `nn.Module.named_parameters`, for functional_call.
    assert list(found) == [key for key, _ in nn.Module.named_parameters(wrapped)]
    assert all(map(same, found.values(), expected.values()))
    # DataParallel moves a module to a GPU.
    out = plain().to(next(wrapped.parameters()).device)
    perturb(wrapped, 0.5, seed=7, out=out)
    assert all(map(same, out.parameters(), expected.values()))
    perturb(model.to(out[0].weight.device), 0.5, seed=7, out=wrapped)
    assert all(map(same, wrapped.parameters(), expected.values()))
    first = next(iter(perturb(wrapped, 0.5, seed=7, ids={"0.weight": 5}).values()))
    assert same(first, perturb([next(wrapped.parameters()).detach()], 0.5, seed=7, ids=[5])[0])


def test_only_wrappers_lose_their_part_of_a_name() -> None:
    class Named(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module, self._orig_mod = nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False)

    model = Named()
    for name, x in perturb(model, 0.5, seed=7).items():
        number = zlib.crc32(name.encode())
        assert same(x, perturb([model.get_parameter(name).detach()], 0.5, seed=7, ids=[number])[0])


def test_names_in_mappings_and_pairs() -> None:
    x = np.zeros(3, np.float32)
    expected = perturb({"0.weight": x}, 0.5, seed=7)["0.weight"]
    of_fsdp = "_fsdp_wrapped_module.0._orig_mod.weight"
    for name in ("_orig_mod.0.weight", "0._checkpoint_wrapped_module.weight", of_fsdp):
        assert same(perturb({name: x}, 0.5, seed=7)[name], expected)
        assert same(perturb([(name, x)], 0.5, seed=7)[name], expected)
        assert not same(perturb({name: x}, 0.5, seed=7, ids={name: 5})[name], expected)
        out = {"0.weight": np.ones(3, np.float32)}
        assert perturb({name: x}, 0.5, seed=7, out=out) is out and same(out["0.weight"], expected)
    assert not same(perturb({"module.0.weight": x}, 0.5, seed=7)["module.0.weight"], expected)


def test_ambiguous_names_raise() -> None:
    class Extra(AveragedModel):  # type: ignore[misc]
        def __init__(self, model: Any) -> None:
            super().__init__(model)
            self.weight = nn.Parameter(torch.zeros(2))

    message = r"^parameters: expected a different name for each array, got '{}' and '{}', both"
    x = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=message.format("weight", "module.weight")):
        perturb_(Extra(nn.Linear(2, 2)).requires_grad_(True), 0.5, seed=7)
    with pytest.raises(ValueError, match=message.format("a", "_orig_mod.a") + " called 'a' without wrappers$"):
        perturb({"a": x, "_orig_mod.a": x.copy()}, 0.5, seed=7)
    with pytest.raises(ValueError, match=r"^parameters: expected a different name .*, got two called 'a'$"):
        perturb([("a", x), ("a", x.copy())], 0.5, seed=7)
    assert not x.any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch.compile", "DataParallel", "checkpoint_wrapper of a layer", "AveragedModel"])
def test_a_compiled_call_knows_wrappers(name: str) -> None:
    torch._dynamo.reset()
    wrapped, expected = WRAPPERS[name](plain()), perturb(plain(), 0.5, seed=7)
    torch.compile(lambda: perturb_(wrapped, 0.5, seed=7), backend="eager", fullgraph=True)()
    assert all(map(same, wrapped.parameters(), expected.values()))


def test_iterators_and_views_of_dicts_are_lists_and_dicts() -> None:
    model = plain()
    named = dict(model.named_parameters())
    listed, mapped = perturb(list(named.values()), 0.5, seed=7), perturb(named, 0.5, seed=7)
    for given in (model.parameters(), (x for x in model.parameters()), named.values()):
        found = perturb(given, 0.5, seed=7)
        assert type(found) is list and all(map(same, found, listed))
    for given in (model.named_parameters(), named.items(), list(named.items()), tuple(named.items())):
        found = perturb(given, 0.5, seed=7)
        assert list(found) == list(mapped) and all(map(same, found.values(), mapped.values()))
    written = perturb_(model.parameters(), 0.5, seed=7)
    assert type(written) is list and all(map(same, model.parameters(), listed))
    assert list(perturb_(model.named_parameters(), -0.5, seed=7)) == list(named)
    pairs = list(model.named_parameters())
    assert perturb(pairs, 0.5, seed=7, out=pairs) is pairs


Pair = collections.namedtuple("Pair", "weight bias")


def test_nested_structures_join_names() -> None:
    a, b, c, d = (np.full(k, k, np.float32) for k in (2, 3, 4, 5))
    nested = {"x": [a, {"y": b}], "z": Pair(c, (d,))}
    flat = perturb({"x.0": a, "x.1.y": b, "z.weight": c, "z.bias.0": d}, 0.5, seed=7)
    for of in (np.array, torch.tensor):
        arrays: Any = {"x": [of(a), {"y": of(b)}], "z": Pair(of(c), (of(d),))}
        found = perturb(arrays, 0.5, seed=7)
        assert list(found) == ["x", "z"] and type(found["x"]) is list and type(found["z"]) is Pair
        leaves = [found["x"][0], found["x"][1]["y"], found["z"].weight, found["z"].bias[0]]
        assert all(map(same, leaves, flat.values()))
        assert perturb(arrays, 0.5, seed=7, out=arrays) is arrays
        assert all(map(same, (arrays["x"][0], arrays["z"].bias[0]), (flat["x.0"], flat["z.bias.0"])))
    assert same(perturb([nested["x"], d], 0.5, seed=7)[1], perturb({"1": d}, 0.5, seed=7)["1"])
    assert perturb([[], {}], 0.5, seed=7) == [[], {}]


X = np.zeros(3, np.float32)
ITERATOR = (X for _ in "xy")
ALL = r"an array, a torch\.nn\.Module, or a sequence, a mapping, \(name, array\) pairs or an iterator of arrays"


@pytest.mark.parametrize(("parameters", "out", "error", "message"), [
    (None, None, TypeError, f"^parameters: expected {ALL}.*, got None"),
    ({1, 2}, None, TypeError, f"^parameters: expected {ALL}.*, got {{1, 2}} of type set$"),
    ("abc", None, TypeError, f"^parameters: expected {ALL}.*, got 'abc'"),
    ([X, "x"], None, TypeError, r"^parameters\[1\]: expected an array, got 'x'"),
    ([X, nn.ReLU()], None, TypeError, r"^parameters\[1\]: expected an array, got ReLU"),
    ({"a": [X, 3.0]}, None, TypeError, r"^parameters\['a\.1'\]: expected an array, got 3\.0 of type float$"),
    ({"a": [X.copy(), None]}, None, TypeError, r"^parameters\['a\.1'\]: expected an array, got None"),
    ({"a": {3: X}}, None, TypeError, r"^parameters\['a'\]: expected names of type str, got 3$"),
    ([("a", X), X], None, TypeError, r"^parameters\[1\]: expected a pair of a name and an array, got array"),
    (nn.BatchNorm1d(3).state_dict(), None, TypeError, r"^parameters\['num_batches_tracked'\]: .* got int64$"),
    ([X], (X for _ in "x"), TypeError, "^out: expected a structure that can be read again, got <generator"),
    (ITERATOR, ITERATOR, TypeError, "^out: expected a structure that can be read again, got <generator"),
    ({"a": [X]}, [[X]], ValueError, "^out: expected the names of parameters, got none called 'a.0'$"),
    ({"a": [X]}, {"a": X}, ValueError, "^out: expected the names of parameters, got none called 'a.0'$"),
])  # fmt: skip
def test_structures_that_perturb_refuses(parameters: Any, out: Any, error: Any, message: str) -> None:
    for _ in range(2):
        with pytest.raises(error, match=message):
            perturb(parameters, 0.5, seed=7, out=out)
    assert not X.any()


@pytest.mark.parametrize("place", ["meta", "fake", "fake, outside of its mode"])
def test_tensors_without_elements_give_shapes(place: str) -> None:
    with FakeTensorMode() as mode:
        fake = {"a": torch.zeros(3), "b": torch.zeros(4, 2).T.half()}
    meta = {name: x.to("meta") for name, x in (("a", torch.zeros(3)), ("b", torch.zeros(4, 2).T.half()))}
    state = torch.get_rng_state()
    tensors = meta if place == "meta" else fake
    coefficients = [0.5, torch.ones(4, device="meta")] if place == "meta" else [0.5, [0.5] * 3]

    def check() -> None:
        for given in coefficients:
            results = perturb({**tensors, "tied": tensors["a"]}, given, seed=7)
            assert results["tied"] is results["a"] and results["b"].is_contiguous()
            for name, x in tensors.items():
                found = results[name]
                assert (found.shape, found.dtype, found.device) == (x.shape, x.dtype, x.device)
            assert perturb_(tensors, given, seed=7) is tensors
            for wrong, message in (
                ({"seed": -1}, "^seed:"), ({"out": {"a": tensors["b"], "b": tensors["a"]}}, r"^out\['a'\]: .* shape"),
                ({"ids": {"a": 5, "b": 5}}, "^ids:"), ({"backend": "none"}, "^backend:"),
            ):  # fmt: skip
                with pytest.raises(ValueError, match=message):
                    perturb(tensors, given, **({"seed": 7} | wrong))
        with pytest.raises(ValueError, match=r"^coefficients: expected finite"):
            perturb(tensors, float("nan"), seed=7)

    if place == "fake":
        with mode:
            check()
            perturb_(nn.Linear(3, 3), torch.ones(3), seed=7)
    else:
        check()
    assert same(state, torch.get_rng_state())


def test_a_module_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Model()
    versions = [x._version for x in model.parameters()]
    assert perturb_(model, 0.5, seed=7) is model
    assert versions == [x._version for x in model.parameters()]
    found = perturb(model, [0.5] * 9, seed=multisample.Key(7, 3), member=4)
    trained = {name: x.shape for name, x in model.named_parameters() if x.requires_grad}
    assert {name: x.shape for name, x in found.items()} == trained
    assert all(x.is_meta and x.requires_grad for x in found.values())
    found = perturb(model, 0.5, seed=[1, 2, 3])
    assert all(x.shape == (3, *model.get_parameter(name).shape) for name, x in found.items())
    assert torch.func.vmap(lambda x: perturb(x, 0.5, seed=7))(torch.zeros(2, 3, device="meta")).shape == (2, 3)
