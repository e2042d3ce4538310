"""Wheels with compiled libraries: built for real, installed where there is no compiler, and refused where they do not fit.

A library that is taken though it does not fit would crash, or draw something else; so what must not be taken is tested
as much as what must.
"""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from installations import ROOT, attempt, contents, copy_checkout, install, run

import multisample
from multisample import BackendUnavailableError
from multisample.__main__ import main
from multisample.backends import csrc_files, platform_tag, prebuilt, registry, torch_ext_build, wheel_libraries

torch = pytest.importorskip("torch")
pytest.importorskip("build")
needs_tools = pytest.mark.skipif(
    bool(torch_ext_build.missing_tools()), reason="; ".join(torch_ext_build.missing_tools())
)
TORCH_CUDA = torch.version.cuda
NVCC = torch_ext_build._cuda_home()

# Draws from PyTorch tensors in memory of a kind, and says which library did.
USE = """
import json, sys
import torch
import multisample
from multisample.backends import registry

device = sys.argv[1]
mu = torch.linspace(-3, 3, 70, device=device)
bits = {}
for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
    x = multisample.sample(mu, mu.abs(), 301, seed=3, dtype=dtype, backend="torch_ext")
    bits[str(dtype)] = x.cpu().contiguous().view(torch.uint8).numpy().tobytes().hex()
status = multisample.backends()["torch_ext"]
loaded = [line.split()[-1] for line in open("/proc/self/maps") if "multisample_torch" in line]
print(json.dumps({"bits": bits, "device": status.device, "loaded": sorted(set(loaded))}))
"""


def build_wheel(folder: Path, asked: str, **environment: str) -> Path:
    source = copy_checkout(folder / "source")
    run(
        sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist", source,
        folder=folder, MULTISAMPLE_PREBUILT=asked, **environment,
    )  # fmt: skip
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With libraries for the CPU."""
    return build_wheel(tmp_path_factory.mktemp("prebuilt"), "cpu")
