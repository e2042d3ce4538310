"""`Learner`: trains the weights of a player by the cross-entropy method. All players in an iteration play equal games.

A good player's game on the full board lasts for millions of lines, too long to train on. Training uses a board of half
the height, where the same player survives some thousand lines; longer survival there means longer survival on the full
board too (Gabillon, Ghavamzadeh and Scherrer 2013). Added variance keeps the search from converging to players that
were only lucky (Szita and Lőrincz 2006).

References
----------
I. Szita, A. Lőrincz, "Learning Tetris using the noisy cross-entropy method", Neural Computation 18, 2006,
doi:10.1162/neco.2006.18.12.2936.
C. Thiery, B. Scherrer, "Improvements on learning Tetris with cross entropy", ICGA Journal 32 (1), 2009.
V. Gabillon, M. Ghavamzadeh, B. Scherrer, "Approximate dynamic programming finally performs well in the game of
Tetris", NIPS 2013.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from multisample._arguments import check_choice, checked_integer, describe
from multisample.cem import CEM, Task
from multisample.cem._method import checked_number
from multisample.cem._tasks import run_tasks

from .player import FEATURES, checked_height, play

if TYPE_CHECKING:
    from concurrent.futures import Executor

_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a training run. Equal settings give equal weights, bit for bit, on any number of threads or workers.

    Attributes
    ----------
    features : {"dellacherie", "bertsekas"}
        The set of features.
    seed : int
        Seed of the players and of the pieces, ``0 <= seed < 2**64``.
    n : int
        Number of players in each iteration.
    elite_frac : float
        Fraction of the players that the refit uses.
    games : int
        Number of games of each player in each iteration. All players play the same games; each iteration has new ones.
    height : int
        Rows of the board, 4 to 24. Games are shorter on lower boards.
    most_lines : int
        Number of lines after which a game is stopped.
    sigma : float
        Standard deviation of the first weights, whose mean is 0.
    noise, noise_step : float
        Iteration t, counted from 1, adds a variance of ``max(noise - noise_step * t, 0)``.
    """

    features: str = "dellacherie"
    seed: int = 0
    n: int = 100
    elite_frac: float = 0.1
    games: int = 10
    height: int = 10
    most_lines: int = 100_000
    sigma: float = 10.0
    noise: float = 4.0
    noise_step: float = 0.0

    def __post_init__(self) -> None:
        check_choice("features", self.features, tuple(FEATURES))
        checked_integer("seed", self.seed, 0, 1 << 64)
        checked_integer("games", self.games, 1, 1 << 31)
        checked_height(self.height)
        checked_integer("most_lines", self.most_lines, 1, 1 << 62)
        for name in ("sigma", "noise", "noise_step"):
            checked_number(name, getattr(self, name), 0, math.inf)


@dataclasses.dataclass(frozen=True)
class Iteration:
    """The results of one iteration."""

    mean: float
    """Mean number of lines over all games of all players."""
    best: float
    """Mean number of lines over the games of the best player."""
    sigma: float
    """The largest standard deviation of a weight after the refit."""
    pieces: int
    """Number of placed pieces."""
    seconds: float
    """Duration of the iteration."""


