"""What reports are made of: a page that needs nothing else, its parts, and figures in words."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

_STYLE = Path(__file__).with_name("look.css")
FLEET = "fleet"
"""The style of what is of all devices."""


def page(title: str, body: Sequence[str]) -> str:
    """A page that needs nothing else."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE.read_text(encoding='utf-8')}</style></head>"
        f"<body><main><h1>{title}</h1>{''.join(body)}</main></body></html>\n"
    )


def section(title: str, inner: str) -> str:
    """One of its parts."""
    return f"<section><h2>{escape(title)}</h2>{inner}</section>"


def tiles_of(tiles: Sequence[tuple[str, str]]) -> str:
    """Figures in large, with what each is of."""
    inner = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for value, name in tiles
    )
    return f'<div class="tiles">{inner}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells of text."""
    header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="wide" tabindex="0"><table><tr>{header}</tr>{lines}</table></div>'
        '<p class="soft hint">The table goes on to the right: swipe, or scroll sideways.</p>'
    )


def span(seconds: float) -> str:
    """A duration for people: "45 s", "2 min 5 s"."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s"


def milliseconds(seconds: float | None) -> str:
    """As in "4.2 ms"; "-" for None."""
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def factor(times: float | None) -> str:
    """As in "2.50 x"; "-" for None."""
    return "-" if times is None else f"{times:.2f} x"
