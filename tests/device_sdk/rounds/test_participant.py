"""A participant over hours and days, in memory: waits, bounds, and any bytes at all."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_sdk.factorisation import packaged_artifact
from device_sdk.home.round_store import OutboxRow, Participation, RoundOutcome
from device_sdk.rounds import Publish
from device_sdk.wire.publish.receipts import RecordType
from device_sdk.wire.publish.topics import (
    ChunkTopic,
    DescriptorTopic,
    DownTopic,
    ManifestTopic,
    PresenceTopic,
    TasksTopic,
)
from device_sdk.wire.seal.broadcast import Publication, new_group_key
from device_sdk.world import TrainingOptions
from tests.fakes.handmade import linear_artifact
from tests.fakes.in_memory import Bench

OPEN, UPDATE = 5, int(RecordType.CONTRIBUTION)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "home")


def test_rounds_over_three_days_renew_the_session_once_a_day(bench: Bench) -> None:
    for _ in range(72):
        bench.aggregator.open_round(deadline_seconds=3000)
        bench.run(3600)
    assert len(bench.sent(UPDATE)) == 72
    assert len({identity.round for identity, _ in bench.aggregator.seen.bodies}) == 72
    assert 3 <= len(bench.sent(OPEN)) <= 4
    assert bench.participant.refusals.counts() == {}


def test_an_aggregator_that_is_away_for_hours_is_not_pestered(bench: Bench) -> None:
    bench.run(1)
    bench.aggregator.knobs.receipts = bench.aggregator.knobs.answers_opens = False
    bench.aggregator.open_round(deadline_seconds=60)
    bench.run(6 * 3600)
    # Three sends, then opens with growing waits: about one in five minutes each.
    assert len(bench.sent(UPDATE)) == 3
    assert 20 <= len(bench.sent(OPEN)) <= 120
    assert "revoked" in bench.participant.problem
    bench.aggregator.knobs.receipts = bench.aggregator.knobs.answers_opens = True
    bench.run(700)
    assert bench.home.rounds.outbox() == []
    bodies = {body for _, body in bench.aggregator.seen.bodies}
    assert len(bodies) == 1 and bench.participant.problem == ""


def test_an_update_is_repeated_early_once_and_then_with_patience(tmp_path: Path) -> None:
    first_waits = []
    for seed in range(12):
        bench = Bench(tmp_path / f"home-{seed}", seed=seed)
        bench.run(1)
        bench.aggregator.knobs.receipts = False
        bench.aggregator.open_round()
        bench.run(30)
        first, second, third = bench.sent(UPDATE)[:3]
        first_waits.append(second - first)
        assert third - second >= bench.pace.answer_seconds
        bench.home.close()
    assert all(2 <= wait <= 3 for wait in first_waits)
    assert max(first_waits) - min(first_waits) > 0.3  # a fleet does not come again in step


def test_a_slow_way_costs_one_message_more_for_each_update(bench: Bench) -> None:
    bench.run(1)
    for _ in range(10):
        bench.aggregator.knobs.receipts = False
        bench.aggregator.open_round(deadline_seconds=60)
        bench.run(8)  # all receipts come as late as this
        bench.aggregator.knobs.receipts = True
        bench.run(50)
    assert bench.home.rounds.outbox() == []
    assert len(bench.sent(UPDATE)) <= 3 * 10  # with the one that the receipt answers
    assert len(bench.sent(OPEN)) <= 2


def test_a_broker_that_is_away_for_hours_costs_nothing_and_the_outbox_is_sent_at_once(
    bench: Bench,
) -> None:
    bench.run(1)
    bench.aggregator.knobs.receipts = False
    bench.aggregator.open_round()
    bench.run(1)
    bench.set_connected(False)
    published = len(bench.published)
    bench.run(12 * 3600)
    assert len(bench.published) == published
    bench.aggregator.knobs.receipts = True
    bench.set_connected(True)
    bench.run(1)
    assert bench.home.rounds.outbox() == [] and len(bench.sent(OPEN)) == 1


def test_forged_epochs_cost_few_sessions(bench: Bench) -> None:
    bench.aggregator.open_round()
    bench.run(1)
    topic = bench.aggregator.topics.write(ManifestTopic("default", "all"))
    for epoch in range(100, 460):
        forged = Publication(new_group_key(epoch), "default", "all").seal_manifest(
            b"x", bench.aggregator._delegate
        )
        bench.broker.publish(topic, forged)
        bench.broker.publish(topic, bench.aggregator.manifest_message)
        bench.run(10)
    # An hour of forgeries every ten seconds, with the true manifest repeated in between: the waits
    # between opens grow to ten minutes.
    assert len(bench.sent(OPEN)) <= 25
    bench.aggregator.open_round()
    bench.run(1)
    assert bench.home.rounds.outbox() == [] and len(bench.sent(UPDATE)) == 2


def test_presences_of_many_restarts_reopen_after_a_random_wait(tmp_path: Path) -> None:
    waits = []
    for seed in range(8):
        bench = Bench(tmp_path / str(seed), seed=seed)
        bench.run(60)
        bench.aggregator.forget_sessions()
        bench.aggregator.publish_standing()
        began = bench.now_seconds
        bench.run(60)
        assert len(bench.sent(OPEN)) == 2
        waits.append(bench.sent(OPEN)[-1] - began)
        bench.home.close()
    assert min(waits) > 0 and max(waits) <= bench.pace.reopen_seconds
    assert max(waits) - min(waits) > 2


def test_updates_without_receipts_hold_further_rounds_back_until_receipts_come(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.aggregator.knobs.receipts = False
    for _ in range(20):
        bench.aggregator.open_round(deadline_seconds=3000)
        bench.run(60)
    assert bench.home.rounds.outbox_size()[0] == 8
    last = bench.home.rounds.last()
    assert last is not None and (last.round, last.outcome) == (20, RoundOutcome.OUTBOX_FULL)
    assert "8 updates" in bench.participant.problem and "8 updates" in last.detail
    assert [each for each in caplog.messages if "not trained" in each] == [
        f"round 9 and later ones are not trained: {last.detail}"
    ]
    bench.restart()
    bench.aggregator.open_round(deadline_seconds=3000)
    bench.run(60)
    assert bench.home.rounds.outbox_size()[0] == 8
    bench.aggregator.knobs.receipts = True
    bench.run(700)
    assert bench.home.rounds.outbox() == [] and bench.participant.problem == ""
    bench.aggregator.open_round()
    bench.run(60)
    assert {each.round for each, _ in bench.aggregator.seen.bodies} == {*range(1, 9), 22}


def test_a_learner_that_must_know_what_counted_trains_once_the_receipts_are_there(
    bench: Bench,
) -> None:
    """Else, after a lost receipt, a device would take its own share for the others'."""
    bench.aggregator.knobs.receipts = False
    bench.aggregator.open_round(method="teacher_logits")
    bench.run(5)
    bench.aggregator.open_round(deadline_seconds=300, method="teacher_logits")
    bench.run(5)
    bench.restart()
    bench.run(5)
    assert [job.manifest.round for job in bench.jobs] == [1]
    bench.aggregator.knobs.receipts = True
    bench.run(60)
    assert [job.manifest.round for job in bench.jobs] == [1, 2]
    assert bench.home.rounds.outbox() == []
    # A receipt that does not come at all costs rounds, as late chunks do, and no more.
    bench.aggregator.knobs.receipts = False
    for _ in range(2):
        bench.aggregator.open_round(deadline_seconds=60, method="teacher_logits")
        bench.run(100)
    last = bench.home.rounds.last()
    assert last is not None and (last.round, last.outcome) == (4, RoundOutcome.TOO_LATE)
    assert "receipt" in last.detail
    bench.aggregator.knobs.receipts = True
    bench.run(700)
    bench.aggregator.open_round(method="teacher_logits")
    bench.run(5)
    assert [job.manifest.round for job in bench.jobs] == [1, 2, 3, 5]


