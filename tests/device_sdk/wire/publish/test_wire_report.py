"""Reports and contributions: what is written is read, and nothing else is."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import decode, encode
from device_sdk.wire.publish.receipts import (
    UpdateIdentity,
    leave_digest,
    read_contribution,
    with_report,
    write_update,
)
from device_sdk.wire.publish.report import (
    MOST_EVALUATION_BYTES,
    MOST_LABELS_BYTES,
    MOST_OUTCOME_BYTES,
    Details,
    ItemCount,
    Reason,
    Report,
    ReportedOutcome,
)

IDENTITY = UpdateIdentity(b"device", "films", 1_700_000_000, 7)
SLUGS = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,22}[a-z0-9])?", fullmatch=True)
LABELS = st.dictionaries(SLUGS, st.text(min_size=1, max_size=12), max_size=2).filter(
    lambda labels: len(cbor.encode(dict(labels))) <= MOST_LABELS_BYTES
)


def texts(most: int) -> st.SearchStrategy[str]:
    return st.text(max_size=most).filter(lambda text: len(text.encode()) <= most)


COUNTS = st.integers(0, 2**31 - 1)
DETAILS = st.builds(
    Details,
    texts(16),
    texts(16),
    texts(18),
    texts(16),
    st.none() | st.floats(0, 1e9, width=32),
    st.integers(0, 2**32 - 1),
    LABELS,
    st.none() | st.builds(lambda known, more: ItemCount(known + more, more), COUNTS, COUNTS),
)
EVALUATIONS = st.binary(max_size=40) | st.just(bytes(MOST_EVALUATION_BYTES))
REPORTS = st.one_of(
    st.builds(
        Report, st.just(ReportedOutcome.TRAINED), st.just(""), st.none() | DETAILS, EVALUATIONS
    ),
    st.builds(
        Report,
        st.sampled_from([ReportedOutcome.DECLINED, ReportedOutcome.FAILED]),
        SLUGS | st.sampled_from([each.value for each in Reason]),
        st.none() | DETAILS,
        EVALUATIONS,
    ),
)


@given(REPORTS)
def test_every_report_is_read_as_it_was_written_and_its_outcome_fits(report: Report) -> None:
    data = encode(report)
    assert decode(Report, data) == report
    assert len(encode(report.without_evaluation())) <= MOST_OUTCOME_BYTES
    assert decode(Report, encode(report.without_evaluation())) == replace(report, evaluation=b"")


def test_the_longest_of_everything_fits() -> None:
    seconds = 1234.567
    labels = {"site": "n" * (MOST_LABELS_BYTES - 1 - 5 - 2)}
    count = ItemCount(2**32 - 1, 2**32 - 1)
    longest = Details("s" * 16, "r" * 16, "p" * 18, "o" * 16, seconds, 2**32 - 1, labels, count)
    report = Report(ReportedOutcome.DECLINED, "r" * 24, longest, bytes(MOST_EVALUATION_BYTES))
    assert len(encode(report.without_evaluation())) == MOST_OUTCOME_BYTES
    assert decode(Report, encode(report)) == report
    with pytest.raises(ValueError, match="at most 56 bytes"):
        replace(longest, labels={"site": labels["site"] + "n"})


FULL: list[cbor.CborValue] = ["1", "", "linux", "", None, 0, {}, [6, 5]]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "wrong-fields"),
        ({"outcome": "failed"}, "bad-field"),
        ({"outcome": "trained", "more": 1}, "wrong-fields"),
        ({"outcome": "trained", "reason": "no-data"}, "bad-field"),
        ({"outcome": "failed", "reason": ""}, "bad-field"),
        ({"outcome": "failed", "reason": "My data is bad!"}, "bad-name"),
        ({"outcome": "failed", "reason": "a" * 25}, "bad-field"),
        ({"outcome": "slept", "reason": "late"}, "bad-field"),
        ({"outcome": "trained", "evaluation": b""}, "bad-field"),
        ({"outcome": "trained", "evaluation": "text"}, "bad-field"),
        ({"outcome": "trained", "evaluation": bytes(4097)}, "bad-field"),
        ({"outcome": "trained", "evaluation": bytes(5000)}, "too-large"),
        ({"outcome": "trained", "details": [*FULL[:6], {"A site": "x"}, None]}, "bad-name"),
        *(
            ({"outcome": "trained", "details": details}, "bad-field")
            for details in (
                {},
                FULL[:7],
                [*FULL, 1],
                ["s" * 17, *FULL[1:]],
                [*FULL[:4], -0.5, *FULL[5:]],
                [*FULL[:4], 1, *FULL[5:]],
                [*FULL[:5], -1, *FULL[6:]],
                [*FULL[:5], True, *FULL[6:]],
                [*FULL[:5], 2**32, *FULL[6:]],
                [*FULL[:6], [], None],
                [*FULL[:6], {"site": 1}, None],
                [*FULL[:6], {"site": "n" * 60}, None],
                [*FULL[:7], 6],
                [*FULL[:7], [6]],
                [*FULL[:7], [6, True]],
                [*FULL[:7], [5, 6]],
                [*FULL[:7], [6, -1]],
                [*FULL[:7], [2**32, 0]],
            )
        ),
    ],
)
def test_what_no_device_writes_is_refused(value: cbor.CborValue, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        decode(Report, cbor.encode(value))
    assert caught.value.reason == reason


@given(st.binary(max_size=300), st.binary(max_size=60))
def test_a_contribution_is_read_as_it_was_written(report: bytes, body: bytes) -> None:
    content = with_report(report, body)
    found = read_contribution(write_update(IDENTITY, content), b"device")
    assert (found.identity, found.report, found.body) == (IDENTITY, report, body)
    assert found.content_sha256 == hashlib.sha256(content).digest()
    # With another report it is the same update; a report alone is what it says.
    assert found.body_sha256 == hashlib.sha256(body or content).digest()


@given(st.binary(max_size=80))
def test_any_bytes_are_a_contribution_or_refused(payload: bytes) -> None:
    try:
        found = read_contribution(payload, b"device")
    except WireError:
        return
    assert found.report is not None
    assert write_update(found.identity, with_report(found.report, found.body)) == payload


@pytest.mark.parametrize("content", [b"", b"\x01", b"\x02\x00a"])
def test_a_contribution_that_ends_early_is_refused(content: bytes) -> None:
    with pytest.raises(WireError) as caught:
        read_contribution(write_update(IDENTITY, content), b"device")
    assert caught.value.reason == "truncated"


def test_a_farewell_is_named_by_its_device() -> None:
    assert len({leave_digest(b"a"), leave_digest(b"b")}) == 2
