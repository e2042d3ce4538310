"""Tests of the numba backend that need a CUDA device; ``test_cuda.py`` has the tests for all backends.

The functions that the GPU shares with the CPU compute the same numbers. Kernels wait for the streams that Numba arrays
and objects with a protocol name. Kernels are compiled once per machine.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_memory import (
    CYCLES,
    SECONDS,
    Array,
    Exported,
    ExportedByDlpack,
    ToArray,
    device_count,
    known_sums,
    memory_of,
    numpy_dtype,
    on_cpu,
    require,
    vectors,
)
from places import SUPPORT
from tables import DTYPES, NOISES

import multisample
from multisample import _backends
from multisample.backends import registry
from multisample.backends.kernels.cuda import geometry


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


# --- The transform, for every word ----------------------------------------------------------------


@pytest.fixture(scope="module")
def over_all_words() -> list[int]:
    """Sums of the transform's bit patterns over all words, and the number of incorrectly rounded radii."""
    require("numba")
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
    other = types.FunctionType(function.__code__, {**function.__globals__, "sqrt": rounded}, "rounded_radius")
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
    return [int(number) for number in out.copy_to_host()]


def test_all_words_give_the_known_sums(over_all_words: list[int]) -> None:
    assert over_all_words[:3] == known_sums()


def test_the_square_root_is_correctly_rounded_for_every_word(over_all_words: list[int]) -> None:
    assert over_all_words[3] == 0


