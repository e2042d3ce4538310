"""Compiles the libraries of a wheel, for every processor and every GPU that the wheel supports.

The build hook runs this module in a separate process, from the sources of the wheel: `prebuilt` refuses a library of
other sources.
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

from multisample.backends.errors import BackendUnavailableError

from . import build, libraries, prebuilt, toolchain
from .compiler_flags import LibraryKind
from .platform_tag import platform_tag

ARCHITECTURES = "7.5;8.0;8.6;9.0+PTX"
"""The default of TORCH_CUDA_ARCH_LIST. GPUs of 8.9 run the code for 8.6. For newer ones, drivers compile the PTX."""


def build_all(kinds: Collection[LibraryKind], root: Path) -> list[Path]:
    """Compile libraries into a folder of `root`, named as `prebuilt` expects, and return their paths.

    The wheel has the folder `root` as its `prebuilt.root()`. Raises BackendUnavailableError if a tool is missing or a
    library cannot be compiled, and ValueError if TORCH_CUDA_ARCH_LIST has anything other than numbers.
    """
    os.environ["TORCH_CUDA_ARCH_LIST"] = os.environ.get("TORCH_CUDA_ARCH_LIST") or ARCHITECTURES
    reasons = list(toolchain.missing_tools())
    if not prebuilt.cpu_targets():
        reasons.append(f"no processors are defined to compile for on {platform.machine()!r}")
    if "cuda" in kinds:
        reasons.extend(libraries.cuda_reasons(ahead_of_time=True) or toolchain.missing_nvcc())
    if reasons:
        raise BackendUnavailableError("; ".join(reasons))
    folder = root / prebuilt.folder().name
    # The CUDA library takes longest, so it is first.
    tasks: list[Callable[[], Path]] = [functools.partial(_build_cuda, folder)] if "cuda" in kinds else []
    if "cpu" in kinds:
        tasks.extend(functools.partial(_build_cpu, folder, target) for target in prebuilt.cpu_targets())
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return [built.result() for built in [pool.submit(task) for task in tasks]]


def _build_cpu(folder: Path, target: str) -> Path:
    place = folder / prebuilt.cpu_file(target)
    build.build_portable("cpu", place, f"-march={target}")
    return place


def _build_cuda(folder: Path) -> Path:
    names = os.environ["TORCH_CUDA_ARCH_LIST"]
    architectures = names.replace(" ", ";").split(";")
    if not all(re.fullmatch(r"\d+\.\d(\+PTX)?", name) for name in architectures):
        raise ValueError(f"TORCH_CUDA_ARCH_LIST: expected numbers, as in {ARCHITECTURES!r}, got {names!r}")
    import torch

    place = folder / prebuilt.cuda_file(str(torch.version.cuda), architectures)
    build.build_portable("cuda", place)
    return place


def main(root: str, kinds: Sequence[str]) -> int:
    """Compile libraries of `kinds` below `root` and print the platform tag of a wheel with them; 1 if that fails."""
    try:
        built = build_all([kind for kind in ("cpu", "cuda") if kind in kinds], Path(root))
    except (BackendUnavailableError, ValueError) as error:
        print(f"multisample: error: {error}", file=sys.stderr)
        return 1
    print(platform_tag(built))
    return 0
