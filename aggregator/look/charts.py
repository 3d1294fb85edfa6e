"""Pictures as SVG, within a page or in a file. Colours come from the page's style sheet, so they
follow its theme."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources
from typing import Literal

_WIDTH, _HEIGHT = 400.0, 230.0
_LEAST_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 10.0, 12.0, 36.0
_LABEL = 14.0
_ROW = 30.0
_MOST_DIGITS, _LARGE = 6, 1e7
# Of a character at most, in units: a narrow place has letters of 15 (look.css), and fonts differ.
_CHARACTER = 0.64 * 15


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture, drawn.

    Attributes:
        title: what it shows, for those who do not see it too.
        parts: SVG elements, their texts escaped; none: there is nothing to show.
        legend: names and styles.
    """

    title: str
    height: float = 0.0
    parts: tuple[str, ...] = ()
    legend: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def html(self) -> str:
        """Within a page; empty where there is nothing to show."""
        return f"{self._svg()}{self._keys()}" if self.parts else ""

    def __html__(self) -> str:
        """For templates: it is no text that they would have to escape."""
        return self.html

    def file(self) -> str:
        """As a file that needs nothing else, in the colours of a light page."""
        top = self.height + 4
        lines = [
            f'<g class="{style}"><path class="line" d="M4 {top + place * _LABEL + 8:g}h18"/></g>'
            + _text(28, top + place * _LABEL + 12, name, "start")
            for place, (name, style) in enumerate(self.legend)
        ]
        height = top + _LABEL * len(self.legend) + 4
        back = f'<rect class="back" width="{_WIDTH:g}" height="{height:g}"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" '
            f'width="{2 * _WIDTH:g}" height="{2 * height:g}"><title>{escape(self.title)}</title>'
            f"<style>{_file_style()}</style>{back}{''.join(self.parts)}{''.join(lines)}</svg>\n"
        )

    def _svg(self) -> str:
        return (
            f'<svg viewBox="0 0 {_WIDTH:g} {self.height:g}" role="img" '
            f'aria-label="{escape(self.title)}"><title>{escape(self.title)}</title>'
            f"{''.join(self.parts)}</svg>"
        )

    def _keys(self) -> str:
        if not self.legend:
            return ""
        keys = "".join(
            f'<span class="key"><i class="{style}"></i>{escape(name)}</span>'
            for name, style in self.legend
        )
        return f'<p class="legend">{keys}</p>'


@cache
def _file_style() -> str:
    """The rules for pictures, with the light theme's colours put in: not all that shows SVG knows
    variables."""
    text = (resources.files(__package__) / "look.css").read_text("utf-8")
    colours = dict(re.findall(r"--(\w[\w-]*): ([^;]+);", text.partition("@media")[0]))
    rules = text.partition("/* Pictures. */")[2]
    rules = re.sub(r"var\(--([\w-]+)\)", lambda found: colours[found[1]], rules)
    return f".back {{ fill: {colours['card']}; }} text {{ font-family: sans-serif; }}{rules}"


