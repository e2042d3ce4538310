"""Checks that every row of README's table of installations resolves from the package index alone.

pip may also take packages from local folders and other indexes (`pip config list`), so an installation that works on
one machine proves little about others. uv reads the index only, and resolves for any Python and platform.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

__all__ = ["Installation", "installations", "problem"]

ROOT = Path(__file__).resolve().parents[1]
HEADING = "| `pip install -e` | Python | On |"
PLATFORMS = {"Linux": ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28"), "macOS": ("aarch64-apple-darwin",)}


class Installation(NamedTuple):
    """A command of README for one Python and platform; `possible` is false where README says that none fits."""

    requirements: str
    python: str
    platform: str
    resolution: str
    possible: bool


def installations(readme: str) -> Iterator[Installation]:
    """The installations in the table of README."""
    lines = itertools.takewhile(str.strip, readme[readme.index(HEADING) :].splitlines()[2:])
    rows = [[cell.strip() for cell in line.split("|")][1:4] for line in lines]
    pythons = {text: _versions(text) for _, text, _ in rows if text != "none"}
    pythons["none"] = max(pythons.values(), key=len)
    for commands, text, systems in rows:
        platforms = [platform for system in systems.split(", ") for platform in PLATFORMS[system]]
        targets = [(python, "highest") for python in pythons[text]]
        targets += [(python, "lowest-direct") for python in (pythons[text][0], pythons[text][-1])]
        for requirements in re.findall(r"`([^`]+)`", commands):
            for (python, resolution), platform in itertools.product(targets, platforms):
                yield Installation(requirements, python, platform, resolution, possible=text != "none")


def _versions(text: str) -> list[str]:
    """Every version of "3.10-3.14"."""
    first, last = (int(minor) for minor in re.findall(r"3\.(\d+)", text))
    return [f"3.{minor}" for minor in range(first, last + 1)]


def problem(installation: Installation) -> str:
    """What README says wrongly about an installation; an empty text if nothing."""
    project, *others = shlex.split(installation.requirements)
    extras = re.fullmatch(r"\.(?:\[(.+)\])?", project)
    assert extras is not None, f"expected this project first, got {installation.requirements}"
    # As pip does, take a pre-release only of projects that have no other release.
    command = [
        "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--only-binary", ":all:",
        "--prerelease", "if-necessary", "--resolution", installation.resolution,
        # Without an interpreter, uv searches for one of that version, which takes longer than all else.
        "--python", sys.executable, "--python-version", installation.python, "--python-platform", installation.platform,
        "pyproject.toml", "-", *(f"--extra={extra}" for extra in (extras[1] or "").split(",") if extra),
    ]  # fmt: skip
    # Settings of uv may add sources of packages. PyTorch's wheels need macOS 14.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    own = {"UV_NO_CONFIG": "1", "UV_PYTHON_DOWNLOADS": "never", "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    done = subprocess.run(
        command, input="\n".join(others), cwd=ROOT, env=inherited | own, capture_output=True, text=True
    )  # fmt: skip
    if installation.possible:
        return done.stderr if done.returncode else ""
    if done.returncode == 0:
        return "resolves, and README says that it does not"
    return "" if "No solution found" in done.stderr else done.stderr


def main() -> None:
    """Resolve all installations and report those that README describes wrongly."""
    start = time.monotonic()
    found = list(installations((ROOT / "README.md").read_text(encoding="utf-8")))
    with ThreadPoolExecutor(24) as executor:
        problems = list(executor.map(problem, found))
    for (requirements, python, platform, resolution, _), text in zip(found, problems, strict=True):
        if text:
            print(f"{requirements} on Python {python}, {platform}, {resolution}: {text}")
    print(f"{len(found)} resolutions in {time.monotonic() - start:.0f} s, {sum(map(bool, problems))} wrong")
    sys.exit(any(problems))


if __name__ == "__main__":
    main()
