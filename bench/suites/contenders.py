"""The contenders: our backends, and the libraries that people use today.

`start` of a contender does the untimed work. It returns the call to time, or named variants: the fastest counts.
A call uses vectors of the contender's own library and returns a new matrix of shape (d, n).
For the results of other operations, see their checks in `OPERATIONS`. Libraries are imported on first use.
"""

import functools
import itertools
import operator
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import multisample
from bench.suites import curanddx_peer, mkl_peer
from bench.suites.cases import MODES, Case, vectors, weights
from bench.suites.sample_checks import OPERATIONS
from multisample.backends.native import library_cache, toolchain
from multisample.backends.system.threads import thread_count

Call = Callable[[], Any]
Variants = dict[str, Call]

MATRICES = ("sample", "batch")
FILLS = ("sample", "fill")
EVERY_DTYPE = ("float32", "float16", "bfloat16", "float64")
EVERYTHING: dict[str, Any] = {
    "noises": ("independent", "shared"), "dtypes": EVERY_DTYPE, "operations": (*MATRICES, "perturb", "moments"),
}  # fmt: skip
BARE = "applies neither mu nor sigma"


@dataclass(frozen=True)
class Contender:
    name: str
    start: Callable[[Case, str], Call | Variants]  # What is timed for a case and a mode. Peers ignore it.
    reason: Callable[[], str | None] = lambda: None  # Why it cannot run here, or None.
    ours: bool = False
    lacks: str | None = None  # What the others of its group do and this contender does not.
    noises: tuple[str, ...] = ("independent",)
    dtypes: tuple[str, ...] = ("float32",)
    modes: tuple[str, ...] = tuple(MODES)  # The modes in which it is compared.
    operations: tuple[str, ...] = ("sample",)
    most_samples: int | None = None
    wait: Callable[[Any], None] | None = None  # Waits for a result outside the device's default stream.

    def fits(self, case: Case) -> bool:
        return (
            case.operation in self.operations
            and case.noise in self.noises
            and case.dtype in self.dtypes
            and (self.most_samples is None or case.n <= self.most_samples)
        )


