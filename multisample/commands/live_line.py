"""A progress line: rewritten in place in a terminal, else printed as separate lines."""

from __future__ import annotations

from typing import TextIO


class LiveLine:
    """A line on `stream` that `show` rewrites if the stream is a terminal; else each text is a line of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.live = stream.isatty()
        self._width = 0

    def show(self, text: str) -> None:
        """Replace the line by `text`."""
        # Pad with spaces, to overwrite a longer line.
        self._stream.write("\r" + text.ljust(self._width) if self.live else text + "\n")
        self._stream.flush()
        self._width = len(text)

    def end(self) -> None:
        """Finish the line; the next output begins a new line."""
        if self.live and self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0
