"""Pictures in the docs are there, are shown, and are small."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
PICTURES = DOCS / "pictures"
MOST_BYTES_OF_CONSOLE = 400_000
WIDE, PHONE = 1200, 390


def _shown(page: Path) -> set[Path]:
    return {
        (page.parent / each).resolve()
        for each in re.findall(r"!\[[^\]]+\]\(([^)]+\.png)\)", page.read_text())
    }


def _chunks(png: bytes) -> dict[str, bytes]:
    found, at = {}, 8
    assert png[:at] == b"\x89PNG\r\n\x1a\n"
    while at < len(png):
        length, kind = struct.unpack_from(">I4s", png, at)
        found[kind.decode()] = png[at + 8 : at + 8 + length]
        at += 12 + length
    return found


def test_each_picture_is_shown_on_a_page_and_each_that_is_shown_is_there() -> None:
    pages = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
    shown = set().union(*map(_shown, pages))
    assert shown == set(PICTURES.glob("*.png"))


def test_pictures_of_the_console_are_within_their_bounds() -> None:
    """Else: make screenshots."""
    files = _shown(DOCS / "operating" / "console.md")
    widths = []
    for each in sorted(files):
        chunks = _chunks(each.read_bytes())
        width, height = struct.unpack_from(">II", chunks["IHDR"])
        widths.append(width)
        assert 600 <= height <= 1200
        assert chunks.keys() <= {"IHDR", "PLTE", "IDAT", "IEND"}, "nothing is told but the picture"
    assert sorted(widths) == [PHONE, WIDE, WIDE, WIDE]
    assert sum(each.stat().st_size for each in files) < MOST_BYTES_OF_CONSOLE


def test_the_target_takes_those_that_the_page_shows() -> None:
    pytest.importorskip("playwright", reason="playwright is not installed")
    pytest.importorskip("PIL", reason="pillow is not installed")
    from tests import screenshots

    assert {each.file for each in screenshots.SCREENSHOTS} == _shown(
        DOCS / "operating" / "console.md"
    )
    assert screenshots.MOST_BYTES == MOST_BYTES_OF_CONSOLE
