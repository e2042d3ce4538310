"""``torch.ops.multisample``: draws and gradients of the operators, on the CPU and on a CUDA device."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from forks import forked, in_forks
from processes import run_python
from skip_rules import require
from tables import DTYPES, slow_but

import multisample
from multisample.backends import registry

Array = np.ndarray[Any, Any]

# Tolerances relative to the sum of magnitudes: 16 roundings to float32, and in float64 the roundings of a long sum.
BOUND = {"float32": 16 * 2.0**-24, "float64": 256 * 2.0**-53}


@pytest.fixture
def device(torch_device: str) -> Any:
    """A device, with the operators loaded."""
    registry.find("torch_ext").prepare("cuda" if torch_device == "cuda" else "cpu")
    return torch.device(torch_device)


@pytest.fixture(scope="module")
def operators() -> Any:
    return torch.ops.multisample


def load_on_cuda() -> None:
    """For a test on CUDA only."""
    require("torch_ext")
    registry.find("torch_ext").prepare("cuda")


def vectors(d: int) -> tuple[Any, Any]:
    return torch.linspace(-3, 3, d, dtype=torch.float64), torch.linspace(0, 2, d, dtype=torch.float64)


def expected(mu: Array, sigma: Array, n: int, seed: int, offset: int = 0, **options: Any) -> Array:
    generator = multisample.Generator(seed)
    generator.state = {**generator.state, "offset": offset}
    return np.asarray(multisample.sample(mu, sigma, n, backend="cpu", generator=generator, **options))


def made(d: int, n: int, dtype: str, device: Any) -> Any:
    """A gradient with elements of both signs."""
    host = torch.randn((d, n), generator=torch.Generator().manual_seed(d * 10007 + n), dtype=torch.float32)
    return host.to(device).to(getattr(torch, dtype))


def noise_for(operators: Any, grad: Any, **options: Any) -> Any:
    """The noise for a `grad` of shape (d, n), in float64, on grad's device."""
    d, n = grad.shape
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    zero = torch.zeros(d, dtype=dtype, device=grad.device)
    return operators.sample(zero, zero + 1, n, **options).double()


def assert_sums(got: tuple[Any, Any], grad: Any, z: Any) -> None:
    """Check that `got` has the gradients of mu and sigma; `grad` and `z` have shape (d, n)."""
    g = grad.double()
    real = "float64" if grad.dtype == torch.float64 else "float32"
    for name, sums, terms in (("mu", got[0], g), ("sigma", got[1], g * z)):
        assert sums.shape == (len(grad),)
        assert sums.dtype == getattr(torch, real)
        error, size = (sums.double() - terms.sum(1)).abs(), terms.abs().sum(1)
        assert bool((error <= BOUND[real] * size).all()), (name, float((error / size).max()))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sample_operator_has_the_bits_of_sample(
    operators: Any, device: Any, bits: Callable[[Any], Array], dtype: str, transposed: bool
) -> None:
    cases = [(1, 1, 0, 0, 0), (5, 700, 3, 7, 2), (300, 9, 2**63, 1, 5), (17, 64, 2**64 - 2, 0, 8)]
    # tests/stream has antithetic pairs of the other types.
    pairs = (False, True) if dtype == "float32" else (False,)
    for (d, n, offset, dim_offset, sample_offset), shared, antithetic in itertools.product(cases, (False, True), pairs):
        mu, sigma = vectors(d)
        options = {"dim_offset": dim_offset, "sample_offset": sample_offset, "antithetic": antithetic}
        noise = "shared" if shared else "independent"
        wanted = expected(mu.numpy(), sigma.numpy(), n, 2**64 - 3, offset, dtype=dtype, noise=noise, **options)
        arguments = mu.to(device), sigma.to(device)
        words = {"seed": -3, "offset": offset - 2**64 * (offset >= 2**63), "shared": shared, **options}
        got = operators.sample(*arguments, n, dtype=getattr(torch, dtype), transposed=transposed, **words)
        assert got.shape == ((n, d) if transposed else (d, n))
        assert got.is_contiguous()
        assert got.device.type == device.type
        assert np.array_equal(bits(got.T.contiguous() if transposed else got), bits(wanted)), (d, n)
        out = torch.full_like(got, torch.nan)
        in_place = operators.sample_(out.T if transposed else out, *arguments, **words)
        assert in_place is None
        assert torch.equal(out, got)


