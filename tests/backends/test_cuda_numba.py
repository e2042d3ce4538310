"""Tests of the numba backend that need a CUDA device; ``test_cuda.py`` has the tests for all backends.

Functions shared by the GPU and the CPU compute the same numbers. Kernels wait for the stream of a Numba array, or of an
object with `__cuda_array_interface__`. Kernels are compiled once per machine.
"""

import functools
import itertools
import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_memory import CYCLES, SECONDS, Array, Exported, ToArray, known_sums, memory_of, on_cpu, vectors
from processes import run_python
from skip_rules import device_count, require, require_device
from tables import DTYPES, NOISES, STORE_KINDS, versions_of

import multisample
from multisample.backends.kernels.cuda.geometry import StoreKind

require_device()


@pytest.fixture
def numba() -> Any:
    """Operations on Numba's arrays; skips the test if the backend cannot run."""
    require("numba")
    return memory_of("numba")


def sample(*arguments: Any, **options: Any) -> Any:
    return multisample.sample(*arguments, backend="numba", **options)


def stream_of(array: Any) -> int | None:
    """The stream in the array's CUDA array interface."""
    stream: int | None = array.__cuda_array_interface__["stream"]
    return stream


def test_all_words_give_the_known_sums_and_correctly_rounded_radii(numba: Any) -> None:
    from llvmlite import ir
    from numba import cuda, njit
    from numba.extending import intrinsic

    from multisample.backends.kernels.stream.arithmetic import float_bits
    from multisample.backends.kernels.stream.normals import half_turns_f32, radius_f32

    @intrinsic
    def rounded(typingctx, square):
        def codegen(context, builder, signature, args):
            kind = ir.FunctionType(args[0].type, [args[0].type])
            return builder.asm(kind, "sqrt.rn.f32 $0, $1;", "=f,f", args, False)

        return square(square), codegen

    # `radius` with another square root.
    function = radius_f32.py_func
    assert "sqrt" in function.__code__.co_names
    names = {**function.__globals__, "sqrt": rounded}
    other = types.FunctionType(function.__code__, names, "rounded_radius", None, function.__closure__)
    rounded_radius = njit(forceinline=True)(other)

    # The options with which the backend compiles its kernels.
    @cuda.jit(lto=False, opt=True)
    def kernel(out):
        radii = cosines = sines = wrong = np.uint64(0)
        w, step = np.uint64(cuda.grid(1)), np.uint64(cuda.gridsize(1))
        while w < 2**32:
            word = np.uint32(w)
            radius = np.uint32(float_bits(radius_f32(word)))
            cosine, sine = half_turns_f32(np.int32(word))
            radii += np.uint64(radius)
            cosines += np.uint64(np.uint32(float_bits(cosine)))
            sines += np.uint64(np.uint32(float_bits(sine)))
            wrong += np.uint64(radius != np.uint32(float_bits(rounded_radius(word))))
            w += step
        cuda.atomic.add(out, 0, radii)
        cuda.atomic.add(out, 1, cosines)
        cuda.atomic.add(out, 2, sines)
        cuda.atomic.add(out, 3, wrong)

    out = cuda.to_device(np.zeros(4, np.uint64))
    kernel[2048, 256](out)
    *sums, wrong_radii = (int(number) for number in out.copy_to_host())
    assert sums == known_sums()
    assert wrong_radii == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_kernels_spill_no_registers_and_fit_their_launch_bounds(numba: Any, dtype: str) -> None:
    from multisample.backends.kernels.cuda.compilation import kernel_of
    from multisample.backends.kernels.cuda.keys import KernelKey
    from multisample.backends.kernels.cuda.plain import CALL, GEOMETRY

    device = numba.cuda.current_context().device
    kinds, flags = (StoreKind.kPlain, StoreKind.kPlainTransposed), (False, True)
    choices = itertools.product(flags, flags, flags, kinds)
    for number, (shared, antithetic, fast_math, store_kind) in enumerate(choices):
        if fast_math and dtype == "float64":
            continue
        # Rows with pairs or with shared noise have one turn in the wide types.
        kind, one_turn = STORE_KINDS[store_kind], antithetic or (shared and dtype == "float64")
        has_turns = kind == "plain_transposed" or not one_turn
        versions = [x for x in versions_of(kind, dtype, antithetic) if x[0] == 1 or has_turns]
        version = versions[(number // 2 + len(dtype)) % len(versions)]
        key = KernelKey(dtype, shared, antithetic, fast_math, store_kind, False, False, device.id, *version)
        function = kernel_of(key, device.compute_capability)
        kernel = function.compile((CALL, GEOMETRY))
        assert kernel.local_mem_per_thread == 0, (key, kernel.local_mem_per_thread)
        threads, blocks = function.targetoptions["launch_bounds"]
        assert kernel.max_threads_per_block >= threads
        # Registers are allocated in units of eight per thread.
        registers = -(-kernel.regs_per_thread // 8) * 8
        assert registers * threads * blocks <= device.MAX_REGISTERS_PER_MULTIPROCESSOR, key


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "float32"}, {"dtype": "float16"}], ids=["no dtype", "float32", "float16"]
)
def test_a_result_names_the_stream_on_which_it_is_ready(numba: Any, bits: ToArray, options: dict[str, Any]) -> None:
    d, n = 300, 1031
    mu, sigma = numba.put(np.zeros(d, np.float32)), numba.put(np.ones(d, np.float32))
    numba.synchronize()
    expected = bits(on_cpu([5.0] * d, [1.0] * d, n, **{"dtype": "float32", **options}, seed=3))
    assert stream_of(sample(mu, sigma, n, seed=3, **options)) is None
    with numba.stream() as stream:
        mu = mu.bind(stream)
        for cycles in (1, CYCLES):
            numba.keep_busy(cycles)
            numba.fill(mu, 5.0)
            x = sample(mu, sigma, n, seed=3, **options)
            assert stream_of(x) == int(stream)
            ready = numba.marker()
        assert not ready(), "the call waited for the device"
        # A consumer (here Numba) waits for that stream, and may then read the memory on another stream.
        taken = numba.cuda.as_cuda_array(Exported(x, stream=stream_of(x)))
        assert ready()
        assert np.array_equal(bits(taken.bind(0)), expected)
        # If one input is a number, the other input names the stream.
        assert stream_of(sample(0.5, mu, n, seed=3, **options)) == int(stream)
    # The result is `out` itself, which names no stream.
    out = numba.cuda.device_array((d, n), options.get("dtype", "float32"))
    assert sample(mu, sigma, n, seed=3, out=out, **options) is out
    assert stream_of(out) is None
    numba.synchronize()
    assert np.array_equal(bits(out), expected)


