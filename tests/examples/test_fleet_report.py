"""The report: self-contained, honest about what is missing, and safe with any title."""

from __future__ import annotations

import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from aggregator.look.charts import Line, line_chart
from examples.fleet.evaluate import FleetQuality
from examples.fleet.journal import Finished, Measured, RoundQuality, Trouble, UserShown
from examples.fleet.plan import CLASSES
from examples.fleet.report import report_html, write_report
from examples.fleet.results import FleetResults, Run
from examples.fleet.summary import print_summary

_VOID = {"meta", "br"}


class Page(HTMLParser):
    """Collects tags and attributes, and checks that what opens closes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def results(*, synthetic: bool = False) -> FleetResults:
    run = Run(
        "MovieLens 100K", "read from data", synthetic, "the published 99 a user", 943, 1682, 99_057,
        8, 2, 12, 64, 0.01, {1: 0.002, 32: 0.003, 64: 0.004},
        {"EASE": FleetQuality(943, 0.15, 0.07, 0.65, 0.39)},
    )  # fmt: skip
    return FleetResults(run)


def filled() -> FleetResults:
    found = results()
    for number in range(8):
        capacity = CLASSES[number % 4]
        name = f"device-{number}"
        found.take(
            Measured(
                name,
                capacity.name,
                2.0 - number % 4 / 3,
                capacity.about_k,
                0.005,
                "k fits <in time>",
            )
        )
        for round_id in range(1, 13):
            found.take(
                RoundQuality(
                    *(name, capacity.name, round_id, capacity.about_k, 20),
                    *(round_id, round_id / 2, 16, 12.0),
                )
            )
        found.take(Finished(name, capacity.name, capacity.about_k, 11, 11 * 1000, 0.006, 0))
    found.take(
        UserShown("device-0", "user 7", 8, ("Heat <b>", "Alien"), ("Fargo & co", "Up"), "Up")
    )
    found.take(Trouble("device-1", "<script>alert(1)</script>"))
    found.closed_rounds, found.round_seconds = 12, [1.0, 2.0]
    return found


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = report_html(filled())
    page = Page(text)
    assert "http" not in text
    assert "@import" not in text
    assert "url(" not in text
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert not {"src", "href", "srcset", "xlink:href"} & {name for name, _ in page.attributes}
    assert ("name", "viewport") in page.attributes
    assert "prefers-color-scheme: dark" in text
    assert page.tags.count("svg") == 5
    assert not re.search(r"\b(nan|inf)\b", text)


def test_nothing_is_wider_than_a_phone() -> None:
    text = report_html(filled())
    page = Page(text)
    assert ("content", "width=device-width, initial-scale=1") in page.attributes
    style = text[text.index("<style>") : text.index("</style>")]
    # 320 pixels, of which 16 on either side are the page's margin and 17 the card's.
    room = 320 - 2 * (16 + 17)
    for rule in re.findall(r"[^{}]*\{[^{}]*\}", style):
        # What may be wide lies in a box that scrolls, or is at most as wide as its box.
        for number, unit in re.findall(r"(?<!max-)width:\s*([\d.]+)(px|rem)", rule):
            assert float(number) * (16 if unit == "rem" else 1) <= room, rule
        for least in re.findall(r"minmax\(([^,()]+),", rule):
            number = re.fullmatch(r"([\d.]+)rem", least.strip())
            assert number is None or float(number[1]) * 16 <= room, rule
    assert re.search(r"\.wide\s*\{[^}]*overflow-x:\s*auto", style)
    table, hint = '<div class="wide" tabindex="0"><table>', '<p class="soft hint">'
    assert text.count("<table>") == text.count(table) == text.count(hint) > 0
    # Pictures shrink with the page; no attribute gives them a size of their own.
    assert re.search(r"svg\s*\{[^}]*width:\s*100%", style)
    assert "<svg width" not in text
    # Then their letters grow: 12 pixels in 400 would be 8 on 270.
    assert re.search(r"@container[^{]*\{ svg text \{ font-size: 15px", style)


def test_a_trouble_that_is_over_is_not_told() -> None:
    found = filled()
    found.take(Trouble("device-02", "no connection"))
    found.take(Trouble("device-03", "no connection"))
    found.take(Trouble("device-02", "no connection", over=True))
    text = report_html(found)
    assert "device-03: no connection" in text
    assert "device-02: no connection" not in text


def test_figures_and_titles_are_in_it() -> None:
    text = report_html(filled())
    # 12 hits of 20 users on every device.
    assert "0.600" in text
    assert "Fargo &amp; co" in text
    assert "Up (watched next)" in text
    assert "k fits &lt;in time&gt;" in text
    assert "&lt;script&gt;" in text
    assert f"1/{1682 * 64 * 4 / 1000:.1f} of dense" in text
    assert "SYNTHETIC" not in text


@pytest.mark.parametrize("early", ["", "it was interrupted."])
def test_a_run_of_which_nothing_is_known(tmp_path: Path, early: str) -> None:
    found = results(synthetic=True)
    found.stopped_early = early
    write_report(tmp_path / "report.html", found)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    Page(text)
    assert "SYNTHETIC DATA" in text
    assert ("it was interrupted." in text) == bool(early)


def test_the_summary_says_the_same() -> None:
    for found, expected in (
        (filled(), ("0.600", "Fargo & co", "Up  <- watched next", "5.0 ms", "6.0 ms", "430,592")),
        (results(synthetic=True), ("No round was evaluated", "SYNTHETIC DATA")),
    ):
        text = io.StringIO()
        print_summary(Console(file=text, width=200), found)
        for part in expected:
            assert part in text.getvalue()


numbers = st.floats(-1e6, 1e6, allow_nan=False, allow_subnormal=False)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20), numbers)
def test_all_points_of_a_chart_lie_in_the_picture(
    points: list[tuple[float, float]], level: float
) -> None:
    text = line_chart(
        "t", [Line("a", "b", sorted(points))], x_label="x", levels=[("l", level)]
    ).html
    Page(text)
    width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', text).groups())  # type: ignore[union-attr]
    path = re.search(r'class="line b" d="M([^"]*)"', text)
    assert path is not None
    for pair in path[1].split("L"):
        x, y = map(float, pair.split())
        assert math.isfinite(x)
        assert 0 <= x <= width
        assert 0 <= y <= height
