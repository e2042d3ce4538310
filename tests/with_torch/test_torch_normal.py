"""`multisample.torch.Normal` replaces `torch.distributions.Normal`: equal results, except for the drawn numbers."""

from __future__ import annotations

import copy
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributions

from multisample import Generator, Key, sample
from multisample.torch import Normal

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
SHAPES = [(), (1,), (5,), (2, 3), (0,), (2, 0, 3), torch.Size([4])]


@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS)
def test_samples_have_the_shape_dtype_and_device_of_pytorch_samples(torch_device: str, parameters: Any) -> None:
    loc, scale = (x.to(torch_device) if isinstance(x, torch.Tensor) else x for x in parameters)
    own, theirs = Normal(loc, scale), distributions.Normal(loc, scale)
    for shape in SHAPES:
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
            rows = sample(
                loc.reshape(-1), scale.repeat(2), math.prod(shape), layout="nd", generator=generator, **options
            )
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