@functools.cache
def cuda_reason() -> str | None:
    """Why nothing can be timed on a CUDA device here, or None. CuPy takes the times."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # A missing or broken installation may raise anything.
        return f"CuPy has no CUDA device here ({type(error).__name__}: {str(error).splitlines()[0]})"
    return None


def _torch_reason() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "this PyTorch has no CUDA device"


def _module_reason(name: str) -> str | None:
    return None if toolchain.is_installed(name) else f"no module {name} is installed"


@functools.cache
def _jax_reason(platform: str) -> str | None:
    if reason := _module_reason("jax"):
        return reason
    try:
        _jax().devices(platform)
    except RuntimeError as error:
        return f"this JAX has no {platform} device ({str(error).splitlines()[0]})"
    return None


def _jax() -> Any:
    # By default JAX reserves most of a GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    return jax


def _vectors(case: Case, place: str) -> list[Any]:
    """mu and sigma in arrays of NumPy or CuPy, or in tensors on the CPU or on the GPU."""
    if place == "numpy":
        return [vector.astype(case.dtype) for vector in vectors(case.d)]
    if place == "cupy" and case.dtype != "bfloat16":  # CuPy has bfloat16 only with another package.
        import cupy

        return [cupy.asarray(vector.astype(case.dtype)) for vector in vectors(case.d)]
    import torch

    device = "cpu" if place == "cpu" else "cuda"
    return [torch.from_numpy(vector).to(device, getattr(torch, case.dtype)) for vector in vectors(case.d)]


def _columns(arrays: list[Any], case: Case) -> list[Any]:
    """`arrays` of shape (d,) as columns of a matrix, or of the matrices of a batch."""
    return [vector.reshape(*case.shape[:-1], 1) for vector in arrays]


def _filling(case: Case, fill: Callable[[Any], object]) -> Call:
    """A call that fills a new array of CuPy."""
    import cupy

    def call() -> Any:
        out = cupy.empty((case.d, case.n), np.float32)
        fill(out)
        return out

    return call


def _like(vector: Any, array: np.ndarray[Any, Any]) -> Any:
    """`array` in the library and on the device of `vector`, of its type if both are floating."""
    library, floating = sys.modules[type(vector).__module__.partition(".")[0]], array.dtype.kind == "f"
    if library.__name__ == "torch":
        return library.from_numpy(array).to(vector.device, vector.dtype if floating else library.int64)
    return library.asarray(array, vector.dtype if floating else None)


def _ours(backend: str, place: str) -> Contender:
    """Our calls. `sample` gets no seed: it uses the default generator of the arrays' library, as peers do.

    The numba backend gets CuPy's arrays: Numba allocates its own without a pool, which takes ten times as long.
    """

    def start(case: Case, mode: str) -> Call:
        return _our_call(case, *_vectors(case, place), backend=backend, **MODES[mode])

    def reason() -> str | None:
        reasons = multisample.list_backends()[backend].reasons
        return "; ".join(reasons or (library_cache.cuda_reasons() if place == "cuda" else ())) or None

    everything = EVERYTHING | {"operations": tuple(OPERATIONS)}
    return Contender(backend, start, reason, ours=True, **everything)


def _our_call(case: Case, mu: Any, sigma: Any, **options: Any) -> Call:
    """A call of ours, with other numbers each time."""
    if case.operation == "batch":
        mu, sigma, seeds = _batch(case, mu, sigma)
        return lambda: multisample.sample(mu, sigma, case.n, seed=next(seeds), **options)
    calls = itertools.count()
    if case.operation == "perturb":
        p, many = 0 * mu[:1].repeat(case.n), sigma if case.d > 1 else float(sigma[0])
        return lambda: multisample.perturb(p, many, seed=multisample.Key(7, next(calls)), out=p, **options)
    if case.operation == "moments":
        w = _like(mu, weights(case.n))
        return lambda: multisample.weighted_moments(w, mu, sigma, seed=next(calls), **options)
    if case.operation == "fill":
        options["out"] = _like(mu, np.zeros((case.d, case.n)))
    return functools.partial(multisample.sample, mu, sigma, case.n, noise=case.noise, **options)


def _batch(case: Case, mu: Any, sigma: Any) -> tuple[Any, Any, Iterator[Any]]:
    seeds = [_like(mu, np.arange(case.matrices) + k * case.matrices) for k in range(16)]
    return mu.reshape(case.matrices, -1), sigma.reshape(case.matrices, -1), itertools.cycle(seeds)


def _loop(place: str, case: Case, mode: str) -> Call:
    mu, sigma, _ = _batch(case, *_vectors(case, place))
    seeds = itertools.count()
    return lambda: [multisample.sample(*row, case.n, seed=next(seeds)) for row in zip(mu, sigma, strict=True)]


def _flat(place: str, case: Case, mode: str) -> Call:
    mu, sigma = _vectors(case, place)
    return lambda: multisample.sample(mu, sigma, case.n).reshape(case.shape)


def _vmap(device: str, case: Case, mode: str) -> Call:
    import torch

    mu, sigma, seeds = _batch(case, *_vectors(case, device))
    draw = torch.func.vmap(lambda mu, sigma, seed: multisample.sample(mu, sigma, case.n, seed=seed))
    return lambda: draw(mu, sigma, next(seeds))


def _sample_and_product(device: str, case: Case, mode: str) -> Call:
    mu, sigma = _vectors(case, device)
    w = _like(mu, weights(case.n))
    return lambda: _moments(multisample.sample(mu, sigma, case.n), mu[:, None], w)


def _moments(x: Any, mu: Any, w: Any) -> tuple[Any, Any]:
    return x @ w, (x - mu) ** 2 @ w


def _torch_eager(device: str, case: Case, mode: str) -> functools.partial[Any]:
    """What users of PyTorch write, with its arguments."""
    import torch

    mu, sigma = _columns(_vectors(case, device), case)
    shape, dtype, place = case.shape if case.noise == "independent" else (1, case.n), mu.dtype, mu.device

    def draw(mu: Any, sigma: Any) -> Any:
        return mu + sigma * torch.randn(shape, dtype=dtype, device=place)

    def moments(mu: Any, sigma: Any, w: Any) -> Any:
        return _moments(draw(mu, sigma), mu, w)

    def perturb(p: Any) -> Any:
        for coefficient in coefficients:
            p.add_(torch.randn_like(p), alpha=coefficient)
        return p

    if case.operation == "perturb":
        coefficients = sigma[:, 0].tolist()
        return functools.partial(perturb, 0 * mu[0].repeat(case.n))
    if case.operation == "moments":
        return functools.partial(moments, mu, sigma, _like(mu, weights(case.n)))
    return functools.partial(draw, mu, sigma)


def _torch_compile(case: Case, mode: str) -> Variants:
    """The compiled expression; for headlines also tuned. Without CUDA graphs, which would overwrite earlier results."""
    import torch

    torch.compiler.reset()  # Each shape gets its own, best code.
    call = _torch_eager("cuda", case, mode)
    return {
        way: functools.partial(torch.compile(call.func, fullgraph=True, dynamic=False, mode=way), *call.args)
        for way in ("default", "max-autotune-no-cudagraphs")[: 1 + case.headline]
    }


def _normal_rsample(device: str, case: Case, mode: str) -> Call:
    import torch

    mu, sigma = _columns(_vectors(case, device), case)
    return torch.distributions.Normal(mu, sigma).expand(case.shape).rsample


def _torch_randn(device: str, case: Case, mode: str) -> Call:
    import torch

    shape, dtype = (case.d, case.n), getattr(torch, case.dtype)
    if case.operation == "fill":
        return torch.zeros(shape, dtype=dtype, device=device).normal_
    return functools.partial(torch.randn, shape, dtype=dtype, device=device)


def _torch_func_random(case: Case, mode: str) -> Call:
    """PyTorch's generator with keys, from PyTorch 2.12 on, on CUDA only."""
    from torch.func import _random

    mu, sigma = _columns(_vectors(case, "cuda"), case)
    key, calls = _random.key(7, device=mu.device), itertools.count()
    return lambda: mu + sigma * _random.normal(_random.fold_in(key, next(calls)), case.shape)


