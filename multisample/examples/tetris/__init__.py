"""The cross-entropy method trains a player of Tetris.

`play` lets many players play many games. `Learner` finds the weights of a good player. The command
``python -m multisample tetris`` trains a player, plays new games with it, and draws pictures.
"""

from .learning import Learner, Settings
from .player import FEATURES, Move, Played, moves, placement, play

__all__ = ["FEATURES", "Learner", "Move", "Played", "Settings", "moves", "placement", "play"]