@pytest.mark.parametrize("antithetic", [False, True])
def test_the_operators_have_the_fast_math_bits_of_sample(operators: Any, device: Any, antithetic: bool) -> None:
    mu, sigma = (x.float().to(device) for x in vectors(70))
    options = {"seed": 3, "antithetic": antithetic}
    got = operators.sample(mu, sigma, 500, fast_math=True, **options)
    out = torch.empty_like(got)
    operators.sample_(out, mu, sigma, fast_math=True, **options)
    assert torch.equal(out, got)
    assert torch.equal(got, multisample.sample(mu, sigma, 500, fast_math=True, backend="torch_ext", **options))
    assert torch.equal(got, operators.sample(mu, sigma, 500, **options)) == (device.type == "cpu")


def test_the_first_draws_of_a_process_have_the_kernels_of_their_directions() -> None:
    program = """
import itertools, torch, multisample, multisample.torch
multisample.torch.load_operators()
mu, sigma = torch.linspace(-3, 3, 70), torch.linspace(0, 2, 70)
names = "fast_math", "shared", "transposed"
words = [dict(zip(names, flags)) for flags in itertools.product((True, False), repeat=3)]
drawn = [torch.ops.multisample.sample(mu, sigma, 500, seed=3, **options) for options in words]
for got, options in zip(drawn, words):
    noise, layout = "shared" if options["shared"] else "independent", "nd" if options["transposed"] else "dn"
    wanted = multisample.sample(mu.numpy(), sigma.numpy(), 500, seed=3, noise=noise, layout=layout)
    assert torch.equal(got, torch.from_numpy(wanted)), options
"""
    run_python("-c", program)


def test_the_operator_promotes_dtypes_as_sample_does(operators: Any, device: Any) -> None:
    types = [getattr(torch, name) for name in (*DTYPES, "int32", "int64")]
    for a, b in itertools.product(types, types):
        mu, sigma = torch.ones(3, dtype=a, device=device), torch.ones(3, dtype=b, device=device)
        wanted = multisample.sample(mu, sigma, 2, seed=1, backend="torch_ext")
        got = operators.sample(mu, sigma, 2, seed=1)
        assert got.dtype == wanted.dtype, (a, b)
        assert torch.equal(got, wanted), (a, b)


def test_mu_and_sigma_may_have_any_strides(operators: Any, device: Any) -> None:
    mu, sigma = (x.to(device) for x in vectors(6))
    wanted = operators.sample(mu, sigma, 40, seed=5)
    apart = torch.stack((mu, sigma), 1)
    assert torch.equal(operators.sample(apart[:, 0], apart[:, 1], 40, seed=5), wanted)
    one = torch.tensor([0.5], device=device)
    got = operators.sample(one.expand(6), one.expand(6), 40, seed=5)
    assert torch.equal(got, operators.sample(one.repeat(6), one.repeat(6), 40, seed=5))


def test_an_offset_tensor_replaces_the_offset_argument(operators: Any, device: Any) -> None:
    mu, sigma = (x.float().to(device) for x in vectors(9))
    grad = made(9, 50, "float32", device)
    for offset in (0, 1, 2**40 + 7, 2**63 - 1, -1, -(2**63)):
        for shape in ((1,), (), (1, 1)):
            counter = torch.full(shape, offset, dtype=torch.int64, device=device)
            wanted = operators.sample(mu, sigma, 50, seed=2, offset=offset)
            assert torch.equal(operators.sample(mu, sigma, 50, seed=2, offset=77, counter=counter), wanted)
            out = torch.empty_like(wanted)
            operators.sample_(out, mu, sigma, seed=2, counter=counter)
            assert torch.equal(out, wanted)
            numbers = {"counter": counter}, {"offset": offset}
            results = (operators.sample_backward(grad, seed=2, **number) for number in numbers)
            for got, sums in zip(*results, strict=True):
                assert torch.equal(got, sums)
            assert int(counter) == offset


