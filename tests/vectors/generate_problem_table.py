"""Writes the table of problems that docs/operating/problems.md ends with."""

from __future__ import annotations

from pathlib import Path

from aggregator.operate.problems import KINDS

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "operating" / "problems.md"
_HEAD = "| code | severity | what it means | what to do |\n|---|---|---|---|\n"


def table() -> str:
    """A row a kind."""
    rows = (
        f"| `{each.code}` | {each.severity} | {each.means} | {each.to_do} |\n"
        for each in KINDS.values()
    )
    return _HEAD + "".join(rows)


def page(text: str) -> str:
    """The page with the table of now."""
    return text[: text.index(_HEAD)] + table()


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
