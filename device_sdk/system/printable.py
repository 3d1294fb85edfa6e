"""Text from outside, made fit for logs and terminals.

A broker's reason, an item's title, an error's message may hold line breaks that look like lines of
our own, escape sequences that a terminal obeys, and marks that turn the direction of writing.

And tables, times and sizes in words.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import TypeAlias


def in_words(error: BaseException) -> str:
    """An error's class and what it says, for people. What it says is its class's code, which may
    be any package's, and fail."""
    name = type(error).__name__
    try:
        said = str(error)
    except Exception as failed:
        said = f"its words cannot be had ({type(failed).__name__})"
    return f"{name}: {said}" if said else name


MOST_CHARACTERS = 2000
_MARGIN = "  | "
_SysExcInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


def printable(text: str, most_characters: int = MOST_CHARACTERS) -> str:
    """``text`` as one line that says what is in it: what does not print is written as an escape.

    Control characters, line breaks, marks of direction and format, unassigned characters and
    surrogates become escapes as in a Python string; other kinds of space become a space. What
    prints, in any script, stays. Longer text is cut, and says by how much.
    """
    left_over = len(text) - most_characters
    if left_over > 0:
        text = text[:most_characters]
    if not text.isprintable():
        text = "".join(each if each.isprintable() else _escaped(each) for each in text)
    return f"{text}... ({left_over} characters more)" if left_over > 0 else text


def printable_lines(text: str, most_characters: int = MOST_CHARACTERS) -> str:
    """The same for a text of several lines of ours, each of them for itself."""
    return "\n".join(printable(line, most_characters) for line in text.split("\n"))


def text_table(rows: Sequence[Sequence[str]], headers: Sequence[str] = (), align: str = "") -> str:
    """Columns two spaces apart; headers, where there are any, over a line of dashes.

    ``align`` has a letter a column, ``r`` for the right; columns without one stand to the left. A
    line has no space at its end. Raises ValueError where rows differ in length.
    """
    lines = [list(headers), *map(list, rows)] if headers else [*map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if headers:
        # Two more than a header, so that short columns do not stand on one another's heels.
        widths = [max(w, len(name) + 2) for w, name in zip(widths, headers, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
    sides = align.ljust(len(widths))
    return "\n".join(
        "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(line, widths, sides, strict=True)
        ).rstrip()
        for line in lines
    )


def _escaped(character: str) -> str:
    # Separators that are no line's or paragraph's end: non-breaking spaces and their like.
    if character.isspace() and len(character.splitlines()[0]) == 1 and character > "\x7f":
        return " "
    return character.encode("unicode_escape").decode("ascii")


class PrintableFormatter(logging.Formatter):
    """Writes each record so that nothing in it can pass for another record.

    The message becomes one printable line. Tracebacks and stacks, whose errors may quote anything,
    follow in printable lines behind a margin.
    """

    def format(self, record: logging.LogRecord) -> str:
        # Another handler's formatter may have left its own rendering of the traceback here.
        cached, record.exc_text = record.exc_text, None
        try:
            return super().format(record)
        finally:
            record.exc_text = cached

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: _SysExcInfo) -> str:
        return _behind_a_margin(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _behind_a_margin(super().formatStack(stack_info))


def _behind_a_margin(text: str) -> str:
    return "\n".join(_MARGIN + printable(line) for line in text.splitlines())


def span(seconds: float) -> str:
    """Such as "4 s", "12 min", "3 h" or "9 d"."""
    for unit, length in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def ago(unix_seconds: float | None, now: float) -> str:
    """How long ago, or "never"."""
    return "never" if unix_seconds is None else f"{span(now - unix_seconds)} ago"


def size(count: float) -> str:
    """Bytes, such as "1.4 MB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