def test_operators_raise_for_invalid_arguments(operators: Any, device: Any) -> None:
    mu, sigma, grad = torch.zeros(5, device=device), torch.ones(5, device=device), torch.ones((5, 7), device=device)
    counter, where = torch.zeros(1, dtype=torch.int64, device=device), "cuda:0" if device.type == "cuda" else "cpu"
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
        ("sample", (mu[:, None], sigma, 7), {}, r"mu .*shape \(5, 1\)"),
        ("sample", (mu, sigma[:4], 7), {}, r"sigma .*shape \(4,\)"),
        ("sample", (mu, sigma, -1), {}, "n must be at least 0, got -1"),
        ("sample", (mu.to(torch.complex64), sigma, 7), {}, "mu .*Complex"),
        ("sample", (mu, sigma, 7), {"dtype": torch.int32}, "out .*int32"),
        ("sample", (mu, sigma, 7), {"dim_offset": 2**32 - 4}, r"dim_offset .*2\*\*32"),
        ("sample", (mu, sigma, 7), {"counter": counter.expand(2)}, r"counter .*int64.*shape \(2,\)"),
        ("sample_", (grad, mu, sigma), {"counter": counter.int()}, "counter .*int64.*int32"),
        ("sample_", (grad.view(-1), mu, sigma), {}, rf"out .*two dimensions.*shape \(35,\).*float32.*on {where}"),
        ("sample_", (grad[None], mu, sigma), {}, r"out .*shape \(1, 5, 7\)"),
        ("sample_", (grad.long(), mu, sigma), {}, "out .*float64.*dtype int64"),
        ("sample_", (grad.to(torch.complex64), mu, sigma), {}, "out .*Complex"),
        ("sample_", (grad[:, :1].expand(5, 7), mu, sigma), {}, r".*out .*share memory.*strides \(7, 0\)"),
        ("sample_", (grad[:1].expand(5, 7), mu, sigma), {}, r".*out .*share memory.*strides \(0, 1\)"),
        ("sample_", (grad, mu[:4], sigma), {}, r"mu .*shape \(d,\).*shape \(4,\).*shape \(5, 7\)"),
        ("sample_", (grad, mu[0], sigma), {}, r"mu .*shape \(\)"),
        ("sample_", (grad, mu, sigma[:, None]), {}, r"sigma .*shape \(5, 1\)"),
        ("sample_", (grad, mu, sigma.bool()), {}, "sigma .*Bool"),
        *(
            ("sample_", (grad, mu, sigma), {name: offset}, rf"{name} .*2\*\*{power}.*{offset}; {size}")
            for name, power, size, offsets in (
                ("dim_offset", 32, "d is 5", (-1, 2**32 - 4, 2**63 - 1)),
                ("sample_offset", 34, "n is 7", (-1, 2**34 - 6, -(2**63))),
            )
            for offset in offsets
        ),
        ("sample_backward", (mu,), {}, r"grad .*two dimensions.*shape \(5,\)"),
        ("sample_backward", (grad.long(),), {}, "grad .*int64"),
        ("sample_backward", (grad,), {"dim_offset": -1}, r"dim_offset .*2\*\*32.*-1; d is 5"),
        ("sample_backward", (grad,), {"transposed": True, "dim_offset": 2**32 - 6}, ".*; d is 7"),
        ("sample_backward", (grad,), {"sample_offset": 2**34 - 6}, r"sample_offset .*2\*\*34.*; n is 7"),
        ("sample_backward", (grad,), {"counter": counter.double()}, "counter .*int64.*float64"),
    ]
    if device.type == "cuda":
        cases += [
            ("sample", (mu, sigma.cpu(), 7), {}, "sigma must be on the device of out.*on cpu.*on cuda"),
            ("sample_", (grad, mu.cpu(), sigma), {}, "mu must be on the device of out.*on cpu.*on cuda:0"),
            ("sample_", (grad.cpu(), mu, sigma), {}, "mu must be on the device of out.*on cuda:0.*on cpu"),
            ("sample", (mu, sigma, 7), {"counter": counter.cpu()}, "counter must be on the device of out.*on cpu"),
            ("sample_backward", (grad,), {"counter": counter.cpu()}, "counter must be on the device of grad.*on cpu"),
        ]
    for name, tensors, options, message in cases:
        with pytest.raises(RuntimeError, match=rf"^multisample::{name}: {message}"):
            getattr(operators, name)(*tensors, seed=1, **options)
    assert bool((grad == 1).all())


