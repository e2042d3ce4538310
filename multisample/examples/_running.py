"""The command lines of the examples: options by their default values."""

import argparse
from collections.abc import Sequence
from typing import Any


def parsed(name: str, doc: str | None, argv: Sequence[str] | None, **options: Any) -> argparse.Namespace:
    """The arguments of example `name`, by their defaults: a value, a tuple of choices, or a list of any length."""
    parser = argparse.ArgumentParser(
        prog=f"python -m multisample examples {name}", description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    for option, default in options.items():
        kind: dict[str, Any] = {"type": type(default)}
        if isinstance(default, tuple):
            kind, default = {"choices": default}, default[0]
        elif isinstance(default, list):
            kind = {"nargs": "+"}
        parser.add_argument(f"--{option}", **kind, default=default, help="[%(default)s]")
    return parser.parse_args(argv)
