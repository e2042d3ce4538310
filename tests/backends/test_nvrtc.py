"""CUDA C++ kernels of the numba and cupy backends, which NVRTC compiles without a GPU."""

import contextlib
import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import run_python
from skip_rules import requires
from tables import PLAIN_VERSIONS

from multisample.backends import cupy as cupy_backend
from multisample.backends import numba as numba_backend
from multisample.backends import nvrtc
from multisample.backends.cupy import CupyBackend
from multisample.backends.errors import BackendUnavailableError
from multisample.backends.kernels.cuda.geometry import StoreKind
from multisample.backends.kernels.cuda.keys import CppKey, KernelKey, Key, instance, perturb_key
from multisample.backends.kernels.cuda.perturb_geometry import KeyOrigin
from multisample.backends.kernels.cuda.toolchain import nvrtc_version
from multisample.backends.native import csrc_files
from multisample.backends.numba import NumbaBackend
from multisample.backends.system import cache, cuda_driver
from multisample.backends.system.cuda_driver import MachineCode


def sample_key(
    store_kind: int, origin_in_memory: bool = False, batched: bool = False, version: tuple[int, bool] = (0, False)
) -> KernelKey:
    return KernelKey("float32", False, False, False, store_kind, origin_in_memory, batched, 0, *version)


MOMENTS = CppKey("moments_kernel", "multisample::finish_moments_kernel<float>", 0)
ADVANCE = CppKey("advance_kernel", "multisample::advance_kernel", 0)


def perturbing(origin: KeyOrigin) -> CppKey:
    return perturb_key("float32", False, True, True, origin, 0)


pytestmark = requires("numba_cuda", "NVRTC", nvrtc_version)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("MULTISAMPLE_CACHE_DIR", str(tmp_path))
    cache.say_compiling.cache_clear()
    return tmp_path


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> NumbaBackend:
    """The numba backend on a GPU of compute capability 9.0."""
    from numba import cuda

    monkeypatch.setattr(cuda, "get_current_device", lambda: SimpleNamespace(compute_capability=(9, 0)))
    monkeypatch.setattr(cuda_driver, "on_device", contextlib.nullcontext)
    return NumbaBackend()


