"""What is compiled into a wheel: libraries for every processor and every GPU that the wheel is for.

The build backend runs this from the unpacked files of the wheel, so that the sources are those that users will have:
a library whose sources are others is refused (`prebuilt`).
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import platform
import re
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from multisample.exceptions import BackendUnavailableError

from . import prebuilt, torch_ext_build
from .platform_tag import platform_tag
from .torch_ext_build import LibraryKind

__all__ = ["ARCHITECTURES", "build", "main"]

ARCHITECTURES = "7.5;8.0;8.6;9.0+PTX"
"""What to compile for where TORCH_CUDA_ARCH_LIST says nothing. Code for 8.6 runs on 8.9; of PTX, drivers make code for
whatever comes after 9.0."""


def build(kinds: Collection[LibraryKind]) -> list[Path]:
    """Compile libraries into `prebuilt.folder()`.

    Parameters
    ----------
    kinds : collection of {"cpu", "cuda"}

    Returns
    -------
    list of pathlib.Path
        The libraries.

    Raises
    ------
    BackendUnavailableError
        If one of them cannot be compiled, or what is needed for that is missing.
    ValueError
        If TORCH_CUDA_ARCH_LIST has anything but numbers.
    """
    os.environ["TORCH_CUDA_ARCH_LIST"] = os.environ.get("TORCH_CUDA_ARCH_LIST") or ARCHITECTURES
    reasons = list(torch_ext_build.missing_tools())
    if not prebuilt.cpu_targets():
        reasons.append(f"it is not known what to compile for on {platform.machine()!r}")
    if "cuda" in kinds:
        reasons.extend(torch_ext_build.cuda_reasons(ahead_of_time=True) or torch_ext_build.missing_nvcc())
    if reasons:
        raise BackendUnavailableError("; ".join(reasons))
    # What takes longest goes first.
    tasks: list[Callable[[], Path]] = [_build_cuda] if "cuda" in kinds else []
    if "cpu" in kinds:
        tasks.extend(functools.partial(_build_cpu, target) for target in prebuilt.cpu_targets())
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return [made.result() for made in [pool.submit(task) for task in tasks]]


def _build_cpu(target: str) -> Path:
    place = prebuilt.folder() / prebuilt.cpu_file(target)
    torch_ext_build.build_portable("cpu", place, f"-march={target}")
    return place


def _build_cuda() -> Path:
    names = os.environ["TORCH_CUDA_ARCH_LIST"]
    architectures = names.replace(" ", ";").split(";")
    if not all(re.fullmatch(r"\d+\.\d(\+PTX)?", name) for name in architectures):
        raise ValueError(f"TORCH_CUDA_ARCH_LIST: expected numbers, as in {ARCHITECTURES!r}, got {names!r}")
    import torch

    place = prebuilt.folder() / prebuilt.cuda_file(str(torch.version.cuda), architectures)
    torch_ext_build.build_portable("cuda", place)
    return place


def main(kinds: Sequence[str]) -> int:
    """Compile libraries of `kinds` and print the platform that a wheel with them is for; 1 if that fails."""
    try:
        libraries = build([kind for kind in ("cpu", "cuda") if kind in kinds])
    except (BackendUnavailableError, ValueError) as error:
        print(f"multisample: error: {error}", file=sys.stderr)
        return 1
    print(platform_tag(libraries))
    return 0
