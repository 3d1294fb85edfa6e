"""Pictures as inline SVG. Colours come from the page's style sheet, so they follow its theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

_WIDTH, _HEIGHT = 400.0, 230.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 10.0, 12.0, 36.0
_LABEL = 14.0
_ROW = 30.0


@dataclass(frozen=True, slots=True)
class Line:
    """``style`` is a class of the style sheet; points are (x, y), rising in x."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Bar:
    """One horizontal bar, with what stands at its end."""

    name: str
    style: str
    value: float
    text: str


@dataclass(frozen=True, slots=True)
class Strip:
    """One row of dots."""

    name: str
    style: str
    values: Sequence[float]


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_digits: int = 2,
    levels: Sequence[tuple[str, float]] = (),
    level_names: Literal["left", "right"] = "right",
) -> str:
    """Lines over a common x, the first on top; ``levels`` are dashed lines with a name each."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + [level for _, level in levels]
    if not xs:
        return ""
    y_ticks = _ticks(min(0.0, *ys), max(ys), 5)
    # Rounds, rungs and columns are whole numbers.
    few = max(1, min(6, int(max(xs) - min(xs))))
    x_ticks = [tick for tick in _ticks(min(xs), max(xs), few) if min(xs) <= tick <= max(xs)]
    low, high = y_ticks[0], y_ticks[-1]

    def at_x(x: float) -> float:
        spread = max(xs) - min(xs) or 1.0
        return _LEFT + (x - min(xs)) / spread * (_WIDTH - _LEFT - _RIGHT)

    def at_y(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for tick in y_ticks:
        y = at_y(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{tick:.{y_digits}f}", "end"))
    for tick in x_ticks:
        parts.append(_text(at_x(tick), _HEIGHT - _BOTTOM + 16, f"{tick:g}", "middle"))
    parts.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 4, x_label, "middle"))
    for _, level in levels:
        parts.append(f'<path class="level" d="M{_LEFT} {at_y(level):.1f}H{_WIDTH - _RIGHT}"/>')
    for line in reversed(lines):
        path = "L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in line.points)
        parts.append(f'<path class="line {line.style}" d="M{path}"/>')
    x, anchor = (_WIDTH - _RIGHT, "end") if level_names == "right" else (_LEFT + 4, "start")
    below = -math.inf
    for name, level in sorted(levels, key=lambda each: -each[1]):
        below = max(at_y(level) - 4, below + _LABEL)  # one under the other, where they are near
        parts.append(_text(x, below, name, anchor))
    return _svg(title, _HEIGHT, parts) + _legend([(line.name, line.style) for line in lines])


def bar_chart(title: str, bars: Sequence[Bar]) -> str:
    """Horizontal bars from zero."""
    if not bars:
        return ""
    most = max(bar.value for bar in bars) or 1.0
    parts = []
    for place, bar in enumerate(bars):
        y = place * _ROW
        length = bar.value / most * (_WIDTH - 2 * _RIGHT)
        parts.append(_text(2, y + 12, f"{bar.name}: {bar.text}", "start"))
        parts.append(
            f'<rect class="bar {bar.style}" x="2" y="{y + 16:.1f}" width="{max(1.0, length):.1f}" '
            'height="9" rx="2"/>'
        )
    return _svg(title, _ROW * len(bars), parts)


def strip_chart(title: str, rows: Sequence[Strip], *, x_label: str, most: float) -> str:
    """A dot for each value; equal values are stacked beside each other."""
    left = 70.0
    height = _ROW * len(rows) + _BOTTOM
    ticks = [tick for tick in _ticks(0.0, most, 5) if tick <= most]

    def at_x(x: float) -> float:
        return left + x / most * (_WIDTH - left - 2 * _RIGHT)

    parts = []
    for tick in ticks:
        x = at_x(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} 4V{height - _BOTTOM:.1f}"/>')
        parts.append(_text(x, height - _BOTTOM + 16, f"{tick:g}", "middle"))
    parts.append(_text((left + _WIDTH) / 2, height - 4, x_label, "middle"))
    for place, row in enumerate(rows):
        middle = place * _ROW + _ROW / 2
        parts.append(_text(2, middle + 4, row.name, "start"))
        seen: dict[float, int] = {}
        for value in sorted(row.values):
            count = seen[value] = seen.get(value, 0) + 1
            # 0, +1, -1, +2, -2, ... steps from the middle
            step = count // 2 * (1 if count % 2 == 0 else -1)
            y = middle + 2.0 * max(-6, min(6, step))
            parts.append(
                f'<circle class="dot {row.style}" cx="{at_x(value):.1f}" cy="{y:.1f}" r="4"/>'
            )
    return _svg(title, height, parts)


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from at or below ``low`` to at or above ``high``."""
    raw = (high - low or abs(high) or 1.0) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(each * power for each in (1.0, 2.0, 2.5, 5.0, 10.0) if each * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * place for place in range(first, max(last, first + 1) + 1)]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH:g} {height:g}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    keys = "".join(
        f'<span class="key"><i class="{style}"></i>{escape(name)}</span>' for name, style in entries
    )
    return f'<p class="legend">{keys}</p>'
