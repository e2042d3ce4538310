"""Plain `pytest` runs every benchmark once, on a small shape, to show that it works; it is timed when asked for."""

from typing import Any

import pytest

from bench.suites.cases import is_timed
from bench.suites.contenders import cuda_reason
from bench.suites.machine import describe
from bench.suites.running import CudaRunner
from bench.suites.timing import CudaDevice


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Set here and not in the options of pyproject.toml, where it would contradict --benchmark-only.
    if not is_timed(config):
        config.option.benchmark_disable = True


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    on_gpu = any(entry["extra_info"].get("device_s") for entry in output_json["benchmarks"])
    output_json["multisample_machine"] = describe(gpu=on_gpu)
    # Every single time of every round: megabytes that nobody reads.
    for entry in output_json["benchmarks"]:
        entry["stats"].pop("data", None)


@pytest.fixture(scope="session")
def cuda() -> CudaRunner:
    """Runs contenders on a GPU; skips the test where there is none."""
    reason = cuda_reason()
    if reason:
        pytest.skip(reason)
    return CudaRunner(CudaDevice())
