"""The program of each rank in the tests of sharded matrices; `test_torch_sharded.py` starts the ranks.

Every rank runs every case, since processes take seconds to start. A case passes if each rank holds the block
of the single-device matrix that PyTorch's `distribute_tensor` sends to that rank.
"""

import datetime
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from operator_mode import Operators
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import multisample
import multisample.cem
from multisample import Generator
from multisample.examples.cem_cluster import minimize
from multisample.torch import perturb_, sample_sharded

# Timeout of a collective that a failed rank does not join. It includes time for ranks that compile.
PATIENCE = datetime.timedelta(seconds=300)
SEED = 0x1234_5678_9ABC_DEF0
# d for even shards, uneven shards, and an empty shard on four ranks and on two.
LENGTHS = (8, 13, 5, 3, 1)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

Case = Callable[["Ranks"], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Ranks:
    """The ranks, from the view of one rank."""

    def __init__(self, device_type: str, rank: int, size: int) -> None:
        self.device_type, self.rank, self.size = device_type, rank, size
        self.device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
        self.backend = ""
        self.line = init_device_mesh(device_type, (size,))
        self.grid = init_device_mesh(device_type, (2, size // 2), mesh_dim_names=("replica", "shard"))
        self.meshes = (self.line, self.grid)

    def collectives(self) -> int:
        """The number of collectives so far."""
        groups = {distributed.group.WORLD, *(group for mesh in self.meshes for group in mesh.get_all_groups())}
        return sum(group._get_sequence_number_for_group() for group in groups)

    def vectors(self, d: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """Means and standard deviations, the same on every rank."""
        where = torch.arange(d, dtype=torch.float32)
        mu, sigma = torch.sin(where) * 10, 1.5 + torch.cos(3 * where)
        return mu.to(self.device, dtype), sigma.to(self.device, dtype)

    def single(self, mu: Any, sigma: Any, n: int, **call: Any) -> torch.Tensor:
        """The matrix that a single device draws."""
        whole: torch.Tensor = multisample.sample(mu, sigma, n, backend=self.backend, **call)
        return whole

    def on(self, mesh: DeviceMesh, tensor: torch.Tensor, *placements: Any) -> DTensor:
        """A tensor that all ranks hold, as a DTensor, without communication."""
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    def spread(self, mesh: DeviceMesh, vectors: Iterable[torch.Tensor], *placements: Any) -> tuple[DTensor, ...]:
        """`on` for several tensors."""
        return tuple(self.on(mesh, x, *placements) for x in vectors)

    def parameters(self, wholes: dict[str, torch.Tensor]) -> Iterator[tuple[DeviceMesh, dict[str, Any]]]:
        """The parameters as DTensors, for several meshes and placements. Parameters have the axes that are sharded."""
        strided = _StridedShard(0, split_factor=self.grid.size(1))
        for mesh, *placements in (
            (self.line, Shard(0)), (self.line, Shard(1)), (self.line, Replicate()), (self.grid, Shard(0), Shard(1)),
            (self.grid, Shard(1), Shard(0)), (self.grid, Shard(0), Shard(0)), (self.grid, Replicate(), Shard(1)),
            (self.grid, Replicate(), Shard(0)), (self.grid, strided, Shard(0)),
        ):  # fmt: skip
            parts = {}
            for name, x in wholes.items():
                own = (Shard(min(p.dim, x.dim() - 1)) if type(p) is Shard else p for p in placements)
                parts[name] = self.on(mesh, x.clone(), *own)
            yield mesh, parts

    def sharded(self, mu: Any, sigma: Any, n: int, mesh: DeviceMesh, placements: Any, **call: Any) -> DTensor:
        result: DTensor = sample_sharded(mu, sigma, n, mesh=mesh, placements=placements, backend=self.backend, **call)
        return result

    def sample(self, mu: Any, sigma: Any, n: int, **call: Any) -> DTensor:
        result: DTensor = multisample.sample(mu, sigma, n, backend=self.backend, **call)
        return result

    def check_part(self, result: Any, whole: torch.Tensor, mesh: DeviceMesh, placements: Any) -> None:
        """Check that `result` is a DTensor with this rank's part of `whole`."""
        expected = self.on(mesh, whole, *placements)
        assert type(result) is DTensor
        for name in ("device_mesh", "placements", "shape", "dtype", "device"):
            assert getattr(result, name) == getattr(expected, name), (name, result, expected)
        local, part = result.to_local(), expected.to_local()
        assert (local.shape, local.device) == (part.shape, self.device), result.placements
        assert same(local, part), (result.placements, whole.shape)

    def check(self, result: Any, whole: torch.Tensor, mesh: DeviceMesh, placements: Any) -> None:
        """`check_part` for a sample, which is contiguous."""
        self.check_part(result, whole, mesh, placements)
        assert result.stride() == whole.stride(), (result.stride(), whole.stride())
        assert result.to_local().is_contiguous()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def every_placement(ndim: int) -> Iterator[tuple[Any, ...]]:
    return itertools.product((Shard(0), Shard(1), Replicate()), repeat=ndim)


def kinds_of_draw() -> Iterator[tuple[torch.dtype, dict[str, Any]]]:
    noises, layouts, flags = ("independent", "shared"), ("dn", "nd"), (False, True)
    for dtype, noise, antithetic, layout, fast_math in itertools.product(DTYPES, noises, flags, layouts, flags):
        call = {"noise": noise, "antithetic": antithetic, "layout": layout, "fast_math": fast_math}
        yield dtype, call | {"seed": SEED}


@case
def every_placement_of_the_result(ranks: Ranks) -> None:
    sizes = [(13, 37, "dn"), (13, 37, "nd"), (3, 1030, "dn"), (64, 3, "nd")]
    sizes += [(d, n, "dn") for d, n in itertools.product((*LENGTHS, 0), repeat=2)]
    for d, n, layout in sizes:
        mu, sigma = ranks.vectors(d)
        whole = ranks.single(mu, sigma, n, seed=SEED, layout=layout)
        for mesh in ranks.meshes:
            for placements in every_placement(mesh.ndim):
                result = ranks.sharded(mu, sigma, n, mesh, placements, seed=SEED, layout=layout)
                ranks.check(result, whole, mesh, placements)
        result = ranks.sharded(mu, sigma, n, ranks.grid, [Shard(-1), Shard(-2)], seed=SEED, layout=layout)
        ranks.check(result, whole, ranks.grid, [Shard(1), Shard(0)])


@case
def every_kind_of_draw(ranks: Ranks) -> None:
    for dtype, call in kinds_of_draw():
        mu, sigma = ranks.vectors(13, dtype)
        whole = ranks.single(mu, sigma, 103, **call)
        for mesh, *placements in ((ranks.line, Shard(0)), (ranks.line, Shard(1)), (ranks.grid, Shard(1), Shard(0))):
            ranks.check(ranks.sharded(mu, sigma, 103, mesh, placements, **call), whole, mesh, placements)
        result = ranks.sample(*ranks.spread(ranks.line, (mu, sigma), Shard(0)), 103, **call)
        ranks.check(result, whole, ranks.line, [Shard(int(call["layout"] == "nd"))])
        wide = call | {"dtype": "float64"}
        result = ranks.sharded(mu, sigma, 103, ranks.line, [Shard(1)], **wide)
        ranks.check(result, ranks.single(mu, sigma, 103, **wide), ranks.line, [Shard(1)])


@case
def windows_of_shards_are_windows_of_the_matrix(ranks: Ranks) -> None:
    mu, sigma = ranks.vectors(40)
    whole = ranks.single(mu, sigma, 90, seed=SEED)
    call = {"dim_offset": 7, "sample_offset": 5, "seed": SEED}
    for placements in every_placement(2):
        result = ranks.sharded(mu[7:28], sigma[7:28], 67, ranks.grid, placements, **call)
        ranks.check(result, whole[7:28, 5:72].contiguous(), ranks.grid, placements)
    result = ranks.sample(*ranks.spread(ranks.line, (mu[7:28], sigma[7:28]), Shard(0)), 67, **call)
    ranks.check(result, whole[7:28, 5:72].contiguous(), ranks.line, [Shard(0)])
    last = {"dim_offset": 2**32 - 40, "sample_offset": 2**34 - 9, "seed": SEED}
    result = ranks.sharded(mu, sigma, 9, ranks.line, [Shard(1)], **last)
    ranks.check(result, ranks.single(mu, sigma, 9, **last), ranks.line, [Shard(1)])


@case
def vectors_of_every_form(ranks: Ranks) -> None:
    mu, sigma = ranks.vectors(13)
    whole = ranks.single(mu, sigma, 21, seed=SEED)
    placements = [Shard(0), Shard(1)]
    strided = torch.stack([mu, mu], 1)[:, 0]
    for given in ([Replicate(), Replicate()], [Shard(0), Replicate()]):
        for one, other in (
            (ranks.on(ranks.grid, mu, *given), sigma),
            (mu[:, None], ranks.on(ranks.grid, sigma, *given)),
            (ranks.on(ranks.grid, mu[:, None].contiguous(), *given), ranks.on(ranks.grid, sigma, *given)),
            (strided, sigma[:, None]),
        ):
            result = ranks.sharded(one, other, 21, ranks.grid, placements, seed=SEED)
            ranks.check(result, whole, ranks.grid, placements)
    for number in (2.5, torch.tensor(2.5, device=ranks.device)):
        result = ranks.sharded(mu, number, 21, ranks.grid, placements, seed=SEED)
        ranks.check(result, ranks.single(mu, 2.5, 21, seed=SEED), ranks.grid, placements)
        result = ranks.sharded(number, sigma, 21, ranks.grid, placements, seed=SEED)
        ranks.check(result, ranks.single(2.5, sigma, 21, seed=SEED), ranks.grid, placements)


@case
def results_are_placed_as_mu_and_sigma(ranks: Ranks) -> None:
    for d, layout in itertools.product((*LENGTHS, 0), ("dn", "nd")):
        mu, sigma = ranks.vectors(d)
        whole = ranks.single(mu, sigma, 21, seed=SEED, layout=layout)
        for mesh in ranks.meshes:
            for given in itertools.product((Shard(0), Replicate()), repeat=mesh.ndim):
                expected = [Shard(1) if p == Shard(0) and layout == "nd" else p for p in given]
                one, other, column = ranks.spread(mesh, (mu, sigma, mu[:, None].contiguous()), *given)
                means, deviations = ranks.spread(mesh, (mu, sigma), *[Replicate()] * mesh.ndim)
                for pair in ((one, other), (column, other), (one, deviations), (means, other)):
                    ranks.check(ranks.sample(*pair, 21, seed=SEED, layout=layout), whole, mesh, expected)
    mu, sigma = ranks.spread(ranks.line, ranks.vectors(5), Shard(0))
    for number in (2.5, ranks.on(ranks.line, torch.tensor(2.5, device=ranks.device), Replicate())):
        for pair, single in (((mu, number), (ranks.vectors(5)[0], 2.5)), ((number, sigma), (2.5, ranks.vectors(5)[1]))):
            whole = ranks.single(*single, 21, seed=SEED)
            ranks.check(ranks.sample(*pair, 21, seed=SEED), whole, ranks.line, [Shard(0)])


@case
def parts_of_fsdp_after_tensor_parallelism(ranks: Ranks) -> None:
    """The second mesh dimension cuts the axis first."""
    for d, layout in itertools.product((16, 13, 5), ("dn", "nd")):
        mu, sigma = ranks.vectors(d)
        pieces = ranks.grid.size(1)
        given = (_StridedShard(0, split_factor=pieces), Shard(0))
        axis = int(layout == "nd")
        whole = ranks.single(mu, sigma, 21, seed=SEED, layout=layout)
        result = ranks.sample(*ranks.spread(ranks.grid, (mu, sigma), *given), 21, seed=SEED, layout=layout)
        ranks.check(result, whole, ranks.grid, (_StridedShard(axis, split_factor=pieces), Shard(axis)))
    mu, sigma = ranks.vectors(16)
    with pytest.raises(ValueError, match="placements: expected contiguous shards, got pieces that begin at"):
        ranks.sample(ranks.on(ranks.line, mu, _StridedShard(0, split_factor=2)), 1.0, 21, seed=SEED)


@case
def vectors_that_are_still_on_their_way(ranks: Ranks) -> None:
    mu, sigma = ranks.vectors(1 << 20)
    gathered = ranks.on(ranks.line, mu, Shard(0)).redistribute(placements=[Replicate()], async_op=True)
    assert type(gathered.to_local()) is not torch.Tensor
    result = ranks.sharded(gathered, sigma, 3, ranks.line, [Shard(1)], seed=SEED)
    ranks.check(result, ranks.single(mu, sigma, 3, seed=SEED), ranks.line, [Shard(1)])


@case
def out_is_written_and_returned(ranks: Ranks) -> None:
    mu, sigma = ranks.vectors(13)
    for layout in ("dn", "nd"):
        whole = ranks.single(mu, sigma, 21, seed=SEED, layout=layout)
        for placements in every_placement(2):
            out = ranks.on(ranks.grid, torch.zeros_like(whole), *placements)
            result = ranks.sharded(mu, sigma, 21, ranks.grid, placements, seed=SEED, layout=layout, out=out)
            assert result is out
            ranks.check(out, whole, ranks.grid, placements)
    whole = ranks.single(mu, sigma, 21, seed=SEED)
    out = ranks.on(ranks.line, torch.zeros_like(whole), Shard(0))
    given = ranks.spread(ranks.line, (mu, sigma), Shard(0))
    assert ranks.sample(*given, 21, seed=SEED, out=out) is out
    ranks.check(out, whole, ranks.line, [Shard(0)])
    for wrong, error, message in (
        (torch.zeros_like(whole), TypeError, r"^out: expected a DTensor, got .* of type Tensor$"),
        (ranks.on(ranks.line, whole, Shard(1)), ValueError, r"^out: expected it on .*Shard\(dim=0\)"),
        (ranks.on(ranks.grid, whole, Shard(0), Replicate()), ValueError, "^out: expected it on DeviceMesh"),
        (ranks.on(ranks.line, whole[:, 1:], Shard(0)), ValueError, r"^out: expected shape \(13, 21\), got \(13, 20\)"),
        (ranks.on(ranks.line, whole.double(), Shard(0)), ValueError, "^out: expected dtype float32"),
    ):
        with pytest.raises(error, match=message):
            ranks.sample(*given, 21, seed=SEED, out=wrong)
    with pytest.raises(TypeError, match=r"^mu: expected a DTensor or a number where other arguments are DTensors, got"):
        ranks.sample(mu, 1.0, 21, seed=SEED, out=out)


@case
def parameters_are_those_of_one_process(ranks: Ranks) -> None:
    options: dict[str, Any] = {"seed": multisample.Key(SEED, 3), "member": 2, "backend": ranks.backend}
    for dtype in DTYPES:
        wholes = {
            "vector": torch.linspace(-1, 1, 13), "matrix": torch.linspace(-2, 2, 7 * 10).reshape(7, 10),
            "kernel": torch.linspace(-2, 2, 8 * 3 * 5).reshape(8, 3, 5), "turned": torch.ones(6, 8).T,
        }  # fmt: skip
        wholes = {name: x.to(ranks.device, dtype) for name, x in wholes.items()}
        expected = multisample.perturb(wholes, [0.5, -1e-3], **options)
        for mesh, parts in ranks.parameters(wholes):
            results = multisample.perturb(parts, [0.5, -1e-3], **options)
            assert perturb_(parts, [0.5, -1e-3], **options) is parts
            for found, (name, x) in itertools.product((results, parts), expected.items()):
                ranks.check_part(found[name], x, mesh, parts[name].placements)


@case
def populations_and_gradients_are_those_of_one_process(ranks: Ranks) -> None:
    wholes = {"vector": torch.linspace(-1, 1, 13), "matrix": torch.linspace(-2, 2, 7 * 10).reshape(7, 10)}
    wholes = {name: x.to(ranks.device) for name, x in wholes.items()}
    options: dict[str, Any] = {"seed": [3, 4, 5], "decay": {"matrix": 0.25}, "backend": ranks.backend}
    expected = multisample.perturb(wholes, 0.5, **options)
    for _, parts in ranks.parameters(wholes):
        parts = {name: part.detach().requires_grad_(name == "matrix") for name, part in parts.items()}
        results = multisample.perturb(parts, 0.5, **options)
        assert results["matrix"].requires_grad and not results["vector"].requires_grad
        for name, result in results.items():
            assert same(result.detach().full_tensor(), expected[name]), (name, parts[name].placements)
        results["matrix"].sum().backward()
        gradient = parts["matrix"].grad
        assert gradient.placements == parts["matrix"].placements
        assert (gradient.full_tensor() == 0.75 * 3).all()


@case
def modules_with_tensor_and_data_parallelism_have_the_bits_of_one_process(ranks: Ranks) -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(12, 10), torch.nn.ReLU(), torch.nn.Linear(10, 6)).to(ranks.device)

    options: dict[str, Any] = {"seed": SEED, "backend": ranks.backend}
    expected = multisample.perturb(model(), 0.5, **options)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    for mesh, with_fsdp in ((ranks.line, False), (ranks.grid["shard"], False), (ranks.grid["shard"], True)):
        module = parallelize_module(model(), mesh, plan)
        if with_fsdp:
            fully_shard(module, mesh=ranks.grid["replica"])
        assert perturb_(module, 0.5, **options) is module
        for name, x in module.named_parameters():
            assert same(x.full_tensor().detach(), expected[name]), name


@case
def parameters_seen_before_have_a_plan(ranks: Ranks) -> None:
    """Tied, empty on some ranks, and beside a tensor that is not sharded."""
    wholes = {"a": torch.linspace(-1, 1, 13), "b": torch.linspace(-2, 2, 70).reshape(7, 10), "c": torch.ones(1)}
    wholes = {name: x.to(ranks.device) for name, x in wholes.items()}
    options: dict[str, Any] = {"seed": SEED, "backend": ranks.backend}
    expected = multisample.perturb(wholes, 0.5, **options)

    def make() -> dict[str, Any]:
        parts = {name: ranks.on(ranks.line, x.clone(), Shard(0)) for name, x in wholes.items()}
        return parts | {"tied": parts["b"], "whole": wholes["a"].clone()}

    first, others = make(), [make() for _ in range(3)]
    perturb_(first, 0.5, **options)
    results = multisample.perturb(others[0], 0.5, **options)
    assert results["tied"]._local_tensor is results["b"]._local_tensor
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_routes.dtensor._blocks_of", "_model_parameters.perturb_plan._run_first"):
            patch.setattr(f"multisample.{name}", None)
        found = [perturb_(parts, 0.5, **options) for parts in others]
        found.append(multisample.perturb(make(), 0.5, **options))
        # The results have specs that are known too.
        multisample.perturb(found[-1], 0.5, **options)
    longer = torch.ones(40, device=ranks.device)
    mixed = multisample.perturb(make() | {"whole": longer}, 0.5, **options)["whole"]
    assert same(mixed, multisample.perturb({"whole": longer}, 0.5, **options)["whole"])
    for parts in (first, *found):
        for name, x in expected.items():
            ranks.check_part(parts[name], x, ranks.line, [Shard(0)])
        assert same(parts["whole"], multisample.perturb({"whole": wholes["a"]}, 0.5, **options)["whole"])


@case
def wrong_parameters_are_refused(ranks: Ranks) -> None:
    whole = torch.zeros(8, device=ranks.device)
    part = ranks.on(ranks.line, whole, Shard(0))
    partial = DTensor.from_local(whole, ranks.line, [Partial()])
    short = DTensor.from_local(whole[:1], ranks.line, [Shard(0)], run_check=False, shape=torch.Size((80,)), stride=(1,))
    recorded = ranks.on(ranks.line, whole, Shard(0)).requires_grad_() * 2
    perturb_([part], 0.0, seed=SEED)
    for parameters, options, error, message in (
        ([part, partial], {}, ValueError, r"^parameters\[1\]: expected placements Shard or Replicate\(\), got"),
        ([part], {"out": [whole]}, TypeError, r"^out\[0\]: expected DTensor, as the parameter is, got Tensor$"),
        ([part], {"out": [ranks.on(ranks.line, whole, Replicate())]}, ValueError, r"^out\[0\]: expected it on"),
        ([short], {}, ValueError, r"^parameters\[0\]: expected a local tensor as large as its placements say, got"),
        ([part], {"out": [recorded]}, ValueError, r"^out\[0\]: expected a leaf, or a tensor that does not require"),
    ):
        for _ in range(2):
            with pytest.raises(error, match=message):
                multisample.perturb(parameters, 0.5, seed=SEED, **options)
    assert not part.to_local().any() and not partial.to_local().any()


@case
def nobody_communicates(ranks: Ranks) -> None:
    mu, sigma = ranks.vectors(13)
    rows = ranks.on(ranks.line, mu, Shard(0))
    both = ranks.on(ranks.grid, mu, Shard(0), Shard(0))
    calls: list[Callable[[], Any]] = [
        lambda: ranks.sample(rows, 1.0, 21),
        lambda: ranks.sample(both, ranks.on(ranks.grid, sigma, Replicate(), Replicate()), 21),
        lambda: ranks.sharded(mu, sigma, 21, ranks.line, [Shard(1)]),
        lambda: ranks.sharded(mu, sigma, 21, ranks.grid, [Shard(1), Shard(0)]),
        lambda: ranks.sharded(both, sigma, 21, ranks.grid, [Shard(0), Shard(0)]),
    ]
    for call in calls:
        before = ranks.collectives()
        call()
        assert ranks.collectives() == before
        if ranks.backend == "torch_ext":  # The only backend that calls operators in a dispatch mode.
            with Operators(lambda name: "c10d" in name.partition(".")[0]):
                call()
    torch.manual_seed(11)
    on_grid = lambda: ranks.sharded(mu, sigma, 21, ranks.grid, [Shard(1), Shard(0)], validate=True)  # noqa: E731
    for call, mesh in ((lambda: ranks.sample(rows, 1.0, 21, validate=True), ranks.line), (on_grid, ranks.grid)):
        before = ranks.collectives()
        call()
        # A dimension of one rank needs none.
        assert ranks.collectives() == before + sum(size > 1 for size in mesh.shape)


def default_state(ranks: Ranks) -> torch.Tensor:
    return torch.cuda.get_rng_state(ranks.device) if ranks.device_type == "cuda" else torch.get_rng_state()


def generators(ranks: Ranks) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Functions that make a source of randomness and read its state."""
    yield lambda: torch.manual_seed(11) and None, lambda generator: default_state(ranks).tolist()
    yield lambda: torch.Generator(ranks.device).manual_seed(11), lambda generator: generator.get_state().tolist()
    yield lambda: Generator(11), lambda generator: generator.state
    if ranks.device_type == "cuda":
        yield lambda: Generator(11, graph_safe=True), lambda generator: generator.state


@case
def generators_stay_level(ranks: Ranks) -> None:
    mu, sigma = ranks.vectors(1)  # Only one rank has a dimension.
    rows = ranks.on(ranks.line, mu, Shard(0))
    for make, state in generators(ranks):
        alone = make()
        wholes = [ranks.single(mu, sigma, 5, generator=alone) for _ in range(4)]
        after = state(alone)
        level = make()
        results = [
            (ranks.sample(*ranks.spread(ranks.line, (mu, sigma), Shard(0)), 5, generator=level), [Shard(0)]),
            (ranks.sharded(mu, sigma, 5, ranks.line, [Shard(1)], generator=level), [Shard(1)]),
            (ranks.sharded(rows, sigma, 5, ranks.line, [Shard(0)], generator=level, validate=True), [Shard(0)]),
            (ranks.sharded(mu, sigma, 5, ranks.line, [Replicate()], generator=level), [Replicate()]),
        ]
        assert state(level) == after
        for (result, placements), whole in zip(results, wholes, strict=True):
            ranks.check(result, whole, ranks.line, placements)
        assert not any(torch.equal(wholes[0], other) for other in wholes[1:])


@case
def ranks_that_differ_are_named(ranks: Ranks) -> None:
    mu, _ = ranks.vectors(13)
    rows = ranks.on(ranks.line, mu, Shard(0))
    odd = int(ranks.rank == 1)
    others = ", ".join(str(rank) for rank in range(ranks.size) if rank != 1)
    others = f"ranks {others}" if ranks.size > 2 else f"rank {others}"

    def differ(name: str, usual: Any, of_rank_1: Any) -> Any:
        message = f"^{name}: expected the same on every rank, got {usual} on {others}, {of_rank_1} on rank 1$"
        return pytest.raises(ValueError, match=message)

    mine = Generator(11)
    if odd:
        ranks.single(mu, 1.0, 1, generator=mine)
    state = mine.state
    for mesh, placements in ((ranks.line, [Shard(1)]), (ranks.grid, [Shard(1), Replicate()])):
        with differ("generator's offset", 0, 1):
            ranks.sharded(mu, 1.0, 9, mesh, placements, generator=mine, validate=True)
        assert mine.state == state
    torch.manual_seed(11 + odd)
    before = default_state(ranks)
    with differ("generator's seed", r"\d+", r"\d+"):
        ranks.sample(rows, 1.0, 9, validate=True)
    assert torch.equal(default_state(ranks), before)
    with differ("seed", 2**64 - 1, 2**64 - 2):
        ranks.sample(rows, 1.0, 9, seed=2**64 - 1 - odd, validate=True)
    for name, usual in (("n", 9), ("dim_offset", 0), ("sample_offset", 0)):
        call = {"n": 9, name: usual + odd}
        with differ(name, usual, usual + 1):
            ranks.sharded(mu, 1.0, mesh=ranks.line, placements=[Shard(1)], seed=1, validate=True, **call)


@case
def ranks_outside_the_mesh_have_nothing(ranks: Ranks) -> None:
    for members in ([0], list(range(1, ranks.size))):
        mesh = DeviceMesh(ranks.device_type, members)
        mu, sigma = ranks.vectors(5)
        for make, state in generators(ranks):
            alone = make()
            wholes = [ranks.single(mu, sigma, 21, generator=alone) for _ in range(2)]
            level = make()
            results = [ranks.sharded(mu, sigma, 21, mesh, [Shard(1)], generator=level, validate=True)]
            results.append(ranks.sample(*ranks.spread(mesh, (mu, sigma), Shard(0)), 21, generator=level))
            assert state(level) == state(alone)
            for result, whole, placement in zip(results, wholes, (Shard(1), Shard(0)), strict=True):
                ranks.check(result, whole, mesh, [placement])
                assert (result.to_local().numel() == 0) == (ranks.rank not in members)
        out = ranks.on(mesh, torch.zeros_like(wholes[0]), Shard(0))
        assert ranks.sharded(mu, sigma, 21, mesh, [Shard(0)], seed=SEED, out=out) is out
        ranks.check(out, ranks.single(mu, sigma, 21, seed=SEED), mesh, [Shard(0)])


def close(gradient: torch.Tensor, expected: torch.Tensor, scale: float) -> bool:
    """Whether sums of float32 in another order agree."""
    return gradient.shape == expected.shape and bool(((gradient - expected).abs() <= 1e-6 * scale).all())


@case
def gradients_are_those_of_a_single_device(ranks: Ranks) -> None:
    if ranks.backend != "torch_ext":
        rows = ranks.on(ranks.line, ranks.vectors(13)[0], Shard(0)).requires_grad_()
        with pytest.raises(ValueError, match=r"^mu: .*requires grad"):
            ranks.sample(rows, 1.0, 9)
        return
    n = 203
    whole, part, rows_of_part = [Replicate(), Replicate()], [Shard(0), Replicate()], [Replicate(), Shard(0)]
    for d, layout in ((13, "dn"), (13, "nd"), (1, "dn")):
        vectors = ranks.vectors(d)
        alone = [vector.clone().requires_grad_() for vector in vectors]
        matrix = ranks.single(*alone, n, seed=SEED, layout=layout)
        weights = torch.cos(torch.arange(d * n, device=ranks.device)).view(matrix.shape)
        (matrix * weights).sum().backward()
        expected = [vector.grad for vector in alone]
        for placements in every_placement(2):
            by_rows = [Shard(0) if p == Shard(int(layout == "nd")) else Replicate() for p in placements]
            for given in (whole, by_rows):
                spread = [ranks.on(ranks.grid, vector, *given).requires_grad_() for vector in vectors]
                result = ranks.sharded(*spread, n, ranks.grid, placements, seed=SEED, layout=layout)
                assert result.requires_grad
                ranks.check(result.detach(), matrix.detach(), ranks.grid, placements)
                local = result.to_local() * ranks.on(ranks.grid, weights, *placements).to_local()
                with CommDebugMode() as communication:
                    local.sum().backward()
                assert communication.get_total_counts() == 0
                for vector, right in zip(spread, expected, strict=True):
                    assert vector.grad.placements == tuple(
                        Partial() if of_vector == Replicate() and of_result != Replicate() else of_vector
                        for of_vector, of_result in zip(given, placements, strict=True)
                    )
                    assert close(vector.grad.full_tensor(), right, 2 * n), (given, placements)
        for given in (part, rows_of_part, [Shard(0), Shard(0)]):
            spread = [ranks.on(ranks.grid, vector, *given).requires_grad_() for vector in vectors]
            result = ranks.sample(*spread, n, seed=SEED, layout=layout)
            (result * ranks.on(ranks.grid, weights, *result.placements)).sum().backward()
            for vector, right in zip(spread, expected, strict=True):
                assert close(vector.grad.full_tensor(), right, 2 * n), given


@case
def gradients_of_plain_tensors_are_of_this_part(ranks: Ranks) -> None:
    if ranks.backend != "torch_ext":
        return
    vectors = ranks.vectors(13)
    alone = [vector.clone().requires_grad_() for vector in vectors]
    ranks.single(*alone, 103, seed=SEED).square().sum().backward()
    for placement in (Shard(0), Shard(1)):
        mine = [vector.clone().requires_grad_() for vector in vectors]
        result = ranks.sharded(*mine, 103, ranks.line, [placement], seed=SEED)
        result.to_local().square().sum().backward()
        for vector, right in zip(mine, alone, strict=True):
            distributed.all_reduce(vector.grad)
            assert close(vector.grad, right.grad, float(right.grad.abs().max()) + 103)


@case
def ranks_outside_the_mesh_take_no_part_in_gradients(ranks: Ranks) -> None:
    if ranks.backend != "torch_ext":
        return
    mesh = DeviceMesh(ranks.device_type, [0])
    mu, sigma = ranks.vectors(5)
    rows = ranks.on(mesh, mu, Shard(0)).requires_grad_()
    result = ranks.sharded(rows, sigma, 9, mesh, [Shard(0)], seed=SEED)
    if ranks.rank == 0:  # On other ranks PyTorch has no gradient of an empty local tensor.
        result.to_local().sum().backward()
        assert torch.equal(rows.grad.to_local(), torch.full_like(mu, 9))


@case
def wrong_arguments_are_refused(ranks: Ranks) -> None:
    mu, sigma = ranks.vectors(16)
    line, grid = ranks.line, ranks.grid
    rows = ranks.on(line, mu, Shard(0))
    partial = DTensor.from_local(mu, line, [Partial()])
    nested = torch.nested.as_nested_tensor([mu, mu[1:]])
    kind = ranks.device_type
    for call, error, message in (
        ({"mesh": [0, 1]}, TypeError, r"^mesh: expected a DeviceMesh, got \[0, 1\] of type list$"),
        ({"placements": Shard(1)}, ValueError, "^placements: expected 1, one for each dimension of the mesh, got"),
        ({"placements": [Shard(2)]}, ValueError, r"^placements: expected Shard\(0\), Shard\(1\) or Replicate\(\), got"),
        ({"mu": mu.cpu().numpy()}, TypeError, "^mu: expected a tensor or a number, got .* of type ndarray$"),
        ({"mu": mu.to("meta")}, ValueError, f"^mu: expected a tensor on the device type of mesh, {kind}, got meta"),
        ({"mu": nested}, TypeError, "^mu: expected a strided tensor, got a nested tensor$"),
        ({"mu": 0.0, "sigma": 1.0}, ValueError, "^mu, sigma: expected at least one"),
        ({"mu": mu[1:]}, ValueError, "^sigma: expected as many elements as mu, 15, got 16$"),
        ({"mu": mu.view(4, 4)}, ValueError, r"^mu: expected shape \(d,\) or \(d, 1\), got \(4, 4\); flatten it$"),
        ({"n": (2, 3)}, TypeError, r"^n: expected an integer, got \(2, 3\) of type tuple$"),
        ({"mu": partial}, ValueError, r"^mu: expected placements Shard\(0\) or .*; redistribute it$"),
        ({"mu": rows}, ValueError, "^mu: expected it replicated, or sharded over dimensions as the result is, got"),
        ({"mu": ranks.on(grid, mu, Shard(0), Shard(0))}, ValueError, "^mu: expected a DTensor on the same mesh"),
        ({"n": 2**34, "sample_offset": 1}, ValueError, r"^n: expected sample_offset \+ n <= 2\*\*34"),
        ({"dim_offset": 2**32 - 15}, ValueError, r"^dim_offset: expected .* <= 2\*\*32, got 4294967281 \+ 16$"),
        ({"layout": "nn"}, ValueError, "^layout: expected 'dn' or 'nd', got 'nn'$"),
        ({"validate": 1}, TypeError, "^validate: expected True or False"),
        ({"generator": 7, "validate": True}, TypeError, "^generator: expected a multisample.Generator"),
        ({"seed": -1, "validate": True}, ValueError, "^seed: expected 0 <= seed"),
        ({"seed": torch.arange(3)}, TypeError, "^seed: expected one seed for a sharded result, got a vector of 3$"),
    ):  # fmt: skip
        given = {"mu": mu, "sigma": sigma, "n": 9, "mesh": line, "placements": [Shard(1)], **call}
        torch.manual_seed(11)
        before = default_state(ranks)
        with pytest.raises(error, match=message):
            sample_sharded(**given)
        assert torch.equal(default_state(ranks), before)
    for one, other, error, message in (
        (ranks.on(line, mu[:, None].contiguous(), Shard(1)), 1.0, ValueError, r"^mu: expected placements Shard\(0\)"),
        (rows, sigma, TypeError, "^sigma: expected a DTensor or a number where other .* are DTensors, got .* Tensor$"),
        (mu, rows, TypeError, "^mu: expected a DTensor or a number where other arguments are DTensors, got .* Tensor$"),
        (rows, ranks.on(grid, sigma, Replicate(), Replicate()), ValueError, "^sigma: expected .* on the same mesh"),
        (rows, ranks.on(line, sigma[1:], Shard(0)), ValueError, "^sigma: expected as many elements as mu, 16, got 15$"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            ranks.sample(one, other, 9)
    if ranks.size > 2:
        whole, part = ranks.on(grid, mu, Shard(0), Shard(0)), ranks.on(grid, sigma, Replicate(), Shard(0))
        with pytest.raises(ValueError, match=r"^sigma: expected it replicated, or sharded over dimensions as"):
            ranks.sample(whole, part, 9, seed=1)
    with pytest.raises((ValueError, multisample.BackendUnavailableError), match=r"^backend: "):
        multisample.sample(rows, 1.0, 9, backend="cpu" if kind == "cuda" else "cupy")


@case
def cross_entropy_runs_exchange_scores_only(ranks: Ranks) -> None:
    def scores(x: torch.Tensor) -> torch.Tensor:
        return (x[0] - 1).abs() + (x[1] + 2).abs() + x[2] * x[2]

    mu, sigma = ranks.vectors(3)
    for n, options in ((100, {}), (37, {"antithetic": True, "smoothing": 0.7}), (2 * ranks.size + 1, {})):
        call: dict[str, Any] = {"seed": SEED, "elite_frac": 0.5, "backend": ranks.backend, **options}
        whole = multisample.cem.minimize(scores, mu, sigma, n, iterations=5, **call)
        before = ranks.collectives()
        found = minimize(scores, mu, sigma, n, mesh=ranks.line, iterations=5, **call)
        # One collective of scores in an iteration.
        assert ranks.collectives() - before <= found.nit == whole.nit
        assert all(same(getattr(found, name), getattr(whole, name)) for name in ("mu", "sigma", "x"))
        assert found.fun == whole.fun


def main(device_type: str, rank: int, size: int, folder: Path, backends: list[str]) -> None:
    torch.set_num_threads(1)
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    kind, store = "nccl" if device_type == "cuda" else "gloo", distributed.FileStore(str(folder / "store"), size)
    distributed.init_process_group(kind, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    ranks = Ranks(device_type, rank, size)
    failures = {}
    for ranks.backend in backends:
        if rank == 0:  # The other ranks read its compiled kernels from the cache.
            for dtype, call in kinds_of_draw():
                ranks.single(*ranks.vectors(3, dtype), 5, **call)
        distributed.barrier()
        for name, function in CASES.items():
            try:
                function(ranks)
            except (Exception, pytest.fail.Exception):
                failures[f"{name}[{ranks.backend}]"] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(failures))
    distributed.barrier()  # A rank must not exit while others wait for its messages.
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5].split(","))
