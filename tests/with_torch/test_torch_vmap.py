"""torch.func: derivatives, and `vmap`, whose `randomness` means the same as for PyTorch's own draws."""

from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import multisample.torch
from multisample import Generator, sample

B, D, N = 3, 5, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "shared": {"noise": "shared"}, "nd": {"layout": "nd"},
    "all": {"antithetic": True, "layout": "nd", "dim_offset": 1, "sample_offset": 3, "dtype": torch.float64},
}  # fmt: skip
# PyTorch compiles its forward-mode rules with its own deprecated functions.
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def batches(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    mu = torch.linspace(-2, 3, B * D, device=device).reshape(B, D)
    return mu, torch.linspace(0.5, 2, B * D, device=device).reshape(B, D)


def distinct(x: torch.Tensor) -> int:
    """The number of different elements along the first dimension."""
    return len({element.cpu().numpy().tobytes() for element in x})


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0), (1, 0), (-1, None), (1, 1)])
def test_with_a_seed_a_batch_equals_single_calls(torch_device: str, in_dims: Any, options: Any) -> None:
    rows = batches(torch_device)
    moved = [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(rows, in_dims, strict=True)]

    def draw(mu: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return sample(mu, sigma, N, seed=3, **options)

    for randomness in ("error", "same", "different"):
        for element, x in enumerate(vmap(draw, in_dims=in_dims, randomness=randomness)(*moved)):
            alone = [x[0 if dim is None else element] for x, dim in zip(rows, in_dims, strict=True)]
            assert torch.equal(x, draw(*alone))


def test_every_form_of_vectors_can_be_batched(torch_device: str) -> None:
    mu, sigma = batches(torch_device)
    for draw, batch in (
        (lambda x: sample(x, 0.5, N, seed=3), mu),
        (lambda x: sample(0, x, N, seed=3), sigma),
        (lambda x: sample(x[:, None], 0.5, N, seed=3), mu),
        (lambda x: sample(mu[0], x, N, seed=3), sigma[:, 0]),
        (lambda x: sample(x.double(), sigma[0], N, seed=3), mu),
        (lambda x: sample(x.double(), 1e300, N, seed=3), mu),
    ):
        assert torch.equal(vmap(draw)(batch), torch.stack([draw(x) for x in batch]))


@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"noise": "shared", "layout": "nd"}], ids=str)
def test_a_batch_may_be_empty(torch_device: str, options: dict[str, Any]) -> None:
    mu, sigma = (x[:0] for x in batches(torch_device))

    def value(mu: torch.Tensor, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = sample(mu, sigma, N, **options)
        return x.sum(), x

    slope, x = vmap(grad(value, has_aux=True), randomness="different")(mu, sigma)
    assert slope.shape == (0, D)
    assert x.shape == ((0, N, D) if "layout" in options else (0, D, N))


def test_out_may_be_a_batch(torch_device: str) -> None:
    mu, sigma = batches(torch_device)
    for layout, shape in (("dn", (B, D, N)), ("nd", (B, N, D))):
        out = torch.zeros(shape, device=torch_device)
        vmap(lambda mu, out, layout=layout: sample(mu, sigma[0], N, seed=3, out=out, layout=layout))(mu, out)
        assert torch.equal(out, torch.stack([sample(x, sigma[0], N, seed=3, layout=layout) for x in mu]))
    with pytest.raises(RuntimeError, match="expected an out for each element of the batch"):
        vmap(lambda mu: sample(mu, sigma[0], N, seed=3, out=out[0].T))(mu)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("source", ["default", "generator"])
def test_randomness_means_the_same_as_for_randn(torch_device: str, source: str, batched: bool) -> None:
    _, sigma = batches(torch_device)
    mu = torch.zeros(B, D, device=torch_device)

    def options() -> dict[str, Any]:
        if source == "default":
            torch.manual_seed(3)
            return {}
        return {"generator": torch.Generator(torch_device).manual_seed(3)}

    def draw(randomness: str, own: bool) -> torch.Tensor:
        source = options()

        def function(mu: torch.Tensor) -> torch.Tensor:
            if own:
                return sample(mu if batched else torch.zeros_like(sigma[0]), sigma[0], N, **source) + 0 * mu[:, None]
            return torch.randn((D, N), device=torch_device, **source) + 0 * mu[:, None]

        return vmap(function, randomness=randomness)(mu)

    errors = []
    for own in (True, False):
        with pytest.raises(RuntimeError) as caught:
            draw("error", own)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert "randomness" in errors[0]
    for randomness, kinds in (("same", 1), ("different", B)):
        assert distinct(draw(randomness, own=False)) == kinds
        got = draw(randomness, own=True)
        assert distinct(got) == kinds
        assert torch.equal(got, draw(randomness, own=True))
        assert got.isfinite().all()


@pytest.mark.parametrize("outer", ["same", "different"])
@pytest.mark.parametrize("inner", ["same", "different"])
def test_nested_batches_have_independent_randomness_settings(torch_device: str, outer: str, inner: str) -> None:
    mu = torch.zeros(B, 2, D, device=torch_device)
    draw = vmap(vmap(lambda mu: sample(mu, 1.0, N), randomness=inner), randomness=outer)(mu)
    assert draw.shape == (B, 2, D, N)
    assert distinct(draw) == (B if outer == "different" else 1)
    assert distinct(draw[0]) == (2 if inner == "different" else 1)
    assert distinct(draw.flatten(0, 1)) == (B if outer == "different" else 1) * (2 if inner == "different" else 1)


def test_a_batched_call_has_the_documented_seed_and_an_offset_from_pytorch(torch_device: str) -> None:
    mu, sigma = batches(torch_device)
    torch.manual_seed(3)
    got = vmap(lambda mu: sample(mu, sigma[0], N), randomness="same")(mu)
    torch.manual_seed(3)
    offset = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=torch_device).item() % 2**64
    for x, alone in zip(got, mu, strict=True):
        generator = Generator(0x636F6D70696C6564)
        generator.state = {**generator.state, "offset": int(offset)}
        assert torch.equal(x, sample(alone, sigma[0], N, generator=generator))


