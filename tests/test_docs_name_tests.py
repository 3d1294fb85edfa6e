"""Which test shows it: every test, test file and make target that two pages of docs name exists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_TEST = re.compile(r"^ *def (test_\w+)", re.MULTILINE)


def _names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def _threats() -> list[str]:
    """The last column of each row of the threat model's tables that name tests."""
    found = []
    for table in (DOCS / "threat-model.md").read_text().split("\n\n"):
        lines = table.splitlines()
        if lines[0].endswith("| test |"):
            found += [line.split("|")[-2] for line in lines[2:]]
    return found


def _missing(names: Sequence[str]) -> Iterator[str]:
    """Those that have the form of a test, a test file or a make target, and are none.

    ``a::b`` is ``test_b`` of ``tests/attacks/test_a.py``, ``a::*`` all of them, and ``..c`` the one
    test whose name ends with ``c`` of the file named before.
    """
    file: Path | None = None
    for name in names:
        test = ""
        if match := re.fullmatch(r"(\w+)::(?:\*|(\w+))", name):
            file = ROOT / "tests/attacks" / f"test_{match[1]}.py"
            test = f"test_{match[2]}" if match[2] else ""
        elif match := re.fullmatch(r"((?:\w+/)*test_\w+\.py)(?:::(\w+))?", name):
            found = [each for each in ROOT.glob("tests/**/*.py") if each.match(match[1])]
            file, test = (found[0] if len(found) == 1 else None), match[2] or ""
        elif match := re.fullmatch(r"\.\.(\w+)", name):
            test = match[1]
        elif match := re.match(r"make ([\w-]+)", name):
            if f"\n{match[1]}:" not in (ROOT / "Makefile").read_text():
                yield name
            continue
        else:
            continue
        tests = _TEST.findall(file.read_text()) if file is not None and file.is_file() else []
        same = [each for each in tests if each == test or (name[0] == "." and each.endswith(test))]
        if not tests or (test and len(same) != 1):
            yield name


def test_every_threat_names_a_test_that_is_there() -> None:
    threats = _threats()
    assert len(threats) > 50
    assert [each for each in threats if not _names(each)] == []
    assert [name for each in threats for name in _missing(_names(each))] == []


def test_what_the_page_of_reliability_names_is_there() -> None:
    assert list(_missing(_names((DOCS / "reliability.md").read_text()))) == []


@pytest.mark.parametrize(
    "name",
    [
        "replays::no_such_test",
        "nothing::*",
        "..evicts_nobody",
        "tests/test_none.py",
        "make nothing",
    ],
)
def test_a_name_without_its_test_is_noticed(name: str) -> None:
    there = "replays::a_replayed_open_evicts_nobody"
    assert list(_missing([there, name])) == [name]
