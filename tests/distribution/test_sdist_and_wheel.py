"""Wheels, source distributions and editable installations are complete."""

import email
import email.message
import json
import os
import re
import runpy
import shutil
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from installations import contents, copy_checkout, install, run
from places import ROOT, SUPPORT

import multisample
from multisample.backends.native import csrc_files

USE = """
import importlib.util, json
import numpy as np
import multisample
from multisample.backends import contract

x = multisample.sample(np.array([0, 10], np.float32), np.array([1, 0.5], np.float32), 5, seed=3)
print(json.dumps({
    "file": multisample.__file__,
    "contract": contract.__file__,
    "version": multisample.__version__,
    "bits": x.view(np.uint32).tolist(),
    "available": multisample.list_backends()["cpu"].available,
    "backends": importlib.util.find_spec("backends") is not None,
}))
"""

# Libraries are blocked, not absent: the new environment has all packages of this one.
WITHOUT_LIBRARIES = """
import sys
libraries = ("torch", "cupy", "jax", "numba_cuda")
sys.modules.update(dict.fromkeys(libraries))
import multisample
import json
assert not {"numba", "cuda"} & set(sys.modules)
from multisample.backends.native import csrc_files
statuses = multisample.list_backends()
assert not any(map(sys.modules.get, libraries))
print(json.dumps({
    "csrc": str(csrc_files.folder()),
    "digest": csrc_files.digest(),
    "include": multisample.get_include(),
    "available": {name: status.available for name, status in statuses.items()},
    "reasons": {name: status.reasons for name, status in statuses.items()},
}))
"""

# pip -e builds this way.
BUILD_EDITABLE = """
import sys
import build
build.ProjectBuilder(sys.argv[1]).build("editable", sys.argv[2])
"""

# This test checks that the tests of an sdist import the sdist's own package.
PLACE = """
from pathlib import Path
import multisample
def test_place() -> None:
    assert Path(multisample.__file__).parents[1] == Path(__file__).parents[1]
"""

PACKAGE = Path(multisample.__file__).parent
RESOLVE = runpy.run_path(str(ROOT / ".ci" / "resolve.py"))


class Distributions(NamedTuple):
    """Built distributions: an sdist, a wheel from it, and wheels from the checkout; one of them is editable."""

    wheel: Path
    sdist: Path
    wheel_of_sdist: Path
    editable: Path
    source: Path


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    folder = tmp_path_factory.mktemp("packaging")
    source = copy_checkout(folder / "source")
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    run(*build, folder / "direct", "--wheel", source, folder=folder)
    # Without --wheel or --sdist, the wheel is made from the sdist.
    run(*build, folder / "dist", source, folder=folder)
    (wheel,) = (folder / "direct").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel_of_sdist,) = (folder / "dist").glob("*.whl")
    # Remove the results of the other builds, which a fresh checkout does not have.
    shutil.rmtree(source)
    copy_checkout(source)
    # An editable wheel ignores MULTISAMPLE_PREBUILT, and has no compiled libraries.
    run(sys.executable, "-c", BUILD_EDITABLE, source, folder / "editable", folder=folder, MULTISAMPLE_PREBUILT="cpu")
    (editable,) = (folder / "editable").glob("*.whl")
    return Distributions(wheel, sdist, wheel_of_sdist, editable, source)


