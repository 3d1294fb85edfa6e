"""Figures on pages are what the command beside them prints of the runs that are stored."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
ONE_DEVICE = "--one-device --split validation"
PRINTED = [
    ("figures/scatter.md", "Scatter aggregation", ["scatter", "scatter --data ml-1m --seeds 10"]),
    ("figures/methods.md", "Mutual learning", ["mutual"]),
    ("figures/methods.md", "Federated distillation", ["distill"]),
    ("figures/methods.md", "Attention", ["attention"]),
    (
        "figures/hostile.md",
        "Hostile devices",
        ["robust --method scatter --epochs 40 --seeds 3"],
    ),
    ("figures/hostile.md", "Federated averaging", ["robust --method fedavg --seeds 3"]),
    ("figures/hostile.md", "Teacher logits", ["robust --method logits --seeds 3"]),
    (
        "figures/hostile.md",
        "One device, any value",
        [
            f"robust {ONE_DEVICE} --method fedavg",
            f"robust {ONE_DEVICE} --method scatter --epochs 40 --seeds 2 --attacks opposite",
            f'robust {ONE_DEVICE} --method scatter --epochs 10 --attacks "pattern;row"',
        ],
    ),
    ("figures/submodels.md", "Submodels", ["submodels --seeds 5"]),
    ("figures/submodels-pictures.md", "Submodels on pictures", ["submodels --seeds 5"]),
    ("figures/training.md", "Few rows a device", ["recipe"]),
    (
        "figures/staleness.md",
        "Waiting for all, closing early, and staleness",
        ["staleness"],
    ),
    ("figures/personalisation.md", "Models of devices' own", ["personalisation"]),
    ("methods/teacher_logits.md", "What the parts bring", ["distill"]),
    ("methods/attention.md", "Measured", ["attention"]),
    ("device/boards.md", "What was run", ["arm64"]),
    ("operating/console.md", "What it costs", ["console"]),
    ("methods/scatter/privacy.md", "What rows reveal", ["privacy --seeds 1"]),
]
"""Page, heading, and the benchmarks whose stored runs its tables and decimals are of."""
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def section(text: str, heading: str) -> str:
    """From a heading to the next one of its level or above."""
    found = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert found, f"there is no heading {heading!r}"
    level = len(found[1])
    after = text[found.end() :]
    end = re.search(rf"^#{{1,{level}}} ", after, re.MULTILINE)
    return after[: end.start()] if end else after


def numbers(text: str) -> Iterator[tuple[str, float, int]]:
    """Each number as written, its size, and its decimals."""
    for match in _NUMBER.finditer(text):
        plain = match[0].rstrip(",").replace(",", "")
        yield match[0], float(plain), len(plain.partition(".")[2])


def stated(text: str) -> set[tuple[str, float, int]]:
    """Every number of the tables' cells, and every decimal beside them."""
    found = set()
    for line in re.sub(r"`[^`]*`|\]\([^)]*\)", "", text).splitlines():
        if line.startswith("|"):
            cells = re.sub(r"\([\d.]+\)", "", line.split("|", 2)[2])  # in brackets: a paper's
            found |= set(numbers(cells)) if "---" not in line else set()
        else:
            found |= {each for each in numbers(line) if each[2]}
    return found


def unprinted(text: str, printed: str) -> list[str]:
    """Those that are no printed number, rounded."""
    known = [size for _, size, _ in numbers(printed)]
    return sorted(
        said
        for said, size, decimals in stated(text)
        if not any(abs(each - size) <= 0.5001 * 10**-decimals for each in known)
    )


@cache
def _main(benchmark: str) -> object:
    return importlib.import_module(f"benchmarks.{benchmark}.__main__")


@pytest.mark.parametrize(("page", "heading", "commands"), PRINTED)
def test_a_page_has_the_figures_that_its_commands_print(
    page: str, heading: str, commands: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = section((DOCS / page).read_text(encoding="utf-8"), heading)
    for command in commands:
        benchmark, *options = shlex.split(command)
        assert f"bench-{benchmark}" in text or f"benchmarks.{benchmark}" in text
        assert _main(benchmark).main([*options, "--table-only"]) == 0  # type: ignore[attr-defined]
    assert unprinted(text, capsys.readouterr().out) == []


def test_a_figure_that_no_command_prints_is_found() -> None:
    page = "ten 3.25, `9.9` and | no table\n| row | 1,234 (9) | 0.66 |\n|---|---|---|\n"
    assert unprinted(page, "3.2467 1,234 0.6551") == []
    assert unprinted(page, "3.26 1,235 0.654") == ["0.66", "1,234", "3.25"]
