"""The `examples` command: lists the example programs, or runs one."""

import argparse
import importlib
from typing import Any

from multisample import examples

from . import tetris


def add_parser(subparsers: Any) -> Any:
    """Add ``examples`` to the command line."""
    text = "list the example programs, or run one"
    parser = subparsers.add_parser("examples", help=text, description=f"{text.capitalize()}.")
    parser.add_argument("name", nargs="?", choices=examples.__all__, help="the program to run; default: list all")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="options of the program; --help lists them")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the named program; without a name, print what each program shows, and its command."""
    if args.name == "tetris":
        subparsers = argparse.ArgumentParser(prog="python -m multisample").add_subparsers()
        return tetris.run(tetris.add_parser(subparsers).parse_args(args.arguments))
    if args.name:
        program = importlib.import_module(f"multisample.examples.{args.name}")
        return int(program.main(args.arguments))
    for name in examples.__all__:
        summary = (importlib.import_module(f"multisample.examples.{name}").__doc__ or "").partition("\n")[0]
        print(f"{name}\n    {summary}\n    python -m multisample examples {name}")
    return 0
