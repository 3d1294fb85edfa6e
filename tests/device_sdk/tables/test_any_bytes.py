"""Tables of any bytes: read or refused, and what was written as a table is what is read."""

from __future__ import annotations

import csv
import gzip
import io
import re
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.interactions import Interactions, InteractionsError, read_interactions
from device_sdk.tables.text import Reading
from device_sdk.tables.times import MISSING, TimesError, seconds_of

_PIECES = (
    *("user", "item", "time", "user_id:token", "movieId", "anna", "f1", "5.0", "1260759144"),
    *("2009-05-04T23:08:57Z", "02/01/2024", '"', '""', "\\", "'", ",", ";", "\t", "::", "|", " "),
    *("\n", "\r\n", "\r", "\ufeff", "\u2028", "\x0b", "\x0c", "\x85", "\x00", "#", "sep=;", "NULL"),
)
_TEXTS = st.lists(st.sampled_from(_PIECES), max_size=60).map("".join)
_BYTES = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda text, encoding, cut, junk: text.encode(encoding, "replace")[cut:] + junk,
        _TEXTS,
        st.sampled_from(("utf-8", "utf-16", "utf-16-be", "utf-32", "latin-1", "cp1252")),
        st.integers(0, 3),
        st.binary(max_size=3),
    ),
    st.builds(lambda text: gzip.compress(text.encode()), _TEXTS),
)


@given(data=_BYTES)
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(data)
    try:
        found = read_interactions(path)
    except InteractionsError as error:
        assert str(path) in str(error) or "--" in str(error)
        return
    pairs = list(found.pairs())
    assert 0 < len(pairs) == len(set(pairs))
    assert all(user.strip() and item.strip() for user, item in pairs)
    assert "\ufeff" not in "".join(user + item for user, item in pairs)


_CELLS = (
    st.text(
        st.characters(
            codec="utf-8", exclude_characters="\ufeff\x00", exclude_categories=("Cs", "Cc", "Zs")
        ),
        min_size=1,
        max_size=8,
    )
    .map(str.strip)
    .filter(lambda each: each and each not in MISSING)
)
_USERS = st.one_of(_CELLS, st.sampled_from(("anna", "bert")))
_TIMES = st.one_of(st.integers(0, 10**10), st.sampled_from((7, 8)))
_LINES = st.text(st.sampled_from(',;\t|: "\n\r\u2028\x0b\x0cab1'), max_size=12)


@given(
    rows=st.lists(st.tuples(_USERS, _CELLS, _LINES, _TIMES), min_size=1, max_size=12),
    separator=st.sampled_from(",;\t|"),
    encoding=st.sampled_from(("utf-8", "utf-8-sig", "utf-16", "utf-32")),
    style=st.sampled_from(
        ((csv.QUOTE_MINIMAL, "\r\n"), (csv.QUOTE_ALL, "\n"), (csv.QUOTE_ALL, "\r"))
    ),
)
def test_what_a_program_writes_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str, str, int]],
    separator: str,
    encoding: str,
    style: tuple[int, str],
) -> None:
    text = io.StringIO()
    quoting, end = style
    writer = csv.writer(text, delimiter=separator, quoting=quoting, lineterminator=end)  # type: ignore[arg-type]
    writer.writerow(("timestamp", "review", "user_id", "item_id"))
    writer.writerows((time, review, user, item) for user, item, review, time in rows)
    path = tmp_path_factory.getbasetemp() / "written"
    path.write_bytes(text.getvalue().encode(encoding))
    digest = {row: sha256(f"{row[0]}\n{row[1]}".encode()).digest() for row in rows}
    ordered = sorted(rows, key=lambda row: (row[3], digest[row]))
    expected = Interactions.from_pairs((user, item) for user, item, _, _ in ordered)
    try:
        found = read_interactions(path)
    except InteractionsError as error:
        # A text may look as if it were cut by another one, and an id as if it were several.
        assert re.search("--separator|seem to hold several items", str(error))
        found = read_interactions(path, Reading({"item": "item_id"}, separator))
    assert sorted(found.pairs()) == sorted(expected.pairs())
    for user in expected.user_ids:
        ours, theirs = (
            [each.item_ids[item] for item in each.items_of(each.user_row(user))]
            for each in (found, expected)
        )
        assert ours == theirs


@given(texts=st.lists(st.one_of(st.text(max_size=12), st.sampled_from(_PIECES)), max_size=8))
def test_any_texts_are_times_or_refused(texts: list[str]) -> None:
    try:
        found = seconds_of(texts)
    except TimesError:
        return
    assert found.shape == (len(texts),)
    assert np.all(np.isfinite(found) | np.isnan(found))
