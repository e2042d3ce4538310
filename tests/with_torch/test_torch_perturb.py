"""`perturb` in torch.func, forward-mode AD and torch.compile: populations in one launch, and gradients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from processes import run_python
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from multisample import Key, perturb
from multisample._model_parameters import perturb_plan

# torch.compile and forward-mode AD import modules of PyTorch that PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:::torch")

P = {"a": torch.randn(5, 7), "b": torch.randn(40), "half": torch.randn(3).bfloat16()}
SEVERAL = {name: torch.stack([x, x + 1, x - 2]) for name, x in P.items()}
SEEDS = torch.tensor([3, 4, 5])
NUMBERS, MATRIX = torch.tensor([0.5, 1.0, -2.0]), torch.randn(3, 4)
HALVES = torch.tensor([[1, 2], [3, 4], [2**31, 7]]).to(torch.uint32)
MEMBERS = [0, 9, 2**32 - 1]
Tree = dict[str, Any]


def check(found: Tree, call: Callable[[int], Tree], count: int = 3) -> None:
    """Element k of each result equals that of ``call(k)``, bit for bit."""
    for k in range(count):
        for name, x in call(k).items():
            assert torch.equal(found[name][k], x), (name, k)


def element(k: int) -> Tree:
    return {name: x[k] for name, x in SEVERAL.items()}


# The calls that vmap makes, and call k by itself.
CALLS: dict[str, tuple[Callable[[], Tree], Callable[[int], Tree]]] = {
    "seed": (lambda: vmap(lambda s: perturb(P, 0.5, seed=s, member=2))(SEEDS),
             lambda k: perturb(P, 0.5, seed=3 + k, member=2)),
    "halves": (lambda: vmap(lambda s: perturb(P, 0.5, seed=s))(HALVES), lambda k: perturb(P, 0.5, seed=HALVES[k])),
    "member": (lambda: vmap(lambda m: perturb(P, 0.5, seed=Key(3, 9), member=m, decay=0.25))(torch.tensor(MEMBERS)),
               lambda k: perturb(P, 0.5, seed=Key(3, 9), member=MEMBERS[k], decay=0.25)),
    "number": (lambda: vmap(lambda c: perturb(P, c, seed=3))(NUMBERS), lambda k: perturb(P, float(NUMBERS[k]), seed=3)),
    "vector": (lambda: vmap(lambda c: perturb(P, c, seed=3))(MATRIX), lambda k: perturb(P, MATRIX[k], seed=3)),
    "vector, a seed each": (lambda: vmap(lambda c: perturb(P, c, seed=[3, 4, 5, 6]))(MATRIX),
                            lambda k: perturb(P, MATRIX[k], seed=[3, 4, 5, 6])),
    "seed, vector": (lambda: vmap(lambda s: perturb(P, [0.1, 0.2], seed=s))(SEEDS),
                     lambda k: perturb(P, [0.1, 0.2], seed=3 + k)),
    "parameters": (lambda: vmap(lambda p: perturb(p, 0.5, seed=3))(SEVERAL),
                   lambda k: perturb(element(k), 0.5, seed=3)),
    "all": (lambda: vmap(lambda p, c, s: perturb(p, c, seed=s, decay={"a": 0.5}))(SEVERAL, NUMBERS, SEEDS),
            lambda k: perturb(element(k), float(NUMBERS[k]), seed=3 + k, decay={"a": 0.5})),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_elements_of_vmap_equal_their_own_calls(name: str) -> None:
    found, call = CALLS[name]
    check(found(), call)


def test_vmap_of_vmap_and_of_populations() -> None:
    twice = vmap(lambda m: vmap(lambda s: perturb(P, 0.5, seed=s, member=m))(SEEDS))(torch.tensor([0, 1]))
    of_seeds = vmap(lambda m: perturb(P, 0.5, seed=[3, 4, 5], member=m))(torch.tensor([0, 1]))
    of_members = vmap(lambda s: perturb(P, 0.5, seed=s, member=[0, 1]))(SEEDS)
    for m in range(2):
        for found in (twice, of_seeds):
            check({name: x[m] for name, x in found.items()}, lambda k, m=m: perturb(P, 0.5, seed=3 + k, member=m))
        check({name: x[:, m] for name, x in of_members.items()}, lambda k, m=m: perturb(P, 0.5, seed=3 + k, member=m))


def test_vmap_makes_one_launch_for_each_type(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []

    def found(*arguments: Any, before: Any = perturb_plan._groups) -> Any:
        made = before(*arguments)
        groups.append(len(made))
        return made

    monkeypatch.setattr(perturb_plan, "_groups", found)
    p = {"x": torch.zeros(11), "y": torch.zeros(3, 13), "z": torch.zeros(2).double()}
    vmap(lambda s: perturb(p, 0.5, seed=s))(SEEDS)
    assert groups == [2]


def loss(p: Tree, seed: Any) -> Any:
    return sum((x.float() ** 2).sum() for x in perturb(p, 0.1, seed=seed, decay=0.25).values())


def test_grad_vjp_and_jvp() -> None:
    plain = {name: P[name] for name in ("a", "b")}
    right = {name: 1.5 * x for name, x in perturb(plain, 0.1, seed=3, decay=0.25).items()}
    torch.testing.assert_close(grad(loss)(plain, 3), right)
    each = vmap(grad(loss), in_dims=(None, 0))(plain, SEEDS)
    torch.testing.assert_close({name: x[0] for name, x in each.items()}, right)
    ones = {name: torch.ones_like(x) for name, x in plain.items()}
    for seed, shape in ((3, (5, 7)), ([3, 4], (2, 5, 7))):
        found, tangents = jvp(lambda p, s=seed: perturb(p, 0.1, seed=s, decay=0.25), (plain,), (ones,))
        assert torch.equal(found["a"], perturb(plain, 0.1, seed=seed, decay=0.25)["a"])
        assert tangents["a"].shape == shape and (tangents["a"] == 0.75).all()
    recorded = {name: x.clone().requires_grad_() for name, x in plain.items()}
    vmap(lambda s: perturb(recorded, 0.1, seed=s, decay=0.5))(SEEDS)["a"].sum().backward()
    assert (recorded["a"].grad == 1.5).all()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(P["a"], torch.ones(5, 7))
        found = perturb({"a": dual, "b": P["b"]}, 0.1, seed=3)
        assert (forward_ad.unpack_dual(found["a"]).tangent == 1).all()
        assert torch.equal(found["b"], perturb({"a": P["a"], "b": P["b"]}, 0.1, seed=3)["b"])


@pytest.mark.slow
def test_the_first_call_of_a_program_can_be_transformed(tmp_path: Path) -> None:
    call = "torch.func.grad(lambda p: multisample.perturb(p, 0.1, seed=3).sum())(torch.zeros(3))"
    run_python("-c", f"import torch, multisample\n{call}", folder=tmp_path)


def test_a_population_trains_through_a_functional_call() -> None:
    module, x = torch.nn.Linear(7, 3), torch.randn(2, 7)
    members = perturb(module, 0.1, seed=7, member=range(4))
    vmap(lambda own: functional_call(module, own, (x,)))(members).sum().backward()
    torch.testing.assert_close(module.weight.grad, 4 * x.sum(0).expand(3, 7))


ONE = torch.tensor(0.5)
WRONG: list[tuple[Callable[..., Any], Any, type[Exception], str]] = [
    (grad(lambda c: perturb(P, c, seed=3)["a"].sum()), ONE, ValueError, "^coefficients: require grad"),
    (lambda c: jvp(lambda c: perturb(P, c, seed=3), (c,), (c,)), ONE, ValueError, "^coefficients: require grad"),
    (vmap(lambda s: perturb(P, 0.1, seed=s, out=P)), SEEDS, ValueError, "^out: expected None where PyTorch"),
    (vmap(lambda s: perturb(P, 0.1, seed=s)), SEEDS.float(), TypeError, "^seed: expected integers"),
    (vmap(lambda m: perturb(P, 0.1, seed=1, member=m)), -SEEDS, ValueError, r"^member\[2\]: expected 0 <"),
    (vmap(lambda m: perturb(P, 0.1, seed=1, member=m)), NUMBERS, TypeError, "^member: expected integers"),
    (vmap(lambda d: perturb(P, 0.1, seed=1, decay=d)), NUMBERS, TypeError, "^decay: expected a number"),
    (vmap(lambda s: perturb(P, 0.1, seed=[1, 2], member=s[None])), SEEDS, ValueError, "^seed, member: expected"),
]


@pytest.mark.parametrize(("call", "argument", "error", "message"), WRONG, ids=map(str, range(len(WRONG))))
def test_errors_name_the_argument(call: Any, argument: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(argument)


class Perturbed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return perturb(x, 0.5, seed=3) * 2


@pytest.mark.slow
def test_a_trace_without_an_operator_raises() -> None:
    exported = torch.export.export(Perturbed(), (MATRIX,), strict=True).module()
    assert torch.equal(exported(MATRIX), Perturbed()(MATRIX))
    with pytest.raises(ValueError, match=r"^parameters: expected plain arrays.*strict=True"):
        torch.export.export(Perturbed(), (MATRIX,), strict=False)
    with pytest.raises(ValueError, match=r"^parameters: expected plain arrays"):
        make_fx(Perturbed(), tracing_mode="fake")(MATRIX)


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


GRAPHS: dict[str, Callable[[Any], Tree]] = {
    "decay": lambda s: perturb(P, 0.5, seed=3, decay={"a": 0.25}),
    "keys": lambda s: perturb(P, 0.5, seed=[3, Key(2, 3), 2**63 + 1], decay=0.25),
    "members": lambda s: perturb(P, 0.5, seed=3, member=[3, 4]),
    "tensor of seeds": lambda s: perturb(P, 0.5, seed=s),
    "tensor of members": lambda s: perturb(P, 0.5, seed=3, member=s),
    "update": lambda s: perturb(P, [0.5, 0.2, 0.1], seed=s),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_compiled_populations_have_the_bits_of_eager_calls(name: str) -> None:
    found, expected = compiled(GRAPHS[name])(SEEDS), GRAPHS[name](SEEDS)
    assert all(torch.equal(x, expected[key]) for key, x in found.items())


@pytest.mark.parametrize("seed", [3, SEEDS], ids=["one", "population"])
def test_compiled_gradients_equal_those_of_eager_calls(seed: Any) -> None:
    p = {name: P[name].clone().requires_grad_(name == "a") for name in ("a", "b")}
    right = torch.autograd.grad(loss(p, seed), p["a"])
    torch.testing.assert_close(torch.autograd.grad(compiled(loss)(p, seed), p["a"]), right)