def test_a_compiled_call_raises_the_error_of_the_operator(operators: Any, device: Any) -> None:
    sigma = torch.ones(4, device=device)
    for mu, name in ((torch.zeros(5, device=device), "sigma"), (torch.zeros((), device=device), "mu")):
        call = torch.compile(lambda mu, sigma: operators.sample(mu, sigma, 7, seed=1), backend="aot_eager")
        with pytest.raises(RuntimeError, match=rf"^multisample::sample: {name} must have shape \(d,\)"):
            call(mu, sigma)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_sums_with_the_noise_of_sample(operators: Any, device: Any, dtype: str, transposed: bool) -> None:
    shapes = [(1, 1), (3, 7), (16, 33), (40, 1000), (300, 5), (1, 20_000), (2000, 2)]
    windows = (0, 0), (3, 5), (2**32 - 2000, 2**34 - 20_000)
    for (d, n), shared, antithetic, window in itertools.product(shapes, (False, True), (False, True), windows):
        options = {"seed": 8, "offset": 4, "shared": shared, "antithetic": antithetic}
        options |= {"dim_offset": window[0], "sample_offset": window[1]}
        grad = made(d, n, dtype, device)
        given = grad.T.contiguous() if transposed else grad
        got = operators.sample_backward(given, transposed=transposed, **options)
        assert_sums(got, grad, noise_for(operators, grad, **options))


def strided(grad: Any) -> Iterator[tuple[str, Any]]:
    """Views of a gradient with the strides that autograd may pass."""
    d, n = grad.shape
    buffer = torch.full((d + 2, 2 * n + 3), torch.nan, dtype=grad.dtype, device=grad.device)
    for name, view in [
        ("padded", buffer[1 : d + 1, :n]),
        ("at an odd address", buffer[1 : d + 1, 1 : n + 1]),
        ("every other column", buffer[1 : d + 1, 1 : 2 * n : 2]),
        ("rows apart", buffer.view(-1)[: d * (n + 1)].view(d, n + 1)[:, :n]),
    ]:
        view.copy_(grad)
        yield name, view
        view.fill_(torch.nan)
    yield "transposed", grad.T.contiguous().T
    yield "one number", grad[:1, :1].expand(d, n)
    yield "one row", grad[:1].expand(d, n)
    yield "one column", grad[:, :1].expand(d, n)


@pytest.mark.parametrize("dtype", slow_but(["float32"], DTYPES))
def test_gradients_are_read_at_any_strides(operators: Any, device: Any, dtype: str) -> None:
    for (d, n), shared, antithetic in itertools.product([(5, 37), (130, 260), (600, 3)], (False, True), (False, True)):
        options = {"seed": 3, "offset": 1, "sample_offset": 2, "shared": shared, "antithetic": antithetic}
        grad = made(d, n, dtype, device)
        z = noise_for(operators, grad, **options)
        for _, view in strided(grad):
            assert_sums(operators.sample_backward(view, **options), view, z)
            assert_sums(operators.sample_backward(view.T, transposed=True, **options), view, z)


@pytest.mark.parametrize("layout", ["rows", "odd rows", "dimensions"])
@pytest.mark.parametrize("dtype", slow_but(["float32"], DTYPES))
def test_large_gradients_are_summed_correctly(operators: Any, device: Any, dtype: str, layout: str) -> None:
    """Gradients so large that CUDA threads sum several rows, and rows are split into segments."""
    large = device.type == "cuda"
    shapes = [(4096, 2100), (70, 130_000), (100_000, 100)] if large else [(300, 2100), (3, 60_000), (10_000, 20)]
    for (d, n), shared, antithetic, fast in itertools.product(shapes, (False, True), (False, True), {False, large}):
        n += layout == "odd rows"
        options = {"seed": 6, "offset": 9, "shared": shared, "antithetic": antithetic, "fast_math": fast}
        grad = made(d, n, dtype, device)
        if layout == "dimensions":
            grad = grad.T.contiguous().T
        got = operators.sample_backward(grad, **options)
        assert_sums(got, grad, noise_for(operators, grad, **options))
        for sums, again in zip(got, operators.sample_backward(grad, **options), strict=True):
            assert torch.equal(sums, again)


