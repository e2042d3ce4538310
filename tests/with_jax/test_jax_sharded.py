"""Sharded calls: each device draws its window of the matrix that one device would draw, and asks no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")

SCRIPT = Path(__file__).parents[1] / "support" / "sharded_jax.py"
FLAGS = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
PLATFORMS: dict[str, dict[str, str]] = {"cpu": {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"}, "cuda": {}}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_check_passes_in_a_process_with_several_devices(platform: str) -> None:
    if platform == "cuda" and (jax.default_backend() == "cpu" or jax.device_count() < 2):
        pytest.skip("this JAX has fewer than two CUDA devices")
    path = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=os.environ | PLATFORMS[platform] | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    failed = [f"{check}:\n{error}" for check, error in found.items() if error]
    assert not failed, "\n".join(failed)
    assert len(found) >= 10
