"""What a device tells of its rounds, whom, and when not; both ends in one thread."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from device_sdk.errors import (
    BatchError,
    GraphRunError,
    NonFiniteStep,
    RuntimeMissing,
)
from device_sdk.home.round_store import RoundOutcome
from device_sdk.methods.learner import Declined, LearnerError
from device_sdk.rounds.current_round import CurrentRound
from device_sdk.rounds.participant import Participant
from device_sdk.train.job import TrainedRound, TrainingJob, reason_of
from device_sdk.wire.publish.receipts import RecordType
from device_sdk.wire.publish.report import Reason, Report, ReportedOutcome
from device_sdk.world import TrainingOptions
from tests.fakes.in_memory import Bench

UPDATE, CONTRIBUTION, LEAVE = (
    int(each) for each in (RecordType.UPDATE, RecordType.CONTRIBUTION, RecordType.LEAVE)
)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "home")


def reports(bench: Bench) -> list[Report]:
    return [report for _, report in bench.aggregator.seen.reports]


def test_an_update_takes_its_report_with_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "home", options=TrainingOptions(labels={"site": "north"}))
    bench.run(1)
    bench.aggregator.open_round()
    bench.run(1)
    (report,) = reports(bench)
    assert (report.outcome, report.reason, report.evaluation) == (ReportedOutcome.TRAINED, "", b"")
    details = report.details
    assert (details.option, details.labels) == ("k=8", {"site": "north"})
    assert details.seconds == float(np.float32(0.1))
    assert details.platform.startswith("linux-") and details.sdk and details.received_bytes > 500
    status = bench.home.rounds.last_receipted()
    assert status is not None and status.verdict is not None and status.verdict.value == "counted"
    assert bench.home.rounds.outbox() == [] and bench.sent(UPDATE) == []


def test_a_round_without_an_update_is_told_once_and_leaves_no_verdict(bench: Bench) -> None:
    bench.refuse_training = True
    bench.run(1)
    manifest = bench.aggregator.open_round()
    bench.run(1)
    ((identity, report),) = bench.aggregator.seen.reports
    assert (identity.round, identity.generation) == (manifest.round, manifest.generation)
    assert (report.outcome, report.reason) == (ReportedOutcome.FAILED, "error")
    assert bench.aggregator.seen.bodies == [] and bench.home.rounds.outbox() == []
    assert bench.home.rounds.last_receipted() is None


def test_an_app_may_keep_all_but_the_outcome(tmp_path: Path) -> None:
    options = TrainingOptions(report="outcome", labels={"site": "north"})
    bench = Bench(tmp_path / "home", options=options)
    bench.run(1)
    bench.aggregator.open_round()
    bench.run(1)
    assert reports(bench) == [Report(ReportedOutcome.TRAINED)]


def test_nothing_is_told_of_rounds_that_did_not_ask_for_this_device(bench: Bench) -> None:
    bench.run(1)
    bench.aggregator.open_round(threshold=0)
    bench.run(1)
    last = bench.home.rounds.last()
    assert last is not None and last.outcome is RoundOutcome.NOT_SELECTED
    assert bench.sent(CONTRIBUTION) == [] and bench.fetched == []


def test_chunks_that_never_came_are_told_after_the_deadline(bench: Bench) -> None:
    bench.run(1)
    bench.aggregator.knobs.tamper_chunk = lambda index, message: b""
    bench.aggregator.open_round(deadline_seconds=60)
    bench.run(61)
    assert [(each.outcome, each.reason) for each in reports(bench)] == [
        (ReportedOutcome.FAILED, "too-late")
    ]


def test_a_contribution_survives_the_process_with_the_same_bytes(bench: Bench) -> None:
    bench.aggregator.knobs.receipts = False
    bench.run(1)
    bench.aggregator.open_round()
    bench.run(1)
    (before,) = bench.home.rounds.outbox()
    bench.restart()
    assert bench.home.rounds.outbox() == [before] and before.report is not None
    bench.aggregator.knobs.receipts = True
    bench.run(60)
    assert bench.home.rounds.outbox() == []
    assert len({report.reason for report in reports(bench)}) == 1


def test_training_that_took_too_long_is_told(bench: Bench) -> None:
    def slow(round_: CurrentRound, job: TrainingJob) -> None:
        bench.now_seconds += 120
        state = {"users": np.zeros((1, 8), np.float32)}
        round_.trained(job, TrainedRound(8, b"body", state, None, 120.0))

    bench._train = slow  # type: ignore[method-assign]
    bench.run(1)
    bench.aggregator.open_round(deadline_seconds=60)
    bench.run(150)
    assert [each.reason for each in reports(bench)] == ["too-slow"]
    last = bench.home.rounds.last()
    assert last is not None and last.outcome is RoundOutcome.TOO_LATE


def chained(outer: Exception, inner: Exception) -> Exception:
    try:
        raise outer from inner
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NonFiniteStep(float("nan"), 0.0), "not-finite"),
        (chained(LearnerError("failed"), NonFiniteStep(float("nan"), 0.0)), "not-finite"),
        (chained(LearnerError("failed"), BatchError("shape")), "bad-data"),
        (chained(LearnerError("failed"), GraphRunError("index")), "bad-data"),
        (chained(LearnerError("failed"), GraphRunError("std::bad_alloc")), "out-of-memory"),
        (chained(RuntimeError("the app's"), MemoryError()), "out-of-memory"),
        (RuntimeMissing("none"), "no-runtime"),
        (LearnerError("no samples", Reason.NO_DATA), "no-data"),
        (LearnerError("other"), "does-not-fit"),
        (Declined("on battery"), "not-now"),
        (Declined("none fits", Reason.NO_ARTIFACT_FITS), "no-artifact-fits"),
        (KeyError("the patient's name"), "error"),
    ],
)
def test_an_error_becomes_one_of_a_few_words(error: Exception, reason: str) -> None:
    assert reason_of(error).value == reason


def leaving(bench: Bench) -> Participant:
    bench.participant = Participant(bench.participant._world, leaves=True)
    bench.participant.start()
    bench.participant.connected(True)
    return bench.participant


def test_leaving_is_told_until_it_is_heard_and_the_home_remembers(bench: Bench) -> None:
    bench.aggregator.knobs.receipts = False
    bench.run(1)
    bench.aggregator.open_round()
    bench.run(1)
    assert len(bench.home.rounds.outbox()) == 1
    participant = leaving(bench)
    bench.run(25)
    farewell = participant.farewell
    assert farewell is not None and not farewell.done
    assert bench.aggregator.seen.farewells == 3
    bench.run(120)
    bench.aggregator.knobs.receipts = True
    bench.run(300)
    assert farewell.done and bench.home.rounds.outbox() == []
    membership = bench.home.membership.load()
    assert membership is not None and membership.has_left
    told = bench.aggregator.seen.farewells
    bench.run(3600)
    assert bench.aggregator.seen.farewells == told
