"""What pages name is there: files, commands, make targets, and the tests that show a claim."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("**/*.md")])
MAKEFILE = (ROOT / "Makefile").read_text()
_TEST = re.compile(r"^ *def (test_\w+)", re.MULTILINE)


def _names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def _threats() -> list[str]:
    """The last column of each row of the threat model's tables, on a page for each attacker."""
    found = []
    pages = sorted(DOCS.glob("threat-model/*.md"))
    for table in "\n\n".join(page.read_text() for page in pages).split("\n\n"):
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
            if f"\n{match[1]}:" not in MAKEFILE:
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


def test_what_the_pages_of_reliability_name_is_there() -> None:
    pages = [DOCS / "reliability.md", *DOCS.glob("reliability/*.md")]
    assert [list(_missing(_names(page.read_text()))) for page in pages] == [[]] * 5


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


# Files and folders, make targets and modules: on every page.


def _prose(page: Path) -> str:
    """The page without its programs: these are run elsewhere, and name files of the reader's."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


_FILE = re.compile(r"[\w./-]+\.(?:py|md|svg|png|pml|pv|template)|(?:[\w-]+/)+")
_NOT_OURS = re.compile(r"tutorial/")
"""Folders that a reader makes."""


@cache
def _all_names() -> frozenset[str]:
    """Of all files and folders that are not hidden."""
    return frozenset(path.name for path in [*ROOT.glob("[!.]*"), *ROOT.glob("[!.]*/**/*")])


def _missing_files(page: Path) -> list[str]:
    """Paths in backticks that lead nowhere, from the root, the page or a package of ours.

    A bare name has to be that of some file or folder.
    """
    tops = [ROOT, page.parent, ROOT / "device_sdk", ROOT / "docs"]
    missing = []
    for name in _names(_prose(page)):
        if not _FILE.fullmatch(name) or _NOT_OURS.match(name):
            continue
        if "/" in name.rstrip("/"):
            there = any((top / name).exists() for top in tops)
        else:
            there = name.rstrip("/") in _all_names()
        if not there:
            missing.append(name)
    return missing


def _missing_commands(text: str) -> list[str]:
    """Make targets and modules that are not there: in backticks, and in programs of shells."""
    shells = re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    missing = []
    for command in [*_names(text), *"\n".join(shells).splitlines()]:
        if (match := re.match(r"make ([a-z0-9-]+)", command)) and f"\n{match[1]}:" not in MAKEFILE:
            missing.append(command)
        if match := re.match(r"python -m ([\w.]+)", command):
            place = ROOT / match[1].replace(".", "/")
            if _NOT_OURS.match(match[1].replace(".", "/")) or match[1].split(".")[0] == "pip":
                continue
            if not (place.with_suffix(".py").exists() or (place / "__main__.py").exists()):
                missing.append(command)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_commands_that_a_page_names_are_there(page: Path) -> None:
    assert _missing_files(page) == []
    assert _missing_commands(page.read_text()) == []


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            wrong.append(target)
        elif anchor:
            headings = re.findall(r"^#+ (.+)$", _prose(file), re.MULTILINE)
            if anchor not in map(_anchor, headings):
                wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("page", ["a-round.md", "architecture.md"])
def test_pages_about_the_code_name_many_files(page: Path) -> None:
    found = [name for name in _names(_prose(DOCS / page)) if _FILE.fullmatch(name)]
    assert len(found) > 20


def test_a_file_or_command_that_is_not_there_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`device_sdk/device.py`, `device_sdk/nothing.py`, `nothing.py`, `nothing/`")
    assert _missing_files(page) == ["device_sdk/nothing.py", "nothing.py", "nothing/"]
    text = "`make test`, `make nothing`, `python -m examples.embed`, `python -m examples.nothing`"
    assert _missing_commands(text) == ["make nothing", "python -m examples.nothing"]


# What a reader meets first is short, and readable on a phone.


def test_the_readme_is_short_and_its_tables_are_narrow() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 200
    assert [line for line in lines if line.startswith("|") and len(line) > 120] == []


def test_each_page_is_read_in_one_sitting() -> None:
    words = {page.relative_to(ROOT): len(page.read_text().split()) for page in PAGES}
    assert {page: count for page, count in words.items() if count >= 3000} == {}
    releases = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert [each.split()[0] for each in releases if len(each.split()) > 900] == []


def test_pictures_are_small() -> None:
    for picture in DOCS.glob("**/*.png"):
        assert picture.stat().st_size < 150_000, picture
