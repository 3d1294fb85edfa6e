"""Pictures hold what they are given, say it, and stand alone as files."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape

from aggregator.look.charts import Band, Dots, Line, Picture, bar_chart, dot_chart, line_chart

_NASTY = '<script>alert("1")</script> & co'
_SVG = "{http://www.w3.org/2000/svg}"


def _line(*points: tuple[float, float], name: str = "fleet") -> Line:
    return Line(name, "fleet", points)


def test_each_point_says_its_value() -> None:
    html = line_chart("hr10", [_line((1, 0.25), (2, 0.5))], x_label="version").html
    assert "<title>fleet, version 1: 0.25</title>" in html
    assert "<title>fleet, version 2: 0.5</title>" in html


def test_a_mark_stands_at_its_place_and_names_it() -> None:
    chart = line_chart("t", [_line((0, 1), (10, 2))], x_label="x", marks=[("best: 10", 10)])
    assert ">best: 10</text>" in chart.html
    plain = line_chart("t", [_line((0, 1), (10, 2))], x_label="x")
    assert len(chart.parts) == len(plain.parts) + 2


def test_without_zero_the_picture_is_of_what_there_is() -> None:
    lines = [_line((1, 0.91), (2, 0.92))]
    labels = re.findall(
        r">([\d.]+)</text>", line_chart("t", lines, x_label="x", from_zero=False).html
    )
    assert min(map(float, labels)) >= 0.9
    assert "0.900" not in labels or "0.910" in labels, "lines of the grid can be told apart"
    assert "0.0" in re.findall(r">([\d.]+)</text>", line_chart("t", lines, x_label="x").html)


@pytest.mark.parametrize("least", [4e-4, 1e-9, 0.0, -2.5e-5, 1234567.0, 3e12])
@pytest.mark.parametrize("spread", [2e-4, 1e-9, 3.0, 1e7])
def test_letters_lie_in_the_picture_and_tell_its_lines_apart(least: float, spread: float) -> None:
    """Also in a narrow place, where they are largest."""
    lines = [_line((999_990, least), (1_000_000, least + spread))]
    dots = Dots("d", "s", [(1, abs(least), "")])
    for chart in (
        line_chart("t", lines, x_label="round", from_zero=False),
        dot_chart("t", [dots], x_label="k", x_ticks=[(0, "1of16"), (1, "full size")]),
    ):
        found = re.findall(r'<text x="(.+?)" y="(.+?)" text-anchor="(\w+)">([^<]+)<', chart.html)
        for x, y, anchor, text in found:
            begins = float(x) - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * _wide(text)
            assert begins >= 0 and begins + _wide(text) <= 400, text
            assert 11 <= float(y) <= chart.height
        beside = [text for _, _, anchor, text in found if anchor == "end"]
        assert len(set(beside)) == len(beside) > 1


def _wide(text: str) -> float:
    """In a font whose letters are as wide as any that pages have, DejaVu Sans."""
    return 15 * sum(0.32 if each in ".-" else 0.64 for each in text)


def test_of_nothing_there_is_no_picture() -> None:
    nothing = line_chart("t", [], x_label="x"), bar_chart("t", []), _dots()
    assert not any(nothing) and {each.html for each in nothing} == {""}


def _dots(*points: tuple[float, float, str]) -> Picture:
    return dot_chart("t", [Dots("d", "tablet", points)], x_label="k", x_ticks=[(2, "2"), (8, "8")])


numbers = st.floats(-1e6, 1e6, allow_nan=False, allow_subnormal=False)


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=20))
def test_dots_and_bands_lie_in_the_picture(points: list[tuple[float, float, float]]) -> None:
    points.sort()
    band = Band("fleet", [(x, min(a, b), max(a, b)) for x, a, b in points])
    lines = [_line(*((x, a) for x, a, _ in points))]
    for chart in (
        line_chart("t", lines, x_label="x", bands=[band]),
        dot_chart(
            "t", [Dots("d", "s", [(x, a, "") for x, a, _ in points])], x_label="x", x_ticks=[]
        ),
    ):
        places = re.findall(r'c([xy])="([^"]+)"', chart.html)
        assert places
        for which, place in places:
            assert 0 <= float(place) <= (400 if which == "x" else chart.height)
        for path in re.findall(r'class="band fleet" d="M([^Z]+)Z"', chart.html):
            for pair in path.split("L"):
                x, y = map(float, pair.split())
                assert 0 <= x <= 400 and 0 <= y <= chart.height


def test_what_a_picture_is_called_is_escaped_everywhere() -> None:
    line = Line(_NASTY, "fleet", [(0, 1), (1, 2)])
    chart = line_chart(
        _NASTY, [line], x_label=_NASTY, levels=[(_NASTY, 1.0)], marks=[(_NASTY, 1.0)]
    )
    dots = dot_chart(
        _NASTY, [Dots(_NASTY, "s", [(0, 1, _NASTY)])], x_label=_NASTY, x_ticks=[(0, _NASTY)]
    )
    for each in (chart, dots):
        assert "<script>" not in each.html + each.file()
        assert str(escape(each)) == each.html, "templates take it as it is"
        ElementTree.fromstring(each.file())


def test_a_file_needs_nothing_else() -> None:
    file = line_chart("hr10", [_line((0, 1), (1, 2), name="all")], x_label="version").file()
    root = ElementTree.fromstring(file)
    assert root.tag == f"{_SVG}svg"
    style = root.findtext(f"{_SVG}style") or ""
    assert "var(" not in style and "url(" not in style and ".line" in style
    assert "all" in "".join(root.itertext()), "with its legend"
