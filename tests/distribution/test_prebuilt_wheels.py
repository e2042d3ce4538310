"""Wheels with compiled libraries need no compiler, and an incompatible machine refuses their libraries."""

import base64
import csv
import email
import hashlib
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from installations import attempt, contents, copy_checkout, install, run
from places import ROOT

import multisample
from multisample import BackendUnavailableError
from multisample.__main__ import main
from multisample.backends import registry, torch_ext
from multisample.backends.native import build, csrc_files, library_cache, prebuilt, targets, toolchain, units, wheels
from multisample.commands import build as commands

torch = pytest.importorskip("torch")
needs_tools = pytest.mark.skipif(bool(toolchain.missing_tools()), reason="; ".join(toolchain.missing_tools()))
NO_NVCC = torch.version.cuda is None or toolchain.cuda_home() is None
BUILDING = sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have other library formats")


def of_a_wheel(test: Any) -> Any:
    """Mark a test of the wheel with compiled libraries: compiling them takes long."""
    return pytest.mark.slow(needs_tools(needs_linux(test)))


# Draws with PyTorch tensors, and prints the bits and the loaded libraries.
USE = """
import json, pathlib, re, sys
import torch
import multisample

mu = torch.linspace(-3, 3, 70, device=sys.argv[1])
bits = {}
for name in ("float16", "bfloat16", "float32", "float64"):
    x = multisample.sample(mu, mu.abs(), 301, seed=3, dtype=name, backend="torch_ext")
    bits[name] = x.cpu().contiguous().view(torch.uint8).numpy().tobytes().hex()
print(json.dumps({
    "bits": bits,
    "status": multisample.list_backends()["torch_ext"].device,
    "loaded": sorted(set(re.findall(r"/.*multisample_torch_.*", pathlib.Path("/proc/self/maps").read_text()))),
}))
"""


def build_wheel(folder: Path, setting: str, **environment: str) -> Path:
    source = copy_checkout(folder / "source")
    command = *BUILDING, folder / "dist", source
    run(*command, folder=folder, MULTISAMPLE_PREBUILT=setting, **environment)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


class Installation(NamedTuple):
    python: Path
    package: Path
    folder: Path

    def run(self, code: str, *arguments: str) -> str:
        """The output of Python, with an empty PATH and a cache folder of its own."""
        return run(
            self.python, "-c", code, *arguments, folder=self.folder, PATH=str(self.folder / "nothing"),
            HOME=str(self.folder / "home"), CXX="c++", CUDA_HOME=str(self.folder / "nothing"),
            MULTISAMPLE_CACHE_DIR=str(self.folder / "cache"),
        )  # fmt: skip


def expected_bits() -> dict[str, str]:
    mu = torch.linspace(-3, 3, 70)
    names = "float16", "bfloat16", "float32", "float64"
    drawn = {name: multisample.sample(mu, mu.abs(), 301, seed=3, dtype=name, backend="cpu") for name in names}
    return {name: x.view(torch.uint8).numpy().tobytes().hex() for name, x in drawn.items()}


