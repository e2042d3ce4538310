"""A progress line: rewritten in place in a terminal, else printed as separate lines."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Self

# Seconds between updates in a terminal.
_INTERVAL = 0.1
RARE = 10.0
"""Seconds between updates outside a terminal, for commands that report progress there."""


class LiveLine:
    """A line on `stream` that `show` rewrites if the stream is a terminal; else each text is a line of its own.

    `update` shows a text if it is due, every `elsewhere` seconds outside a terminal. A ``with`` statement finishes the
    line, so that the next output begins a new one. A stream that cannot be written to shows nothing.
    """

    def __init__(self, stream: TextIO | None, elsewhere: float = math.inf) -> None:
        self._stream = stream
        try:
            self._live = stream is not None and stream.isatty()  # A process may have no stderr.
        except ValueError:  # A closed file.
            self._live = False
        self._interval = _INTERVAL if self._live else elsewhere
        self._next = -math.inf if self._interval < math.inf else math.inf
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live and self._width:
            self._write("\n")

    def update(self, text: str) -> None:
        """Show `text` if the interval has passed."""
        if time.monotonic() >= self._next:
            self.show(text)

    def show(self, text: str) -> None:
        """Replace the line by `text`; the next interval begins."""
        self._next = time.monotonic() + self._interval
        # Pad with spaces, to overwrite a longer line.
        self._write("\r" + text.ljust(self._width) if self._live else text + "\n")
        self._width = len(text)

    def _write(self, text: str) -> None:
        assert self._stream is not None
        with contextlib.suppress(OSError):  # A closed pipe, or a full disk.
            self._stream.write(text)
            self._stream.flush()
