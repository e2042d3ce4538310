"""CUDA C++ kernels of the numba backend, which NVRTC compiles without a GPU."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import run_python
from skip_rules import requires
from tables import PLAIN_VERSIONS

from multisample.backends import nvrtc
from multisample.backends.errors import BackendUnavailableError
from multisample.backends.kernels.cuda.geometry import StoreKind
from multisample.backends.kernels.cuda.keys import ConversionKey, KernelKey, Key, MomentsKey, PerturbKey
from multisample.backends.kernels.cuda.toolchain import nvrtc_version
from multisample.backends.native import csrc_files
from multisample.backends.numba import NumbaBackend
from multisample.backends.system import cache


def sample_key(
    store_kind: int, origin_in_memory: bool = False, batched: bool = False, version: tuple[int, bool] = (0, False)
) -> KernelKey:
    return KernelKey("float32", False, False, False, store_kind, origin_in_memory, batched, 0, *version)


MOMENTS = MomentsKey("float32", False, False, 1, False, False, True, 0)


pytestmark = requires("numba_cuda", "NVRTC", nvrtc_version)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("MULTISAMPLE_CACHE_DIR", str(tmp_path))
    cache.say_compiling.cache_clear()
    return tmp_path


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> NumbaBackend:
    """The numba backend on a GPU of compute capability 9.0, which loads nothing."""
    from numba import cuda

    monkeypatch.setattr(cuda, "get_current_device", lambda: SimpleNamespace(compute_capability=(9, 0)))
    monkeypatch.setattr("multisample.backends.numba.load_kernel", lambda code, symbol: 7)
    return NumbaBackend()


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (MOMENTS, "finish_moments_kernel"), (PerturbKey("bfloat16", True, True, True, 1, 0), "perturb_kernel"),
        (sample_key(StoreKind.kStrided), "sample_kernel"), (ConversionKey("float64", 0), "conversion_kernel"),
        (None, "advance_kernel"),
    ],
    ids=["moments", "perturb", "sample", "conversion", "advance"],
)  # fmt: skip
def test_a_kernel_is_compiled_with_its_name(
    hopper: NumbaBackend, key: Key | None, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    handle, code = hopper.compile(key)
    assert handle == 7
    assert code.cubin.startswith(b"\x7fELF")
    assert name in code.symbol and f".text.{code.symbol}\0".encode() in code.cubin
    assert capfd.readouterr().err == (
        "multisample: compiling kernels of numba, once for this machine: some seconds for each kind of call\n"
    )


def test_numba_compiles_the_plain_kernels_and_nvrtc_all_others(
    hopper: NumbaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from multisample.backends.kernels.cuda import compilation

    in_python: list[Key | None] = []
    in_cpp: list[Key | None] = []

    def compile_kernel(key: Key) -> Any:
        in_python.append(key)
        return SimpleNamespace(library=SimpleNamespace(get_cufunc=lambda: SimpleNamespace(handle=5)))

    def machine_code(key: Key | None, architecture: str) -> nvrtc.MachineCode:
        assert architecture == "sm_90"
        in_cpp.append(key)
        return nvrtc.MachineCode("symbol", b"cubin")

    monkeypatch.setattr(compilation, "compile_kernel", compile_kernel)
    monkeypatch.setattr("multisample.backends.numba.machine_code", machine_code)
    origins = [(False, False), (True, False), (True, True)]
    plain = [
        sample_key(StoreKind[f"k{name.title().replace('_', '')}"], version=version)
        for name, versions in PLAIN_VERSIONS.items()
        for version in versions
    ]
    kinds = set(StoreKind) - {StoreKind.kPlain, StoreKind.kPlainTransposed}
    keys = [*plain, *(sample_key(kind, *origin) for kind, origin in itertools.product(kinds, origins))]
    for key in (*keys, MOMENTS, None):
        handle, _ = hopper.compile(key)
        assert handle == (5 if in_python and in_python[-1] is key else 7)
    assert in_python == plain
    assert in_cpp == [key for key in (*keys, MOMENTS, None) if key not in in_python]


def test_a_second_process_loads_the_kernel_from_the_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "from multisample.backends.kernels.cuda.keys import MomentsKey;"
        "from multisample.backends.nvrtc import machine_code;"
        f"print(machine_code({MOMENTS}, 'sm_90').symbol)"
    )
    done = run_python("-c", script, seconds=120, MULTISAMPLE_CACHE_DIR=str(root))
    monkeypatch.setattr(nvrtc, "_compiled", None)
    code = nvrtc.machine_code(MOMENTS, "sm_90")
    assert code.symbol == done.stdout.strip()
    assert code.cubin.startswith(b"\x7fELF")


def test_different_kernels_compilers_and_headers_have_different_files(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "_compiled", lambda *program: nvrtc.MachineCode("symbol", b"cubin"))
    nvrtc.machine_code(MOMENTS, "sm_90")
    nvrtc.machine_code(MOMENTS, "sm_80")
    nvrtc.machine_code(PerturbKey("float32", False, True, True, 1, 0), "sm_90")
    nvrtc.machine_code(PerturbKey("float32", False, True, True, 2, 0), "sm_90")
    nvrtc.machine_code(sample_key(StoreKind.kStrided), "sm_90")
    nvrtc.machine_code(sample_key(StoreKind.kStrided, origin_in_memory=True), "sm_90")
    nvrtc.machine_code(None, "sm_90")
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: "0.0")
    nvrtc.machine_code(MOMENTS, "sm_90")
    monkeypatch.setattr(csrc_files, "digest", lambda: "other")
    nvrtc.machine_code(MOMENTS, "sm_90")
    assert len(list((root / "nvrtc").iterdir())) == 9


def test_without_nvrtc_the_reason_has_the_install_command(
    hopper: NumbaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcVersion", missing)
    with pytest.raises(
        BackendUnavailableError,
        match=r"^backend: 'numba' needs NVRTC .* NVRTC cannot be loaded \(libnvrtc\.so\.13: .*\):"
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
        hopper.compile(MOMENTS)


def test_in_an_archive_the_reason_says_that_compilers_cannot_read_the_headers(
    hopper: NumbaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csrc_files, "folder", lambda: Path("archive.zip/multisample/csrc"))
    with pytest.raises(BackendUnavailableError, match="is no folder, since multisample is in an archive"):
        hopper.compile(MOMENTS)