@pytest.fixture(scope="module")
def wheel(build_once: Callable[..., Path]) -> Path:
    """A wheel with libraries for the CPU, and for CUDA if nvcc is available."""
    sources = [ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE", "multisample")]
    sources += [csrc_files.folder().resolve(), Path(build.__file__).resolve().parents[1]]
    setting = ("cpu", {}) if NO_NVCC else ("1", {"TORCH_CUDA_ARCH_LIST": capabilities()})

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as building:
            shutil.copy(build_wheel(Path(building), setting[0], **setting[1]), folder)

    (wheel,) = build_once("wheel", (setting, torch.__version__, sys.version), sources, make).glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("installation")
    python, packages = install(wheel, folder)
    return Installation(python, packages / "multisample", folder)


def libraries_of(wheel: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(wheel).items() if name.endswith(".so")}


def capabilities() -> str:
    """The architectures of the devices here, or 9.0."""
    found = {torch.cuda.get_device_capability(device) for device in range(targets.device_count())}
    return ";".join("{}.{}".format(*capability) for capability in sorted(found)) or "9.0"


def cuda_file() -> list[str]:
    return [] if NO_NVCC else [prebuilt.cuda_file(torch.version.cuda, capabilities().split(";"))]


@of_a_wheel
def test_a_wheel_with_libraries_is_for_this_platform_and_its_record_is_right(wheel: Path) -> None:
    machine = re.sub(r"\W", "_", platform.machine())
    tag = re.fullmatch(rf"multisample-{multisample.__version__}-(py3-none-(many)?linux_.*{machine})\.whl", wheel.name)
    assert tag, wheel.name
    found = contents(wheel)
    about = f"multisample-{multisample.__version__}.dist-info"
    stated = email.message_from_bytes(found[f"{about}/WHEEL"])
    assert stated.get_all("Tag") == [tag[1]]
    assert stated["Root-Is-Purelib"] == "false"
    place = f"multisample/backends/native/prebuilt/{prebuilt.folder().name}"
    files = [prebuilt.CPU_FILE, *cuda_file()]
    assert set(libraries_of(wheel)) == {f"{place}/{name}" for name in files}
    # The wheel has all sources too, whose digest selects the libraries.
    sources = "csrc/stream/words.h", "csrc/torch/cpu.cpp", "backends/cpu.py", "backends/native/prebuilt.py", "STREAM.md"
    assert {f"multisample/{name}" for name in sources} <= found.keys()
    *other_names, last = found
    assert last == f"{about}/RECORD"
    rows = list(csv.reader(found[last].decode().splitlines()))
    assert [name for name, *_ in rows] == [*other_names, last]
    for name, digest, size in rows[:-1]:
        assert int(size) == len(found[name])
        assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(found[name]).digest()).decode().strip("=")
    assert rows[-1][1:] == ["", ""]


@of_a_wheel
def test_libraries_depend_only_on_system_libraries_and_pytorch(wheel: Path, tmp_path: Path) -> None:
    for name, content in libraries_of(wheel).items():
        library = tmp_path / Path(name).name
        library.write_bytes(content)
        needs = wheels.needs(library)
        is_cuda = library.name in cuda_file()
        assert (f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}" if is_cuda else "libtorch_cpu.so") in needs
        # These libraries are not part of the stable ABI.
        assert {"libc10.so", "libc10_cuda.so", "libtorch_python.so"}.isdisjoint(needs)
        for path in (tempfile.gettempdir(), *([] if is_cuda else [str(Path(torch.__file__).parents[1])])):
            assert f"{path}/".encode() not in content, name


@of_a_wheel
def test_an_installation_draws_without_a_compiler(installation: Installation) -> None:
    (library,) = installation.package.glob(f"backends/native/prebuilt/*/{prebuilt.CPU_FILE}")
    found = json.loads(installation.run(USE, "cpu"))
    assert found["bits"] == expected_bits()
    assert found["status"].startswith("cpu (prebuilt")
    assert found["loaded"] == [str(library)]
    assert not (installation.folder / "cache" / "torch_ext").exists()


@of_a_wheel
@pytest.mark.skipif(NO_NVCC or targets.device_count() == 0, reason="no CUDA device")
def test_a_wheel_with_a_cuda_library_runs_on_the_devices_here(installation: Installation) -> None:
    found = json.loads(installation.run(USE, "cuda"))
    assert found["bits"] == expected_bits()
    assert not (installation.folder / "cache" / "torch_ext").exists()
    assert found["status"] == "cpu (prebuilt) and CUDA (prebuilt)"
    assert [Path(path).name for path in found["loaded"]][1:] == cuda_file()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The module of the build hook, which changes sys.path."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    return runpy.run_path(str(Path(build.__file__).with_name("wheel_hook.py")))