def _original_kernel(case: Case, mode: str) -> Call:
    from torch.utils.cpp_extension import load

    source = Path(__file__).with_name("original_kernel.cu")
    extension = load("original_kernel", [str(source)], extra_cuda_cflags=["-O3", "--use_fast_math"])
    return functools.partial(extension.sample, *_vectors(case, "cuda"), case.n)


def _cupy(generator: bool, case: Case, mode: str) -> Call:
    import cupy

    mu, sigma = _columns(_vectors(case, "cupy"), case)
    if not generator:
        return functools.partial(cupy.random.RandomState(7).normal, mu, sigma, (case.d, case.n), dtype=np.float32)
    rng = cupy.random.default_rng(7)
    return lambda: mu + sigma * rng.standard_normal((case.d, case.n), dtype=np.float32)


def _curand_host(case: Case, mode: str) -> Variants:
    """cuRAND's host interface through CuPy, with its fastest generator, Philox, in both of its orderings."""
    from cupy.cuda import curand

    def variant(ordering: int) -> Call:
        generator = curand.createGenerator(curand.CURAND_RNG_PSEUDO_PHILOX4_32_10)
        curand.setPseudoRandomGeneratorSeed(generator, 7)
        curand.setGeneratorOrdering(generator, ordering)
        curand.setStream(generator, 0)
        return _filling(case, lambda out: curand.generateNormal(generator, out.data.ptr, out.size, 0.0, 1.0))

    # Constants of curand.h: CURAND_ORDERING_PSEUDO_DEFAULT and CURAND_ORDERING_PSEUDO_DYNAMIC.
    return {"default ordering": variant(101), "dynamic ordering": variant(104)}


