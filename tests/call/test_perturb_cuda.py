"""`perturb` of tensors on a GPU, through every backend: the bits of the CPU, and no wait for the device."""

from typing import Any

import numpy as np
import pytest
import torch
from cuda_memory import memory_of
from skip_rules import require_device

import multisample
from multisample import Key, perturb
from multisample.backends.element_types import MATRIX_TYPES
from multisample.torch import perturb_

require_device()

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
LAUNCHES = 3  # The calls make a plan, check it, and use it.
DEVICE, CHUNK = "cuda", 2**26


@pytest.fixture
def gpu(backend: str) -> str:
    if backend == "cpu":
        pytest.skip("cpu has no memory on a GPU")
    return backend


def steps(first: int, count: int, dtype: Any) -> Any:
    """Elements `first` and on of a vector of numbers that every type represents."""
    return (torch.arange(first, first + count, device=DEVICE) % 251 / 8).to(dtype)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 10**8), ("float64", 10**8), ("bfloat16", 2**31 + 5)])
def test_every_element_of_a_large_parameter_has_the_noise_of_sample(gpu: str, room: Any, dtype: str, size: int) -> None:
    of, real = getattr(torch, dtype), getattr(torch, MATRIX_TYPES[dtype].computing)
    room(memory_of("torch"), size * of.itemsize + 2**32)
    p = torch.empty(size, dtype=of, device=DEVICE)
    chunks = [(first, min(CHUNK, size - first)) for first in range(0, size, CHUNK)]
    # Powers of two, whose products are exact: the sums have one rounding, as fma has.
    for coefficients in (0.5, [0.5, -2.0]):
        for first, count in chunks:
            p[first : first + count] = steps(first, count, of)
        assert perturb_(p, coefficients, seed=Key(7, 3), member=2, ids=[5], backend=gpu) is p
        zeros = torch.zeros(np.size(coefficients), dtype=real, device=DEVICE)
        for first, count in chunks:
            window: dict[str, Any] = {"seed": Key(7, 3 + (5 << 32)), "dim_offset": 2, "sample_offset": first}
            z = multisample.sample(zeros, 1.0, count, backend=gpu, **window)
            exact = steps(first, count, real)
            for c, row in zip(np.atleast_1d(coefficients).tolist(), z, strict=True):
                exact += c * row
            assert torch.equal(p[first : first + count], exact.to(of)), first


def test_structures_on_several_devices_and_of_several_types(gpu: str) -> None:
    sizes = np.random.default_rng(2).integers(0, 60, 300)
    types = [getattr(torch, name) for name in MATRIX_TYPES]
    host = {f"p{k}": torch.zeros(int(size), dtype=types[k % 4]) for k, size in enumerate(sizes)}
    mixed = {name: p if k % 5 == 0 else p.cuda() for k, (name, p) in enumerate(host.items())}
    exact = perturb(host, 0.5, seed=7)
    for _ in range(LAUNCHES):
        found = perturb({name: p for name, p in mixed.items() if p.is_cuda}, 0.5, seed=7, backend=gpu)
        assert all(torch.equal(found[name].cpu(), exact[name]) for name in found)
        found = perturb(mixed, 0.5, seed=7)
        assert all(torch.equal(found[name].cpu(), exact[name]) for name in exact)


