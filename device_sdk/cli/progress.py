"""One line of progress, on terminals only."""

from __future__ import annotations

from typing import TextIO


class ProgressLine:
    """Rewrites one line of `stream`; silent where that is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._width = 0

    def show(self, text: str) -> None:
        """Replace the line by `text`."""
        if self._live:
            self._stream.write("\r" + text.ljust(self._width))
            self._stream.flush()
            self._width = len(text)

    def clear(self) -> None:
        """Leave an empty line."""
        if self._live and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0