def _curanddx(options: tuple[str, ...], case: Case, mode: str) -> Variants:
    """Calls of all variants. With fewer than 128 columns, a block for each row would have idle threads."""
    import cupy

    draw = curanddx_peer.compiled(cupy.cuda.Device().compute_capability, *options)
    mu, sigma = _vectors(case, "cupy")
    calls = itertools.count()

    def fill(variant: int, out: Any) -> None:
        draw(out.data.ptr, mu.data.ptr, sigma.data.ptr, case.d, case.n, next(calls), variant, 0)

    return {
        name: _filling(case, functools.partial(fill, number))
        for number, name in enumerate(curanddx_peer.VARIANTS)
        if case.n >= 128 or not name.startswith("a row")
    }


def _triton_randn(case: Case, mode: str) -> Variants:
    import torch

    from bench.suites import triton_peer

    mu, sigma = _vectors(case, "cuda")
    calls = itertools.count()

    def call(tile: int, warps: int) -> Any:
        out = torch.empty((case.d, case.n), device=mu.device)
        triton_peer.launch(out, mu, sigma, next(calls), tile, warps)
        return out

    tiles = ((128, 1), (256, 2), (512, 4), (1024, 4), (1024, 8))
    return {f"{tile} groups, {warps} warps": functools.partial(call, tile, warps) for tile, warps in tiles}


