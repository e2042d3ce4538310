"""The commands of ``python -m multisample``."""

from . import build, draw, examples, report, tetris

COMMANDS = (report, draw, build, examples, tetris)
"""The modules of the commands, each with `add_parser` and `run`, in the order of the help."""
