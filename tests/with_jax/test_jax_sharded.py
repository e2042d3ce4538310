"""Sharded calls: each device draws its window of the matrix that one device would draw, and asks no other."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest
from processes import run_python

pytest.importorskip("jax")

SCRIPT = Path(__file__).parents[1] / "support" / "sharded_jax.py"
# The names of the checks, read from the source: an import would need the devices of SCRIPT's own process.
CHECKS, SLOW_CHECKS = (
    [
        node.name
        for node in ast.parse(SCRIPT.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(x, ast.Name) and x.id == decorator for x in node.decorator_list)
    ]
    for decorator in ("check", "slow_check")
)


def run(*checks: str) -> dict[str, str]:
    """What each check found, in a process with eight virtual devices. Without names, all quick checks run."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    run = run_python(str(SCRIPT), *checks, seconds=600, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    found: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def findings() -> dict[str, str]:
    return run()


@pytest.mark.parametrize("check", CHECKS)
def test_sharded(findings: dict[str, str], check: str) -> None:
    assert findings[check] == ""


@pytest.mark.slow
@pytest.mark.parametrize("check", SLOW_CHECKS)
def test_sharded_slowly(check: str) -> None:
    assert run(check)[check] == ""


def test_sharded_checks_exist() -> None:
    assert len(CHECKS) >= 10
