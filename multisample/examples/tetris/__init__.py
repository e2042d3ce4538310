"""The first user of the sampler: a Tetris player whose weights the cross-entropy method finds.

`play` lets many players play many games, `Learner` finds the weights of a good one; ``python -m multisample tetris`` is
both, with pictures.
"""

from __future__ import annotations

from .learning import Learner, Settings
from .player import FEATURES, Move, Played, moves, placement, play

__all__ = ["FEATURES", "Learner", "Move", "Played", "Settings", "moves", "placement", "play"]