@pytest.mark.parametrize(("setting", "missing", "message"), [
    ("yes", (), "MULTISAMPLE_PREBUILT: expected 1, cpu or 0, got 'yes'"),
    ("1", ("torch",), "MULTISAMPLE_PREBUILT=1: torch cannot be imported where the wheel is"),
    ("cpu", ("torch", "numpy"), "MULTISAMPLE_PREBUILT=cpu: torch and numpy cannot be"),
])  # fmt: skip
def test_invalid_prebuilt_settings_raise(
    hook: dict[str, Any], monkeypatch: pytest.MonkeyPatch, setting: str, missing: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("MULTISAMPLE_PREBUILT", setting)
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match=f"^{message}"):
        hook["_requested_kinds"]()


@pytest.mark.slow
def test_a_wheel_build_without_its_requested_libraries_fails(tmp_path: Path) -> None:
    source = copy_checkout(tmp_path / "source")
    environment = {"MULTISAMPLE_PREBUILT": "1", "CUDA_HOME": str(tmp_path / "no toolkit")}
    done = attempt(*BUILDING, tmp_path / "dist", source, folder=tmp_path, **environment)
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert ("PyTorch is built without CUDA" if torch.version.cuda is None else "nvcc not found") in text
    assert "MULTISAMPLE_PREBUILT=1: the libraries were not built: " in text
    assert not list(tmp_path.glob("dist/*.whl"))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The list of compiled libraries, with a fake compiler and an empty library folder."""
    made = []

    def compile_nothing(libraries: Any) -> list[str]:
        for folder, library in libraries.items():
            folder.mkdir()
            made.append((library, os.environ.get("TORCH_CUDA_ARCH_LIST")))
            (folder / f"multisample_{library.name}.so").touch()
        return [""] * len(libraries)

    monkeypatch.setattr(prebuilt, "root", lambda: tmp_path / "prebuilt")
    monkeypatch.setattr(build, "compile_libraries", compile_nothing)
    monkeypatch.setattr(toolchain, "missing_tools", lambda: ())
    monkeypatch.setattr(library_cache, "cuda_reasons", lambda ahead_of_time: ())
    monkeypatch.setattr(toolchain, "missing_nvcc", lambda: ())
    monkeypatch.setattr(wheels, "platform_tag", lambda libraries: f"for {len(libraries)}")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "")
    return made


def platform_tag(hook: dict[str, Any], *kinds: str) -> str:
    """The tag of a wheel for which the hook compiles libraries."""
    return str(hook["WheelHook"]._compile(SimpleNamespace(root=ROOT), prebuilt.root(), kinds))


ARCHITECTURES = "TORCH_CUDA_ARCH_LIST: expected numbers, as in '7.5;8.0;8.6;9.0+PTX', got "
FAILURES: dict[str, tuple[tuple[str, ...], Callable[[pytest.MonkeyPatch], object], str]] = {
    "no nvcc": (  # Even with a library in the cache.
        ("cpu", "cuda"),
        lambda patch: patch.setattr(toolchain, "missing_nvcc", lambda: ("nvcc not found",)),
        "nvcc not found",
    ),
    "a compile error": (
        ("cpu",),
        lambda patch: patch.setattr(build, "compile_libraries", lambda libraries: ["no such luck"]),
        "multisample_torch_cpu.so could not be built:\nno such luck",
    ),
    **{
        f"architectures {names}": (
            ("cuda",),
            lambda patch, names=names: patch.setenv("TORCH_CUDA_ARCH_LIST", names),
            f"{ARCHITECTURES}{names!r}",
        )
        for names in ("native", "Hopper", "9.0a", "9.0;", "90")
    },
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_wheel_build_that_fails_names_the_reason(
    compiled: list[Any], hook: dict[str, Any], monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    kinds, spoil, message = FAILURES[failure]
    spoil(monkeypatch)
    monkeypatch.setenv("MULTISAMPLE_PREBUILT", "1")
    with pytest.raises(SystemExit, match=re.escape(f"MULTISAMPLE_PREBUILT=1: the libraries were not built: {message}")):
        platform_tag(hook, *kinds)
    assert compiled == []


@pytest.mark.parametrize(("kinds", "named", "architectures", "targets"), [
    (("cpu", "cuda"), "", "7.5;8.0;8.6;9.0+PTX", ["cpu", "cuda13-7.5-8.0-8.6-9.0+PTX"]),
    (("cuda",), "7.5 9.0+PTX", "7.5 9.0+PTX", ["cuda13-7.5-9.0+PTX"]),
    (("cuda",), "7.5;9.0+PTX", "7.5;9.0+PTX", ["cuda13-7.5-9.0+PTX"]),
])  # fmt: skip
def test_a_wheel_build_compiles_every_target(
    compiled: list[Any], hook: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], named: str,
    architectures: str, targets: list[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", named)
    assert platform_tag(hook, *kinds) == f"for {len(targets)}"
    assert {path.name for path in prebuilt.folder().iterdir()} == {f"multisample_torch_{name}.so" for name in targets}
    assert {names for _, names in compiled} == {architectures}
    for library, _ in compiled:
        assert not any(flag.startswith("-march=") for flag in library.flags)
        assert "-DTORCH_TARGET_VERSION=0x020a000000000000" in library.flags
        assert library.is_portable
        assert library.units == (units.all_units() if library.kind == "cuda" else ())


@pytest.fixture
def came(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """``came(*names)``: adds empty files with these names to the installation's libraries."""
    monkeypatch.setattr(prebuilt, "root", lambda: tmp_path / "prebuilt")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("MULTISAMPLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)

    def come(*names: str) -> Path:
        prebuilt.folder().mkdir(parents=True, exist_ok=True)
        for name in names:
            (prebuilt.folder() / name).touch()
        return prebuilt.folder()

    return come


@pytest.fixture
def no_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "missing_tools", lambda: ("no tools",))
    monkeypatch.setattr(toolchain, "cuda_home", lambda: None)
    monkeypatch.setattr(library_cache, "_failures", {})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


