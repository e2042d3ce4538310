"""Plain `pytest` runs every benchmark once, on a small shape, to show that it works; it is timed when asked for."""

from __future__ import annotations

from typing import Any

import pytest


def _timed(config: pytest.Config) -> bool:
    return bool(config.option.benchmark_only or config.option.benchmark_enable)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Set here and not in the options of pyproject.toml, where it would contradict --benchmark-only.
    if not _timed(config):
        config.option.benchmark_disable = True


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    # Every single time of every round: megabytes that nobody reads.
    for entry in output_json["benchmarks"]:
        entry["stats"].pop("data", None)


@pytest.fixture(scope="session")
def timed(request: pytest.FixtureRequest) -> bool:
    """Whether this run measures, or only tries out."""
    return _timed(request.config)