def _numba_xoroshiro(case: Case, mode: str) -> Call:
    """The kernel that people write with `numba.cuda.random`: xoroshiro128+, with a state for each thread."""
    from numba import cuda
    from numba.cuda.random import create_xoroshiro128p_states, xoroshiro128p_normal_float32

    @cuda.jit
    def draw(states, mu, sigma, out):  # type: ignore[no-untyped-def]
        first = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        state = first * cuda.blockDim.x + cuda.threadIdx.x
        for i in range(first, out.shape[0], cuda.gridDim.x * cuda.blockDim.y):
            for j in range(cuda.threadIdx.x, out.shape[1], cuda.blockDim.x):
                out[i, j] = mu[i] + sigma[i] * xoroshiro128p_normal_float32(states, state)

    threads = 256
    width = min(threads, 1 << (case.n - 1).bit_length())
    rows, most_blocks = threads // width, 8 * cuda.get_current_device().MULTIPROCESSOR_COUNT
    blocks = min(-(-case.d // rows), most_blocks)
    arguments = create_xoroshiro128p_states(blocks * threads, seed=7), *map(cuda.as_cuda_array, _vectors(case, "cupy"))
    kernel = draw[blocks, (width, rows)]
    return _filling(case, lambda out: kernel(*arguments, cuda.as_cuda_array(out, sync=False)))


def _jax_normal(platform: str, implementation: str, case: Case, mode: str) -> Call:
    jax = _jax()
    device = jax.devices(platform)[0]
    mu, sigma = (jax.device_put(vector[:, None], device) for vector in _vectors(case, "numpy"))
    key = jax.device_put(jax.random.key(7, impl=implementation), device)

    @jax.jit
    def step(key: Any, mu: Any, sigma: Any) -> tuple[Any, Any]:
        key, used = jax.random.split(key)
        return key, mu + sigma * jax.random.normal(used, (case.d, case.n), mu.dtype)

    def draw() -> Any:
        nonlocal key
        key, result = step(key, mu, sigma)
        return result

    return draw


def _numpy(case: Case, mode: str) -> Call:
    mu, sigma = _columns(_vectors(case, "numpy"), case)
    rng = np.random.default_rng(7)
    shape = case.shape if case.noise == "independent" else (1, case.n)
    w, p = weights(case.n).astype(mu.dtype), np.zeros(case.n, mu.dtype)

    def draw() -> Any:
        return mu + sigma * rng.standard_normal(shape, dtype=mu.dtype)

    def perturb() -> Any:
        for coefficient in sigma:
            np.add(p, coefficient * rng.standard_normal(case.n, dtype=mu.dtype), out=p)
        return p

    return {"moments": lambda: _moments(draw(), mu, w), "perturb": perturb}.get(case.operation, draw)


def _numpy_bare(case: Case, mode: str) -> Call:
    rng = np.random.default_rng(7)
    out = np.zeros((case.d, case.n), case.dtype) if case.operation == "fill" else None
    return lambda: rng.standard_normal((case.d, case.n), dtype=case.dtype, out=out)


def _mkl(bare: bool, case: Case, mode: str) -> Variants:
    columns = None if bare else [vector[:, None] for vector in _vectors(case, "numpy")]
    same = np.zeros((case.d, case.n), np.float32)

    def call(fill: Callable[..., None]) -> Any:
        out = same if case.operation == "fill" else np.empty_like(same)
        fill(out, columns)
        return out

    return {
        f"{generator}, threads: {threads}": functools.partial(call, mkl_peer.filling(generator, threads))
        for generator in mkl_peer.GENERATORS
        for threads in sorted({1, min(thread_count(), case.d)})
    }


def _peer(name: str, start: Callable[..., Call | Variants], *first: Any, **other: Any) -> Contender:
    return Contender(name, functools.partial(start, *first), **other)


def _jax_peer(name: str, platform: str, implementation: str) -> Contender:
    reason, wait = functools.partial(_jax_reason, platform), operator.methodcaller("block_until_ready")
    return _peer(name, _jax_normal, platform, implementation, reason=reason, wait=wait)


def _users_of_torch(device: str, place: str, **other: Any) -> list[Contender]:
    """Peers in PyTorch on `device`. The loop and the flattened call run `multisample.sample` on arrays of `place`."""
    return [
        _peer("torch_eager", _torch_eager, device, **EVERYTHING, **other),
        _peer("normal_rsample", _normal_rsample, device, dtypes=EVERY_DTYPE, operations=MATRICES, **other),
        _peer("loop", _loop, place, operations=("batch",), **other),
        _peer("flat", _flat, place, operations=("batch",), **other),
        _peer("vmap", _vmap, device, operations=("batch",), **other),
        _peer("sample_and_product", _sample_and_product, device, operations=("moments",), **other),
    ]


_curanddx_reason = functools.partial(curanddx_peer.missing, curanddx_peer.HEADERS)

_CUDA = (
    _ours("torch_ext", "cuda"),
    _ours("cupy", "cupy"),
    _ours("numba", "cupy"),
    *_users_of_torch("cuda", "cuda", reason=_torch_reason),
    _peer("original_kernel", _original_kernel, reason=_torch_reason, noises=("shared",), most_samples=1024),
    _peer("torch_compile", _torch_compile, reason=_torch_reason, **EVERYTHING),
    _peer("torch_func_random", _torch_func_random, reason=functools.partial(_module_reason, "torch.func._random")),
    _peer("triton_randn", _triton_randn, reason=functools.partial(_module_reason, "triton")),
    _peer("numba_xoroshiro", _numba_xoroshiro, reason=functools.partial(_module_reason, "numba.cuda.random")),
    _peer("cupy_random", _cupy, False),
    _peer("cupy_generator", _cupy, True),
    _peer("curand_host", _curand_host, lacks=BARE),
    _peer("curanddx", _curanddx, (), reason=_curanddx_reason),
    _peer("curanddx_fast_math", _curanddx, curanddx_peer.FAST, reason=_curanddx_reason, modes=("fast_math",)),
    _jax_peer("jax", "cuda", "threefry2x32"),
    _jax_peer("jax_rbg", "cuda", "rbg"),  # JAX's faster generator.
)
_CPU = (
    _ours("cpu", "numpy"),
    _ours("torch_ext", "cpu"),
    *_users_of_torch("cpu", "numpy"),
    _peer("numpy", _numpy, **EVERYTHING),
    _peer("numpy_bare", _numpy_bare, lacks=BARE, operations=FILLS),
    _peer("mkl", _mkl, False, reason=mkl_peer.missing),
    _peer("mkl_bare", _mkl, True, reason=mkl_peer.missing, lacks=BARE, operations=FILLS),
    _peer("torch_randn", _torch_randn, "cpu", lacks=BARE, operations=FILLS),
    _jax_peer("jax", "cpu", "threefry2x32"),
)
CUDA, CPU = ({contender.name: contender for contender in contenders} for contenders in (_CUDA, _CPU))