def test_a_batched_call_with_a_host_side_generator_raises(torch_device: str) -> None:
    mu, sigma = batches(torch_device)
    generator = Generator(3)
    with pytest.raises(ValueError, match=r"^generator: expected a torch.Generator where PyTorch transforms the call"):
        vmap(lambda mu: sample(mu, sigma[0], N, generator=generator), randomness="different")(mu)
    assert generator.offset == 0
    # Without a batch, the generator is accepted and advances.
    value = grad(lambda mu: sample(mu, sigma[0], N, generator=generator).sum())(mu[0])
    assert torch.equal(value, torch.full_like(value, N))
    assert generator.offset == 1


@pytest.mark.parametrize(("call", "error", "message"), [
    ({"sigma": torch.ones(D - 1)}, ValueError, r"^sigma: expected as many elements as mu, 5, got 4"),
    ({"sigma": torch.ones(D, device="meta")}, ValueError, r"^sigma: expected it on the device of mu"),
    ({"sigma": torch.ones(D, dtype=torch.complex64)}, TypeError, r"^sigma: expected elements of type"),
    ({"sigma": torch.ones(D).to_sparse()}, TypeError, r"^sigma: expected a strided tensor"),
    ({"sigma": -0.5}, ValueError, r"^sigma: expected finite standard deviations of at least 0, got -0.5"),
    ({"sigma": float("nan")}, ValueError, r"^sigma: expected finite standard deviations"),
    ({"sigma": 1e39}, ValueError, r"^sigma: expected finite standard deviations"),
    ({"dim_offset": 2**32 - 2}, ValueError, r"^dim_offset: expected dim_offset \+ d <= 2\*\*32"),
    ({"validate": True}, ValueError, r"^validate: expected False"),
    ({"backend": "cpu"}, ValueError, r"^backend: expected torch_ext where PyTorch transforms the call"),
    ({"out": torch.ones(D, N + 1)}, ValueError, r"^out: expected shape \(5, 4\), got \(5, 5\)"),
    ({"out": torch.ones(D, N, dtype=torch.float64)}, ValueError, r"^out: expected dtype float32, got float64"),
    ({"out": torch.ones(D, N, requires_grad=True)}, ValueError, r"^out: requires grad"),
])  # fmt: skip
def test_transformed_calls_raise_the_eager_errors(call: dict[str, Any], error: type[Exception], message: str) -> None:
    multisample.torch.load_operators()
    call = {"sigma": 1.0, "n": N, **call}
    if call.keys() & {"backend", "validate"}:
        sample(torch.zeros(D), **call)  # A plan of the eager call is not used.
    state = torch.get_rng_state()
    with pytest.raises(error, match=message):
        vmap(lambda mu: sample(mu, **call), randomness="different")(torch.zeros(B, D))
    assert torch.equal(torch.get_rng_state(), state)


