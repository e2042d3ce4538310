"""Tetris learns the same player on a Dask cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dask
import pytest

from multisample.__main__ import main

QUICK = ("--n", "20", "--games", "2", "--height", "6", "--seed", "7", "--fresh-games", "1", "--fresh-lines", "60",
         "--iterations", "2")  # fmt: skip


@pytest.mark.slow
def test_a_scheduler_learns_the_same_player(client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tetris", *QUICK, "-o", str(tmp_path / "alone")]) == 0
    capsys.readouterr()
    address = client.scheduler.address
    assert main(["tetris", *QUICK, "-o", str(tmp_path / "cluster"), "--scheduler", address]) == 0
    assert " on 4 workers\n" in capsys.readouterr().err
    states = [json.loads((tmp_path / name / "state.json").read_text())["cem"] for name in ("alone", "cluster")]
    assert states[0] == states[1]


def test_a_scheduler_that_does_not_answer_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        assert main(["tetris", *QUICK, "-o", str(tmp_path / "x"), "--scheduler", "tcp://127.0.0.1:1"]) == 1
    assert "multisample: error: " in capsys.readouterr().err
