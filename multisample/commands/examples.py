"""The `examples` command: lists the example programs."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from multisample import examples


def add_parser(subparsers: Any) -> Any:
    """Add ``examples`` to the command line."""
    return subparsers.add_parser("examples", help="list the example programs", description="List the example programs.")


def run(args: argparse.Namespace) -> int:
    """Print what each program shows, and its command."""
    for name in examples.__all__:
        summary = (importlib.import_module(f"multisample.examples.{name}").__doc__ or "").partition("\n")[0]
        command = "multisample tetris" if name == "tetris" else f"multisample.examples.{name}"
        print(f"{name}\n    {summary}\n    python -m {command}")
    return 0