def test_a_task_that_rests_is_read_with_a_full_outbox(bench: Bench) -> None:
    bench.aggregator.knobs.receipts = False
    for _ in range(9):
        bench.aggregator.open_round()
        bench.run(60)
    bench.aggregator.open_round(threshold=0)
    bench.run(60)
    last = bench.home.rounds.last()
    assert last is not None and last.outcome is RoundOutcome.READ


@pytest.mark.parametrize(
    ("updates", "body_bytes", "holds"),
    [(7, 142, False), (8, 1, True), (8, 0, False), (1, 1000, True)],
)
def test_an_outbox_is_full_by_its_updates_or_their_bytes(
    tmp_path: Path, updates: int, body_bytes: int, holds: bool
) -> None:
    options = TrainingOptions(most_outbox_updates=8, most_outbox_bytes=1000)
    sender = Bench(tmp_path / "home", options=options).participant.sender
    for number in range(updates):
        sender.add(OutboxRow(os.urandom(32), "default", 1, number, bytes(body_bytes)))
    assert bool(sender.obstacle) is holds


@pytest.mark.parametrize(
    "wrong", [{"most_outbox_updates": 0}, {"most_outbox_bytes": -1}, {"most_outbox_bytes": True}]
)
def test_an_outbox_without_room_for_one_update_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainingOptions(**wrong)  # type: ignore[arg-type]


