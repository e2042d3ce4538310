"""Populations, updates and decay: `perturb` with vectors of seeds or members, and gradients of its results."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from multisample import Key, perturb
from multisample._model_parameters.populations import factor_of
from multisample.backends.element_types import MATRIX_TYPES
from multisample.torch import perturb_

KEYS = [3, Key(4, 9), 2**63 + 5]
WORDS = [(3, 0), (4, 9), (2**63 + 5, 0)]
MEMBERS = [4, 0, 2**32 - 1]
Tree = dict[str, Any]


def tree(dtype: str = "float32") -> Tree:
    draw = torch.Generator().manual_seed(5)
    base = {
        "w": torch.randn(9, 7, generator=draw), "long": torch.randn(40_000, generator=draw),
        "turned": torch.randn(6, 5, 4, generator=draw).transpose(0, 2), "none": torch.zeros(0, 3),
    }  # fmt: skip
    return {name: x.to(getattr(torch, dtype)) for name, x in base.items()}


def check(found: Tree, expected: list[Tree]) -> None:
    """Element k of each result equals that of call k, bit for bit."""
    for name, x in found.items():
        assert x.shape == (len(expected), *expected[0][name].shape)
        for own, call in zip(x, expected, strict=True):
            assert torch.equal(own.cpu(), call[name].cpu()), name


@pytest.mark.parametrize("dtype", MATRIX_TYPES)
@pytest.mark.parametrize("decay", [0, 0.3, {"w": 0.25}])
def test_results_equal_those_of_each_call(everywhere: Any, dtype: str, decay: Any) -> None:
    p, options = tree(dtype), {"decay": decay, "backend": everywhere.backend}
    own, device = {name: everywhere.put(x) for name, x in p.items()}, everywhere.device
    words = torch.from_numpy(np.array(WORDS, np.uint64)).to(device)
    expected = [perturb(p, 0.5, seed=k, member=2, decay=decay) for k in KEYS]
    for seeds in (KEYS, words, *([words.view(torch.int64)] if device == "cuda" else [])):  # Modulo 2**64.
        check(perturb(own, 0.5, seed=seeds, member=2, **options), expected)
    expected = [perturb(p, 0.5, seed=Key(7, 1), member=k, decay=decay) for k in MEMBERS]
    out = {name: torch.full((3, *x.shape), 9.0, dtype=x.dtype, device=device) for name, x in p.items()}
    turned = {name: torch.zeros(*x.shape, 3, dtype=x.dtype, device=device).movedim(-1, 0) for name, x in p.items()}
    on_device = torch.tensor(MEMBERS, device=device)
    for members in (MEMBERS, tuple(MEMBERS), np.array(MEMBERS), on_device, np.array(MEMBERS, np.uint32)):
        check(perturb(own, 0.5, seed=Key(7, 1), member=members, **options), expected)
    for target in (out, turned):
        assert perturb(own, 0.5, seed=Key(7, 1), member=MEMBERS, out=target, **options) is target
        check(target, expected)


def test_seeds_of_every_form() -> None:
    p = tree()
    expected = [perturb(p, 0.5, seed=Key(*key)) for key in WORDS]
    pairs = np.array(WORDS, np.uint64)
    halves = np.array([[x >> 32, x & 0xFFFFFFFF, y >> 32, y & 0xFFFFFFFF] for x, y in WORDS], np.uint32)
    for seeds in (KEYS, tuple(KEYS), pairs, halves, torch.from_numpy(pairs), torch.from_numpy(halves)):
        check(perturb(p, 0.5, seed=seeds), expected)
    few = [perturb(p, 0.5, seed=k) for k in (1, 2)]
    for seeds in ([1, 2], np.array([1, 2], np.int8), torch.tensor([1, 2], dtype=torch.int16), range(1, 3)):
        check(perturb(p, 0.5, seed=list(seeds) if isinstance(seeds, range) else seeds), few)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_a_vector_of_one_adds_an_axis_and_a_matrix_of_one_row_is_one_key(library: str) -> None:
    of: Any = torch.tensor if library == "torch" else pytest.importorskip("jax").numpy.asarray
    p = of(np.zeros(5, np.float32))
    one, several = np.asarray(perturb(p, 0.5, seed=7)), np.asarray(perturb(p, [0.5, 1.0], seed=7))
    for seed in ([7], np.array([7]), of(np.array([7], np.int32))):
        assert np.array_equal(perturb(p, 0.5, seed=seed), one[None])
        assert np.array_equal(perturb(p, [0.5], seed=seed), one)
    for seed in (np.array([[0, 7]], np.uint32), np.array([[7, 0]]), of(np.array([[0, 7]], np.uint32))):
        assert np.array_equal(perturb(p, 0.5, seed=seed), one)
        assert np.array_equal(perturb(p, [0.5, 1.0], seed=seed), several)
    assert np.array_equal(perturb(p, 0.5, seed=7, member=[0]), one[None])
    for member in ([], of(np.zeros(0, np.int32))):
        assert perturb(p, 0.5, seed=[]).shape == perturb(p, 0.5, seed=7, member=member).shape == (0, 5)


def test_an_update_with_a_seed_for_each_coefficient(everywhere: Any) -> None:
    options: dict[str, Any] = {"backend": everywhere.backend}
    for p in (tree("float32"), tree("float64")):
        for given in ([0.5, 2.0, -1.0], torch.tensor([0.5, 2.0, -1.0], device=everywhere.device, dtype=torch.float64)):
            placed = {name: everywhere.put(x) for name, x in p.items()}
            found = perturb(placed, given, seed=KEYS, member=MEMBERS[2], **options)
            for name, x in p.items():
                for c, key in zip((0.5, 2.0, -1.0), KEYS, strict=True):
                    x = perturb({name: x}, c, seed=key, member=MEMBERS[2])[name]
                assert torch.equal(found[name].cpu(), x)
    half = {name: everywhere.put(x) for name, x in tree("bfloat16").items()}
    wide = {name: x.cpu().float() for name, x in half.items()}
    for seeds in (7, list(range(300)), torch.arange(300, device=everywhere.device)):
        expected = perturb(wide, [1e-2] * 300, seed=7 if isinstance(seeds, int) else list(range(300)), decay=0.1)
        found = perturb(half, [1e-2] * 300, seed=seeds, decay=0.1, **options)
        assert all(torch.equal(found[name].cpu(), x.bfloat16()) for name, x in expected.items())
    assert perturb_(half, [1e-2] * 300, seed=seeds, decay=0.1, **options) is half
    assert all(torch.equal(half[name], x) for name, x in found.items())


def test_the_factor_is_rounded_once() -> None:
    draw = np.random.default_rng(3)
    # The double nearest to 1 - decay lies in the middle between two float32.
    hard = [2.0**-25 + 2.0**-60, 2.0**-25 - 2.0**-60, 2.0**-25, 3 * 2.0**-26 + 2.0**-70]
    for decay in [0.0, 1.0, 0.5, 1e-300, *hard, *draw.random(200).tolist(), *(draw.random(200) ** 8).tolist()]:
        exact = 1 - Fraction(decay)
        near = np.float32(float(exact))
        around = [np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(2))]
        nearest = min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.int32)) & 1))
        assert factor_of(decay, "float32") == nearest, decay
        assert factor_of(decay, "float64") == float(exact)


@pytest.mark.parametrize("dtype", MATRIX_TYPES)
def test_decay_scales_before_the_first_sum(host: str, dtype: str) -> None:
    p, real = tree(dtype)["w"], MATRIX_TYPES[dtype].computing
    for decay in (0.1, 1.0, 2.0**-25 + 2.0**-60):
        wide = (p.to(getattr(torch, real)) * factor_of(decay, real)).to(getattr(torch, real))
        right = perturb({"w": wide}, [0.5, -2.0], seed=7, backend=host)["w"].to(p.dtype)
        assert torch.equal(perturb({"w": p}, [0.5, -2.0], seed=7, decay=decay, backend=host)["w"], right)
        own = p.clone()
        perturb_({"w": own}, [0.5, -2.0], seed=7, decay={"w": decay}, backend=host)
        assert torch.equal(own, right)
    zero = [perturb({"w": p}, 0.5, seed=7, decay=decay)["w"] for decay in (0, 0.0, {}, {"w": 0})]
    assert all(torch.equal(x, zero[0]) for x in zero)
    if real == dtype:
        assert torch.equal(perturb(p, [], seed=7, decay=0.25), p * 0.75)


def test_decay_by_name_follows_ties_and_wrappers() -> None:
    layer = torch.nn.Linear(4, 3)
    module = torch.nn.ModuleDict({"a": layer, "b": layer})
    found = perturb(module, 0.0, seed=1, decay={"a.weight": 0.5})
    assert torch.equal(found["a.weight"], layer.weight / 2) and found["b.weight"] is found["a.weight"]
    nested = {"layers": [torch.ones(3), {"_orig_mod.x": torch.ones(2)}]}
    found = perturb(nested, 0.0, seed=1, decay={"layers.1.x": 0.25})["layers"]
    assert found[0].tolist() == [1] * 3 and found[1]["_orig_mod.x"].tolist() == [0.75] * 2


def test_errors_write_nothing_and_name_the_shape() -> None:
    p = {"w": torch.zeros(3)}
    out = {"w": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"^out\['w'\]: expected shape \(2, 3\) for a population of 2, got \(3,\)$"):
        perturb(p, 0.5, seed=[1, 2], out=out)
    with pytest.raises(ValueError, match=r"^out\['w'\]: expected shape \(2, 3\) for a population of 2, got \(3,\)$"):
        perturb_(p, 0.5, seed=1, member=[1, 2])
    target = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"^(parameters|out): expected memory of its own"):
        perturb(target[0], 0.5, seed=[1, 2], out=target)
    assert not (p["w"].any() or out["w"].any() or target.any())


def test_gradients_flow_to_parameters(everywhere: Any) -> None:
    host, p = everywhere.backend, {name: everywhere.put(x).requires_grad_(name != "long") for name, x in tree().items()}
    for size, seed in ((None, 3), (2, [3, 4])):
        found = perturb(p, 0.5, seed=seed, decay={"w": 0.25}, backend=host)
        assert {name: x.requires_grad for name, x in found.items()} == {name: name != "long" for name in p}
        weights = torch.randn(found["w"].shape, device=everywhere.device)
        gradients = torch.autograd.grad((found["w"] * weights).sum() + found["turned"].sum(), [p["w"], p["turned"]])
        torch.testing.assert_close(gradients[0], 0.75 * (weights if size is None else weights.sum(0)))
        assert (gradients[1] == (size or 1)).all()
        with torch.no_grad():
            plain = perturb(p, 0.5, seed=seed, decay={"w": 0.25}, backend=host)
        assert all(torch.equal(x, plain[name]) and not plain[name].requires_grad for name, x in found.items())
        result = perturb(p["w"], 0.5, seed=seed, backend=host)
        result += 1  # The result may be changed in place.
        result.sum().backward()
        assert p["w"].grad is not None
        p["w"].grad = None
    (first,) = torch.autograd.grad((perturb(p["w"], 0.5, seed=1) ** 3).sum(), p["w"], create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), p["w"])
    torch.testing.assert_close(second, 6 * perturb(p["w"], 0.5, seed=1).detach())


def test_out_and_in_place_record_nothing(host: str) -> None:
    p = torch.ones(4, requires_grad=True)
    out = torch.zeros(4)
    assert not perturb(p, 0.5, seed=1, out=out, backend=host).requires_grad
    perturb_(p, 0.5, seed=1, backend=host)
    assert p.grad_fn is None and p.is_leaf
    with torch.inference_mode():
        assert not perturb(p, 0.5, seed=1, backend=host).requires_grad


def test_gradients_of_tied_parameters() -> None:
    w = torch.ones(3, requires_grad=True)
    frozen, view = w.detach(), w.view(3)
    found = perturb({"a": w, "b": w, "frozen": frozen, "view": view}, 0.5, seed=1)
    assert found["a"] is found["b"] and not found["frozen"].requires_grad
    assert all(torch.equal(x, found["a"]) for x in found.values())
    (found["a"].sum() + found["b"].sum() + 5 * found["view"].sum()).backward()
    assert w.grad is not None and w.grad.tolist() == [7.0] * 3


def test_coefficients_that_require_grad_are_an_error(host: str) -> None:
    c = torch.ones(2, requires_grad=True)
    for call in (lambda: perturb(torch.zeros(3), c, seed=1), lambda: perturb_(torch.zeros(3), c[0], seed=1)):
        with pytest.raises(ValueError, match=r"^coefficients: require grad, but gradients flow to the parameters"):
            call()
        with torch.no_grad():
            call()
