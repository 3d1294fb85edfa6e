"""Writes the table of what rounds say in docs/operating/models.md."""

from __future__ import annotations

from pathlib import Path

from aggregator.methods.said import ROUND_METRICS

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "operating" / "models.md"
_HEAD = "| name | said by | what it is |\n|---|---|---|\n"


def table() -> str:
    """A row a name."""
    return _HEAD + "".join(
        f"| `{name}` | {each.by} | {each.means} |\n" for name, each in ROUND_METRICS.items()
    )


def page(text: str) -> str:
    """The page with the table of now."""
    before, _, after = text.partition(_HEAD)
    return before + table() + "\n" + after.partition("\n\n")[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