@forward_mode
@pytest.mark.parametrize("options", [{}, {"layout": "nd"}, {"noise": "shared"}], ids=str)
def test_derivatives_up_to_third_order_are_exact(torch_device: str, options: dict[str, Any]) -> None:
    sigma = torch.linspace(0.5, 2, D, dtype=torch.float64, device=torch_device)
    z = sample(torch.zeros_like(sigma), 1.0, N, seed=3, **options)
    over_samples = 0 if options.get("layout") == "nd" else 1

    def cubes(sigma: torch.Tensor) -> torch.Tensor:
        return sample(0.0, sigma, N, seed=3, **options).pow(3).sum()

    third = z.pow(3).sum(over_samples)
    first, second = 3 * sigma**2 * third, torch.diag(6 * sigma * third)
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(grad(cubes)(sigma), first, **close)
    torch.testing.assert_close(vjp(cubes, sigma)[1](torch.ones_like(first[0]))[0], first, **close)
    torch.testing.assert_close(jvp(cubes, (sigma,), (torch.ones_like(sigma),))[1], first.sum(), **close)
    for jacobian in (jacrev, jacfwd):
        torch.testing.assert_close(jacobian(cubes)(sigma), first, **close)
        for outer in (jacrev, jacfwd):
            torch.testing.assert_close(outer(jacobian(cubes))(sigma), second, **close)
    torch.testing.assert_close(hessian(cubes)(sigma), second, **close)
    # The third derivative is 6 z^3 if all three indices are equal.
    torch.testing.assert_close(grad(lambda s: hessian(cubes)(s).sum())(sigma), 6 * third, **close)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_gradients_of_batch_elements_use_the_noise_of_the_element(torch_device: str, randomness: str) -> None:
    mu, sigma = (x.double() for x in batches(torch_device))

    def value(mu: torch.Tensor, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = sample(mu, sigma, N)
        return x.square().sum(), x

    (got_mu, got_sigma), x = vmap(grad(value, argnums=(0, 1), has_aux=True), randomness=randomness)(mu, sigma)
    z = (x - mu[..., None]) / sigma[..., None]
    assert distinct(z.float().cpu().round(decimals=3)) == (1 if randomness == "same" else B)
    torch.testing.assert_close(got_mu, 2 * x.sum(-1))
    torch.testing.assert_close(got_sigma, (2 * x * z).sum(-1))
    # The gradient of the whole batch.
    mu.requires_grad_()
    total = vmap(lambda mu, sigma: value(mu, sigma)[0], randomness=randomness)(mu, sigma).sum()
    assert torch.autograd.grad(total, mu)[0].shape == mu.shape


def test_grad_without_vmap_draws_the_eager_numbers(torch_device: str) -> None:
    mu, sigma = (x[0] for x in batches(torch_device))
    torch.manual_seed(3)
    expected = sample(mu, sigma, N)
    torch.manual_seed(3)
    _, got = grad(lambda mu: (lambda x: (x.sum(), x))(sample(mu, sigma, N)), has_aux=True)(mu)
    assert torch.equal(got, expected)
