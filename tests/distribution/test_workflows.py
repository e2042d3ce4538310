"""Workflows run only commands of `.ci/run`, so running it before a push finds every failure of theirs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
COMMANDS = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return found


def commands(path: Path) -> Iterator[str]:
    for job in jobs(path).values():
        for step in job["steps"]:
            yield from step.get("run", "").splitlines()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_each_command_is_one_of_ci(path: Path) -> None:
    assert [command for command in commands(path) if command not in COMMANDS] == []
    assert "secrets" not in path.read_text(encoding="utf-8")


def test_each_check_of_ci_is_in_a_workflow() -> None:
    found = {command for path in WORKFLOWS for command in commands(path)}
    programs = (
        "check-jsonschema", "clang-format", "lint-imports", "mypy", "pytest", "python -m", "python .ci", "ruff",
        "sphinx", "uvx",
    )  # fmt: skip
    expected = {line for line in COMMANDS if line.startswith(programs)}
    assert len(expected) > 10
    assert expected - found == set()


def test_pythons_of_the_tests_are_those_of_readme() -> None:
    versions = jobs(ROOT / ".github" / "workflows" / "test.yml")["tests"]["strategy"]["matrix"]["python"]
    assert f"| `.` | {versions[0]}-{versions[-1]} |" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(versions) == 5
