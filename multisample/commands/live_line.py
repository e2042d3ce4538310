"""One line that says how far something is: rewritten in a terminal, and written now and then where there is none."""

from __future__ import annotations

from typing import TextIO

__all__ = ["LiveLine"]


class LiveLine:
    """A line on `stream` that can be changed, if that is a terminal; else each is a line of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.live = stream.isatty()
        self._width = 0

    def show(self, text: str) -> None:
        """Show `text` instead of what was shown before."""
        # Pad with spaces, to overwrite a longer line.
        self._stream.write("\r" + text.ljust(self._width) if self.live else text + "\n")
        self._stream.flush()
        self._width = len(text)

    def end(self) -> None:
        """Leave the line as it is: what comes next begins another."""
        if self.live and self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0