@dataclass(frozen=True, slots=True)
class Line:
    """``style`` is a class of the style sheet, or several; points are (x, y), rising in x."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Band:
    """What lies about a line: points are (x, lowest y, highest y), rising in x."""

    style: str
    points: Sequence[tuple[float, float, float]]


@dataclass(frozen=True, slots=True)
class Dots:
    """Points with a name each: (x, y, name)."""

    name: str
    style: str
    points: Sequence[tuple[float, float, str]]


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
    y_digits: int | None = None,
    levels: Sequence[tuple[str, float]] = (),
    level_names: Literal["left", "right"] = "right",
    bands: Sequence[Band] = (),
    marks: Sequence[tuple[str, float]] = (),
    from_zero: bool = True,
) -> Picture:
    """Lines over a common x, the first on top, each point with its value; ``levels`` are dashed
    lines with a name each, ``marks`` upright ones. ``from_zero``: it shows where 0 is."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + [level for _, level in levels]
    ys += [y for band in bands for _, *ends in band.points for y in ends]
    if not xs:
        return Picture(title)
    # Rounds, rungs and columns are whole numbers.
    few = max(1, min(6, int(max(xs) - min(xs))))
    x_ticks = [tick for tick in _ticks(min(xs), max(xs), few) if min(xs) <= tick <= max(xs)]
    axes = _Axes.of(xs, [0.0, *ys] if from_zero else ys, y_digits)
    parts = axes.drawn([(tick, f"{tick:.12g}") for tick in x_ticks], x_label)
    right = _WIDTH - _RIGHT
    for _, level in levels:
        parts.append(f'<path class="level" d="M{axes.left:.1f} {axes.at_y(level):.1f}H{right}"/>')
    for name, x in marks:
        at, early = axes.at_x(x), axes.at_x(x) < _WIDTH / 2
        parts.append(f'<path class="level" d="M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
        parts.append(_text(at + (4 if early else -4), _TOP + 2, name, "start" if early else "end"))
    for band in bands:
        ends = [f"{axes.at_x(x):.1f} {axes.at_y(low):.1f}" for x, low, _ in band.points]
        ends += [f"{axes.at_x(x):.1f} {axes.at_y(high):.1f}" for x, _, high in band.points[::-1]]
        parts.append(f'<path class="band {band.style}" d="M{"L".join(ends)}Z"/>')
    for line in reversed(lines):
        path = "L".join(f"{axes.at_x(x):.1f} {axes.at_y(y):.1f}" for x, y in line.points)
        parts.append(f'<path class="line {line.style}" d="M{path}"/>')
    for line in reversed(lines):
        parts += [
            axes.spot("spot", line.style, x, y, f"{line.name}, {x_label} {x:g}: {y:.4g}")
            for x, y in line.points
        ]
    place, anchor = (right, "end") if level_names == "right" else (axes.left + 4, "start")
    below = -math.inf
    for name, level in sorted(levels, key=lambda each: -each[1]):
        below = max(axes.at_y(level) - 4, below + _LABEL)  # one under the other, where near
        parts.append(_text(place, below, name, anchor))
    legend = tuple((line.name, line.style) for line in lines)
    return Picture(title, _HEIGHT, tuple(parts), legend)


def dot_chart(
    title: str,
    groups: Sequence[Dots],
    *,
    x_label: str,
    x_ticks: Sequence[tuple[float, str]],
    y_digits: int | None = None,
) -> Picture:
    """Dots over a common x, each with its name; y begins at zero."""
    found = [point for group in groups for point in group.points]
    if not found:
        return Picture(title)
    xs = [*(x for x, _, _ in found), *(x for x, _ in x_ticks)]
    axes = _Axes.of(xs, [0.0, *(y for _, y, _ in found)], y_digits, inset=16.0)
    parts = axes.drawn(x_ticks, x_label)
    for group in groups:
        parts += [axes.spot("dot", group.style, x, y, name) for x, y, name in group.points]
    return Picture(title, _HEIGHT, tuple(parts), tuple((each.name, each.style) for each in groups))


@dataclass(frozen=True, slots=True)
class _Axes:
    """Where a picture has what. ``left``: where its grid begins, beside the longest of the labels
    of ``y_ticks``; ``inset``: how far the least and the largest x stay from its edges."""

    x_ends: tuple[float, float]
    y_ticks: tuple[float, ...]
    y_labels: tuple[str, ...]
    left: float
    inset: float

    @classmethod
    def of(
        cls, xs: Sequence[float], ys: Sequence[float], y_digits: int | None, inset: float = 0.0
    ) -> _Axes:
        """``y_digits``: None: as many as tell the lines of the grid apart."""
        ticks = _ticks(min(ys), max(ys), 5)
        form = _form(ticks) if y_digits is None else f".{y_digits}f"
        labels = tuple(f"{tick:{form}}" for tick in ticks)
        left = max(_LEAST_LEFT, 6 + max(map(_wide, labels)))
        return cls((min(xs), max(xs)), tuple(ticks), labels, left, inset)

    def at_x(self, x: float) -> float:
        low, high = self.x_ends
        room = _WIDTH - self.left - _RIGHT - 2 * self.inset
        share = (x - low) / (high - low) if high > low else 0.5 if self.inset else 0.0
        return self.left + self.inset + share * room

    def at_y(self, y: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def drawn(self, x_ticks: Sequence[tuple[float, str]], x_label: str) -> list[str]:
        """Grid and labels."""
        parts = []
        for tick, label in zip(self.y_ticks, self.y_labels, strict=True):
            y = self.at_y(tick)
            parts.append(f'<path class="grid" d="M{self.left:.1f} {y:.1f}H{_WIDTH - _RIGHT}"/>')
            parts.append(_text(self.left - 6, y + 4, label, "end"))
        for tick, name in x_ticks:
            parts.append(_text(self.at_x(tick), _HEIGHT - _BOTTOM + 16, name, "middle"))
        parts.append(_text((self.left + _WIDTH) / 2, _HEIGHT - 4, x_label, "middle"))
        return parts

    def spot(self, kind: str, style: str, x: float, y: float, name: str) -> str:
        """A point that says its name."""
        return (
            f'<circle class="{kind} {style}" cx="{self.at_x(x):.1f}" cy="{self.at_y(y):.1f}" '
            f'r="{2 if kind == "spot" else 4}"><title>{escape(name)}</title></circle>'
        )


def _form(ticks: Sequence[float]) -> str:
    """That tells them apart."""
    step, most = ticks[1] - ticks[0], max(map(abs, ticks))
    fixed = (n for n in range(_MOST_DIGITS + 1) if _is_whole(step * 10**n))
    if most < _LARGE and (digits := next(fixed, None)) is not None:
        return f".{digits}f"
    scale = 10.0 ** math.floor(math.log10(most))
    return f".{next(n for n in range(20) if _is_whole(step / scale * 10**n))}e"


def _is_whole(value: float) -> bool:
    return round(value) > 0 and math.isclose(value, round(value), rel_tol=1e-6)


def bar_chart(title: str, bars: Sequence[Bar]) -> Picture:
    """Horizontal bars from zero."""
    if not bars:
        return Picture(title)
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
    return Picture(title, _ROW * len(bars), tuple(parts))


def strip_chart(title: str, rows: Sequence[Strip], *, x_label: str, most: float) -> Picture:
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
    return Picture(title, height, tuple(parts))


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from at or below ``low`` to at or above ``high``."""
    # What is no more than the error of a sum is no difference.
    wide = high - low if high - low > 1e-6 * max(abs(low), abs(high)) else abs(high)
    raw = (wide or 1.0) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(each * power for each in (1.0, 2.0, 2.5, 5.0, 10.0) if each * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * place for place in range(first, max(last, first + 1) + 1)]


def _wide(text: str) -> float:
    return _CHARACTER * len(text)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    if anchor == "middle":
        half = _wide(text) / 2
        x = max(half, min(x, _WIDTH - half))
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
