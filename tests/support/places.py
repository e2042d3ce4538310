"""Folders of the repository that tests read."""

from pathlib import Path

SUPPORT = Path(__file__).parent
DATA, SHIM = SUPPORT / "data", SUPPORT / "shim"
ROOT = SUPPORT.parents[1]