# --- Registers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_spill_few_registers_and_fit_their_launch_bounds(numba: Any, dtype: str) -> None:
    from multisample.backends.kernels.cuda.compilation import launch_bounds
    from multisample.backends.launch import KernelKey

    backend: Any = registry.find("numba")
    device = numba.cuda.current_context().device
    ways = range(len(geometry.KERNEL_STORES))
    flags = (False, True)
    for shared, antithetic, fast_math, stores in itertools.product(flags, flags, flags, ways):
        # fast_math and antithetic are tested separately, not in combination.
        if fast_math and (dtype == "float64" or antithetic):
            continue
        key = KernelKey(dtype, shared, antithetic, fast_math, stores, False, False, device.id)
        backend.kernel(key)
        kernel = backend.compiled[key]
        name = geometry.KERNEL_STORES[stores]
        # Some kernels spill a few registers outside their loops (test_numba_ptx.py), and more before 9.0.
        most = 24 if device.compute_capability >= (9, 0) else 64
        assert kernel.local_mem_per_thread <= most, (key, kernel.local_mem_per_thread)
        threads, blocks = launch_bounds(dtype, shared, antithetic, stores, device.compute_capability)
        most_threads = {"kTransposed": 128, "kTransposedStaged": 256 if shared else 128}
        assert kernel.max_threads_per_block >= threads == most_threads.get(name, geometry.MOST_THREADS)
        # Registers are allocated in units of eight per thread.
        registers = -(-kernel.regs_per_thread // 8) * 8
        assert registers * threads * blocks <= device.MAX_REGISTERS_PER_MULTIPROCESSOR, (name, shared, fast_math)


# --- Host data ------------------------------------------------------------------------------------


def test_host_data_gives_a_numba_array(numba: Any, bits: ToArray) -> None:
    for d, n in [(3, 5), (300, 1027)]:
        mu, sigma = vectors(d)
        for given in (
            (mu, sigma),
            (mu.tolist(), sigma.tolist()),
            (mu.astype(np.float64), sigma),
            (mu, 2),
            (-1.5, sigma[:, None]),
            (np.repeat(mu, 2)[::2], sigma),
        ):
            options: dict[str, Any]
            for options in ({}, {"dtype": "float16"}, {"dtype": "bfloat16"}, {"noise": "shared", "sample_offset": 1}):
                expected = np.asarray(multisample.sample(*given, n, backend="cpu", seed=9, **options))
                x = sample(*given, n, seed=9, **options)
                assert type(x) is numba.array
                assert (x.shape, x.dtype) == ((d, n), expected.dtype)
                assert x.is_c_contiguous()
                assert stream_of(x) is None
                assert np.array_equal(bits(x), bits(expected)), (d, n, options)


def test_host_data_is_checked_and_out_must_be_a_device_array(numba: Any) -> None:
    mu, sigma = vectors(4)
    generator = multisample.Generator(1)
    out = np.full((4, 3), 7, np.float32)
    with pytest.raises(ValueError, match=r"^out: backend 'numba' writes numba arrays, got host memory"):
        sample(mu, sigma, 3, generator=generator, out=out)
    assert (out == 7).all()
    with pytest.raises(ValueError, match=r"^sigma: .*of at least 0, got sigma\[1\] = -1.0"):
        sample(mu, [1, -1, 1, 1], 3, generator=generator)
    with pytest.raises(TypeError, match=r"^mu, sigma, out: expected arrays of one library"):
        sample(mu, sigma, 3, generator=generator, out=numba.put(out))
    assert generator.offset == 0


def test_zero_samples_give_an_empty_numba_array(numba: Any) -> None:
    for d, n in [(0, 5), (5, 0), (0, 0)]:
        mu, sigma = (numba.cuda.device_array(d, np.float32) for _ in range(2))
        for options in ({}, {"dtype": "float64"}):
            x = sample(mu, sigma, n, seed=1, **options)
            assert type(x) is numba.array
            assert (x.shape, x.dtype) == ((d, n), np.dtype(options.get("dtype", "float32")))


# --- Numba's arrays -------------------------------------------------------------------------------


def test_auto_takes_numba_for_numba_arrays(numba: Any, bits: ToArray) -> None:
    assert _backends.choose("auto", "numba", "cuda").name == "numba"
    host = vectors(7)
    x = multisample.sample(*map(numba.put, host), 33, seed=2)
    assert type(x) is numba.array
    assert np.array_equal(bits(x), bits(on_cpu(*host, 33, seed=2)))


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
    # `out` is returned unchanged.
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


def test_numba_views_of_other_memory_are_accepted(numba: Any, bits: ToArray) -> None:
    host = vectors(300)
    mu, sigma = (numba.cuda.as_cuda_array(Exported(numba.put(x))) for x in host)
    out = numba.cuda.as_cuda_array(Exported(numba.cuda.device_array((300, 700), np.float32)))
    expected = bits(on_cpu(*host, 700, seed=4))
    assert np.array_equal(bits(sample(mu, sigma, 700, seed=4)), expected)
    assert sample(mu, numba.put(host[1]), 700, seed=4, out=out) is out
    assert np.array_equal(bits(out), expected)


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


# --- Objects with a protocol only -----------------------------------------------------------------


def test_objects_with_the_cuda_array_interface_are_shared(numba: Any, bits: ToArray) -> None:
    d, n = 300, 517
    host = vectors(d)
    for options in ({}, {"dtype": "float16"}, {"noise": "shared", "dim_offset": 7}):
        dtype = options.get("dtype", "float32")
        expected = bits(on_cpu(*host, n, **{**options, "dtype": dtype}, seed=6))
        # Streams of the protocol: None, a missing entry, and the two default streams.
        for more in ({"stream": None}, {}, {"stream": 1}, {"stream": 2}, {"version": 2}):
            mu, sigma = (Exported(numba.put(x), **more) for x in host)
            numba.synchronize()
            x = sample(mu, sigma, n, seed=6, **options)
            assert type(x) is numba.array
            assert stream_of(x) == more.get("stream")
            numba.synchronize()
            assert np.array_equal(bits(x.bind(0)), expected), (options, more)
            buffer = numba.poisoned(d * n * np.dtype(dtype).itemsize)
            for strides in ((n, 1), (1, d)):
                out = Exported(numba.view(buffer, dtype, (d, n), strides, 0), **more)
                numba.synchronize()
                assert sample(mu, sigma, n, seed=6, out=out, **options) is out
                numba.synchronize()
                assert np.array_equal(bits(out.array), expected), (options, more, strides)
    # Reversed, a column, another type, read-only, and a number.
    every_other = numba.put(np.stack((host[0], host[0][::-1]), 1))
    for mu in (every_other[::-1, 1:], every_other[:, :1], numba.put(host[0].astype(np.float64))):
        given = Exported(mu, data=(mu.__cuda_array_interface__["data"][0], True))
        x = sample(given, 0.75, n, seed=6, dtype="float32")
        assert np.array_equal(bits(x), bits(on_cpu(host[0], 0.75, n, seed=6)))


@pytest.mark.parametrize("named", ["mu", "sigma", "out"])
@pytest.mark.parametrize("options", [{}, {"dtype": "float16"}], ids=["float32", "float16"])
def test_a_call_is_ordered_with_the_stream_that_an_object_names(
    numba: Any, bits: ToArray, options: dict[str, Any], named: str
) -> None:
    d, n = 300, 1031
    dtype = options.get("dtype", "float32")
    arrays = {"mu": numba.put(np.zeros(d, np.float32)), "sigma": numba.put(np.ones(d, np.float32))}
    buffer = numba.poisoned(d * n * 4)
    arrays["out"] = numba.view(buffer, dtype, (d, n), (n, 1), 0)
    # The same bytes as integers, for a test kernel without float16.
    written = numba.view(buffer, "float32", (d * n,), (1,), 0) if named == "out" else arrays[named]

    def draw(stream: int | None) -> None:
        given = {name: Exported(array, stream=stream if name == named else None) for name, array in arrays.items()}
        sample(**given, n=n, seed=3, **options)

    # The first call may wait for the device, since it compiles and loads.
    draw(None)
    numba.synchronize()
    with numba.stream() as stream:
        numba.fill(written, 1.0)
        numba.synchronize()
        numba.keep_busy(CYCLES)
        numba.fill(written, 5.0)
        written_at_last = numba.marker()
        assert not written_at_last()
        draw(int(stream))
        numba.synchronize()
    means, deviations = (5.0 if named == name else usual for name, usual in (("mu", 0.0), ("sigma", 1.0)))
    expected = on_cpu([means] * d, [deviations] * d, n, dtype, seed=3)
    assert np.array_equal(bits(arrays["out"]), bits(expected))


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_objects_with_dlpack_are_shared_and_ordered(numba: Any, bits: ToArray, library: str) -> None:
    memory = memory_of(library)
    d, n = 300, 1031
    host = vectors(d)
    mu, sigma = map(memory.put, host)
    memory.synchronize()
    x = sample(ExportedByDlpack(mu), ExportedByDlpack(sigma), n, seed=8)
    assert type(x) is numba.array
    assert np.array_equal(bits(x), bits(on_cpu(*host, n, seed=8)))
    for dtype in ("float32", "float16", "bfloat16"):
        if dtype == "bfloat16" and library == "cupy":
            continue  # This library cannot export the type.
        buffer = memory.poisoned(numpy_dtype(dtype).itemsize * d * (n + 1))
        out = memory.view(buffer, dtype, (d, n), (n + 1, 1), 0)
        memory.synchronize()
        target = ExportedByDlpack(out)
        assert sample(ExportedByDlpack(mu), ExportedByDlpack(sigma), n, seed=8, dtype=dtype, out=target) is target
        numba.synchronize()
        assert np.array_equal(bits(out), bits(on_cpu(*host, n, dtype, seed=8))), dtype
    with memory.stream():
        memory.keep_busy(CYCLES)
        memory.fill(mu, 5.0)
        x = sample(ExportedByDlpack(mu), ExportedByDlpack(sigma), n, seed=8)
        got = bits(x)
        memory.finish()
    assert np.array_equal(got, bits(on_cpu([5.0] * d, host[1], n, seed=8)))


def test_invalid_objects_raise_and_change_nothing(numba: Any) -> None:
    d, n = 5, 70
    mu, sigma = map(numba.put, vectors(d))
    buffer, untouched = numba.poisoned(8192), numba.poisoned(8192)
    target = numba.view(buffer, "float32", (d, n), (n, 1), 0)
    pointer = target.__cuda_array_interface__["data"][0]
    generator = multisample.Generator(1)
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "out: expected a writable array", {"out": Exported(target, data=(pointer, True))}),
        (ValueError, "out: expected elements at multiples", {"out": Exported(target, data=(pointer + 2, False))}),
        (ValueError, "out: expected shape", {"out": Exported(target, shape=(d, n - 1))}),
        (ValueError, "out: expected dtype", {"out": Exported(target, typestr="<i4")}),
        (ValueError, "out: .* they overlap", {"out": Exported(target, strides=(4, 4))}),
        (ValueError, "out: .* mu also uses", {"mu": Exported(numba.view(buffer, "float32", (d,), (1,), 7))}),
        (TypeError, "mu: .* memory can be shared", {"mu": Exported(mu, mask=Exported(mu))}),
        (TypeError, "mu: expected elements of type", {"mu": Exported(mu, typestr="<c8", strides=None)}),
        (TypeError, "mu, sigma, out: expected arrays of one library", {"out": target}),
        (TypeError, "mu, sigma, out: expected arrays of one library", {"mu": mu}),
    ]
    right = {"mu": Exported(mu), "sigma": Exported(sigma), "out": Exported(target)}
    for error, message, wrong in cases:
        with pytest.raises(error, match=f"^{message}"):
            sample(**{**right, **wrong}, n=n, generator=generator)
    assert generator.offset == 0
    assert numba.same(buffer, untouched)


