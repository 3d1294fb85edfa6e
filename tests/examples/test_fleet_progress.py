"""The estimate of the time left, and what is shown of it."""

from __future__ import annotations

import io

from rich.console import Console

from examples.fleet.progress import ClassLine, Progress, Stage, TimeLeft, live_view


class Now:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_the_estimate_follows_what_units_take() -> None:
    now = Now()
    left = TimeLeft((Stage("a", 10, 1.0), Stage("b", 5, 2.0)), now)
    assert left.seconds() == 20.0
    now.seconds += 4.0
    assert left.seconds() == 16.0
    for done in range(1, 9):
        now.seconds += 3.0
        left.update("a", done)
    # 28 s for 8 units: 3 s each by now, 2 to go, and stage b.
    assert 4.0 + 10.0 < left.seconds() < 8.0 + 10.0
    left.update("b", 1)
    left.update("a", 10)  # late news of a stage that is over
    assert left.stage.name == "b"
    assert left.done == 1
    left.update("b", 9)
    assert left.done == 5
    assert left.seconds() == 0.0
    assert left.share() == 1.0


PROGRESS = Progress(
    "round", 3, 45, 0.2, 61.0, "12 of 48 updates", 3, 0.5, 0.25,
    {"phone": ClassLine(12, 1.5, (15, 17), 0.5, 0.25)},
)  # fmt: skip


def test_without_a_terminal_a_line_comes_now_and_then() -> None:
    text, now = io.StringIO(), Now()
    with live_view(Console(file=text, force_terminal=False, width=200), now) as show:
        for _ in range(12):
            show(PROGRESS)
            now.seconds += 1.0
    lines = text.getvalue().splitlines()
    assert (
        lines
        == ["round 3 of 45 (12 of 48 updates), HR@10 0.500, NDCG@10 0.250, about 1 min 1 s left"]
        * 3
    )