@pytest.fixture
def cupy_hopper(monkeypatch: pytest.MonkeyPatch) -> CupyBackend:
    """The cupy backend on such a GPU."""
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(cupy.cuda, "Device", lambda: SimpleNamespace(compute_capability="90"))
    of_hopper = lambda architecture: ("-arch=sm_90", "cubin")  # noqa: E731  CuPy's own function asks the device.
    monkeypatch.setattr(cupy.cuda.compiler, "_get_arch_for_options_for_nvrtc", of_hopper)
    monkeypatch.setattr(cuda_driver, "on_device", contextlib.nullcontext)
    return CupyBackend()


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (MOMENTS, "finish_moments_kernel"), (perturbing(KeyOrigin.kInMemory), "perturb_kernel"),
        (sample_key(StoreKind.kStrided), "sample_kernel"), (ADVANCE, "advance_kernel"),
        (CppKey("conversion_kernel", instance("conversion_kernel", "float64"), 0), "conversion_kernel"),
    ],
    ids=["moments", "perturb", "sample", "advance", "conversion"],
)  # fmt: skip
@pytest.mark.parametrize("compiler", ["hopper", "cupy_hopper"])
def test_a_kernel_is_compiled_with_its_name(
    request: pytest.FixtureRequest, compiler: str, key: Key, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = request.getfixturevalue(compiler)
    code = backend.compile(key)
    assert code.image.startswith(b"\x7fELF")
    assert name in code.symbol and f".text.{code.symbol}\0".encode() in code.image
    assert capfd.readouterr().err == (
        f"multisample: compiling kernels of {backend.name}, once for this machine: some seconds for each kind of call\n"
    )


def test_both_backends_compile_the_same_program_once(
    root: Path, hopper: NumbaBackend, cupy_hopper: CupyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same version of NVRTC, they share the file."""
    monkeypatch.setattr(cupy_backend, "_compiled", None)
    monkeypatch.setattr("cupy.cuda.nvrtc.getVersion", lambda: nvrtc_version().split("."))
    assert hopper.compile(ADVANCE) == cupy_hopper.compile(ADVANCE)
    assert len(list((root / "nvrtc").iterdir())) == 1


def test_without_a_cache_a_warning_names_the_folder(
    root: Path, cupy_hopper: CupyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MULTISAMPLE_CACHE_DIR", str(root / "file"))
    (root / "file").write_text("no folder")
    monkeypatch.setattr(cache, "_warned", set())
    for expected in (pytest.warns(RuntimeWarning, match=f"a kernel of 'cupy' .*{root}"), contextlib.nullcontext()):
        with expected:
            cupy_hopper.compile(ADVANCE)


def test_numba_compiles_the_plain_kernels_and_nvrtc_all_others(
    hopper: NumbaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from multisample.backends.kernels.cuda import compilation

    in_python: list[Key] = []
    in_cpp: list[Key] = []

    def compile_kernel(key: Key, capability: tuple[int, int], toolkit: str) -> MachineCode:
        assert capability == (9, 0)
        in_python.append(key)
        return MachineCode("plain", b"cubin")

    def machine_code(key: Key, backend: str, architecture: str, *rest: Any) -> MachineCode:
        assert (backend, architecture) == ("numba", "sm_90")
        in_cpp.append(key)
        return MachineCode("other", b"cubin")

    monkeypatch.setattr(compilation, "compile_kernel", compile_kernel)
    monkeypatch.setattr(numba_backend, "machine_code", machine_code)
    origins = [(False, False), (True, False), (True, True)]
    plain = [
        sample_key(StoreKind[f"k{name.title().replace('_', '')}"], version=version)
        for name, versions in PLAIN_VERSIONS.items()
        for version in versions
    ]
    kinds = set(StoreKind) - {StoreKind.kPlain, StoreKind.kPlainTransposed}
    keys = [*plain, *(sample_key(kind, *origin) for kind, origin in itertools.product(kinds, origins))]
    for key in (*keys, MOMENTS, ADVANCE):
        assert hopper.compile(key).symbol == ("plain" if in_python and in_python[-1] is key else "other")
    assert in_python == plain
    assert in_cpp == [key for key in (*keys, MOMENTS, ADVANCE) if key not in in_python]


def test_a_second_process_loads_the_kernel_from_the_cache(
    root: Path, hopper: NumbaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
from types import SimpleNamespace
from numba import cuda
from multisample.backends import numba
from multisample.backends.kernels.cuda.keys import CppKey
cuda.get_current_device = lambda: SimpleNamespace(compute_capability=(9, 0))
print(numba.BACKEND.compile({MOMENTS}).symbol)
"""
    done = run_python("-c", script, seconds=120, MULTISAMPLE_CACHE_DIR=str(root))
    monkeypatch.setattr(numba_backend, "_compiled", lambda *program: pytest.fail("compiled again"))
    code = hopper.compile(MOMENTS)
    assert code.symbol == done.stdout.strip()
    assert code.image.startswith(b"\x7fELF")


def test_different_kernels_compilers_and_headers_have_different_files(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(key: Key, architecture: str = "sm_90", version: str = "13.0") -> None:
        nvrtc.machine_code(key, "numba", architecture, version, lambda *program: MachineCode("symbol", b"cubin"))

    compiled(MOMENTS)
    compiled(MOMENTS, "sm_80")
    compiled(perturbing(KeyOrigin.kInMemory))
    compiled(perturbing(KeyOrigin.kOfBatch))
    compiled(sample_key(StoreKind.kStrided))
    compiled(sample_key(StoreKind.kStrided, origin_in_memory=True))
    compiled(ADVANCE)
    compiled(MOMENTS, version="0.0")
    monkeypatch.setattr(csrc_files, "digest", lambda: "other")
    compiled(MOMENTS)
    assert len(list((root / "nvrtc").iterdir())) == 9


def test_without_nvrtc_the_reason_has_the_install_command(
    hopper: NumbaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcVersion", missing)
    with pytest.raises(
        BackendUnavailableError,
        match=r"^backend: 'numba' needs NVRTC, and NVRTC cannot be loaded \(libnvrtc\.so\.13: .*\):"
        r" pip install 'numba-cuda\[cu13\]",
    ):
        hopper.compile(MOMENTS)
    assert any(re.match("NVRTC cannot be loaded: pip install", reason) for reason in hopper.status().reasons)


def test_an_architecture_that_nvrtc_does_not_know_is_named(
    hopper: NumbaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from numba import cuda

    monkeypatch.setattr(cuda, "get_current_device", lambda: SimpleNamespace(compute_capability=(99, 0)))
    with pytest.raises(BackendUnavailableError, match=r"(?s)NVRTC for sm_990: .*architecture.*pip install"):
        hopper.kernel(MOMENTS)


def test_a_program_that_does_not_compile_is_quoted(cupy_hopper: CupyBackend) -> None:
    key = CppKey("advance_kernel", "multisample::no_kernel", 0)
    advice = "to try another NVRTC: pip install --upgrade"
    with pytest.raises(BackendUnavailableError, match=rf"(?s)^backend: 'cupy' could not .*no_kernel.*\n{advice}"):
        cupy_hopper.kernel(key)


def test_in_an_archive_the_reason_says_that_compilers_cannot_read_the_headers(
    hopper: NumbaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csrc_files, "folder", lambda: Path("archive.zip/multisample/csrc"))
    with pytest.raises(BackendUnavailableError, match="is no folder, since multisample is in an archive"):
        hopper.compile(MOMENTS)