class Learner:
    """Trains the weights of a player, one iteration at a time.

    Parameters
    ----------
    settings : Settings
        Settings of the run.

    Raises
    ------
    TypeError
        If a setting has the wrong type.
    ValueError
        If a setting is out of range.

    Attributes
    ----------
    settings : Settings
    history : list of Iteration
        Results of the iterations.

    Examples
    --------
    >>> learner = Learner(Settings(seed=7, n=20, games=2, height=6))
    >>> for _ in range(3):
    ...     _ = learner.step()
    >>> learner.weights.shape, len(learner.history)
    ((8,), 3)

    A saved learner continues with the same bits:

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learner.save(pathlib.Path(folder, "state.json"))
    ...     other = Learner.load(pathlib.Path(folder, "state.json"))
    >>> learner.step().mean == other.step().mean
    True
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.history: list[Iteration] = []
        self._cem = CEM(
            np.zeros(len(FEATURES[settings.features])),
            settings.sigma,
            settings.n,
            elite_frac=settings.elite_frac,
            noise_floor=lambda t: max(settings.noise - settings.noise_step * t, 0.0),
            seed=settings.seed,
        )

    @property
    def weights(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The mean player, shape (d,).

        The mean player is better than the best player of an iteration, which is often only the luckiest.
        """
        return np.array(self._cem.mu)

    @property
    def ended(self) -> str:
        """The reason for the end of the training; empty while it can continue."""
        return self._cem.result().message if self._cem.status else ""

    def step(
        self,
        progress: Callable[[int], None] | None = None,
        *,
        threads: int | None = None,
        executor: Executor | None = None,
        tasks: int = 1,
    ) -> Iteration:
        """Run one iteration: draw, play, refit.

        An exception, such as KeyboardInterrupt, leaves the learner unchanged.

        Parameters
        ----------
        progress : callable, optional
            Called repeatedly with the number of finished games, out of ``n * games``.
        threads : int, optional
            As for `play`; not used with `executor`.
        executor : concurrent.futures.Executor, optional
            Plays the games in its threads or processes, each task by one thread.
        tasks : int, default 1
            With `executor`: number of tasks, best a few for each worker, since good players play longer.

        Returns
        -------
        Iteration
            The results, which are also appended to `history`.

        Raises
        ------
        TypeError
            If `threads` or `tasks` is not an integer.
        ValueError
            If `threads` or `tasks` is not at least 1.
        concurrent.futures.BrokenExecutor
            If `executor` breaks.
        """
        settings, start = self.settings, time.perf_counter()
        before, made = self._cem.state, len(self.history)
        games = range(made * settings.games, (made + 1) * settings.games)
        lines, pieces, finished = np.empty(settings.n), 0, 0

        def tell(task: Task, played: tuple[np.ndarray[Any, Any], int]) -> None:
            nonlocal pieces, finished
            lines[task.start : task.start + task.count] = played[0]
            pieces, finished = pieces + played[1], finished + task.count * len(games)
            self._cem.tell_scores(task, -played[0])
            if progress is not None and executor is not None:
                progress(finished)

        try:
            if executor is None:
                (task,) = self._cem.ask_tasks(1)
                tell(task, _play_task(task, settings, games, threads, progress))
            else:
                run_tasks(executor, self._cem.ask_tasks(tasks), lambda task: (_play_task, task, settings, games), tell)
            seconds = time.perf_counter() - start
            done = Iteration(float(lines.mean()), float(lines.max()), float(self._cem.sigma.max()), pieces, seconds)
            self.history.append(done)
        except BaseException:
            self._cem.state = before
            del self.history[made:]
            raise
        return done

    def save(self, path: Path) -> None:
        """Write the state as JSON. The write is atomic: after an error, `path` has its old content."""
        state = {
            "version": _VERSION,
            "settings": dataclasses.asdict(self.settings),
            "history": [dataclasses.asdict(iteration) for iteration in self.history],
            # Python's decimal digits restore the same float.
            "cem": {name: np.asarray(value).tolist() for name, value in self._cem.state.items()},
        }
        write_json(path, state)

    @classmethod
    def load(cls, path: Path) -> Learner:
        """Restore a learner from a file written by `save`.

        Raises
        ------
        ValueError
            If the file was not written by `save`.
        """
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            if state["version"] != _VERSION:
                raise ValueError(f"version: expected {_VERSION}, got {describe(state['version'])}")
            learner = cls(Settings(**state["settings"]))
            learner.history = [Iteration(**iteration) for iteration in state["history"]]
            learner._cem.state = state["cem"]
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            # The original error does not name the file.
            raise ValueError(f"{path}: not a saved state of training ({type(error).__name__}: {error})") from error
        return learner


def _play_task(
    task: Task, settings: Settings, games: range, threads: int | None = 1,
    progress: Callable[[int], None] | None = None,
) -> tuple[np.ndarray[Any, Any], int]:  # fmt: skip
    """The mean number of lines of each player, and the number of pieces of all."""
    played = play(
        task.draw(), games, seed=settings.seed, features=settings.features, height=settings.height,
        most_lines=settings.most_lines, threads=threads, progress=progress,
    )  # fmt: skip
    return played.lines.mean(axis=1), int(played.pieces.sum())


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
