"""Writes the table of events that docs/operating/logs.md ends with."""

from __future__ import annotations

import logging
from pathlib import Path

from aggregator.events import LogEvent

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "operating" / "logs.md"
_HEAD = "| event | level | fields | what it means |\n|---|---|---|---|\n"


def table() -> str:
    """A row an event."""
    return _HEAD + "".join(
        f"| `{each.code}` | {logging.getLevelName(each.level).lower()} | "
        f"{', '.join(f'`{field}`' for field in each.fields)} | {each.means} |\n"
        for each in LogEvent
    )


def page(text: str) -> str:
    """The page with the table of now."""
    return text[: text.index(_HEAD)] + table()


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