# --- Threads and processes ------------------------------------------------------------------------


def run(script: str, *arguments: str, **environment: str) -> Any:
    """The last line of a script's output, parsed as JSON. The script can import the modules of the tests."""
    path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file, with numbers that change if the file is replaced."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.rglob("*") if path.is_file()}


def listed(arrays: list[Array], bits: ToArray) -> list[Any]:
    return [bits(array).tolist() for array in arrays]


CACHED = """
import json

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
for n, options in [(8, {}), (7, {"noise": "shared"}), (7, {"dtype": "float16", "sample_offset": 1})]:
    x = multisample.sample(mu, sigma, n, seed=5, backend="numba", **options).copy_to_host()
    drawn.append(x.view(f"u{x.itemsize}").tolist())
print(json.dumps({"compiled": len(compiled), "drawn": drawn}))
"""


def test_a_kernel_is_compiled_once_for_all_processes(numba: Any, bits: ToArray, tmp_path: Path) -> None:
    first = run(CACHED, MULTISAMPLE_CACHE_DIR=str(tmp_path))
    kept = files_in(tmp_path)
    assert first["compiled"] > 0
    assert len([path for path in kept if Path(path).name.startswith("cuda-sample_kernel_")]) == 3
    second = run(CACHED, MULTISAMPLE_CACHE_DIR=str(tmp_path))
    assert second["compiled"] == 0
    assert files_in(tmp_path) == kept
    mu, sigma = [1.0, 2.0, -3.0], [1.0, 0.5, 2.0]
    cases: list[tuple[int, dict[str, Any]]] = [
        (8, {}), (7, {"noise": "shared"}), (7, {"dtype": "float16", "sample_offset": 1}),
    ]  # fmt: skip
    expected = listed([on_cpu(mu, sigma, n, **{"dtype": "float32", **options}, seed=5) for n, options in cases], bits)
    assert first["drawn"] == second["drawn"] == expected


