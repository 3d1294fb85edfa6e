"""Contributions at the aggregator: what they leave behind, whom a round waits for, and liars."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.home import AggregatorHome
from aggregator.rounds.machine import RoundClosed
from aggregator.store.reports import KEPT_ROUNDS, OutcomeCount
from aggregator.store.rows import StoredReport
from device_sdk.wire.codec.message import decode, encode
from device_sdk.wire.publish.receipts import (
    RecordType,
    UpdateIdentity,
    update_digest,
    with_report,
    write_update,
)
from device_sdk.wire.publish.report import (
    Details,
    Reason,
    Report,
    ReportedOutcome,
)
from tests.aggregator.rounds.test_ingest import ANNA, BERT, CLEO, LATER, Desk, body
from tests.fakes.homes import make_home
from tests.fakes.parts import enrol

DETAILS = Details("0.1.0", "1.22.0", "linux-aarch64", "k=3", 1.5, 4000, {"site": "north"})
TRAINED = Report(ReportedOutcome.TRAINED, "", DETAILS, b"\xa0")
NO_DATA = Report(ReportedOutcome.DECLINED, Reason.NO_DATA.value)
NOT_FINITE = Report(ReportedOutcome.FAILED, Reason.NOT_FINITE.value, DETAILS)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    lines = "quorum = 2\ndeadline_seconds = 100.0\nresume_grace_seconds = 0.0"
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", lines)
    enrol(home, (ANNA, BERT, CLEO))
    enrol(home, [LATER], first_round=8)
    made = Desk(home)
    yield made
    made.parts.store.database.close()


def offer(
    desk: Desk, identity: UpdateIdentity, report: Report | bytes, sent: bytes = b""
) -> tuple[str, str] | None:
    """Offer a contribution, and commit; the verdict and its reason."""
    told = report if isinstance(report, bytes) else encode(report)
    content = with_report(told, sent)
    payload = write_update(identity, content)
    settled = desk.parts.inbox.offer(identity.device_id, payload, RecordType.CONTRIBUTION)
    if settled is None:
        (settled,) = desk.ingest.commit()
    assert settled.device_id == identity.device_id
    digest = update_digest(identity, hashlib.sha256(content).digest())
    assert settled.receipt.digest == digest
    return settled.receipt.verdict.value, settled.receipt.reason


def outcomes(desk: Desk) -> list[OutcomeCount]:
    return desk.parts.store.first.reports.outcomes()


def test_an_update_and_its_report_are_one_thing(desk: Desk) -> None:
    identity = desk.identity(ANNA)
    for _ in range(2):
        assert offer(desk, identity, TRAINED, body()) == ("counted", "")
    assert offer(desk, identity, NOT_FINITE) == ("conflict", "")
    assert offer(desk, identity, TRAINED, body(2.0)) == ("conflict", "")
    row = desk.row
    (stored,) = desk.parts.store.database.rows("SELECT * FROM reports")
    assert stored == (1, *StoredReport(
        row.generation, row.round, ANNA, "trained", "", "0.1.0", "1.22.0", "linux-aarch64", "k=3",
        1.5, 4000,
    ))  # fmt: skip
    assert [each.body for each in desk.parts.store.first.log.after(0)] == [body()]


def test_an_update_is_the_same_with_another_report_or_none(desk: Desk) -> None:
    """A device that lost sight of the list of tasks sends what it has without its report."""
    anna, bert, cleo = (desk.identity(each) for each in (ANNA, BERT, CLEO))
    assert offer(desk, anna, TRAINED, body()) == ("counted", "")
    desk.count(BERT, body())
    assert offer(desk, cleo, TRAINED, body()[:-1]) == ("refused", "bad-length")
    stored = list(desk.parts.store.database.rows("SELECT device_id FROM reports"))
    for _ in range(2):
        assert desk.offer(anna, body()) == ("counted", "")
        assert offer(desk, anna, Report(ReportedOutcome.TRAINED), body()) == ("counted", "")
        assert offer(desk, bert, TRAINED, body()) == ("counted", "")
        assert desk.offer(cleo, body()[:-1]) == ("refused", "bad-length")
        desk.next_round()
    assert list(desk.parts.store.database.rows("SELECT device_id FROM reports")) == stored
    assert desk.ingest.counted == 2 and desk.refused("conflict") == 0


def test_a_round_waits_no_longer_for_who_told_why(desk: Desk) -> None:
    assert offer(desk, desk.identity(ANNA), NO_DATA) == ("noted", "")
    assert offer(desk, desk.identity(BERT), NOT_FINITE) == ("noted", "")
    assert desk.parts.first.rounds.outstanding == 1 and desk.parts.first.rounds.arrived == 0
    assert desk.parts.first.rounds.tick() is None
    assert offer(desk, desk.identity(ANNA), NO_DATA) == ("noted", "")
    assert offer(desk, desk.identity(ANNA), TRAINED, body()) == ("conflict", "")
    desk.count(CLEO, body())
    # Everybody was heard: the round ends at once. One of two that the quorum asks for came.
    closed = desk.parts.first.rounds.tick()
    assert isinstance(closed, RoundClosed) and closed.next_version is None
    assert outcomes(desk) == [
        OutcomeCount(1, "declined", "no-data", 1),
        OutcomeCount(1, "failed", "not-finite", 1),
    ]
    assert desk.ingest.outcomes == {("declined", "no-data"): 1, ("failed", "not-finite"): 1}


def test_a_round_in_which_nobody_trained_keeps_its_time(desk: Desk) -> None:
    """Else a fleet without data would have rounds as fast as they open."""
    for device in (ANNA, BERT, CLEO):
        assert offer(desk, desk.identity(device), NO_DATA) == ("noted", "")
    assert desk.parts.first.rounds.outstanding == 0 and desk.parts.first.rounds.tick() is None


def test_a_restart_remembers_who_was_heard(desk: Desk, tmp_path: Path) -> None:
    assert offer(desk, desk.identity(ANNA), NO_DATA) == ("noted", "")
    desk.parts.store.database.close()
    again = Desk(AggregatorHome(tmp_path / "home"), opens=False)
    assert again.parts.first.rounds.outstanding == 2
    assert offer(again, again.identity(ANNA), NO_DATA) == ("noted", "")
    assert offer(again, again.identity(ANNA), NOT_FINITE) == ("conflict", "")
    again.parts.store.database.close()


@pytest.mark.parametrize(
    ("report", "sent", "reason"),
    [
        (b"", b"", "bad-cbor"),
        (b"\xff", b"", "bad-cbor"),
        (bytes(5000), b"", "too-large"),
        (TRAINED, b"", "bad-field"),
        (NO_DATA, body(), "bad-field"),
        (TRAINED, body()[:-1], "bad-length"),
    ],
)
def test_what_no_device_sends_is_refused_for_good(
    desk: Desk, report: Report | bytes, sent: bytes, reason: str
) -> None:
    identity = desk.identity(ANNA)
    first = offer(desk, identity, report, sent)
    assert first is not None and first[0] == "refused"
    assert offer(desk, identity, report, sent) == first
    assert first[1] == reason and desk.refused(reason) == 1
    assert offer(desk, identity, NO_DATA) == ("conflict", "")
    assert desk.parts.first.rounds.outstanding == 2


def test_who_was_not_asked_has_nothing_to_tell(desk: Desk) -> None:
    assert offer(desk, desk.identity(LATER), NO_DATA) == ("refused", "joined-later")
    assert offer(desk, desk.identity(ANNA, task="other"), NO_DATA) == ("refused", "wrong-task")
    assert outcomes(desk) == []


def test_what_came_too_late_is_kept_once_and_makes_nobody_waited_for_longer(desk: Desk) -> None:
    identity, late = desk.identity(ANNA), Report(ReportedOutcome.FAILED, Reason.TOO_LATE.value)
    stranger = desk.identity(LATER)
    desk.next_round()
    for _ in range(2):
        assert offer(desk, identity, late) == ("noted", "")
    assert offer(desk, desk.identity(BERT, 1), TRAINED, body()) == ("late", "")
    assert offer(desk, stranger, late) == ("noted", "")
    assert desk.ingest.commit() == []
    assert outcomes(desk) == [
        OutcomeCount(1, "failed", "too-late", 1),
        OutcomeCount(1, "trained", "", 1),
    ]
    habits = desk.parts.first.rounds._attendance.habits
    assert habits.of(ANNA).seconds is None and habits.of(BERT).seconds is not None


def test_the_newest_outcome_stays_with_the_device_and_old_rounds_go(desk: Desk) -> None:
    for _ in range(KEPT_ROUNDS + 3):
        offer(desk, desk.identity(ANNA), NO_DATA)
        desk.next_round()
    kept = {each.round for each in outcomes(desk)}
    assert len(kept) == KEPT_ROUNDS and min(kept) == 4
    offer(desk, desk.identity(ANNA), TRAINED, body())
    store = desk.parts.store
    with store.database.transaction():
        desk.ingest.save_seen()
    found = store.first.participations.all()[ANNA]
    assert found.report is not None
    assert decode(Report, found.report) == Report(ReportedOutcome.TRAINED, "", DETAILS)
    assert (found.round, found.told_unix_seconds) == (KEPT_ROUNDS + 4, int(desk.now_seconds))


def test_what_came_too_late_of_an_older_round_is_not_the_newest_outcome(desk: Desk) -> None:
    late = desk.identity(ANNA)
    desk.next_round()
    assert offer(desk, desk.identity(ANNA), TRAINED, body()) == ("counted", "")
    assert offer(desk, late, Report(ReportedOutcome.FAILED, Reason.TOO_LATE.value)) == ("noted", "")
    desk.ingest.commit()
    found = desk.parts.store.first.participations.all()[ANNA]
    assert found.round == 2 and found.report is not None
    assert decode(Report, found.report).outcome is ReportedOutcome.TRAINED


def test_a_device_s_own_words_do_not_grow_the_counters(desk: Desk) -> None:
    for device, word in ((ANNA, "made-up"), (BERT, "also-made-up")):
        offer(desk, desk.identity(device), Report(ReportedOutcome.FAILED, word))
    assert desk.ingest.outcomes == {("failed", "other"): 2}
