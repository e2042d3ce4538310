"""The build backend: that of setuptools, which here can put compiled libraries into a wheel.

The variable MULTISAMPLE_PREBUILT says which: ``1`` those for the CPU and for CUDA, ``cpu`` those for the CPU alone.
They are compiled with the PyTorch, the compilers and the toolkit of the environment, which therefore cannot be an
isolated one::

    MULTISAMPLE_PREBUILT=1 python -m build --wheel --no-isolation

Without the variable, a wheel has the sources alone, which are compiled on first use; and so have an sdist and an
editable installation, whatever the variable says.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_VARIABLE = "MULTISAMPLE_PREBUILT"
_KINDS: dict[str, tuple[str, ...]] = {"": (), "0": (), "cpu": ("cpu",), "1": ("cpu", "cuda")}

# Whatever PyTorch prints comes before the platform.
_BUILD = """
import sys
sys.path.insert(0, sys.argv[1])
from multisample.backends.wheel_libraries import main
sys.exit(main(sys.argv[2:]))
"""


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel in `wheel_directory` and return its name, as PEP 517 has it."""
    kinds = _kinds()
    if not kinds:
        return str(build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))
    with tempfile.TemporaryDirectory() as temporary:
        pure = Path(temporary, build_meta.build_wheel(temporary, config_settings, metadata_directory))
        unpacked = Path(temporary, "unpacked")
        with zipfile.ZipFile(pure) as archive:
            archive.extractall(unpacked)
        platform = _compile(unpacked, kinds)
        libraries = {path.relative_to(unpacked).as_posix(): path.read_bytes() for path in unpacked.rglob("*.so")}
        name = "-".join([*pure.name.split("-")[:2], "py3", "none", f"{platform}.whl"])
        _write(Path(wheel_directory, name), pure, libraries, f"py3-none-{platform}")
    return name


def _kinds() -> tuple[str, ...]:
    asked = os.environ.get(_VARIABLE, "")
    if asked not in _KINDS:
        sys.exit(f"{_VARIABLE}: expected 1, cpu or 0, got {asked!r}")
    kinds = _KINDS[asked]
    missing = [name for name in ("torch", "numpy") if kinds and importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"{_VARIABLE}={asked}: {' and '.join(missing)} cannot be imported where the wheel is built. Build it where"
            " torch>=2.11, numpy, ninja, setuptools and the compilers are installed, and not in isolation:"
            " python -m build --wheel --no-isolation, or pip wheel --no-build-isolation"
        )
    return kinds


def _compile(unpacked: Path, kinds: tuple[str, ...]) -> str:
    """Put libraries beside the sources in `unpacked`, and return the platform of all of them."""
    done = subprocess.run([sys.executable, "-c", _BUILD, unpacked, *kinds], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{_VARIABLE}={os.environ[_VARIABLE]}: the libraries were not built")
    return done.stdout.splitlines()[-1]


def _write(wheel: Path, pure: Path, libraries: dict[str, bytes], tag: str) -> None:
    """Write a wheel with the files of `pure` and with `libraries`, by name."""
    with zipfile.ZipFile(pure) as old, zipfile.ZipFile(wheel, "w") as new:
        (record,) = [info for info in old.infolist() if info.filename.endswith(".dist-info/RECORD")]
        about = record.filename.removesuffix("RECORD")
        files = [(info, old.read(info)) for info in old.infolist() if info is not record]
        for name, content in sorted(libraries.items()):
            info = zipfile.ZipInfo(name, record.date_time)
            info.external_attr = 0o100644 << 16
            files.append((info, content))
        # What is about the wheel comes last in it, and RECORD at the very end.
        files.sort(key=lambda file: file[0].filename.startswith(about))
        lines = []
        for info, content in files:
            if info.filename == f"{about}WHEEL":
                content = _platform_specific(content.decode(), tag).encode()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            lines.append((info.filename, f"sha256={digest}", len(content)))
            new.writestr(info, content, zipfile.ZIP_DEFLATED)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*lines, (record.filename, "", "")])
        new.writestr(record, text.getvalue(), zipfile.ZIP_DEFLATED)


def _platform_specific(about: str, tag: str) -> str:
    """The file WHEEL of a wheel for every platform, for one with libraries."""
    replaced = {"Root-Is-Purelib": "false", "Tag": tag}
    lines = [line.partition(": ") for line in about.splitlines()]
    return "".join(f"{key}{colon}{replaced.get(key, value)}\n" for key, colon, value in lines)
