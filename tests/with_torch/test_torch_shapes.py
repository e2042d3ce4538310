"""Tensors of any shape: `randn`, vectors of seeds for `Normal`, gradients, compiled and transformed calls."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from operator_mode import Operators

import multisample
from multisample import Generator, Key, sample
from multisample.torch import Normal, randn, randn_like

SIZE = (3, 4, 5)


def test_randn_has_the_arguments_of_pytorch_and_the_numbers_of_row_0(torch_device: str) -> None:
    torch.manual_seed(3)
    for dtype in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        expected = torch.randn(SIZE, dtype=dtype, device=torch_device)
        row = sample(
            torch.zeros(1, dtype=expected.dtype, device=torch_device), 1.0, 60, seed=Key(7, 2), sample_offset=5
        )
        for size in (SIZE, (SIZE,), (torch.Size(SIZE),), (list(SIZE),)):
            x = randn(*size, dtype=dtype, device=torch_device, seed=Key(7, 2), start=5)  # type: ignore[arg-type]
            assert (x.shape, x.dtype, x.device) == (expected.shape, expected.dtype, expected.device)
            assert torch.equal(x.reshape(1, -1), row)
        for out in (torch.zeros_like(expected), torch.zeros(3, 4, 10, dtype=x.dtype, device=torch_device)[..., ::2]):
            version = out._version
            assert randn(SIZE, out=out, seed=Key(7, 2), start=5) is out
            assert torch.equal(out, x)
            assert out._version > version
        assert torch.equal(randn_like(expected, seed=Key(7, 2), start=5), x)
    assert randn(seed=7).shape == randn((), seed=7).shape == ()
    assert randn(0, 3, seed=7).shape == (0, 3)


def test_randn_obeys_the_defaults_of_pytorch() -> None:
    torch.manual_seed(3)
    x = randn(SIZE)
    torch.manual_seed(3)
    assert torch.equal(x.reshape(1, -1), sample(torch.zeros(1), 1.0, 60))
    assert torch.equal(randn(2, generator=torch.Generator().manual_seed(3)), x.reshape(-1)[:2])
    torch.set_default_dtype(torch.float64)
    try:
        assert randn(2, seed=7).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        y = randn(SIZE, seed=7)
    assert torch.equal(y, randn(SIZE, seed=7))


@pytest.mark.parametrize("form", [list, tuple, torch.tensor, np.array])
def test_element_b_of_randn_has_seed_b(torch_device: str, form: Any) -> None:
    seeds = form([7, 8])
    seeds = seeds.to(torch_device) if isinstance(seeds, torch.Tensor) else seeds
    for _ in range(2):
        x = randn(2, *SIZE, seed=seeds, device=torch_device)
        for part, seed in zip(x, (7, 8), strict=True):
            assert torch.equal(part, randn(SIZE, seed=seed, device=torch_device))
        assert torch.equal(randn_like(x, seed=seeds), x)
    with pytest.raises(ValueError, match=r"^size: expected the first length to be the number of seeds, 2, got \(3,"):
        randn(SIZE, seed=seeds, device=torch_device)


def test_a_list_of_generators_gives_one_key_each(torch_device: str) -> None:
    def generators() -> list[Any]:
        return [torch.Generator().manual_seed(3), Generator(8), torch.Generator(torch_device).manual_seed(4)]

    expected = [
        randn(SIZE, generator=g, device=torch_device) if isinstance(g, Generator) or g.device.type == torch_device
        else randn(SIZE, seed=multisample.torch.take_key(g), device=torch_device)
        for g in generators()
    ]  # fmt: skip
    used = generators()
    assert torch.equal(randn(3, *SIZE, generator=used, device=torch_device), torch.stack(expected))
    q = Normal(torch.zeros(3, 4, 5, device=torch_device), 1.0)
    assert torch.equal(q.sample(generator=generators()), Normal(q.loc, 1.0, generator=generators()).sample())
    states = [used[0].get_state(), used[1].offset, used[2].get_state()]
    with pytest.raises(ValueError, match=r"^generator: .* got 3 generators with sample_shape \(2,\)"):
        q.sample((2,), generator=used)
    for wrong in ({"out": torch.zeros(3, 2, device=torch_device)}, {"start": -1}):
        with pytest.raises(ValueError, match=r"^(out|start):"):
            randn(3, *SIZE, generator=used, device=torch_device, **wrong)
    with pytest.raises(ValueError, match=r"^sigma: expected finite"):
        sample(torch.zeros(3, 4), -1.0, 5, generator=[torch.Generator(), *used[:2]])
    assert torch.equal(used[0].get_state(), states[0])
    assert torch.equal(used[2].get_state(), states[2])
    assert used[1].offset == states[1]


def test_wrong_arguments_of_randn_raise() -> None:
    arguments: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        (((2, 3), 4), {}, TypeError, r"^size\[0\]: expected an integer, got \(2, 3\)"),
        ((2, -3), {}, ValueError, r"^size\[1\]: expected 0 <="),
        ((2, 3), {"dtype": torch.int32}, TypeError, "^dtype: expected float16"),
        ((2, 3), {"out": np.zeros((2, 3))}, TypeError, "^out: expected a PyTorch tensor"),
        ((2, 3), {"out": torch.zeros(2, 3), "dtype": torch.float64}, ValueError, "^out: expected dtype float64"),
        ((2, 3), {"out": torch.zeros(2, 3), "device": "meta"}, ValueError, "^device: expected that of out"),
        ((2, 3), {"out": torch.zeros(2, 3, requires_grad=True)}, ValueError, "^out: requires grad"),
    ]
    state = torch.get_rng_state()
    for size, options, error, message in arguments:
        for _ in range(2):
            with pytest.raises(error, match=message):
                randn(*size, **options)
    with pytest.raises(TypeError, match=r"^x: expected a PyTorch tensor"):
        randn_like(3)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)


# --- Derivatives and transformations ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["dn", "nd"])
@pytest.mark.parametrize("shape", [(2, 3), (3,), (2, 1), (1, 1), ()])
def test_gradients_have_the_shapes_of_mu_and_sigma(torch_device: str, layout: Any, shape: tuple[int, ...]) -> None:
    options: dict[str, Any] = {"dtype": torch.float64, "device": torch_device}
    mu = torch.linspace(-1, 1, 6, **options).reshape(2, 3).requires_grad_()
    sigma = torch.linspace(1, 2, math.prod(shape), **options).reshape(shape).requires_grad_()

    def draw(mu: Any, sigma: Any, columns: Any = (2, 2), seed: Any = 7) -> Any:
        return sample(mu, sigma, columns, seed=seed, layout=layout)

    assert torch.autograd.gradcheck(draw, (mu, sigma))
    assert torch.autograd.gradcheck(lambda mu: draw(torch.stack([mu, mu]), 1.0, 3, [7, 8]), mu)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_compiled_and_batched_calls_have_the_numbers_of_eager_ones(torch_device: str) -> None:
    mu, sigma = torch.zeros(2, 3, device=torch_device), torch.ones(3, device=torch_device)

    def draw(mu: Any, seed: Any = 7) -> Any:
        x = sample(mu, sigma, (4, 2), seed=seed, layout="nd")
        return x, randn(*mu.shape, 4, seed=7, device=mu.device), randn_like(mu, seed=[7, 8])

    for drawn in (torch.compile(draw, backend="eager", fullgraph=True)(mu), draw(mu)):
        x, z, batch = drawn
        assert torch.equal(x, sample(mu, sigma, (4, 2), seed=7, layout="nd"))
        assert torch.equal(z, randn(2, 3, 4, seed=7, device=torch_device))
        assert torch.equal(batch[1], randn(3, seed=8, device=torch_device))
    several = torch.stack([mu, mu + 1])
    for part, own in zip(torch.vmap(lambda m: sample(m, sigma, (4, 2), seed=7))(several), several, strict=True):
        assert torch.equal(part, sample(own, sigma, (4, 2), seed=7))
    seeds = torch.tensor([7, 8], device=torch_device)
    noise = torch.vmap(lambda seed: randn(SIZE, seed=seed, device=torch_device))(seeds)
    assert torch.equal(noise, randn(2, *SIZE, seed=[7, 8], device=torch_device))
    new = torch.compile(lambda x: randn_like(x), backend="eager", fullgraph=True)
    assert not torch.equal(new(mu), new(mu))
    out = torch.zeros(2, 3, 4, 2, device=torch_device)
    with Operators():
        assert sample(mu, sigma, (4, 2), seed=7, out=out) is out
        with pytest.raises(ValueError, match=r"^out: .* flatten without a copy"):
            sample(mu, sigma, 2, seed=7, out=torch.zeros(3, 2, 2, device=torch_device).transpose(0, 1))
    assert torch.equal(out, sample(mu, sigma, (4, 2), seed=7))


# --- Normal -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 3, 4, 4), (2, 0)])
def test_a_vector_of_seeds_belongs_to_the_first_axis_of_normal(torch_device: str, shape: tuple[int, ...]) -> None:
    loc = torch.linspace(-1, 1, math.prod(shape), device=torch_device).reshape(shape).requires_grad_()
    q = Normal(loc, torch.tensor(0.5, device=torch_device))
    for seeds in ([7, 8], torch.tensor([7, 8], device=torch_device)):
        x = q.rsample(seed=seeds)
        for part, mean, seed in zip(x, loc, (7, 8), strict=True):
            assert torch.equal(part, Normal(mean, 0.5).sample(seed=seed))
        (gradient,) = torch.autograd.grad(x.sum(), loc)
        assert torch.equal(gradient, torch.ones_like(loc))
    for sample_shape, wrong in (((5,), [7, 8]), ((), [7, 8, 9])):
        with pytest.raises(ValueError, match=r"^seed: expected one seed, or with sample_shape \(\) one for each"):
            q.sample(sample_shape, seed=wrong)
