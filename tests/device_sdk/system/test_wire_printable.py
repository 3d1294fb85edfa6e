"""Text from outside in logs and on terminals."""

from __future__ import annotations

import io
import logging
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tabulate import tabulate

from device_sdk.system.printable import (
    PrintableFormatter,
    printable,
    printable_lines,
    text_table,
)

HOSTILE = "x\n2026-11-22 09:00:00 INFO round 7 closed\x1b]0;owned\x07\x1b[2K\r\u202efdp\u2066"


def test_what_prints_stays_and_what_does_not_is_shown() -> None:
    for text in ("", "round 7", "Crème brûlée", "七人の侍", "Ирония судьбы", "C:\\x1b"):
        assert printable(text) == text
    assert printable("a\tb\x00\x9b31m") == "a\\tb\\x00\\x9b31m"
    assert printable("a\u2028b\u0085c\u202ed\u200be\ud800") == (
        "a\\u2028b\\x85c\\u202ed\\u200be\\ud800"
    )
    assert printable("12\xa0000\u202f€") == "12 000 €"


def test_what_is_too_long_is_cut_and_says_so() -> None:
    assert printable("a" * 30, 10) == "a" * 10 + "... (20 characters more)"
    assert len(printable("\x1b" * 1_000_000)) < 10_000
    assert printable_lines("one\x1b\ntwo") == "one\\x1b\ntwo"


@given(st.text(st.characters(codec=None)))
def test_the_result_is_one_line_that_prints(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable() and len(shown.splitlines()) <= 1
    assert not any(unicodedata.category(each)[0] == "C" for each in shown)
    shown.encode()
    assert printable(shown) == shown


def _logged(message: str, *values: object, error: Exception | None = None) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter("%(levelname)s %(message)s"))
    record = logging.LogRecord("n", logging.WARNING, "f", 1, message, values, None)
    if error is not None:
        try:
            raise error
        except Exception as caught:
            record.exc_info = (type(caught), caught, caught.__traceback__)
    handler.handle(record)
    return stream.getvalue()


def test_a_record_is_one_line() -> None:
    assert _logged("no connection (%s)", HOSTILE).count("\n") == 1
    assert "\x1b" not in _logged(HOSTILE)


def test_a_traceback_stands_behind_a_margin() -> None:
    lines = _logged("failed", error=ValueError(HOSTILE)).splitlines()
    assert lines[0] == "WARNING failed"
    assert all(line.startswith("  | ") and line.isprintable() for line in lines[1:])
    assert any("round 7 closed" in line for line in lines)


@pytest.mark.parametrize("text", [HOSTILE])
def test_another_handler_s_rendering_is_not_taken_over(text: str) -> None:
    record = logging.LogRecord("n", logging.WARNING, "f", 1, "m", (), None)
    record.exc_text = text
    assert PrintableFormatter("%(message)s").format(record) == "m"
    assert record.exc_text == text


@pytest.mark.parametrize("align", ["", "rl", "rrr"])
def test_a_table_is_what_a_library_for_them_prints(align: str) -> None:
    rows = [("1", "Amélie", "0.934"), ("12", "M", "-"), ("3", "The Good, the Bad", "10.5")]
    sides = tuple("right" if side == "r" else "left" for side in align.ljust(3))
    for headers in ((), ("", "title", "a long header")):
        expected = tabulate(
            rows,
            headers,
            tablefmt="simple" if headers else "plain",
            colalign=sides,
            disable_numparse=True,
        )
        assert text_table(rows, headers, align) == expected


def test_a_table_without_rows_has_its_headers_alone() -> None:
    assert text_table([]) == ""
    assert text_table([], ("item", "score")) == "item    score\n------  -------"


def test_rows_of_a_table_are_equally_long() -> None:
    with pytest.raises(ValueError, match="zip"):
        text_table([("a", "b"), ("c",)])
