"""Sharded calls: each device draws its window of the matrix that one device would draw, and asks no other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from processes import run_python

pytest.importorskip("jax")

SCRIPT = Path(__file__).parents[1] / "support" / "sharded_jax.py"


@pytest.mark.slow
def test_sharded_over_eight_virtual_devices() -> None:
    """One process runs all checks."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    run_python(str(SCRIPT), seconds=600, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")


def test_sharded_over_gpus(gpus: list[Any]) -> None:
    if len(gpus) < 2:
        pytest.skip("this JAX has one CUDA device")
    run_python(str(SCRIPT), seconds=600)