def test_a_graph_reads_new_keys_and_coefficients(gpu: str) -> None:
    tensors = [torch.zeros(size, device="cuda") for size in (5, 4097, 100)] + [torch.zeros(9, 7, device="cuda").T]
    key, many = torch.tensor([[7, 3]], device="cuda"), torch.tensor([0.5, 2.0], device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        perturb_(tensors, many, seed=key, backend=gpu)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        perturb_(tensors, many, seed=key, backend=gpu)
    torch.cuda.synchronize()
    for seed, offset, given in ((7, 3, [0.5, 2.0]), (1 << 40, 9, [-1.0, 0.25])):
        for p in tensors:
            p.zero_()
        key.copy_(torch.tensor([[seed, offset]]))
        many.copy_(torch.tensor(given))
        graph.replay()
        torch.cuda.synchronize()
        exact = perturb([p.cpu().zero_() for p in tensors], given, seed=Key(seed, offset))
        assert all(torch.equal(p.cpu(), x) for p, x in zip(tensors, exact, strict=True))


def test_numbers_are_captured_and_host_vectors_are_refused(gpu: str) -> None:
    p, graph = torch.zeros(100, device="cuda"), torch.cuda.CUDAGraph()
    perturb_(p, 0.5, seed=7, backend=gpu)
    p.zero_()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        perturb_(p, 0.5, seed=7, backend=gpu)
        with pytest.raises(RuntimeError, match=r"^coefficients: expected a number, or a vector in device memory"):
            perturb_(p, [0.5, 1.0], seed=7, backend=gpu)
    torch.cuda.synchronize()
    graph.replay()
    assert torch.equal(p.cpu(), perturb(torch.zeros(100), 0.5, seed=7))


def test_values_on_a_device_of_their_own_are_refused() -> None:
    p, host = torch.zeros(3, device="cuda"), torch.zeros(3)
    with pytest.raises(ValueError, match=r"^coefficients: expected values on the host.*, got them on cuda:0"):
        perturb(host, torch.ones(2, device="cuda"), seed=7)
    with pytest.raises(ValueError, match=r"^seed: expected values on the host, got them on cuda:0"):
        perturb([p, host], 0.5, seed=torch.tensor([7], device="cuda"))
    assert not host.any()
    assert not p.any()


def test_coefficients_and_seeds_in_memory_that_is_written_are_refused(gpu: str) -> None:
    base = torch.linspace(-1, 1, 300, dtype=torch.float64, device="cuda")
    kept, seeds = base.clone(), torch.tensor([[7, 3]], device="cuda")
    for out, parameters in ((base, base), (base, kept), ([kept.clone(), base], [kept, kept.float()[::2].double()])):
        if isinstance(out, list):
            out[1] = base[:150]
        for _ in range(LAUNCHES):
            with pytest.raises(ValueError, match=r"^coefficients: expected memory that is not written"):
                perturb(parameters, base[149:151], seed=7, out=out, backend=gpu)
            for given in (0.5, [0.5, 1.0], kept[:2]):
                with pytest.raises(ValueError, match=r"^seed: expected memory that is not written"):
                    perturb(parameters, given, seed=base[:2].view(torch.int64)[None], out=out, backend=gpu)
            assert torch.equal(base, kept)
    for _ in range(LAUNCHES):
        exact = perturb(kept.cpu(), kept[:50].cpu(), seed=Key(7, 3))
        assert torch.equal(perturb(kept, kept[:50], seed=seeds, backend=gpu).cpu(), exact)
        assert torch.equal(perturb(kept, kept[:50], seed=seeds, out=base, backend=gpu).cpu(), exact)


def test_cupy_and_numba_arrays(gpu: str) -> None:
    cupy, numba_cuda = pytest.importorskip("cupy"), pytest.importorskip("numba.cuda")
    p = np.random.default_rng(1).normal(size=(40, 9)).astype(np.float32)
    exact = multisample.perturb(p, [0.5, 2.0], seed=7)
    for _ in range(LAUNCHES):
        assert np.array_equal(perturb(cupy.asarray(p), [0.5, 2.0], seed=7, backend=gpu).get(), exact)
        on_device = numba_cuda.to_device(p)
        assert perturb(on_device, [0.5, 2.0], seed=7, out=on_device, backend=gpu) is on_device
        assert np.array_equal(on_device.copy_to_host(), exact)


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, x in found.items():
        assert x.is_cuda and torch.equal(x.cpu(), expected[name]), name


def test_vmap_over_all_arguments_has_the_bits_of_the_cpu(gpu: str) -> None:
    p = {"w": torch.randn(5, 7), "b": torch.randn(33)}
    several = {name: torch.stack([x, x + 1, x - 2]) for name, x in p.items()}
    own = {name: x.cuda() for name, x in several.items()}
    seeds, numbers = torch.tensor([3, 4, 5]), torch.tensor([[0.5, 1.0], [2.0, 0.1], [-1.0, 3.0]])
    members = perturb(several, 0.5, seed=7, member=seeds)
    check(torch.func.vmap(lambda m: perturb(own, 0.5, seed=7, member=m, backend=gpu))(seeds.cuda()), members)

    def call(x: Any, c: Any, s: Any, backend: str) -> Any:
        return perturb(x, c, seed=s, decay=0.25, backend=backend)

    for c in (numbers, numbers[:, 0]):
        expected = torch.func.vmap(lambda x, c, s: call(x, c, s, "cpu"))(several, c, seeds)
        check(torch.func.vmap(lambda x, c, s: call(x, c, s, gpu))(own, c.cuda(), seeds.cuda()), expected)


def test_a_graph_reads_new_seeds_and_members_of_a_population(gpu: str) -> None:
    p, seeds = torch.zeros(1000, device="cuda"), torch.tensor([1, 2, 3], device="cuda")
    members, out = torch.tensor([4, 5, 6], device="cuda"), torch.zeros(3, 1000, device="cuda")
    perturb(p, 0.5, seed=seeds, out=out, backend=gpu)
    perturb(p, 0.5, seed=7, member=members, out=out, backend=gpu)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    with torch.cuda.graph(graphs[0]):
        perturb(p, 0.5, seed=seeds, out=out, backend=gpu)
        with pytest.raises(RuntimeError, match=r"^seed: expected values in device memory"):
            perturb(p, 0.5, seed=[1, 2, 3], out=out, backend=gpu)
    with torch.cuda.graph(graphs[1]):
        perturb(p, 0.5, seed=7, member=members, decay=0.5, out=out, backend=gpu)
    for k in range(3):
        seeds += 10
        members += 20
        p += 1
        base = torch.full((1000,), k + 1.0)
        graphs[0].replay()
        assert torch.equal(out.cpu(), perturb(base, 0.5, seed=seeds.cpu()))
        graphs[1].replay()
        assert torch.equal(out.cpu(), perturb(base, 0.5, seed=7, member=members.cpu(), decay=0.5))


def test_members_in_device_memory_have_64_bits_and_are_not_written(gpu: str) -> None:
    p = torch.zeros(4, device="cuda")
    with pytest.raises(TypeError, match=r"^member: expected integers of 64 bits in device memory, got int32$"):
        perturb(p, 0.5, seed=1, member=torch.arange(2, device="cuda", dtype=torch.int32), backend=gpu)
    memory = torch.zeros(2, 4, device="cuda")
    members = memory.view(torch.int64)[0]
    with pytest.raises(ValueError, match=r"^member: expected memory"):
        perturb(p, 0.5, seed=1, member=members, out=memory, backend=gpu)
    assert not memory.any()