# int() of Numba's default stream gives a subclass of int.
@pytest.mark.filterwarnings("ignore:__int__ returned non-int:DeprecationWarning")
@pytest.mark.parametrize("kind", ["stream", "default_stream", "legacy_default_stream", "per_thread_default_stream"])
def test_every_kind_of_stream_is_accepted(numba: Any, bits: ToArray, kind: str) -> None:
    host = vectors(300)
    stream = getattr(numba.cuda, kind)()
    mu, sigma = (numba.put(x).bind(stream) for x in host)
    numba.synchronize()
    for options in ({}, {"dtype": "float64"}):
        x = sample(mu, sigma, 700, seed=4, **options)
        assert stream_of(x) == stream_of(mu)
        numba.synchronize()
        expected = bits(on_cpu(*host, 700, **{"dtype": "float32", **options}, seed=4))
        assert np.array_equal(bits(x.bind(0)), expected), options


def test_misaligned_elements_raise(numba: Any) -> None:
    d, n = 5, 70
    mu, sigma = map(numba.put, vectors(d))
    buffer, untouched = numba.poisoned(8192), numba.poisoned(8192)
    generator = multisample.Generator(1)

    def at(start: int, shape: tuple[int, ...], *strides: int) -> Any:
        return numba.at(buffer, start, shape, strides, "float32")

    cases: list[tuple[str, dict[str, Any]]] = [
        ("mu", {"mu": at(2, (d,), 4)}),
        ("mu", {"mu": at(0, (d,), 6)}),
        ("sigma", {"sigma": at(1, (d,), 4)}),
        ("sigma", {"sigma": at(4, (d,), -2)}),
        ("out", {"out": at(2, (d, n), 4 * n, 4)}),
        ("out", {"out": at(0, (d, n), 4 * n + 2, 4)}),
        ("out", {"out": at(0, (d, n), 4, 4 * d + 1)}),
    ]
    for (name, wrong), extra in itertools.product(cases, ({}, {"dtype": "float32"})):
        arguments = {"mu": mu, "sigma": sigma, "n": n, "generator": generator, **extra, **wrong}
        with pytest.raises(ValueError, match=rf"^{name}: expected elements at multiples of their size, 4 bytes, got"):
            sample(**arguments)
    assert generator.offset == 0
    assert numba.same(buffer, untouched)


def test_types_without_real_numbers_raise(numba: Any) -> None:
    sigma = numba.put(np.ones(3, np.float32))
    for dtype in ("complex64", "bool", "datetime64[s]", [("x", "f4")]):
        mu = numba.cuda.device_array(3, dtype)
        with pytest.raises(TypeError, match=r"^mu: expected elements of type float16, bfloat16, float32, float64 or"):
            sample(mu, sigma, 4, seed=1)
    with pytest.raises(TypeError, match=r"^generator: expected a multisample.Generator with a Numba device array"):
        sample(sigma, sigma, 4, generator=pytest.importorskip("torch").Generator())
    for message, wrong in (
        ("memory can be shared", Exported(sigma, mask=Exported(sigma))),
        ("expected elements of type", Exported(sigma, typestr="<c8", strides=None)),
    ):
        with pytest.raises(TypeError, match=f"^mu: .*{message}"):
            sample(wrong, 1.0, 70)