def test_damaged_cached_kernels_are_compiled_again(numba: Any, tmp_path: Path) -> None:
    first = run(CACHED, MULTISAMPLE_CACHE_DIR=str(tmp_path))
    for path in (tmp_path / "numba").iterdir():
        path.write_bytes(path.read_bytes()[:-1000] + bytes(1000))
    second = run(CACHED, MULTISAMPLE_CACHE_DIR=str(tmp_path), PYTHONWARNINGS="ignore")
    assert second["compiled"] == first["compiled"]
    assert second["drawn"] == first["drawn"]
    assert run(CACHED, MULTISAMPLE_CACHE_DIR=str(tmp_path))["compiled"] == 0


FIRST_AT_ONCE = """
import json
import threading

import numpy as np
from numba import cuda

import multisample

threads = 6
mu, sigma = (cuda.to_device(np.array(x, np.float32)) for x in ([1, 2, -3], [1, 0.5, 2]))
outs = [cuda.device_array((3, 8), "float32") for _ in range(threads)]
together = threading.Barrier(threads)
drawn, errors = [None] * threads, []


def draw(thread):
    # Four threads use one kernel and two use others. Every second thread passes `out`, and so makes no context.
    options = [{}, {}, {}, {}, {"noise": "shared"}, {"dtype": "float64"}][thread]
    if thread % 2 == 0:
        options = {**options, "out": outs[thread]}
    try:
        together.wait()
        drawn[thread] = multisample.sample(mu, sigma, 8, seed=thread, backend="numba", **options)
        cuda.synchronize()
    except BaseException as error:
        errors.append(repr(error))


workers = [threading.Thread(target=draw, args=(thread,)) for thread in range(threads)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
if not errors:
    drawn = [x.copy_to_host() for x in drawn]
    drawn = [x.view(f"u{x.itemsize}").tolist() for x in drawn]
print(json.dumps({"errors": errors, "drawn": drawn if not errors else []}))
"""


