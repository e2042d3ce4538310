"""Building distributions of this checkout, and installing them in environments that cannot import from it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import numpy as np
from places import ROOT

# Seconds after which a command counts as hanging.
DEADLINE = 300
# Build results and personal files, which are no sources of a distribution.
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".editable", ".*_cache", "__pycache__", "build", "dist", "results", "prebuilt"
)  # fmt: skip


def not_source(folder: str, names: list[str]) -> set[str]:
    """The entries of `folder` that are no sources: those of NOT_SOURCE, and virtual environments."""
    return NOT_SOURCE(folder, names) | {name for name in names if Path(folder, name, "pyvenv.cfg").exists()}


def copy_checkout(folder: Path) -> Path:
    """A copy of the checkout without build results."""
    shutil.copytree(ROOT, folder, symlinks=True, ignore=not_source)
    return folder


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    """The output of a command, run in `folder` without access to this checkout."""
    done = attempt(*command, folder=folder, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def attempt(*command: str | Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that may fail, in `folder` without access to this checkout."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "MULTISAMPLE_PREBUILT")
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    environment = inherited | environment
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def install(wheel: Path, folder: Path) -> tuple[Path, Path]:
    """The interpreter of a new environment with the wheel and all packages of this one, and its package folder."""
    environment = folder / "environment"
    venv.create(environment, with_pip=False)
    python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"
    run(*pip, "install", "--no-deps", "--no-index", wheel, folder=folder)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip())
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(np.__file__).parents[1])}
    # Folders named in a .pth file follow the .pth file's folder on sys.path; .pth files in them are not read.
    (packages / "lent.pth").write_text("\n".join(sorted(lent)))
    return python, packages
