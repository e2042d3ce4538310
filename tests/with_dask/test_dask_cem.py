"""The cross-entropy method on a Dask cluster: the same bits, also after workers have died."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scored_functions import DiesOnce, assert_same, fails, run, sphere


def test_a_cluster_gives_the_same_bits_and_errors(client: Any) -> None:
    executor, lock = client.get_executor(), ThreadPoolExecutor(1)
    with pytest.raises(ArithmeticError, match="a score is missing"):
        run(lambda x: fails(x + 10), executor=executor, tasks=3)
    with pytest.raises(TypeError, match=r"f: expected a function that ClientExecutor can send .*, got <function"):
        run(lambda x: lock, executor=executor)
    assert_same(run(lambda x: np.square(x - 1).sum(axis=0), executor=executor, tasks=16), run())


def test_a_worker_that_dies_in_a_task_changes_nothing(client: Any, tmp_path: Path) -> None:
    before = set(client.run(os.getpid).values())
    assert_same(run(DiesOnce(tmp_path), executor=client.get_executor(), tasks=4), run())
    assert set(client.run(os.getpid).values()) != before
    client.wait_for_workers(1)


def test_an_executor_with_retries_repeats_a_failed_task(client: Any, tmp_path: Path) -> None:
    def twice(x: Any) -> Any:
        try:
            (tmp_path / "failed").touch(exist_ok=False)
        except FileExistsError:
            return sphere(x)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run(twice, executor=client.get_executor(), tasks=3)
    (tmp_path / "failed").unlink()
    assert_same(run(twice, executor=client.get_executor(retries=1), tasks=3), run())