@pytest.mark.parametrize("d", [1, 64])
def test_errors_do_not_grow_with_long_rows(operators: Any, device: Any, d: int) -> None:
    """A million columns of terms with equal signs, which do not cancel."""
    n = 10**6
    d = d if device.type == "cuda" else min(d, 3)
    z = operators.sample(torch.zeros(d, device=device), torch.ones(d, device=device), n, seed=4)
    for grad in (torch.rand((d, n), device=device) * z.sign(), torch.rand((d, n), device=device)):
        got = operators.sample_backward(grad, seed=4)
        terms = grad.double() * z.double()
        assert bool(((got[1].double() - terms.sum(1)).abs() <= 1e-6 * terms.abs().sum(1)).all())
        assert_sums(got, grad, z.double())


def test_nonfinite_gradients_affect_only_their_row(operators: Any, device: Any) -> None:
    for value in (float("inf"), float("nan")):
        grad = torch.ones((6, 90), device=device)
        wanted = operators.sample_backward(grad, seed=1)
        grad[2, 89] = value
        for sums, clean in zip(operators.sample_backward(grad, seed=1), wanted, strict=True):
            finite = sums.isfinite()
            assert finite.tolist() == [True, True, False, True, True, True]
            assert torch.equal(sums[finite], clean[finite])


@forked
def test_gradients_do_not_depend_on_the_number_of_threads(operators: Any, bits: Callable[[Any], Array]) -> None:
    require("torch_ext", on_cuda=False)
    registry.find("torch_ext").prepare("cpu")
    before = torch.get_num_threads()
    for (d, n), transposed in itertools.product([(700, 3001), (2, 700_000), (90_000, 20)], (False, True)):
        grad = made(d, n, "float32", "cpu")
        grad = grad.T.contiguous() if transposed else grad
        found = set()
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            sums = operators.sample_backward(grad, seed=1, transposed=transposed)
            found.add((bits(sums[0]).tobytes(), bits(sums[1]).tobytes()))
        assert len(found) == 1, (d, n)
    torch.set_num_threads(4)

    def again() -> bool:
        sums = operators.sample_backward(grad, seed=1, transposed=transposed)
        return (bits(sums[0]).tobytes(), bits(sums[1]).tobytes()) in found

    assert in_forks(again) == [True]
    torch.set_num_threads(before)


def test_operators_run_on_the_current_stream_of_the_device(operators: Any) -> None:
    load_on_cuda()
    for index in range(torch.cuda.device_count()):
        grad, out = (torch.zeros((300, 5000), device=f"cuda:{index}") for _ in range(2))
        wanted = operators.sample_backward(grad + 1, seed=1)
        stream = torch.cuda.Stream(index)
        torch.cuda.synchronize(index)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**8)
            grad += 1
            got = operators.sample_backward(grad, seed=1)
            operators.sample_(out, grad[:, 0], grad[:, 1] - 1, seed=1)
        stream.synchronize()
        assert [sums.device.index for sums in got] == [index, index]
        assert bool((out == 1).all())
        for sums, again in zip(wanted, got, strict=True):
            assert torch.equal(sums, again)


def test_graph_replays_read_the_offset_again_without_synchronization(operators: Any) -> None:
    load_on_cuda()
    mu, sigma = (x.float().cuda() for x in vectors(600))
    grad = made(600, 9000, "float32", "cuda")
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    operators.sample_backward(grad, seed=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = operators.sample(mu, sigma, 9000, seed=1, counter=counter)
        sums = operators.sample_backward(grad, seed=1, counter=counter)
    for offset in (0, 1, 2**40):
        counter.fill_(offset)
        graph.replay()
        assert torch.equal(x, operators.sample(mu, sigma, 9000, seed=1, offset=offset))
        for got, wanted in zip(sums, operators.sample_backward(grad, seed=1, offset=offset), strict=True):
            assert torch.equal(got, wanted)


def test_the_backward_operator_allocates_only_partial_sums(operators: Any) -> None:
    load_on_cuda()
    grad = torch.ones((4096, 16_384), device="cuda")
    for view in (grad, grad.view(16_384, 4096).T):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        operators.sample_backward(view, seed=1)
        assert torch.cuda.max_memory_allocated() - before <= grad.nbytes // 32
