"""The page to choose a method by: its figures are those of the pages that it links to, and its task
files are such."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.task.artifacts import read_artifacts
from aggregator.task.file import read_task
from tests.test_docs_figures import DOCS, section

PAGE = DOCS / "which-method.md"
SHIPPED = Path(__file__).parents[1] / "device_sdk" / "artifacts" / "digits"
_FIGURE = re.compile(r"(?<![\w@.])(?<!\w-)\d[\d,]*(?:\.\d+)?(?!\w)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_SENTENCE_ENDS = re.compile(r"(?<=[.:!?*])\s+(?=[A-Z*`\[])")


def figures(text: str) -> set[str]:
    """Each number as it is written, but those in code and targets, and of names (GRU4Rec, 100K)."""
    return {each.rstrip(",") for each in _FIGURE.findall(_LINK.sub("]", _CODE.sub("", text)))}


def units(text: str) -> Iterator[str]:
    """Sentences, and of tables cells: those of a row whose last one holds the link together."""
    for line in re.sub(r"```.*?```|^#.*?$", "", text, flags=re.DOTALL | re.MULTILINE).splitlines():
        if not line.startswith("|"):
            yield from _SENTENCE_ENDS.split(line)
            continue
        *cells, last = [each for each in line.strip("|").split("|") if "---" not in each] or [""]
        if _LINK.search(last) and not any(map(_LINK.search, cells)):
            yield line
        else:
            yield from (*cells, last)


def linked(target: str, page: Path) -> str:
    """The section that a link is to; without one, the whole page."""
    path, _, anchor = target.partition("#")
    text = ((page.parent / path) if path else page).read_text(encoding="utf-8")
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE) if anchor else ():
        plain = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        if re.sub(r"[\s-]+", "-", plain) == anchor:
            return section(text, heading)
    assert not anchor, f"{target} names no heading"
    return text


def astray(text: str, page: Path) -> list[str]:
    """Figures that do not stand where their sentence, or cell, links to."""
    found = []
    for unit in units(text):
        said = figures(unit)
        if said:
            targets = [each for each in _LINK.findall(unit) if "://" not in each]
            there = {number for each in targets for number in figures(linked(each, page))}
            found += [f"{number} in {unit.strip()!r}" for number in sorted(said - there)]
    return found


def test_each_figure_is_one_of_the_page_that_its_link_names() -> None:
    assert astray(PAGE.read_text(encoding="utf-8"), PAGE) == []


def test_a_figure_that_is_no_longer_there_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A\n## One rule\nfinds 0.25 of 1,000\n## Two\n7\n")
    page = tmp_path / "b.md"
    good = "GRU4Rec of `k = 9` on 100K has [0.25](a.md#one-rule). | |\n| 1,000 | | [a](a.md) |\n"
    assert astray(good, page) == []
    bad = "It has 0.25. See [a](a.md#two) for 7, or [0.26](a.md). \n| [1](a.md) | 7 |\n"
    assert [each.partition(" ")[0] for each in astray(bad, page)] == ["0.25", "0.26", "1", "7"]
    with pytest.raises(AssertionError, match="no heading"):
        astray("[7](a.md#three)", page)


def test_the_page_is_short() -> None:
    assert len(PAGE.read_text(encoding="utf-8").split()) < 1_800


def test_each_task_file_of_the_page_is_taken(tmp_path: Path) -> None:
    texts = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(texts) == 3
    (tmp_path / "items.tsv").write_text("one\ntwo\n", encoding="utf-8")
    (tmp_path / "artifacts").mkdir()
    shutil.copy(SHIPPED / "full.safetensors", tmp_path / "artifacts")
    for text in texts:
        for name in re.findall(r'"(artifacts/\w+)"', text):
            shutil.copytree(SHIPPED / "full", tmp_path / name)
        file = tmp_path / "task.toml"
        for whole in (text, re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)):
            file.write_text(whole, encoding="utf-8")
            read_artifacts(read_task(file))