def run(script: str, *arguments: str, **environment: str) -> Any:
    """The last line of a script's output, parsed as JSON. The script can import the modules of the tests."""
    return json.loads(run_python("-c", script, *arguments, seconds=SECONDS, **environment).stdout.splitlines()[-1])


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file, with numbers that change if the file is replaced."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.rglob("*") if path.is_file()}


def listed(arrays: list[Array], bits: ToArray) -> list[Any]:
    return [bits(array).tolist() for array in arrays]


CACHED = """
import json
import sys

import numpy as np
from numba import cuda
from numba.cuda import dispatcher

import multisample

compiled = []
compile_cuda = dispatcher.compile_cuda


def counted(*arguments, **options):
    compiled.append(1)
    return compile_cuda(*arguments, **options)


dispatcher.compile_cuda = counted
mu, sigma = (cuda.to_device(np.array(x, np.float32)) for x in ([1, 2, -3], [1, 0.5, 2]))
drawn = []
for n, options in json.loads(sys.argv[1]):
    x = multisample.sample(mu, sigma, n, seed=5, backend="numba", **options).copy_to_host()
    drawn.append(x.view(f"u{x.itemsize}").tolist())
print(json.dumps({"compiled": len(compiled), "drawn": drawn}))
"""


def test_a_kernel_is_compiled_once_for_all_processes_unless_damaged(numba: Any, bits: ToArray, tmp_path: Path) -> None:
    calls: list[Any] = [(8, {}), (7, {"noise": "shared"}), (7, {"dtype": "float16", "sample_offset": 1})]
    draw_all = functools.partial(run, CACHED, json.dumps(calls), MULTISAMPLE_CACHE_DIR=str(tmp_path))
    first = draw_all()
    kept = files_in(tmp_path)
    assert first["compiled"] > 0
    assert len([path for path in kept if Path(path).name.startswith("cuda-sample_kernel_")]) == 3
    second = draw_all()
    assert second["compiled"] == 0
    assert files_in(tmp_path) == kept
    mu, sigma = [1.0, 2.0, -3.0], [1.0, 0.5, 2.0]
    expected = listed([on_cpu(mu, sigma, n, **{"dtype": "float32", **options}, seed=5) for n, options in calls], bits)
    assert first["drawn"] == second["drawn"] == expected
    for path in (tmp_path / "numba").iterdir():
        path.write_bytes(path.read_bytes()[:-1000] + bytes(1000))
    assert draw_all(PYTHONWARNINGS="ignore") == first
    assert draw_all()["compiled"] == 0


FIRST_AT_ONCE = """
import concurrent.futures
import json
import sys
import threading

import numpy as np
from numba import cuda

import multisample

mu, sigma = (cuda.to_device(np.array(x, np.float32)) for x in ([1, 2, -3], [1, 0.5, 2]))
every = json.loads(sys.argv[1])
outs = [cuda.device_array((3, 8), options.get("dtype", "float32")) for options in every]
together = threading.Barrier(len(every))


def draw(thread):
    # Every second thread passes `out`, and so makes no context.
    out = {"out": outs[thread]} if thread % 2 == 0 else {}
    together.wait()
    x = multisample.sample(mu, sigma, 8, seed=thread, backend="numba", **every[thread], **out)
    cuda.synchronize()
    return x


with concurrent.futures.ThreadPoolExecutor(len(every)) as pool:
    drawn = [x.copy_to_host() for x in pool.map(draw, range(len(every)))]
print(json.dumps([x.view(f"u{x.itemsize}").tolist() for x in drawn]))
"""


def test_first_calls_from_several_threads_are_correct(numba: Any, bits: ToArray, tmp_path: Path) -> None:
    # Four threads use one kernel and two use others.
    every: list[dict[str, Any]] = [{}, {}, {}, {}, {"noise": "shared"}, {"dtype": "float64"}]
    drawn = run(FIRST_AT_ONCE, json.dumps(every), MULTISAMPLE_CACHE_DIR=str(tmp_path))
    mu, sigma = [1.0, 2.0, -3.0], [1.0, 0.5, 2.0]
    expected = [on_cpu(mu, sigma, 8, **{"dtype": "float32", **o}, seed=thread) for thread, o in enumerate(every)]
    assert drawn == listed(expected, bits)


@pytest.fixture
def two_devices(numba: Any) -> Any:
    if device_count() < 2:
        pytest.skip("there is only one CUDA device")
    return numba


@pytest.mark.parametrize("noise", NOISES)
def test_host_data_is_copied_to_the_current_device(two_devices: Any, bits: ToArray, noise: str) -> None:
    host = vectors(7)
    expected = bits(on_cpu(*host, 33, seed=6, noise=noise))
    for device in (0, 1):
        with two_devices.device(device):
            x = sample(*host, 33, seed=6, noise=noise)
            assert two_devices.device_of(x) == device
            assert two_devices.current_device() == device
            assert np.array_equal(bits(x), expected)