def test_a_round_whose_mark_could_not_be_written_is_taken_when_the_disk_has_room(
    bench: Bench,
) -> None:
    bench.run(1)
    bench.home.database.row("PRAGMA query_only = ON")  # every write fails
    bench.aggregator.open_round(deadline_seconds=600)
    failures = 0
    for _ in range(6):
        try:
            bench.run(30)
        except sqlite3.OperationalError:
            failures += 1
    assert 2 <= failures <= 5  # at once, and then with growing waits
    assert bench.home.rounds.mark("default", "all") is None and bench.jobs == []
    bench.home.database.row("PRAGMA query_only = OFF")
    bench.run(300)
    assert [each.round for each, _ in bench.aggregator.seen.bodies] == [1]
    assert bench.home.rounds.outbox() == []


def test_a_session_whose_time_could_not_be_written_is_opened_again(bench: Bench) -> None:
    bench.aggregator.open_round(deadline_seconds=600)
    bench.aggregator.knobs.answers_opens = False
    bench.run(1)
    bench.aggregator.knobs.answers_opens = True
    bench.home.database.row("PRAGMA query_only = ON")
    with pytest.raises(sqlite3.OperationalError):
        bench.run(30)
    assert not bench.participant.sessions.is_open
    bench.home.database.row("PRAGMA query_only = OFF")
    bench.run(60)
    assert bench.participant.sessions.is_open
    assert [each.round for each, _ in bench.aggregator.seen.bodies] == [1]
    # The one that went unanswered at first was sent twice.
    assert bench.home.rounds.outbox() == [] and len(bench.sent(OPEN)) == 3


