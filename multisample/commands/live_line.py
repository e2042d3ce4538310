"""A progress line: rewritten in place in a terminal, else printed as separate lines."""

from __future__ import annotations

import math
import time
from typing import TextIO


class LiveLine:
    """A line on `stream` that `show` rewrites if the stream is a terminal; else each text is a line of its own.

    Progress is due every `live_interval` seconds in a terminal, and every `interval` seconds elsewhere.
    """

    def __init__(self, stream: TextIO, live_interval: float, interval: float = math.inf) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._interval = live_interval if self._live else interval
        self._next = -math.inf if self._interval < math.inf else math.inf
        self._width = 0

    def is_due(self) -> bool:
        """Whether it is time for progress; if so, the next interval begins."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._interval
        return True

    def show(self, text: str) -> None:
        """Replace the line by `text`."""
        # Pad with spaces, to overwrite a longer line.
        self._stream.write("\r" + text.ljust(self._width) if self._live else text + "\n")
        self._stream.flush()
        self._width = len(text)

    def end(self) -> None:
        """Finish the line; the next output begins a new line."""
        if self._live and self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0