def metadata(wheel: Path) -> email.message.Message:
    (name,) = [name for name in contents(wheel) if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(contents(wheel)[name])


def files(folder: Path) -> dict[str, bytes]:
    """The files in a folder and in linked folders, except caches of Python and editors."""
    paths = [Path(root, name) for root, _, names in os.walk(folder, followlinks=True) for name in names]
    found = {path.relative_to(folder): path for path in paths}
    is_cache = {name: any(part == "__pycache__" or part.startswith(".") for part in name.parts) for name in found}
    return {name.as_posix(): path.read_bytes() for name, path in found.items() if not is_cache[name]}


def test_the_wheel_is_for_every_platform_and_has_every_source_file(distributions: Distributions) -> None:
    assert distributions.wheel.name == f"multisample-{multisample.__version__}-py3-none-any.whl"
    expected = {f"multisample/{name}" for name in files(PACKAGE)} - {"multisample/backends/native/wheel_hook.py"}
    assert {"multisample/py.typed", "multisample/STREAM.md", "multisample/backends/contract.py"} <= expected
    assert {"multisample/csrc/torch/cpu.cpp", "multisample/csrc/cuda/kernel.cuh"} <= expected
    found = contents(distributions.wheel)
    about = f"multisample-{multisample.__version__}.dist-info"
    assert {name for name in found if not name.startswith(f"{about}/")} == expected
    for name in ("STREAM.md", "backends/cpu.py", "csrc/stream/words.h"):
        assert found[f"multisample/{name}"] == (PACKAGE / name).read_bytes()
    # The editable wheel only refers to the checkout.
    assert [name for name in contents(distributions.editable) if name.startswith("multisample/")] == []


def test_a_wheel_from_the_sdist_equals_a_wheel_from_the_checkout(distributions: Distributions) -> None:
    wheel, wheel_of_sdist = contents(distributions.wheel), contents(distributions.wheel_of_sdist)
    assert wheel.keys() == wheel_of_sdist.keys()
    assert [name for name in wheel if wheel[name] != wheel_of_sdist[name]] == []


def test_the_sdist_has_all_files_for_a_build_once(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as archive:
        assert all(member.isfile() or member.isdir() for member in archive)
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", ".ci/run", ".ci/resolve.py", ".clang-format"} <= names
    assert {f"multisample/{name}" for name in files(PACKAGE)} <= names
    for folder in ("tests", "bench"):
        assert {f"{folder}/{name}" for name in files(distributions.source / folder)} <= names
    assert not {name for name in names if name.startswith(("backends", "csrc"))}


def test_the_metadata_lists_requirements_and_platforms(distributions: Distributions) -> None:
    found = metadata(distributions.wheel)
    assert (found["Version"], found["License-File"]) == (multisample.__version__, "LICENSE")
    assert found.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    required = [line.partition(";")[0] for line in found.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.rstrip("0123456789.").rstrip("<>=~ ") for line in required) == ["numba", "numpy"]
    extra_requirements = found.get_all("Requires-Dist", [])
    assert "ninja>=1.11; extra == 'torch'" in extra_requirements
    # hatchling drops the marker of `multisample[jax]; ...`, so pyproject.toml repeats the requirement with its marker.
    assert "jax>=0.10; (python_version >= '3.11') and extra == 'test'" in extra_requirements
    platforms = [line for line in found.get_all("Classifier", []) if line.startswith("Operating System")]
    assert platforms == ["Operating System :: MacOS", "Operating System :: POSIX :: Linux"]


def table_of_installations() -> list[Any]:
    return list(RESOLVE["installations"]((ROOT / "README.md").read_text(encoding="utf-8")))


def test_the_table_of_readme_has_every_extra(distributions: Distributions) -> None:
    rows = table_of_installations()
    extras = {extra for row in rows for extra in re.findall(r"[\w-]+", row.requirements.partition("]")[0])}
    assert extras == set(metadata(distributions.wheel).get_all("Provides-Extra", []))
    requirements = metadata(distributions.wheel).get_all("Requires-Dist", [])
    pages = [ROOT / "README.md", *ROOT.glob(".github/*.md"), *PACKAGE.rglob("*.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    commands = {f'"{found}"' for text in texts for found in re.findall(r'pip install -e "(.+?)"', text)}
    assert {'".[test]"', '".[test,dev]"', '".[dask]"', '".[tetris]"'} <= commands
    assert commands <= {row.requirements for row in rows}
    # Another version would be replaced when the tests are installed.
    (version,) = re.findall(r"^torch==(.+); extra == 'test'$", "\n".join(requirements), re.MULTILINE)
    assert f"PyTorch {version} for CPUs" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_readme_is_resolved_for_every_python_and_platform() -> None:
    rows = table_of_installations()
    tests = {row[1:] for row in rows if row.requirements == '".[test]"'}
    systems = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")
    pythons = [(f"3.{minor}", "highest") for minor in range(10, 15)]
    pythons += [("3.10", "lowest-direct"), ("3.14", "lowest-direct")]
    assert tests == {(python, system, name, True) for python, name in pythons for system in systems}
    assert {row.python for row in rows if "jax" in row.requirements} == {"3.11", "3.12", "3.13", "3.14"}
    assert not {row for row in rows if "cuda" in row.requirements and "darwin" in row.platform}
    assert {row.requirements for row in rows if not row.possible} == {'".[torch,numba-cuda12]"'}


@pytest.mark.parametrize(("possible", "answer", "code", "problem"), [
    (True, "", 0, ""),
    (True, "error: No solution found", 1, "error: No solution found\n"),
    (False, "", 0, "resolves, and README says that it does not"),
    (False, "error: No solution found", 1, ""),
    (False, "error: the index does not answer", 1, "error: the index does not answer\n"),
])  # fmt: skip
def test_a_row_of_readme_is_compared_with_the_answer_of_the_resolver(
    possible: bool, answer: str, code: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = tmp_path / "uv"
    uv.write_text(f"""#!/bin/sh
cd {tmp_path} && cat > input && echo "$@" > arguments && env > environment
[ -z "{answer}" ] || echo "{answer}" >&2
exit {code}
""")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("UV_FIND_LINKS", "/wheels")
    case = RESOLVE["Installation"]('".[torch,jax]" "jax[cuda13]"', "3.12", "linux", "highest", possible)
    assert RESOLVE["problem"](case) == problem
    assert (tmp_path / "input").read_text() == "jax[cuda13]"
    arguments = (tmp_path / "arguments").read_text()
    assert "--python-version 3.12 --python-platform linux" in arguments
    assert "--extra=torch --extra=jax" in arguments
    environment = (tmp_path / "environment").read_text()
    assert "UV_NO_CONFIG=1" in environment
    assert "UV_FIND_LINKS" not in environment


class Installation(NamedTuple):
    python: Path
    packages: Path
    elsewhere: Path
    folders: dict[str, Path]
    """Folders that contain packages."""

    @property
    def is_copy(self) -> bool:
        return self.folders["multisample"].is_relative_to(self.packages)


@pytest.fixture(scope="session", params=["wheel", "editable"])
def installation(request: Any, distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """A new environment with one of the wheels and all other packages of this environment."""
    is_editable = request.param == "editable"
    if is_editable and Path(sysconfig.get_path("purelib"), "multisample").exists():
        pytest.skip("this environment's own multisample would come before the editable one")
    folder = tmp_path_factory.mktemp(request.param)
    python, packages = install(getattr(distributions, request.param), folder)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    package = packages / "multisample"
    folders = {"multisample": package, "backends": package / "backends", "csrc": package / "csrc"}
    if is_editable:
        link = distributions.source / ".editable" / "multisample"
        folders = {"multisample": link, "backends": link / "backends", "csrc": link / "csrc"}
    return Installation(python, packages, elsewhere, folders)


@pytest.mark.slow
def test_an_installation_draws_equal_bits_from_another_folder(installation: Installation) -> None:
    found = json.loads(run(installation.python, "-c", USE, folder=installation.elsewhere))
    mu, sigma = np.array([0, 10], np.float32), np.array([1, 0.5], np.float32)
    assert found["bits"] == multisample.sample(mu, sigma, 5, seed=3).view(np.uint32).tolist()
    assert found["available"]
    assert found["version"] == multisample.__version__
    assert Path(found["file"]) == installation.folders["multisample"] / "__init__.py"
    assert Path(found["contract"]) == installation.folders["backends"] / "contract.py"
    assert not found["backends"]
    # Names that begin with two underscores, such as __pycache__, do not count.
    installed = {path.name for path in installation.packages.iterdir() if not path.name.startswith("__")}
    expected = {"lent.pth", f"multisample-{multisample.__version__}.dist-info"}
    assert installed == expected | {"multisample" if installation.is_copy else "_multisample.pth"}
    for command in ([installation.python, "-m", "multisample"], [installation.python.with_name("multisample")]):
        text = run(*command, "--version", folder=installation.elsewhere)
        assert text.split() == ["multisample", multisample.__version__]


@pytest.mark.slow
def test_an_installation_has_the_sources_to_compile_and_reports_missing_packages(installation: Installation) -> None:
    found = json.loads(run(installation.python, "-c", WITHOUT_LIBRARIES, folder=installation.elsewhere))
    assert Path(found["csrc"]) == installation.folders["csrc"]
    assert files(Path(found["csrc"])) == files(PACKAGE / "csrc")
    assert found["digest"] == csrc_files.digest()
    if shutil.which("g++"):
        own = installation.elsewhere / "own.cpp"
        own.write_text("#include <multisample/normal.h>\nfloat z() { return multisample::Stream(7).normal(0, 0); }\n")
        run("g++", "-std=c++17", "-fsyntax-only", f"-I{found['include']}", own, folder=installation.elsewhere)
    assert {"torch_ext", "cupy", "numba", "cpu"} <= found["available"].keys()
    assert found["available"]["cpu"]
    for name, library in (("torch_ext", "torch"), ("cupy", "cupy"), ("numba", "numba-cuda")):
        assert not found["available"][name]
        assert f"package {library} is not installed" in found["reasons"][name][0]


@pytest.mark.slow
def test_the_tests_of_an_sdist_run(distributions: Distributions, tmp_path: Path) -> None:
    with tarfile.open(distributions.sdist) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = tmp_path.iterdir()
    # README.md links to results, which copy_checkout does not copy.
    (unpacked / "bench" / "results").symlink_to(ROOT / "bench" / "results")
    (unpacked / "tests" / "test_place.py").write_text(PLACE)
    chosen = ("test_place.py", "call/test_dispatch.py", "distribution/test_docs.py")
    options = "-q", "-p", "no:cacheprovider", "-k", "place or dispatch or links or names"
    text = run(sys.executable, "-m", "pytest", *options, *(f"tests/{name}" for name in chosen), folder=unpacked)
    passed = re.search(r"^(\d+) passed", text, re.MULTILINE)
    assert passed is not None and int(passed[1]) > 50, text


TYPED_USER, TYPED_TORCH_USER = (SUPPORT / name for name in ("typed_user.py", "typed_torch_user.py"))


@pytest.mark.slow
def test_an_installation_has_types_for_users_with_and_without_array_libraries(installation: Installation) -> None:
    def check_types(*scripts: Path) -> None:
        copies = [shutil.copy(script, installation.elsewhere) for script in scripts]
        options = "--strict", "--config-file=", "--python-executable", installation.python
        run(sys.executable, "-m", "mypy", *options, *copies, folder=installation.elsewhere)

    if installation.is_copy:  # Most of mypy's time is for PyTorch.
        check_types(TYPED_USER, TYPED_TORCH_USER)
    lent = installation.packages / "lent.pth"
    packages = lent.read_text()
    lent.unlink()
    (installation.packages / "numpy").symlink_to(Path(np.__file__).parent)
    try:
        check_types(TYPED_USER)
    finally:
        (installation.packages / "numpy").unlink()
        lent.write_text(packages)
