"""`multisample.torch.Normal` and `randn` replace those of PyTorch: equal results, except for the drawn numbers."""

import copy
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from operator_mode import Operators
from torch import distributions

import multisample
from multisample import Generator, Key, sample
from multisample.torch import Normal, randn, randn_like

PARAMETERS: dict[str, tuple[Any, Any]] = {
    "numbers": (0.5, 2),
    "no dimension": (torch.tensor(0.5), 2.0),
    "vector": (torch.linspace(-1, 1, 3), 0.5),
    "broadcast": (torch.linspace(-1, 1, 3), torch.linspace(0.5, 2, 2)[:, None]),
    "strided": (torch.linspace(-1, 1, 12).reshape(3, 4).T, torch.ones(4, 1)),
    "expanded": (torch.tensor(0.5).expand(2, 3), torch.tensor([0.5]).expand(3)),
    "float64": (torch.zeros(2, 1, 3, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64)),
    "float16": (torch.zeros(3, dtype=torch.float16), torch.ones(3, dtype=torch.float16)),
    "mixed": (torch.zeros(3, dtype=torch.float64), torch.ones(3)),
    "empty": (torch.zeros(2, 0), 1.0),
}


@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS)
def test_samples_have_the_shape_dtype_and_device_of_pytorch_samples(torch_device: str, parameters: Any) -> None:
    loc, scale = (x.to(torch_device) if isinstance(x, torch.Tensor) else x for x in parameters)
    own, theirs = Normal(loc, scale), distributions.Normal(loc, scale)
    for shape in [(), (1,), (5,), (2, 3), (0,), (2, 0, 3), torch.Size([4])]:
        for method in ("sample", "rsample"):
            x, expected = getattr(own, method)(shape), getattr(theirs, method)(shape)
            assert (x.shape, x.dtype, x.device) == (expected.shape, expected.dtype, expected.device)
            assert x.is_contiguous()
            assert not x.requires_grad


@pytest.mark.parametrize("validate_args", [None, True, False])
def test_arguments_are_validated_as_by_pytorch(validate_args: bool | None) -> None:
    for bad in ((0.0, -1.0), (float("nan"), 1.0)):
        outcomes = []
        for kind in (Normal, distributions.Normal):
            try:
                outcomes.append(str(kind(*bad, validate_args=validate_args)))
            except ValueError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
    loc, scale = torch.zeros(2, requires_grad=True), torch.ones(2)
    q, of_cpu = (Normal(loc, scale, validate_args=validate_args, backend=backend) for backend in ("auto", "cpu"))
    scale[1], z = -1.0, sample(torch.zeros(2), 1.0, 3, seed=7, layout="nd")
    for draw in (q.sample, q.rsample, q.expand((2,)).sample, of_cpu.sample):
        if validate_args is False:
            assert torch.equal(draw((3,), seed=7), z * torch.tensor([1.0, -1.0]))
        else:
            with pytest.raises(ValueError, match=r"^sigma: expected finite standard deviations of at least 0"):
                draw((3,), seed=7)
    if validate_args is False:
        draw = torch.compile(q.rsample, backend="eager", fullgraph=True)
        assert torch.equal(draw((3,), seed=7), q.rsample((3,), seed=7))
    with pytest.raises(TypeError, match=r"^fast_math: expected True or False"):
        Normal(torch.zeros(2), 1.0, fast_math=1).rsample()  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"antithetic": True}, {"fast_math": True}], ids=str)
def test_samples_are_rows_of_one_matrix(torch_device: str, options: dict[str, Any]) -> None:
    loc = torch.linspace(-1, 1, 6, device=torch_device).reshape(2, 3)
    scale = torch.linspace(0.5, 2, 3, device=torch_device)
    q = Normal(loc, scale, generator=Generator(5), **options)
    generator = Generator(5)
    for shape in ((4, 5), (), (7,)):
        rows = sample(loc.reshape(-1), scale.repeat(2), math.prod(shape), layout="nd", generator=generator, **options)
        for x in (q.rsample(shape), q.expand((2, 3)).sample(shape)):
            assert torch.equal(x.reshape(-1, 6), rows)
            n = math.prod(shape)
            rows = sample(loc.reshape(-1), scale.repeat(2), n, layout="nd", generator=generator, **options)
        generator.state = {**generator.state, "offset": generator.offset - 1}


@pytest.mark.parametrize("method", ["sample", "rsample"])
def test_a_call_can_pass_its_seed_or_generator(torch_device: str, method: str) -> None:
    loc, scale = torch.zeros(3, device=torch_device), torch.ones(3, device=torch_device)
    own = Generator(5)
    draw = getattr(Normal(loc, scale, generator=own), method)
    for seed in (7, Key(7, 2)):
        assert torch.equal(draw((4,), seed=seed), sample(loc, scale, 4, seed=seed, layout="nd"))
    for make in (lambda: Generator(3), lambda: torch.Generator(torch_device).manual_seed(3)):
        assert torch.equal(draw((4,), generator=make()), sample(loc, scale, 4, generator=make(), layout="nd"))
    with pytest.raises(TypeError, match="seed, generator: expected one of the two, got both"):
        draw((4,), seed=7, generator=Generator(3))
    with pytest.raises(TypeError, match="seed"):
        draw((4,), seed="7")
    assert own.offset == 0
    assert torch.equal(draw((4,)), sample(loc, scale, 4, generator=Generator(5), layout="nd"))


