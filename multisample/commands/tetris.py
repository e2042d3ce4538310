"""The `tetris` command: trains a player of Tetris with the cross-entropy method.

Each iteration saves its state, so the command can be stopped at any time and resumed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from multisample import examples
from multisample.backends.system.cache import say
from multisample.backends.system.live_line import LiveLine

from .workers import Workers

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from multisample.examples.tetris import Learner, Played

# Files in the output folder.
_STATE, _WEIGHTS, _CURVE, _ANIMATION = "state.json", "weights.json", "learning.png", "best_game.gif"
# Number of the first game after training. Training games have lower numbers.
_FIRST_FRESH = 1 << 32
_HEIGHT = 20
# The animation shows the last pieces of the best game.
_SHOWN = 200
# Tasks for each worker. Good players play longer, so equal shares would let workers wait.
_TASKS = 4


def add_parser(subparsers: Any) -> Any:
    """Add ``tetris`` to the command line."""
    parser = subparsers.add_parser(
        "tetris",
        help="train a player of Tetris with the cross-entropy method",
        description="Train a player of Tetris with the cross-entropy method, then play new games on the full board of"
        " 10 columns and 20 rows. Writes the weights, the learning curve and an animation of the best game. Ctrl-C"
        " stops the training, and --resume continues it with the same results as without the stop.",
    )
    parser.add_argument(
        "--minutes", type=_positive, default=3.0, help="training time of this run (default: 3), up to one iteration"
        " more",
    )  # fmt: skip
    parser.add_argument(
        "--iterations", type=_count, metavar="K", help="stop training after K iterations, including resumed ones"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("tetris"), metavar="DIR", help="output folder (default: tetris)"
    )
    parser.add_argument("--resume", action="store_true", help="continue the training in DIR with its settings")
    workers = parser.add_mutually_exclusive_group()
    workers.add_argument(
        "--workers", type=_count, metavar="K", help="train in K processes of one thread each, instead of in threads of"
        " this process; the result is the same",
    )  # fmt: skip
    workers.add_argument(
        "--scheduler", metavar="ADDRESS", help="train on the workers of the Dask cluster with this scheduler, such as"
        " tcp://host:8786; the result is the same",
    )  # fmt: skip
    training = parser.add_argument_group("training")
    settings: list[tuple[str, Any, str]] = [
        ("--features", str, "dellacherie (8, the default) or bertsekas (22)"),
        ("--seed", int, "seed of players and pieces (default: 0)"),
        ("--n", int, "players in each iteration (default: 100)"),
        ("--elite-frac", float, "fraction of players that the refit uses (default: 0.1)"),
        ("--games", int, "games of each player in each iteration (default: 10)"),
        ("--height", int, "rows of the training board; a low board makes games short (default: 10)"),
        ("--most-lines", int, "stop training games after this number of lines (default: 100000)"),
        ("--sigma", float, "standard deviation of the first weights (default: 10)"),
        ("--noise", float, "variance that each iteration adds (default: 4)"),
        ("--noise-step", float, "decrease of this variance in each iteration (default: 0)"),
    ]
    for name, kind, text in settings:
        training.add_argument(name, type=kind, help=text)
    fresh = parser.add_argument_group("after training")
    fresh.add_argument("--fresh-games", type=_count, default=20, metavar="K", help="games to play (default: 20)")
    fresh.add_argument(
        "--fresh-lines", type=_count, default=100_000, metavar="K",
        help="stop these games after K lines; good players clear millions (default: 100000)",
    )  # fmt: skip
    parser.set_defaults(settings=[name.removeprefix("--").replace("-", "_") for name, _, _ in settings])
    return parser


def run(args: argparse.Namespace) -> int:
    """Train, play and write files, with the settings in `args`."""
    from multisample.examples.tetris import pictures  # Numba takes half a second to import.

    learner = _learner(args)
    args.output.mkdir(parents=True, exist_ok=True)
    no_pictures = pictures.missing()
    if no_pictures:
        say(f"no pictures: {no_pictures}")
    try:
        with _workers(args) as (executor, count):
            _learn(executor, count, learner, args)
        played = _play_fresh(learner, args)
    except KeyboardInterrupt:
        if learner.history:
            _save(learner, args.output)  # Ctrl-C may come after an iteration, before its save.
            done = len(learner.history)
            say(f"{args.output}: saved {done} iterations; --resume continues after them")
        raise
    print(_summary(learner, played))
    written = [_STATE, _WEIGHTS]
    if not no_pictures:
        pictures.plot_learning(args.output / _CURVE, learner.history)
        _animate_best(learner, played, args.output / _ANIMATION)
        written += [_CURVE, _ANIMATION]
    print(f"{args.output}: {', '.join(written)}")
    return 0


def _learner(args: argparse.Namespace) -> Learner:
    """A new learner, or with --resume the learner in the output folder."""
    path = args.output / _STATE
    settings = {name: getattr(args, name) for name in args.settings if getattr(args, name) is not None}
    if not args.resume:
        if path.exists():
            raise ValueError(
                f"--output: expected a folder without {_STATE}, or --resume to continue with it, got {args.output}"
            )
        return examples.tetris.Learner(examples.tetris.Settings(**settings))
    learner = examples.tetris.Learner.load(path)
    for name, value in settings.items():
        if getattr(learner.settings, name) != value:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option}: expected {getattr(learner.settings, name)}, as in {path}, got {value}")
    return learner


def _learn(executor: Executor | None, count: Callable[[], int], learner: Learner, args: argparse.Namespace) -> None:
    start = time.monotonic()
    games = learner.settings.n * learner.settings.games
    last = on_workers = ""

    def progress(finished: int) -> None:
        clock = f"{time.monotonic() - start:.0f} s of {60 * args.minutes:.0f}"
        line.update(f"{last}  [{clock}; iteration {len(learner.history) + 1}: {100 * finished // games} %{on_workers}]")

    with LiveLine(sys.stderr) as line:
        while len(learner.history) < (args.iterations or sys.maxsize) and not learner.ended:
            workers = count()
            on_workers = f" on {workers} worker{'s' if workers > 1 else ''}" if executor else ""
            progress(0)
            done = learner.step(progress, executor=executor, tasks=max(_TASKS * workers, 1))
            _save(learner, args.output)
            last = (
                f"iteration {len(learner.history)}: {done.mean:,.1f} lines, best {done.best:,.1f},"
                f" sigma {done.sigma:.3g}"
            )
            line.show(f"{last}{on_workers}")
            # Check the time after an iteration, because there is no player before the first.
            if time.monotonic() - start >= 60 * args.minutes:
                break
    if learner.ended:
        say(str(learner.ended))


@contextlib.contextmanager
def _workers(args: argparse.Namespace) -> Iterator[tuple[Executor | None, Callable[[], int]]]:
    """The executor that --workers or --scheduler asks for, and a function that counts its workers."""
    if args.workers is not None:
        with Workers(args.workers) as executor:
            yield executor, lambda: args.workers
    elif args.scheduler is not None:
        from distributed import Client

        with Client(args.scheduler, set_as_default=False) as client:
            yield client.get_executor(), lambda: sum(client.nthreads().values())
    else:
        yield None, lambda: 0


def _save(learner: Learner, folder: Path, played: Played | None = None) -> None:
    """Write the state and the weights, with the results of fresh games if `played`."""
    names = examples.tetris.FEATURES[learner.settings.features]
    content: dict[str, Any] = {
        "settings": dataclasses.asdict(learner.settings),
        "weights": dict(zip(names, learner.weights.tolist(), strict=True)),
        "iterations": len(learner.history),
        "seconds": round(sum(done.seconds for done in learner.history), 3),
        "pieces": sum(done.pieces for done in learner.history),
    }
    if played is not None:
        lines = played.lines[0]
        content["fresh games"] = {
            "lines": lines.tolist(),
            "over": played.over[0].tolist(),
            "mean": float(lines.mean()),
            "quartiles": np.quantile(lines, [0.25, 0.5, 0.75]).tolist(),
        }
    learner.save(folder / _STATE)
    examples.tetris.learning.write_json(folder / _WEIGHTS, content)


def _play_fresh(learner: Learner, args: argparse.Namespace) -> Played:
    with LiveLine(sys.stderr) as line:
        played = examples.tetris.play(
            learner.weights, range(_FIRST_FRESH, _FIRST_FRESH + args.fresh_games), seed=learner.settings.seed,
            features=learner.settings.features, height=_HEIGHT, most_lines=args.fresh_lines,
            progress=lambda finished: line.update(f"fresh games: {finished} of {args.fresh_games}"),
        )  # fmt: skip
    _save(learner, args.output, played)
    return played


def _summary(learner: Learner, played: Played) -> str:
    lines = played.lines[0]
    low, middle, high = np.quantile(lines, [0.25, 0.5, 0.75])
    stopped = int((~played.over).sum())
    text = (
        f"{lines.size} fresh games after {len(learner.history)} iterations: {lines.mean():,.0f} lines on average,"
        f" quartiles {low:,.0f}, {middle:,.0f} and {high:,.0f}"
    )
    return f"{text}; {stopped} games were stopped by --fresh-lines" if stopped else text


def _animate_best(learner: Learner, played: Played, path: Path) -> None:
    """Write an animation of the end of the fresh game with the most lines."""
    from multisample.examples.tetris import pictures

    best = int(played.lines[0].argmax())
    last = int(played.pieces[0, best])
    made = examples.tetris.moves(
        learner.weights, _FIRST_FRESH + best, max(last - _SHOWN, 0), last, seed=learner.settings.seed,
        features=learner.settings.features, height=_HEIGHT,
    )  # fmt: skip
    pictures.animate(path, made, _HEIGHT)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return value