def test_a_device_whose_task_is_not_served_says_so_until_it_is(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.run(1)
    assert bench.participant.problem == ""
    for revision, served, is_ours in (
        (1, (("films", "all"), ("music", "phones")), False),
        (2, (("default", "phones"),), False),
        (3, (("default", "all"), ("films", "all")), True),
        (4, (), False),
        (3, (("default", "all"), ("films", "all")), False),  # an old one, shown again
        (5, (("default", "all"),), True),
    ):
        bench.aggregator.revision, bench.aggregator.served = revision, served
        bench.aggregator.publish_standing()
        bench.run(1)
        expected = "" if is_ours else "the aggregator serves no task 'default' with cohort 'all'; "
        assert bench.participant.problem.startswith(expected)
        assert bool(bench.participant.problem) is not is_ours
    assert bench.participant.refusals.counts() == {}
    told = [record.getMessage() for record in caplog.records]
    assert told[0].endswith(
        "there is task 'films' with cohort 'all', task 'music' with cohort 'phones'"
    )
    assert len(told) == 3 and told[2].endswith("; there is none")
    bench.aggregator.open_round()
    bench.run(1)
    assert len(bench.sent(UPDATE)) == 1


def test_what_happens_in_good_order_is_told_in_words(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.aggregator.open_round(deadline_seconds=-5)
    bench.run(1)
    bench.aggregator.rotate_group_key()
    bench.aggregator.open_round()
    bench.run(60)
    assert bench.participant.refusals.counts() == {"expired-manifest": 1, "unknown-epoch": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "the round at the broker is over: this device waits for the next one "
        "(expired-manifest; logged once)",
        "the fleet's key was replaced: this device asks for the new one "
        "(unknown-epoch; logged once)",
    ]
    assert len(bench.sent(UPDATE)) == 1


def test_lists_of_other_lives_and_of_aggregators_that_say_nothing_are_no_problem(
    bench: Bench,
) -> None:
    bench.run(1)
    topic = bench.aggregator.topics.write(TasksTopic())
    bench.aggregator.served = (("films", "all"),)
    bench.aggregator.publish_standing()
    bench.run(1)
    assert "serves no task" in bench.participant.problem
    of_another_life = bench.broker.retained[topic]
    # The next life says nothing of it: what the last one said holds no longer.
    bench.aggregator.served = None
    bench.aggregator.forget_sessions()
    bench.aggregator.publish_standing()
    bench.run(60)
    assert bench.participant.problem == ""
    bench.restart()
    bench.run(60)
    assert bench.participant.sessions.is_open and bench.participant.problem == ""
    assert bench.broker.retained[topic] == of_another_life


def test_a_list_that_comes_before_its_descriptor_is_judged_again(bench: Bench) -> None:
    bench.run(1)
    bench.aggregator.served = (("films", "all"),)
    bench.aggregator.rotate_descriptor()
    bench.restart()
    topics, retained = bench.aggregator.topics, bench.broker.retained
    for topic in (TasksTopic(), DescriptorTopic()):
        text = topics.write(topic)
        bench.participant.message(text, retained[text], retained=True)
        bench.participant.message(text, retained[text], retained=True)
    assert bench.participant.refusals.counts() == {"bad-signature": 2}
    bench.run(60)
    assert "serves no task" in bench.participant.problem
    assert bench.participant.refusals.counts() == {"bad-signature": 2}


def test_a_presence_that_comes_before_its_descriptor_is_judged_again(bench: Bench) -> None:
    bench.run(1)
    bench.aggregator.rotate_descriptor()
    bench.restart()
    topics, retained = bench.aggregator.topics, bench.broker.retained
    opens = len(bench.sent(OPEN))
    presence, descriptor = topics.write(PresenceTopic()), topics.write(DescriptorTopic())
    bench.participant.message(presence, retained[presence], retained=True)
    bench.participant.tick()
    assert bench.participant.refusals.counts() == {"bad-signature": 1}
    assert "has not shown itself" in bench.participant.problem
    assert not any(isinstance(each, Publish) for each in bench.participant.actions)
    bench.participant.actions.clear()
    bench.participant.message(descriptor, retained[descriptor], retained=True)
    bench.participant.start()  # subscribes again: what it asked for was drained
    bench.run(1)
    assert bench.participant.sessions.is_open and bench.participant.problem == ""
    assert len(bench.sent(OPEN)) == opens + 1


def test_devices_that_waited_for_the_aggregator_do_not_ask_at_once(tmp_path: Path) -> None:
    waits = []
    for seed in range(6):
        bench = Bench(tmp_path / str(seed), seed=seed)
        bench.broker.retained.clear()
        bench.run(60)
        assert bench.sent(OPEN) == [] and "has not shown itself" in bench.participant.problem
        began = bench.now_seconds
        bench.aggregator.publish_standing()
        bench.run(60)
        waits.append(bench.sent(OPEN)[0] - began)
        bench.home.close()
    assert min(waits) > 0 and max(waits) <= bench.pace.reopen_seconds
    assert max(waits) - min(waits) > 1


def test_a_wait_is_cut_by_a_round_that_was_trained_meanwhile(bench: Bench) -> None:
    bench.run(5)
    bench.tell_to_wait(500)
    bench.run(1)
    assert bench.participant.sessions.waits_as_told
    opens, seen = len(bench.sent(OPEN)), len(bench.aggregator.seen.bodies)
    bench.aggregator.open_round(deadline_seconds=120)
    bench.run(28)
    assert len(bench.sent(OPEN)) == opens, "nor does it come at once"
    bench.run(34)
    assert len(bench.sent(OPEN)) == opens + 1 and len(bench.aggregator.seen.bodies) > seen


def test_no_open_is_sent_whose_counter_could_not_be_written(bench: Bench) -> None:
    bench.home.database.row("PRAGMA query_only = ON")
    for _ in range(3):
        with pytest.raises(sqlite3.OperationalError):
            bench.run(60)
    assert bench.sent(OPEN) == []
    bench.home.database.row("PRAGMA query_only = OFF")
    bench.run(60)
    assert len(bench.sent(OPEN)) == 1 and bench.participant.sessions.is_open


def test_a_large_update_goes_in_parts(bench: Bench) -> None:
    bench.run(1)
    sender = bench.participant.sender
    part = Participation("default", 1, 1, 0, RoundOutcome.TRAINED)
    big = OutboxRow(os.urandom(32), "default", 1, 1, os.urandom(300_000))
    with bench.home.database.transaction():
        bench.home.rounds.conclude(part)
        bench.home.rounds.post(big)
    sender.add(big)
    sender.tick()
    drained = list(bench.participant.actions)
    envelopes = [action.payload for action in drained if isinstance(action, Publish)]
    assert len(envelopes) == 4 and all(len(each) <= 96 * 1024 for each in envelopes)
    assert len({each[20:28] for each in envelopes}) == 1  # one message id
    # They may still be on their way out: nothing is repeated early.
    assert sender.next_seconds() - bench.now_seconds >= bench.pace.answer_seconds


def test_a_round_that_was_interrupted_is_trained_after_the_restart(bench: Bench) -> None:
    bench.aggregator.knobs.tamper_chunk = lambda index, message: b""
    bench.aggregator.open_round(deadline_seconds=600)
    bench.run(20)
    assert bench.participant.rounds["default"].manifest is not None
    bench.restart()
    bench.aggregator.mend_chunks()
    bench.run(20)
    assert [identity.round for identity, _ in bench.aggregator.seen.bodies] == [1]


def test_a_round_whose_chunks_never_come_ends_at_its_deadline(bench: Bench) -> None:
    bench.aggregator.knobs.tamper_chunk = lambda index, message: b""
    bench.aggregator.open_round(deadline_seconds=600)
    bench.run(599)
    assert bench.participant.rounds["default"].manifest is not None
    bench.run(2)
    last = bench.home.rounds.last()
    assert last is not None and last.outcome is RoundOutcome.TOO_LATE
    bench.aggregator.knobs.tamper_chunk = lambda index, message: message
    bench.aggregator.open_round()
    bench.run(1)
    assert len(bench.aggregator.seen.bodies) == 1


def test_the_next_round_replaces_one_that_is_still_fetched(bench: Bench) -> None:
    bench.aggregator.knobs.tamper_chunk = lambda index, message: b""
    bench.aggregator.open_round()
    bench.run(5)
    bench.aggregator.knobs.tamper_chunk = lambda index, message: message
    bench.aggregator.open_round()
    bench.run(5)
    assert [identity.round for identity, _ in bench.aggregator.seen.bodies] == [2]
    assert len(bench.broker.filters) == 6  # nothing of the fetches is left


def test_a_failed_training_ends_its_round_only(bench: Bench) -> None:
    bench.refuse_training = True
    bench.aggregator.open_round()
    bench.run(1)
    last = bench.home.rounds.last()
    assert last is not None and (last.outcome, last.detail) == (
        RoundOutcome.FAILED,
        "as the test wants",
    )
    assert bench.home.models.learner("default") is None
    bench.refuse_training = False
    bench.aggregator.open_round()
    bench.run(1)
    assert [identity.round for identity, _ in bench.aggregator.seen.bodies] == [2]


def test_an_artifact_of_the_task_is_fetched_checked_and_kept(bench: Bench) -> None:
    files = {path.name: path.read_bytes() for path in packaged_artifact().iterdir()}
    bench.installed = {}  # as a device that has no artifact of this kind installed
    bench.restart()
    bench.aggregator.use_artifact(files)
    bench.aggregator.open_round()
    bench.run(1)
    assert len(bench.sent(UPDATE)) == 1
    folder = bench.home.artifact_folder(bench.aggregator.artifact_id)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    head = bench.aggregator.topics.write(ChunkTopic(bench.aggregator.artifact_id, 0))
    assert head not in bench.broker.filters

    del bench.broker.retained[head]
    bench.aggregator.open_round()
    bench.run(1)
    assert len(bench.sent(UPDATE)) == 2  # nothing was fetched again


def _cut_short(folder: Path) -> None:
    file = folder / "train.onnx"
    file.write_bytes(file.read_bytes()[:-100])


def _same_size(folder: Path) -> None:
    file = folder / "train.onnx"
    file.write_bytes(file.read_bytes()[:-1] + b"!")


def _another(folder: Path) -> None:
    shutil.rmtree(folder)
    linear_artifact(folder)


@pytest.mark.parametrize("change", [_cut_short, _same_size, _another])
@pytest.mark.parametrize("restarts", [False, True])
def test_an_artifact_that_is_changed_in_the_home_is_not_run_and_comes_again(
    bench: Bench, change: Callable[[Path], None], restarts: bool
) -> None:
    files = {path.name: path.read_bytes() for path in packaged_artifact().iterdir()}
    bench.installed = {}
    bench.restart()
    bench.aggregator.use_artifact(files)
    bench.aggregator.open_round()
    bench.run(1)
    folder = bench.home.artifact_folder(bench.aggregator.artifact_id)
    change(folder)
    if restarts:
        bench.restart()
    bench.aggregator.open_round()
    bench.run(1)
    assert len(bench.sent(UPDATE)) == 2
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_a_time_that_falls_is_believed_and_what_was_signed_stays(bench: Bench) -> None:
    bench.run(1)
    first = bench.home.membership.signed_time()
    bench.aggregator.offset_seconds = -5000
    bench.restart()
    bench.run(1)
    time = bench.participant.sessions.time
    assert bench.participant.sessions.is_open
    assert abs(time.unix_seconds() - bench.aggregator.unix_seconds()) < 5
    assert bench.home.membership.signed_time() == first
    bench.run(2 * 3600)
    assert bench.home.membership.signed_time() == first, "no time counts that nobody signed"


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("fuzz") / "home")
    bench.run(1)
    return bench


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bytes_on_any_topic_are_counted_and_change_nothing(
    fuzzed: Bench, data: st.DataObject
) -> None:
    bench = fuzzed
    topics = bench.aggregator.topics
    handle = bench.participant._world.membership.grant.handle
    topic = data.draw(
        st.sampled_from(
            [
                topics.write(DescriptorTopic()),
                topics.write(PresenceTopic()),
                topics.write(TasksTopic()),
                topics.write(ManifestTopic("default", "all")),
                topics.write(DownTopic(handle)),
                topics.write(ChunkTopic(bytes(32), 0)),
                "tessera/nonsense",
            ]
        )
    )
    kind = data.draw(st.sampled_from([0, 1, 2, 6, 7, 8, 9, 16, 17, 200]))
    payload = data.draw(st.one_of(st.binary(max_size=300), st.binary(min_size=20, max_size=300)))
    if data.draw(st.booleans()):
        payload = bytes((1, kind)) + payload
    before = sum(bench.participant.refusals.counts().values())
    bench.participant.message(topic, payload, retained=data.draw(st.booleans()))
    assert list(bench.participant.actions) == []
    if "/chunk/" not in topic:
        assert sum(bench.participant.refusals.counts().values()) > before
    assert bench.participant.sessions.is_open and bench.home.rounds.last() is None


def test_values_are_those_of_the_broadcast(bench: Bench) -> None:
    bench.aggregator.open_round()
    bench.run(1)
    model = bench.home.models.model("default")
    assert model is not None
    sent = bench.aggregator.method.tell().tensors["items"].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(model.arrays["items"], sent)
