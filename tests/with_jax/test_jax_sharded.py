"""Sharded calls: each device draws its window of the matrix that one device would draw, and asks no other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from processes import run_python

pytest.importorskip("jax")

SCRIPT = Path(__file__).parents[1] / "support" / "sharded_jax.py"


@pytest.mark.parametrize("selected", ["quick", pytest.param("slow", marks=pytest.mark.slow)])
def test_sharded(selected: str) -> None:
    """One process with eight virtual devices runs all checks."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    run = run_python(str(SCRIPT), selected, seconds=600, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    found: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    assert found
    failed = [f"{name}: {text}" for name, text in found.items() if text]
    assert not failed, "\n".join(failed)
