"""Modes of PyTorch do not change a sample, and PyTorch sees the calls that it observes, traces or profiles."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from launches import without_builtins
from operator_mode import Operators
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.autograd import forward_ad, graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import multisample.torch
from multisample import Generator, Key, perturb, sample, weighted_moments
from multisample.torch import Normal, take_key

WARNINGS = "ignore:Anomaly Detection", "ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*Profiler clears events"
pytestmark = pytest.mark.filterwarnings(*WARNINGS)
D, N = 5, 7


class Functions(TorchFunctionMode):
    """Records the functions of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext, "TorchFunctionMode": Functions, "TorchDispatchMode": Operators,
    "FlopCounterMode": lambda: FlopCounterMode(display=False), "SchemaCheckMode": SchemaCheckMode,
    "FunctionalTensorMode": FunctionalTensorMode, "Python dispatcher": enable_python_dispatcher,
    "selective checkpoint": lambda: create_selective_checkpoint_contexts([])[0],
    "default device": lambda: torch.device("meta"), "profiler": torch.profiler.profile,
    "autograd profiler": torch.autograd.profiler.profile, "forward-mode AD": forward_ad.dual_level,
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "saved_tensors_hooks": lambda: graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "allow_mutation_on_saved_tensors": graph.allow_mutation_on_saved_tensors, "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}  # fmt: skip


def vectors(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-2, 3, D, device=device), torch.linspace(0.5, 2, D, device=device)


def plain(x: Any) -> torch.Tensor:
    """The result of a call in FunctionalTensorMode is a FunctionalTensor."""
    tensor: torch.Tensor = x.elem if hasattr(x, "elem") else x
    return torch._from_functional_tensor(tensor) if torch._is_functional_tensor(tensor) else tensor


@pytest.mark.parametrize("in_python", [False, True])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_the_numbers_are_those_of_a_call_without_the_mode(mode: Any, torch_device: str, in_python: bool) -> None:
    if mode is FunctionalTensorMode and torch_device == "cuda":
        pytest.skip("a graph draws the offset on the device")
    mu, sigma = vectors(torch_device)
    theirs = torch.Generator(torch_device)
    requiring = mu.clone().requires_grad_()
    normal = Normal(mu, sigma, validate_args=False)

    def draws() -> list[torch.Tensor]:
        torch.manual_seed(3)
        theirs.manual_seed(3)
        options: list[dict[str, Any]] = [{}, {"layout": "nd"}, {"generator": theirs}, {"seed": [1, 2]}, {}]
        options += [{"seed": Key(2**64 - 1, 2**63)}]
        if mode is not FunctionalTensorMode:  # A graph cannot record these.
            out = torch.empty(D, N, device=torch_device)
            options += [{"out": out}, {"generator": Generator(1)}, {"validate": True}]
        found = [sample(mu, sigma, N, **x) for x in options]
        return [*found, sample(requiring, sigma, N).detach(), normal.rsample((N,)), normal.sample()]

    with without_builtins() if in_python else contextlib.nullcontext():
        expected = draws()
        for _ in range(2):  # The first call may make a plan.
            with mode():
                found = draws()
            assert all(torch.equal(plain(x), y) for x, y in zip(found, expected, strict=True))
        assert all(map(torch.equal, draws(), expected))


@pytest.mark.parametrize("mode", [Functions, Operators])
def test_modes_see_the_operator(mode: Any, torch_device: str) -> None:
    mu, sigma = vectors(torch_device)
    for _ in range(2):
        sample(mu, sigma, N, seed=1)
        with mode() as seeing:
            sample(mu, sigma, N)
        name = "multisample.sample" if mode is Functions else "multisample.sample.default"
        assert [seen for seen in seeing.seen if seen.startswith("multisample.")] == [name]
        if mode is Operators:  # Checks and the draw of a seed are not operations of the caller.
            assert len(seeing.seen) == 1


