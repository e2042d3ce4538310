"""Folders of the repository that tests read."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
DATA, SHIM = SUPPORT / "data", SUPPORT / "shim"
ROOT = SUPPORT.parents[1]
