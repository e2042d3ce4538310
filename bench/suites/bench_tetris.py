"""Placements that the Tetris player evaluates per second, for each set of features, on one thread and on two.

The requirement is 10^6 per core. Placements are counted as on an empty board, 162 for every seven pieces.
"""

from typing import Any

import pytest

from bench.suites.cases import is_timed
from multisample.examples.tetris import FEATURES, play

PLACEMENTS_OF_A_PIECE = 162 / 7

WEIGHTS = {
    "dellacherie": [-1, 1, -1, -1, -4, -1, 0, 0],
    # A poor player, whose games have some hundred pieces.
    "bertsekas": [*[-1] * 10, *[-10] * 9, -5, -200, 3],
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.benchmark(min_rounds=7)
def test_play(benchmark: Any, pytestconfig: pytest.Config, features: str, threads: int) -> None:
    timed = is_timed(pytestconfig)
    games = range(2000) if timed else range(2)
    options: dict[str, Any] = {"features": features, "threads": threads, "most_pieces": 400 if timed else 20}
    play(WEIGHTS[features], range(1), features=features, most_pieces=1)  # Compiles.
    played = benchmark(lambda: play(WEIGHTS[features], games, **options))
    placements = int(played.pieces.sum() * PLACEMENTS_OF_A_PIECE)
    benchmark.group = features
    benchmark.extra_info.update(case=features, call=f"{threads} threads")
    if timed:
        ns = 1e9 * benchmark.stats.stats.min / placements
        benchmark.extra_info.update({"ns": ns, "placements per us": 1e3 / ns})
    assert played.pieces.shape == (1, len(games))