def test_function_modes_do_not_refuse_what_no_operator_can_do() -> None:
    mu, sigma = vectors("cpu")
    moments = weighted_moments(torch.ones(N), mu, sigma, seed=1)
    with Functions():
        assert torch.equal(sample(mu, sigma, N, seed=1, backend="cpu"), sample(mu, sigma, N, seed=1))
        assert all(map(torch.equal, weighted_moments(torch.ones(N), mu, sigma, seed=1), moments))
        perturb(mu, 0.1, seed=1)


@pytest.mark.parametrize("profile", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_profiles_show_each_call(profile: Any, torch_device: str) -> None:
    mu, sigma = vectors(torch_device)
    for _ in range(2):
        sample(mu, sigma, N, seed=1)
        with profile(record_shapes=True) as seeing:
            for _ in range(3):
                sample(mu, sigma, N, seed=1)
            weighted_moments(torch.ones(N, device=torch_device), mu, sigma, seed=1)
        found = {(x.key, tuple(map(tuple, x.input_shapes))): x.count for x in seeing.key_averages(True)}
        assert found["multisample::sample", ((D,), (D,), ())] == 3
        assert found["multisample::weighted_moments", ((D,), (D,), (N,))] == 1


BAD = {
    "a negative sigma": lambda mu, sigma: sample(mu, -sigma, N),
    "a mean that is not finite": lambda mu, sigma: sample(mu / 0, sigma, N),
    "validate": lambda mu, sigma: sample(mu, -sigma, N, validate=True),
    "out over mu": lambda mu, sigma: sample(mu, 1.0, N, out=mu.as_strided((D, N), (1, D))),
    "out over sigma": lambda mu, sigma: sample(mu, sigma, N, out=sigma.as_strided((D, N), (1, D), 1)),
    "out over itself": lambda mu, sigma: sample(mu, 1.0, N, out=torch.zeros(2 * N).as_strided((D, N), (1, 1))),
    "out of a wrong shape": lambda mu, sigma: sample(mu, 1.0, N, out=torch.zeros(N, D)),
    "out of a wrong dtype": lambda mu, sigma: sample(mu, 1.0, N, out=torch.zeros(D, N, dtype=torch.float64)),
    "a gradient with out": lambda mu, sigma: sample(mu.requires_grad_(), 1.0, N, out=torch.zeros(D, N)),
    "a negative seed": lambda mu, sigma: sample(mu, sigma, N, seed=torch.tensor([1, -2])),
    "too many samples": lambda mu, sigma: sample(mu, sigma, 2**34, sample_offset=1),
}


@pytest.mark.parametrize("mode", [Functions, Operators, forward_ad.dual_level])
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_errors_are_those_of_a_call_without_the_mode(mode: Any, bad: Callable[..., Any]) -> None:
    def outcome(mode: Any) -> str:
        memory = torch.zeros(2 * D * N)
        mu, sigma = memory[:D], memory[D * N :][:D]
        sigma.fill_(1)
        with pytest.raises(ValueError) as caught, mode():
            bad(mu, sigma)
        assert torch.equal(torch.get_rng_state(), before)
        assert int(memory.count_nonzero()) == D
        return str(caught.value)

    before = torch.get_rng_state()
    assert outcome(mode) == outcome(contextlib.nullcontext)


def traced(function: Any, *arguments: Any) -> Any:
    return torch.jit.trace(function, arguments, check_trace=False)


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("shape", [(D,), (2, 3)])
def test_a_trace_of_jit_draws_new_numbers_from_its_arguments(
    torch_device: str, shape: tuple[int, ...], requires_grad: bool, is_warm: bool
) -> None:
    loc, scale = (torch.ones(shape, device=torch_device, requires_grad=requires_grad) for _ in range(2))

    def draw(loc: Any, scale: Any) -> Any:
        return Normal(loc, scale, validate_args=False).rsample((N,))

    for _ in range(2 * is_warm):
        draw(loc, scale)
    torch.manual_seed(3)
    function = traced(draw, loc, scale)
    first, second = function(loc, scale), function(loc, scale)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    draw(loc, scale)  # What the trace drew.
    if torch_device == "cpu":  # On a GPU, the offset is drawn on the device.
        assert torch.equal(first, draw(loc, scale))
        assert torch.equal(second, draw(loc, scale))
    torch.manual_seed(3)
    moved = function(loc + 100, scale)
    torch.manual_seed(3)
    torch.testing.assert_close(moved, function(loc, scale) + 100)
    longer = torch.ones((4, *shape[1:]), device=torch_device)
    assert function(longer, longer).shape == (N, *longer.shape)
    if requires_grad:
        function(loc, scale).sum().backward()
        assert torch.equal(loc.grad, torch.full_like(loc, N))


def drawing(**options: Any) -> Any:
    def draw(mu: Any, sigma: Any) -> Any:
        return sample(mu, sigma, N, **options)

    return draw


@pytest.mark.parametrize("trace", [traced, lambda function, *arguments: make_fx(function)(*arguments)])
def test_a_trace_has_the_eager_numbers(trace: Any) -> None:
    vectors_ = vectors("cpu")
    theirs = torch.Generator()
    cases: list[dict[str, Any]] = [
        {}, {"layout": "nd", "antithetic": True}, {"seed": 2**64 - 1}, {"seed": Key(7, 2**63)}, {"dtype": "float64"},
        {"sample_offset": 3}, {"generator": theirs},
    ]  # fmt: skip
    for options in cases:
        if trace is not traced and "generator" in options:  # torch.fx has no generators.
            continue
        draw = drawing(**options)
        found = []
        for function in (trace(draw, *vectors_), draw):
            torch.manual_seed(3)
            theirs.manual_seed(3)
            found.append(function(*vectors_))
        assert torch.equal(*found), options


def test_what_a_trace_cannot_record_raises() -> None:
    mu, sigma = vectors("cpu")
    weights = torch.ones(N)
    cases: list[tuple[Callable[..., Any], str]] = [
        (lambda mu: sample(mu, sigma, N, generator=Generator(1)), "^generator: expected a torch.Generator"),
        (lambda mu: sample(mu, sigma, N, seed=1, backend="cpu"), "^backend: expected torch_ext .* torch.jit.trace"),
        (lambda mu: weighted_moments(weights, mu, sigma, seed=1), "^mu, sigma, weights: .* torch.jit.trace"),
        (lambda mu: perturb(mu, 0.1, seed=1), "^parameters: expected plain arrays outside"),
        (lambda mu: sample(mu, sigma, N, seed=take_key()), "^take_key: expected a call outside of traces"),
        (lambda mu: sample(mu, -sigma, N), "^sigma: expected finite standard deviations"),
    ]
    for (function, message), is_warm in itertools.product(cases, [False, True]):
        if is_warm:
            with contextlib.suppress(ValueError):
                function(mu)
        with pytest.raises(ValueError, match=message):
            traced(function, mu)
    own = Generator(1)
    with pytest.raises(ValueError, match=r"^generator: expected a torch\.Generator"):
        make_fx(lambda mu: sample(mu, sigma, N, generator=own))(mu)
    assert own.offset == 0


def test_tensors_without_values_give_shapes_and_types_and_draw_nothing(torch_device: str) -> None:
    own, theirs = Generator(1), torch.Generator(torch_device)
    before = torch.get_rng_state(), theirs.get_state()
    options: list[dict[str, Any]] = [{}, {"seed": 3}, {"generator": own}, {"generator": theirs}, {"seed": [1, 2]}]
    options += [{"layout": "nd"}, {"dtype": "float16"}]
    drawn = [{**x, "seed": x.get("seed", 3), "generator": None} for x in options]
    expected = [sample(*vectors(torch_device), N, **x) for x in drawn]
    weights = torch.ones(N, device=torch_device)
    moments = [weighted_moments(weights, *vectors(torch_device), seed=x, order=2) for x in (3, [1, 2])]

    def check(kind: str, vectors_: tuple[Any, ...], weights: Any) -> None:
        found = [sample(*vectors_, N, **x) for x in options]
        summed = [weighted_moments(weights, *vectors_, seed=x) for x in (3, [1, 2])]
        pairs = [*zip(found, expected, strict=True), *itertools.chain(*map(zip, summed, moments))]
        for x, y in pairs:
            assert (x.shape, x.dtype, x.device.type) == (y.shape, y.dtype, kind)
        assert Normal(*vectors_, validate_args=False).rsample((2, 3)).shape == (2, 3, D)

    check("meta", tuple(x.to("meta") for x in vectors(torch_device)), weights.to("meta"))
    with FakeTensorMode() as mode:
        check(torch_device, tuple(map(mode.from_tensor, vectors(torch_device))), mode.from_tensor(weights))
    assert own.offset == 0
    assert all(map(torch.equal, (torch.get_rng_state(), theirs.get_state()), before))


def test_gradients_flow_to_tensors_without_values() -> None:
    mu = torch.zeros(D, device="meta", requires_grad=True)
    first, second = weighted_moments(torch.ones(N, device="meta"), mu, 1.0, seed=1)
    assert first.requires_grad and not second.requires_grad
    (sample(mu, 1.0, N).sum() + first.sum()).backward()
    assert mu.grad is not None and mu.grad.is_meta


def test_an_out_without_values_is_returned() -> None:
    mu, out = torch.zeros(D, device="meta"), torch.zeros(D, N, device="meta")
    assert sample(mu, 1.0, N, out=out) is out
    with pytest.raises(ValueError, match=r"^validate: "):
        sample(mu, 1.0, N, validate=True)
    with pytest.raises(ValueError, match=r"^sigma: expected it on the device of mu, meta, got cpu"):
        sample(mu, torch.ones(D), N)
    with pytest.raises(ValueError, match=r"^weights: require grad"):
        weighted_moments(torch.ones(N, device="meta", requires_grad=True), mu, 1.0, seed=1)


def test_the_operator_refuses_exactly_the_overlaps() -> None:
    """Bytes of a matrix and of a vector, at random places and strides of one buffer."""
    multisample.torch.load_operators()
    rng, sizes = np.random.default_rng(1), (2, 4, 8)
    outcomes = []
    for _ in range(600):
        memory = torch.zeros(240, dtype=torch.uint8)
        typed = {2: memory.view(torch.float16), 4: memory.view(torch.float32), 8: memory.view(torch.float64)}
        size, other = rng.choice(sizes, 2).tolist()
        d, n, stride, row, column = rng.integers((1, 1, 0, 0, 0), (4, 4, 4, 7, 7)).tolist()
        first, begin = rng.integers((0, 0), (60 // size, 60 // other)).tolist()
        out = typed[size].as_strided((d, n), (row, column), first)
        mu = typed[other].as_strided((d,), (stride,), begin)
        cells = [(first + i * row + j * column) * size + k for i in range(d) for j in range(n) for k in range(size)]
        read = [(begin + i * stride) * other + k for i in range(d) for k in range(other)]
        if len(set(cells)) < len(cells):
            expected = "elements of out must not share memory"
        else:
            expected = "memory that mu also uses" if set(cells) & set(read) else ""
        try:
            torch.ops.multisample.sample_(out, mu, torch.ones(d), seed=1)
            found = ""
        except RuntimeError as error:
            found = str(error)
        assert expected in found and bool(expected) == bool(found), (size, other, d, n, stride, row, column)
        outcomes.append(expected)
    assert len(set(outcomes)) == 3 and min(map(outcomes.count, set(outcomes))) > 50
