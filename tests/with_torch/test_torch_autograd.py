"""Gradients of mu and sigma agree with finite differences; the backward pass draws the noise again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from operator_mode import Operators
from tables import ONE_OPTION

import multisample.torch
from multisample import Generator, _plan, sample
from multisample._routes import torch_autograd

D, N = 5, 7
ALL = {"noise": "shared", "antithetic": True, "layout": "nd", "dim_offset": 1, "sample_offset": 3}
OPTIONS = ONE_OPTION | {"all": ALL}
# Forms of `mu` and `sigma`, made from a vector.
FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "vector": lambda x: x, "column": lambda x: x[:, None], "strided": lambda x: torch.stack((x, x), 1).reshape(-1)[::2],
    "expanded": lambda x: x[:1].expand(D), "no dimension": lambda x: x.sum(),
    "read as imaginary": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag, "number": lambda x: 0.75,
}  # fmt: skip


def vectors(device: str, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    mu, sigma = torch.linspace(-2, 3, D), torch.linspace(0.5, 2, D)
    return mu.to(device, dtype).requires_grad_(), sigma.to(device, dtype).requires_grad_()


def noise(device: str, dtype: torch.dtype = torch.float64, n: int = N, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return sample(torch.zeros(D, dtype=dtype, device=device), 1.0, n, seed=3, **options)


# PyTorch compiles its forward-mode rules with its own deprecated functions.
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@forward_mode
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_of_every_order_and_mode_are_finite_differences(torch_device: str, options: dict[str, Any]) -> None:
    def draw(mu: Any, sigma: Any) -> Any:
        return sample(mu, sigma, N, seed=3, **options)

    inputs = vectors(torch_device)
    modes = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(draw, inputs, **modes)
    assert torch.autograd.gradgradcheck(draw, inputs, check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_reach_every_form_of_vectors(torch_device: str, form: str) -> None:
    inputs = vectors(torch_device)
    for other in FORMS:
        if {form, other} <= {"number", "no dimension"}:  # mu or sigma must be a vector.
            continue

        def draw(mu: Any, sigma: Any, other: str = other) -> Any:
            return sample(FORMS[form](mu), FORMS[other](sigma), N, seed=3)

        assert torch.autograd.gradcheck(draw, inputs)
        x = draw(*inputs)
        assert x.requires_grad
        assert torch.equal(x.detach(), draw(*map(torch.detach, inputs)))


DTYPES = {"float16": 4e-3, "bfloat16": 4e-2, "float32": 3e-6, "float64": 1e-14}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("input_dtype", DTYPES)
def test_gradients_have_the_dtypes_of_the_inputs(torch_device: str, input_dtype: str, options: dict[str, Any]) -> None:
    over_samples, z = int(options.get("layout") != "nd"), noise(torch_device, **options)
    for result in (None, *DTYPES):
        mu, _ = vectors(torch_device, getattr(torch, input_dtype))
        _, sigma = vectors(torch_device, torch.float32)
        x = sample(mu, sigma, N, seed=3, dtype=result, **options)
        grad = torch.randn(x.shape, dtype=torch.float64, device=torch_device).to(x.dtype)
        x.backward(grad)
        assert mu.grad is not None and sigma.grad is not None
        assert mu.grad.dtype is mu.dtype and sigma.grad.dtype is sigma.dtype
        for got, terms in ((mu.grad, grad.double()), (sigma.grad, grad.double() * z)):
            # The rounding to the gradient's type, and the roundings of float32 normals and sums.
            tolerance = DTYPES[str(got.dtype).removeprefix("torch.")]
            tolerance = max(tolerance, DTYPES["float32" if x.dtype is not torch.float64 else "float64"])
            error = (got.double() - terms.sum(over_samples)).abs()
            assert (error <= 2 * tolerance * terms.abs().sum(over_samples)).all()


@pytest.mark.parametrize("fast_math", [False, True])
def test_the_backward_pass_uses_the_noise_of_the_forward_pass(torch_device: str, fast_math: bool) -> None:
    mu, sigma = vectors(torch_device, torch.float32)
    torch.manual_seed(1)
    x = sample(mu, sigma, 1000, fast_math=fast_math)
    torch.manual_seed(1)
    z = sample(torch.zeros(D, device=torch_device), torch.ones(D, device=torch_device), 1000, fast_math=fast_math)
    sample(mu, sigma, 1000).detach()  # A draw before the backward pass changes nothing.
    (grad,) = torch.autograd.grad(x.sum(), sigma)
    assert torch.allclose(grad, z.sum(1), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("d", "n"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("layout", ["dn", "nd"])
def test_gradients_of_empty_samples_are_zero(torch_device: str, d: int, n: int, layout: Any) -> None:
    mu, sigma = (torch.ones(d, device=torch_device, requires_grad=True) for _ in range(2))
    x = sample(mu, sigma, n, seed=1, layout=layout)
    assert x.shape == ((n, d) if layout == "nd" else (d, n))
    x.sum().backward()
    for y in (mu, sigma):
        assert y.grad is not None
        assert torch.equal(y.grad, torch.zeros(d, device=torch_device))


def test_no_noise_is_stored_for_the_backward_pass(torch_device: str) -> None:
    kept: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.numel())
        return x

    mu, sigma = vectors(torch_device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        x = sample(mu, sigma, N, seed=3)
        torch.autograd.grad(x.sum(), (mu, sigma), create_graph=True)
    assert sum(kept) == 0


def test_peak_memory_is_the_sample_and_its_gradient(torch_device: str) -> None:
    if torch_device == "cpu":
        pytest.skip("PyTorch does not count host memory")
    d, n = 512, 8192
    mu, sigma = (torch.ones(d, device="cuda", requires_grad=True) for _ in range(2))
    sample(mu, sigma, 8, seed=1).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = sample(mu, sigma, n, seed=1)
    x.backward(torch.ones_like(x))
    assert torch.cuda.max_memory_allocated() - before <= 2 * 4 * d * n + 2**20


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_recording_gradients_does_not_change_the_numbers(torch_device: str, options: dict[str, Any]) -> None:
    mu, sigma = vectors(torch_device, torch.float32)

    def sources() -> list[dict[str, Any]]:
        of_torch = torch.Generator(torch_device).manual_seed(5)
        return [{"seed": 2**64 - 1}, {}, {"generator": of_torch}, {"generator": Generator(5)}]

    for recorded, plain in zip(sources(), sources(), strict=True):
        torch.manual_seed(4)
        got = [sample(mu, sigma, N, **recorded, **options) for _ in range(2)]
        torch.manual_seed(4)
        expected = [sample(mu.detach(), sigma.detach(), N, **plain, **options) for _ in range(2)]
        assert all(x.requires_grad for x in got)
        assert all(map(torch.equal, got, expected))


def test_the_backward_pass_uses_the_graph_safe_offset_of_the_forward_pass(torch_device: str) -> None:
    if torch_device == "cpu":
        pytest.skip("graph-safe generators need CUDA")
    mu, sigma = vectors(torch_device)
    on_device, plain = Generator(7, graph_safe=True), Generator(7)
    for _ in range(2):
        x, expected = (sample(mu, sigma, N, generator=generator) for generator in (on_device, plain))
        assert torch.equal(x, expected)
        got, want = (torch.autograd.grad(y.square().sum(), (mu, sigma)) for y in (x, expected))
        assert all(map(torch.equal, got, want))
    assert on_device.offset == 2


@pytest.mark.parametrize(("name", "value", "message"), [
    *((name, None, "requires grad, and out= takes no gradient; detach it") for name in ("mu", "sigma", "out")),
    ("mu", float("nan"), r"expected finite means, got mu\[1\] = nan"),
    ("sigma", -1.0, r"expected finite standard deviations of at least 0, got sigma\[1\] = -1"),
])  # fmt: skip
def test_wrong_calls_with_gradients_raise(torch_device: str, name: str, value: float | None, message: str) -> None:
    call = {"mu": torch.zeros(D, device=torch_device), "sigma": torch.ones(D, device=torch_device)}
    out, generator = torch.full((D, N), 7.0, device=torch_device), Generator(1)
    if value is None:
        call["out"] = out
    else:
        call[name][1] = value
    call[name].requires_grad_()
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        sample(n=N, generator=generator, validate=True, **call)
    assert generator.offset == 0
    assert bool((out == 7).all())


@pytest.fixture
def operators(torch_device: str) -> Any:
    multisample.torch.load_operators()
    return torch.ops.multisample


EVERY = {"seed": 5, "shared": True, "antithetic": True, "fast_math": True, "dim_offset": 2, "sample_offset": 3}
NOISES: dict[str, dict[str, Any]] = {"plain": {"seed": -1, "offset": 3}, "all": EVERY}


@pytest.mark.slow
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("options", NOISES.values(), ids=NOISES)
def test_the_operators_pass_opcheck(operators: Any, torch_device: str, options: dict[str, Any], counted: bool) -> None:
    counter = torch.tensor([11], device=torch_device) if counted else None
    for dtype in (torch.float32, torch.bfloat16):
        for requires_grad, transposed in ((False, False), (True, False), (True, True)):
            turned = {**options, "transposed": transposed}
            mu, sigma = (x.detach().requires_grad_(requires_grad) for x in vectors(torch_device, dtype))
            torch.library.opcheck(operators.sample, (mu, sigma, N, counter), turned)
            grad = torch.ones((D, N), dtype=dtype, device=torch_device, requires_grad=requires_grad)
            torch.library.opcheck(operators.sample_backward, (grad, counter), turned)
        mu, sigma = (x.detach() for x in vectors(torch_device, dtype))
        out = torch.empty((N, D), dtype=dtype, device=torch_device)
        torch.library.opcheck(operators.sample_, (out.T, mu, sigma, counter), options)
    torch.library.opcheck(operators.sample, (mu.long(), sigma, N, counter), {**options, "dtype": torch.float16})


def test_the_in_place_operator_raises_for_gradients(operators: Any, torch_device: str) -> None:
    out, mu, sigma = (torch.zeros(shape, device=torch_device) for shape in ((D, N), (D,), (D,)))
    for x in (out, mu, sigma):
        x.requires_grad_()
        with pytest.raises(RuntimeError, match="multisample::sample_: expected tensors that do not require grad"):
            operators.sample_(out, mu, sigma, seed=1)
        with torch.no_grad():
            operators.sample_(out, mu, sigma, seed=1)
        x.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"noise": "shared"}, {"antithetic": True, "sample_offset": 7}])
def test_one_sample_has_the_bits_and_the_gradients_of_others(dtype: Any, options: Any, torch_device: str) -> None:
    """The forward pass keeps the noise. On CUDA, the backward pass of some calls is another sample instead."""
    d = 2001 if torch_device == "cpu" else 70_001
    ones = torch.ones(d, dtype=dtype, device=torch_device)
    strided = torch.stack([ones, ones], 1)[:, 1]
    wide = torch.linspace(-3, 3, 2 * d, dtype=dtype, device=torch_device).reshape(d, 2)
    z = multisample.sample(0 * ones, 1.0, 1, seed=7, **options)
    for mu, sigma in ((2 * ones, ones / 3), (strided, ones / 3), (ones[:1].expand(d), ones), (0.5, ones)):
        leaf = sigma.clone().requires_grad_()
        x = multisample.sample(mu, leaf, 1, seed=7, **options)
        assert torch.equal(x, multisample.sample(mu, sigma, 1, seed=7, **options))
        for grad in (wide[:, :1].contiguous(), wide[:, 1:], wide[:1, :1].expand(d, 1)):
            (found,) = torch.autograd.grad(x, leaf, grad, retain_graph=True)
            assert torch.equal(found, (grad * z)[:, 0])
    leaves = [x.clone().requires_grad_() for x in (ones, ones)]
    for narrow in (dtype, torch.bfloat16):
        real = torch.promote_types(narrow, torch.float32)
        z = multisample.sample(0 * ones, 1.0, 1, seed=7, dtype=str(real)[6:], **options)
        grad = wide[:, :1].to(narrow)
        x = multisample.sample(*leaves, 1, seed=7, dtype=str(narrow)[6:], **options)
        given = {"shared": "noise" in options, "antithetic": "antithetic" in options}
        window = {"sample_offset": options.get("sample_offset", 0)}
        y = torch.ops.multisample.sample(*leaves, 1, seed=7, dtype=narrow, **given, **window)
        for drawn in (x, y):
            of_mu, of_sigma = torch.autograd.grad(drawn, leaves, grad)
            assert torch.equal(of_mu, grad[:, 0].to(dtype))
            assert torch.equal(of_sigma, (grad.to(real) * z)[:, 0].to(dtype))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_gradient_of_mu_alone_draws_no_noise(torch_device: str, options: dict[str, Any], monkeypatch: Any) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("noise is drawn")

    real = torch.float32
    mu, sigma = (x.detach() for x in vectors(torch_device, real))
    grad = torch.randn((N, D) if options.get("layout") == "nd" else (D, N), device=torch_device)
    expected = grad.sum(grad.shape.index(N))
    for column in (False, True):
        leaf = (mu[:, None] if column else mu).clone().requires_grad_()
        x = sample(leaf, sigma, N, seed=3, **options)
        with monkeypatch.context() as patched:
            patched.setattr(torch_autograd, "_gradients", refuse)
            patched.setattr(torch_autograd, "_by_operator", refuse)
            patched.setattr(_plan.Plan, "run", refuse)
            for is_recorded in (False, True):
                (found,) = torch.autograd.grad(x, leaf, grad, create_graph=is_recorded)
                assert found.shape == leaf.shape and torch.allclose(found.reshape(-1), expected, atol=1e-5)
    leaf = mu.clone().requires_grad_()
    x = torch.ops.multisample.sample(leaf, sigma, N, seed=3)
    with Operators(lambda name: name.startswith("multisample.sample_backward")):
        (found,) = torch.autograd.grad(x, leaf, torch.ones_like(x))
    assert torch.equal(found, torch.full_like(mu, N))