def test_gradients_follow_the_reparameterisation(torch_device: str) -> None:
    loc = torch.zeros(2, 1, device=torch_device, requires_grad=True)
    scale = torch.ones(3, device=torch_device, requires_grad=True)
    q = Normal(loc, scale)
    x = q.rsample((5,))
    grad = torch.randn_like(x)
    got = torch.autograd.grad(x, (loc, scale), grad, retain_graph=True)
    z = x.detach()
    torch.testing.assert_close(got[0], grad.sum((0, 2))[:, None])
    torch.testing.assert_close(got[1], (grad * z).sum((0, 1)))
    assert not q.sample((5,)).requires_grad
    if torch_device == "cpu":
        assert Normal(loc, scale, backend="cpu").sample().shape == (2, 3)
        with pytest.raises(ValueError, match="requires grad, and backend 'cpu' records no gradient"):
            Normal(loc, scale, backend="cpu").rsample()


@pytest.mark.slow
def test_without_a_compiler_the_error_names_the_compiler(tmp_path: Path) -> None:
    program = """
import torch
from multisample.torch import Normal
loc = torch.zeros(3, requires_grad=True)
try:
    Normal(loc, torch.ones(3)).rsample()
except ValueError as error:
    print(error)
"""
    environment = {**os.environ, "PATH": str(tmp_path), "MULTISAMPLE_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("CXX", None)
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("mu: requires grad, and backend 'cpu' records no gradient, and torch_ext, which does,")
    assert "no C++ compiler" in run.stdout
    assert "install g++" in run.stdout
    assert "detach" not in run.stdout


def composed(kind: Any, loc: Any) -> Iterator[Any]:
    normal = kind(loc, torch.full_like(loc, 0.5))
    yield normal.expand((2, *loc.shape))
    yield normal.expand((2, *loc.shape)).expand((4, 2, *loc.shape))
    yield distributions.Independent(normal, 1)
    yield distributions.Independent(normal, 1).expand((4,))
    yield distributions.TransformedDistribution(normal, [distributions.TanhTransform()])
    yield distributions.TransformedDistribution(distributions.Independent(normal, 1), [distributions.ExpTransform()])
    yield distributions.MixtureSameFamily(distributions.Categorical(torch.ones_like(loc)), normal)


def test_other_distributions_accept_normal_as_base(torch_device: str) -> None:
    loc = torch.linspace(-1, 1, 3, device=torch_device)
    for own, theirs in zip(composed(Normal, loc), composed(distributions.Normal, loc), strict=True):
        assert (own.batch_shape, own.event_shape) == (theirs.batch_shape, theirs.event_shape)
        x = own.sample((2, 5))
        assert x.shape == theirs.sample((2, 5)).shape
        assert torch.equal(own.log_prob(x), theirs.log_prob(x))
    assert type(next(composed(Normal, loc))) is Normal


def test_normal_can_be_copied_pickled_and_subclassed(torch_device: str) -> None:
    q = Normal(torch.zeros(3, device=torch_device), 1.0, generator=Generator(5))
    copies = [copy.deepcopy(q), pickle.loads(pickle.dumps(q))]
    expected = q.sample()
    assert all(torch.equal(other.sample(), expected) for other in copies)

    class Unit(Normal):
        def __init__(self, loc: Any) -> None:
            super().__init__(loc, 1.0)

    assert Unit(torch.zeros(3)).rsample((2,)).shape == (2, 3)
    with pytest.raises(NotImplementedError, match=r"custom .expand"):
        Unit(torch.zeros(3)).expand((2, 3))


SIZE = (3, 4, 5)


def test_randn_has_the_arguments_of_pytorch_and_the_numbers_of_row_0(torch_device: str) -> None:
    torch.manual_seed(3)
    for dtype in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        expected = torch.randn(SIZE, dtype=dtype, device=torch_device)
        zero = torch.zeros(1, dtype=expected.dtype, device=torch_device)
        row = sample(zero, 1.0, 60, seed=Key(7, 2), sample_offset=5)
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
        ((2, 3), {"out": torch.zeros(2, 3), "device": "meta"}, ValueError, "^device: expected that of out"),
    ]
    state = torch.get_rng_state()
    for size, options, error, message in arguments:
        for _ in range(2):
            with pytest.raises(error, match=message):
                randn(*size, **options)
    with pytest.raises(TypeError, match=r"^x: expected a PyTorch tensor"):
        randn_like(3)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)


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