def test_first_calls_from_several_threads_are_correct(numba: Any, bits: ToArray, tmp_path: Path) -> None:
    done = run(FIRST_AT_ONCE, MULTISAMPLE_CACHE_DIR=str(tmp_path))
    assert done["errors"] == []
    mu, sigma = [1.0, 2.0, -3.0], [1.0, 0.5, 2.0]
    every: list[dict[str, Any]] = [{}, {}, {}, {}, {"noise": "shared"}, {"dtype": "float64"}]
    expected = [on_cpu(mu, sigma, 8, **{"dtype": "float32", **o}, seed=thread) for thread, o in enumerate(every)]
    assert done["drawn"] == listed(expected, bits)


AT_ONCE = """
import json
import sys

import numpy as np
from numba import cuda

import multisample

kind = int(sys.argv[1])
mu, sigma = (cuda.to_device(np.array(x, np.float32)) for x in ([1, 2, -3], [1, 0.5, 2]))
options = [{}, {"noise": "shared"}, {"dtype": "float16"}, {"dtype": "float64"}][kind]
print("ready", flush=True)
sys.stdin.readline()
x = multisample.sample(mu, sigma, 8, seed=5, backend="numba", **options).copy_to_host()
print(json.dumps(x.view(f"u{x.itemsize}").tolist()))
"""


def test_first_calls_from_several_processes_are_correct(numba: Any, bits: ToArray, tmp_path: Path) -> None:
    # Each process compiles another kernel into one folder. Afterwards every process can load all kernels.
    mu, sigma = [1.0, 2.0, -3.0], [1.0, 0.5, 2.0]
    every: list[dict[str, Any]] = [{}, {"noise": "shared"}, {"dtype": "float16"}, {"dtype": "float64"}]
    expected = listed([on_cpu(mu, sigma, 8, **{"dtype": "float32", **o}, seed=5) for o in every], bits)
    environment = {**os.environ, "MULTISAMPLE_CACHE_DIR": str(tmp_path)}
    for _ in range(2):
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", AT_ONCE, str(kind)],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for kind in range(len(every))
        ]  # fmt: skip
        try:
            for worker in workers:
                assert worker.stdout is not None
                assert worker.stdout.readline() == "ready\n"
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write("\n")
                worker.stdin.flush()
            outputs = [worker.communicate(timeout=SECONDS) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        for worker, (_, error) in zip(workers, outputs, strict=True):
            assert worker.returncode == 0, error[-6000:]
        assert [json.loads(output) for output, _ in outputs] == expected


# --- Several devices ------------------------------------------------------------------------------


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


# Runs in a process, because a launch on the wrong device would break all later launches.
ELSEWHERE = """
import json
import sys

import numpy as np
from cuda_memory import Exported, ExportedByDlpack, memory_of

import multisample

library = sys.argv[1]
memory, numba = memory_of(library), memory_of("numba")
export = Exported if library == "numba" else ExportedByDlpack
mu, sigma = (memory.put(np.array(x, np.float32), 1) for x in ([1, 2, -3], [1, 0.5, 2]))
with memory.device(1):
    out = memory.view(memory.poisoned(96), "float32", (3, 8), (8, 1), 0)
    memory.synchronize()
with numba.device(0):
    x = multisample.sample(export(mu), export(sigma), 8, seed=5, backend="numba")
    multisample.sample(export(mu), export(sigma), 8, seed=5, backend="numba", out=export(out))
    current = numba.current_device()
with numba.device(1):
    numba.synchronize()
    taken = out if library == "numba" else numba.cuda.as_cuda_array(out)
    drawn = [y.copy_to_host().view("u4").tolist() for y in (x, taken)]
print(json.dumps({"device": numba.device_of(x), "current": current, "drawn": drawn}))
"""


@pytest.mark.parametrize("library", ["numba", "torch", "cupy"], ids=["cuda array interface", "torch", "cupy"])
def test_objects_with_a_protocol_are_drawn_on_the_device_of_their_memory(
    two_devices: Any, bits: ToArray, library: str
) -> None:
    memory_of(library)
    expected = bits(on_cpu([1.0, 2.0, -3.0], [1.0, 0.5, 2.0], 8, seed=5)).tolist()
    assert run(ELSEWHERE, library) == {"device": 1, "current": 0, "drawn": [expected, expected]}
