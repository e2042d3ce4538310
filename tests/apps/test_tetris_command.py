"""The `tetris` command: every end of a run leaves a state from which it can be resumed."""

import concurrent.futures.process
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dask_cluster import local_cluster
from PIL import Image, ImageSequence
from scored_functions import dies

from multisample.__main__ import main
from multisample.commands.workers import Workers
from multisample.examples.tetris import Learner, learning, moves, pictures

QUICK = ("--n", 20, "--games", 2, "--height", 6, "--seed", 7, "--fresh-games", 3, "--fresh-lines", 60)
FILES = {"state.json", "weights.json", "learning.png", "best_game.gif"}
# Settings under which games are long for every player.
LONG = ("--n", 20, "--games", 1, "--height", 6, "--minutes", 30)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command in this process."""

    def run(*argv: object) -> SimpleNamespace:
        try:
            code: Any = main(["tetris", *map(str, argv)])
        except SystemExit as error:
            code = error.code
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


def learnt(folder: str) -> tuple[Any, Any, Any]:
    """The weights, the fresh games and the state of a run."""
    weights = json.loads(Path(folder, "weights.json").read_text())
    return weights["weights"], weights["fresh games"], json.loads(Path(folder, "state.json").read_text())["cem"]


def test_the_command_trains_plays_and_writes_files(run: Any, folder: Path, terminal: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stderr", terminal)
    done = run(*QUICK, "--iterations", 3, "-o", "out")
    assert done.code == 0, done
    shown = terminal.getvalue()
    assert shown.count("\n") == 2, "one for training, and one for the fresh games"
    assert re.search(r"\r  \[0 s of 180; iteration 1: \d+ %\]", shown)
    assert re.search(r"\riteration 3: [\d,.]+ lines, best [\d,.]+, sigma [\d.]+ *\n", shown)
    assert "\rfresh games: 0 of 3" in shown
    summary, written = done.out.splitlines()
    assert summary.startswith("3 fresh games after 3 iterations: ")
    assert written == "out: state.json, weights.json, learning.png, best_game.gif"
    assert {path.name for path in (folder / "out").iterdir()} == FILES

    weights, fresh, _ = learnt("out")
    assert len(weights) == 8
    assert weights["holes"] == Learner.load(folder / "out" / "state.json").weights[4]
    assert len(fresh["lines"]) == len(fresh["over"]) == 3
    assert fresh["mean"] == sum(fresh["lines"]) / 3
    assert f"{fresh['mean']:,.0f} lines on average" in summary

    with Image.open("out/learning.png") as curve:
        assert min(curve.size) > 300
        assert len(set(curve.convert("L").resize((40, 40)).tobytes())) > 5


def test_an_older_run_is_continued_and_not_overwritten(run: Any, folder: Path) -> None:
    assert run("--resume").err == "multisample: error: tetris/state.json: No such file or directory\n"
    done = run(*QUICK, "--minutes", 1e-9)
    assert (done.code, len(done.err.splitlines())) == (0, 1)  # One iteration.
    before = Path("tetris/state.json").read_bytes()
    done = run(*QUICK, "--iterations", 1)
    assert done.code == 1
    assert "--output: expected a folder without state.json, or --resume to continue with it, got tetris" in done.err
    done = run("--resume", "--seed", 8)
    assert done.code == 1
    assert "error: --seed: expected 7, as in tetris/state.json, got 8" in done.err
    assert Path("tetris/state.json").read_bytes() == before
    done = run("--resume", "--iterations", 3, "--fresh-games", 3, "--fresh-lines", 60, "--n", 20)
    assert done.code == 0
    assert [line.partition(":")[0] for line in done.err.splitlines()] == ["iteration 2", "iteration 3"]
    assert run(*QUICK, "--iterations", 3, "-o", "whole").code == 0
    assert learnt("tetris") == learnt("whole")
    Path("tetris/state.json").write_text("[" * 100_000)
    done = run("--resume")
    assert done.code == 1
    assert re.fullmatch(r"multisample: error: tetris/state\.json: not a saved state of training \([^\n]*\)\n", done.err)
    assert "collapsed in iteration 1" in run(*QUICK, "--sigma", 0, "--noise", 0, "-o", "collapsed").err


@pytest.mark.parametrize(("options", "code", "message"), [
    *((("--minutes", text), 2, f"--minutes: expected a positive number, got '{text}'") for text in ("0", "nan", "inf")),
    (("--iterations", 0), 2, "--iterations: expected a positive integer, got '0'"),
    (("--workers", 0), 2, "--workers: expected a positive integer"),
    (("--workers", 2, "--scheduler", "tcp://127.0.0.1:1"), 2, "not allowed with"),
    (("--features", "mine"), 1, "features: expected 'dellacherie' or 'bertsekas', got 'mine'"),
])  # fmt: skip
def test_wrong_options_print_an_error(run: Any, folder: Path, options: Any, code: int, message: str) -> None:
    done = run(*options)
    assert done.code == code
    assert re.fullmatch(r"multisample: error: [^\n]*\n", done.err)
    assert message in done.err
    assert list(folder.iterdir()) == []


def test_training_works_without_matplotlib_and_pillow(run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("matplotlib", "PIL"):
        monkeypatch.setitem(sys.modules, module, None)
    done = run(*QUICK, "--iterations", 1)
    assert done.code == 0
    named = "no matplotlib and no pillow: pip install -e '.[tetris]'"
    assert f"multisample: no pictures: {named}\niteration 1: " in done.err
    assert {path.name for path in Path("tetris").iterdir()} == {"state.json", "weights.json"}


def full_cells(picture: Image.Image, height: int) -> list[list[bool]]:
    """A mask of the cells of a picture that are lighter than an empty cell, lowest row first."""
    pixel: Any = picture.convert("RGB").getpixel
    rows = [[sum(pixel((12 + 12 * column, 12 + 12 * row))) > 150 for column in range(10)] for row in range(height)]
    return rows[::-1]


@pytest.mark.parametrize("first", [0, 35])
def test_the_animation_shows_the_boards_of_the_game(tmp_path: Path, first: int) -> None:
    made = moves([-1, 1, -1, -1, -4, -1, 0, 0], 3, first, first + 40, seed=7, height=12)
    pictures.animate(tmp_path / "game.gif", made, 12)
    with Image.open(tmp_path / "game.gif") as image:
        found = [full_cells(frame, 12) for frame in ImageSequence.Iterator(image)]
    shown = [move.board[:12].tolist() for move in made[first > 0 :]]
    lines = [*[0] * (first == 0), *(move.lines for move in made)]
    completed = sum(before < after for before, after in itertools.pairwise(lines))
    assert lines[-1] > lines[0]
    assert len(found) >= len(shown)
    remaining = iter(found)
    for board in shown:
        # A picture of the completed rows may come before.
        picture = next(remaining)
        if picture != board:
            completed -= 1
            assert any(map(all, picture))
            picture = next(remaining)
        assert picture == board
    assert next(remaining, None) is None
    assert completed == 0


@pytest.mark.slow
def test_workers_learn_the_same_player(run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = run(*QUICK, "--iterations", 2, "-o", "alone")
    together = run(*QUICK, "--iterations", 2, "-o", "together", "--workers", 2)
    assert together.code == alone.code == 0, together
    assert learnt("together") == learnt("alone")
    assert together.err.replace(" on 2 workers", "") == alone.err
    assert together.err.splitlines()[1].endswith(" on 2 workers")
    with local_cluster() as client:
        cluster = run(*QUICK, "--iterations", 2, "-o", "cluster", "--scheduler", client.scheduler.address)
    assert cluster.code == 0, cluster
    assert learnt("cluster") == learnt("alone")
    assert " on 4 workers\n" in cluster.err
    monkeypatch.setattr(learning, "_play_task", dies)
    done = run("--resume", "--iterations", 3, "-o", "alone", "--workers", 1)
    assert done.code == 1
    assert "multisample: error: executor: expected one that runs all tasks, got Workers, which lost" in done.err


def test_a_scheduler_that_does_not_answer_is_an_error(run: Any, folder: Path) -> None:
    pytest.importorskip("distributed")
    import dask

    with dask.config.set({"distributed.comm.timeouts.connect": "300ms"}):
        done = run(*QUICK, "--scheduler", "tcp://127.0.0.1:1")
    assert done.code == 1
    assert "multisample: error: " in done.err


def test_workers_that_die_while_tasks_are_cancelled_print_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    manager: Any = concurrent.futures.process._ExecutorManagerThread
    wait, is_dead, reported = manager.wait_result_broken_or_wakeup, threading.Event(), list[Any]()

    def wait_for_results_or_deaths(self: Any) -> Any:
        result = wait(self)
        return (None, True, None) if is_dead.is_set() else result

    monkeypatch.setattr(manager, "wait_result_broken_or_wakeup", wait_for_results_or_deaths)
    monkeypatch.setattr(threading, "excepthook", reported.append)
    with pytest.raises(KeyboardInterrupt), Workers(1) as executor:
        futures = [executor.submit(time.sleep, 0.01) for _ in range(20)]
        futures[0].result()
        for future in futures:
            future.cancel()
        is_dead.set()
        raise KeyboardInterrupt
    assert reported == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("--workers", 2)])
def test_a_signal_stops_the_command_after_saving(run: Any, folder: Path, workers: tuple[Any, ...]) -> None:
    # The test process may ignore signals, which its children inherit.
    code = "import signal as s, sys; s.signal(s.SIGINT, s.default_int_handler); s.signal(s.SIGTERM, s.SIG_DFL);"
    code += "from multisample.__main__ import main; raise SystemExit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "tetris", *map(str, (*LONG, *workers))]
    for number, more in ((signal.SIGINT, []), (signal.SIGTERM, ["--resume"]))[: 2 if workers else 1]:
        process = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        known = Path("tetris/state.json").stat().st_mtime_ns if more else 0
        end = time.monotonic() + 60
        while not Path("tetris/state.json").exists() or Path("tetris/state.json").stat().st_mtime_ns == known:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.02)
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=60)
        kept = len(Learner.load(Path("tetris/state.json")).history)
        assert (process.returncode, out) == (128 + number, "")
        assert f"tetris: saved {kept} iterations; --resume continues after them\n" in err
        # No worker process is left, and none has printed a traceback.
        assert err.endswith(f"multisample: stopped by {number.name}\n")
        assert "Traceback" not in err
    done = run("--resume", "--iterations", kept + 1, "--fresh-lines", 60)
    assert done.code == 0
    assert f"after {kept + 1} iterations" in done.out