OTHERS: dict[str, tuple[Any, str, Callable[[], str]]] = {
    "sources": (csrc_files, "digest", lambda: "0" * 64),
    "machine": (platform, "machine", lambda: "aarch64"),
    "system": (platform, "system", lambda: "Darwin"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_libraries_of_other_sources_machines_or_systems_are_refused(
    came: Callable[..., Path], no_tools: None, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    place = came(prebuilt.CPU_FILE, prebuilt.cuda_file("13.0", ["9.0"]))
    assert prebuilt.cpu_library().path
    assert prebuilt.cuda_library("13.0", []).path
    monkeypatch.setattr(*OTHERS[other])
    for found in (prebuilt.cpu_library(), prebuilt.cuda_library("13.0", [])):
        assert found.path is None
        assert f"({place.name} instead of {prebuilt.folder().name}): reinstall multisample" in found.reason
    assert registry.find("torch_ext").status().reasons == (prebuilt.cpu_library().reason, "no tools")
    with pytest.raises(BackendUnavailableError, match=r"are of other sources or for another system .*; no tools"):
        library_cache.libraries(["cpu"])


def _ask_no_device(device: int) -> tuple[int, int]:
    raise AssertionError("this initializes CUDA")


BUILT = ["7.5", "8.0", "9.0+PTX"]


@pytest.mark.parametrize(("built", "version", "capabilities", "reason"), [
    (BUILT, "13.0", [], ""),
    (BUILT, "13.2", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (9, 0)], ""),
    (BUILT, "13.0", [(10, 0), (12, 1)], ""),  # These devices compile the library's PTX.
    (BUILT, "12.8", [(9, 0)], "{file} is not for CUDA 12.8, which PyTorch uses: install a wheel for it"),
    (BUILT, "13.0", [(7, 0), (9, 0)], "{file} does not run on devices of compute capability 7.0"),
    (BUILT, "13.0", [(6, 1), (7, 2)], "{file} does not run on devices of compute capability 6.1, 7.2"),
    (["8.6", "9.0"], "13.0", [(8, 9), (9, 0)], ""),
    (["8.6", "9.0"], "13.0", [(8, 0)], "{file} does not run on devices of compute capability 8.0"),
    (["8.6", "9.0"], "13.0", [(10, 0)], "{file} does not run on devices of compute capability 10.0"),
])  # fmt: skip
def test_a_cuda_library_must_support_all_devices(
    came: Callable[..., Path], built: list[str], version: str, capabilities: list[tuple[int, int]], reason: str
) -> None:
    assert prebuilt.cpu_library() == prebuilt.cuda_library(version, map(_ask_no_device, [0])) == (None, "")
    file = prebuilt.cuda_file("13.0", built)
    place = came(file)
    found = prebuilt.cuda_library(version, capabilities)
    assert found == ((None, reason.format(file=file)) if reason else (place / file, ""))
    # With several libraries, the matching one is chosen.
    other = prebuilt.cuda_file("12.8", ["9.0"])
    came(other)
    assert prebuilt.cuda_library("13.1", []).path == place / file
    assert prebuilt.cuda_library("12.4", []).path == place / other
    assert prebuilt.cuda_library("14.0", []).reason.count("is not for CUDA 14.0") == 2


def test_status_needs_no_compiler_and_initializes_nothing(came: Any, no_tools: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", _ask_no_device)
    backend = registry.find("torch_ext")
    assert backend.status().reasons == ("no tools",)
    came(prebuilt.CPU_FILE)
    nvcc = "nvcc not found: install the CUDA toolkit or set CUDA_HOME"
    assert backend.status().available
    assert backend.status().device == f"cpu (prebuilt) (not CUDA: {nvcc})"
    file = prebuilt.cuda_file("12.8", ["7.5+PTX"])
    came(file)
    other = f"{file} is not for CUDA 13.0, which PyTorch uses: install a wheel for it"
    assert backend.status().device == f"cpu (prebuilt) (not CUDA: {other}; {nvcc})"
    came(prebuilt.cuda_file("13.0", ["7.5+PTX"]))
    assert backend.status().device == "cpu (prebuilt) and CUDA (prebuilt)"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert backend.status().device.startswith("cpu (prebuilt) (not CUDA: no CUDA device")


def test_device_capabilities_are_queried_when_a_library_is_loaded(came: Any, no_tools: None, monkeypatch: Any) -> None:
    file = prebuilt.cuda_file("13.0", ["7.5"])
    place = came(prebuilt.CPU_FILE, file)
    capability = [(7, 5)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    assert library_cache.libraries(["cpu", "cuda"])["cuda"] == place / file
    assert library_cache.is_built("cuda")
    capability[0] = (9, 0)
    assert library_cache.is_prebuilt("cuda")
    assert not library_cache.is_built("cuda")
    with pytest.raises(BackendUnavailableError) as raised:
        library_cache.libraries(["cpu", "cuda"])
    reason = f"{file} does not run on devices of compute capability 9.0"
    assert f"could not be built: {reason}; no tools" in str(raised.value)
    # The status now has the reason without another query.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not library_cache.is_prebuilt("cuda")
    assert reason in library_cache.cuda_reasons()


def test_the_build_command_reports_prebuilt_libraries(came: Any, no_tools: None, monkeypatch: Any, capsys: Any) -> None:
    cpu, cuda = prebuilt.CPU_FILE, prebuilt.cuda_file("13.0", ["7.5"])
    place = came(cpu, cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(commands, "_compile_kernels", lambda: "cpu: compiled 0 kernels in 0.0 s")
    assert main(["build", "torch_ext"]) == 0
    libraries = [f"{name}: came with the installation: {place / x}" for name, x in (("CPU", cpu), ("CUDA", cuda))]
    lines = [*(f"torch_ext, {text}" for text in libraries), "cpu: compiled 0 kernels in 0.0 s"]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_library_that_fails_to_load_raises_with_advice(came: Callable[..., Path]) -> None:
    file = came(prebuilt.CPU_FILE) / prebuilt.CPU_FILE
    with pytest.raises(BackendUnavailableError, match=r"cannot load .*: .*; remove that file, and another library"):
        torch_ext._load(file)


@pytest.mark.parametrize(("here", "needed", "tag"), [
    ("linux-x86_64", set(), "manylinux_2_17_x86_64"),
    ("linux-x86_64", {"GLIBC_2.2.5", "GLIBC_2.32", "GLIBC_2.9"}, "manylinux_2_32_x86_64"),
    ("linux-x86_64", {"GLIBC_2.17", "GLIBCXX_3.4.26"}, "manylinux_2_31_x86_64"),
    ("linux-x86_64", {"GLIBC_2.38", "GLIBCXX_3.4.26", "CXXABI_1.3.13"}, "manylinux_2_38_x86_64"),
    ("linux-x86_64", {"GLIBC_2.17", "GCC_14.0.0"}, "manylinux_2_39_x86_64"),
    ("linux-x86_64", {"GLIBCXX_3.4.99"}, "linux_x86_64"),
    ("linux-x86_64", {"GLIBC_PRIVATE"}, "linux_x86_64"),
    ("linux-x86_64", {"OPENSSL_3.0"}, "linux_x86_64"),
    # The manylinux policies do not allow a wheel to depend on these libraries.
    ("linux-x86_64", "libgomp.so.1", "linux_x86_64"),
    ("linux-x86_64", "libc10d.so", "linux_x86_64"),
    ("linux-x86_64", "libtorch_cpu.so.1", "linux_x86_64"),
    ("linux-x86_64", "libc.musl-x86_64.so.1", "linux_x86_64"),
    ("macosx-11.0-arm64", set(), "macosx_11_0_arm64"),
])  # fmt: skip
def test_the_platform_tag_is_the_oldest_system_with_all_symbols(
    monkeypatch: pytest.MonkeyPatch, here: str, needed: set[str] | str, tag: str
) -> None:
    monkeypatch.setattr(sysconfig, "get_platform", lambda: here)
    needs = {"libtorch_cpu.so": set[str](), "libc10_cuda.so": set(), "libcudart.so.13": {"libcudart.so.13"}}
    needs |= {needed: set(), "libc.so.6": {"GLIBC_2.17"}} if isinstance(needed, str) else {"libc.so.6": needed}
    monkeypatch.setattr(wheels, "needs", lambda path: needs)
    assert wheels.platform_tag([Path("library.so")]) == tag


@needs_linux
@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_elf_dependencies_equal_those_of_readelf() -> None:
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    text = subprocess.run(["readelf", "-dVW", library], check=True, capture_output=True, text=True).stdout
    found = wheels.needs(library)
    assert set(found) == set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))
    assert len(set.union(*found.values())) > 3
    for name, versions in found.items():
        stated = re.search(rf"File: {re.escape(name)}  Cnt: \d+\n((.*  Name: .*\n)*)", text)
        assert versions == set(re.findall(r"Name: (\S+)", stated[1] if stated else ""))


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x01\x01" + bytes(60), b"MZ" + bytes(60)])
def test_files_that_are_no_libraries_raise(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "library.so").write_bytes(content)
    with pytest.raises(ValueError, match=r"^library: expected a shared library that objdump can read, got "):
        wheels.needs(tmp_path / "library.so")
