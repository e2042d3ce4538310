"""Plain `pytest` runs every benchmark once, on a small shape, to show that it works; it is timed when asked for."""

from __future__ import annotations

import pytest


def _timed(config: pytest.Config) -> bool:
    return bool(config.option.benchmark_only or config.option.benchmark_enable)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Set here and not in the options of pyproject.toml, where it would contradict --benchmark-only.
    if not _timed(config):
        config.option.benchmark_disable = True


@pytest.fixture(scope="session")
def timed(request: pytest.FixtureRequest) -> bool:
    """Whether this run measures, or only tries out."""
    return _timed(request.config)
