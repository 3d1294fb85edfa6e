"""One device and several tasks, in memory: which it takes part in, in which order, at what cost."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from device_sdk.home.round_store import Participation, RoundOutcome
from device_sdk.local_data import LocalData
from device_sdk.wire.publish.catalogue import Catalogue
from device_sdk.wire.publish.receipts import RecordType
from device_sdk.wire.publish.task_messages import Standing
from device_sdk.world import TrainingOptions
from tests.fakes.in_memory import Bench
from tests.fakes.small_aggregator import ITEMS

UPDATE = int(RecordType.UPDATE)
BOTH = (("air", "all"), ("default", "all"))


def make_bench(folder: Path, options: TrainingOptions | None = None) -> Bench:
    """A device without a wish; the aggregator serves ``default`` and ``air``. It is midnight."""
    bench = Bench(folder, options=options)
    bench.now_seconds += 86_400 - bench.now_seconds % 86_400
    bench.home.database.row("UPDATE membership SET is_wish = 0")
    bench.restart()
    bench.aggregator.catalogues["air"] = Catalogue(
        tuple(f"film-{n}" for n in range(ITEMS)), tuple(f"air {n}" for n in range(ITEMS))
    )
    serve(bench, *BOTH)
    return bench


def serve(bench: Bench, *names: tuple[str, str]) -> None:
    bench.aggregator.revision += 1
    bench.aggregator.served = tuple(sorted(names))
    bench.aggregator.publish_standing()
    bench.run(1)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = make_bench(tmp_path / "home")
    made.home.interactions.add([("anna", "film-1")], "air")
    made.home.interactions.add([("anna", "film-2")])
    yield made
    made.home.close()


def parts(bench: Bench, task: str) -> list[Participation]:
    return bench.home.rounds._participations("WHERE task = ? ORDER BY number", task)


def outcomes(bench: Bench, task: str) -> list[RoundOutcome]:
    return [part.outcome for part in parts(bench, task)]


def test_a_home_takes_part_in_all_that_is_served_and_counts_each_update_once(bench: Bench) -> None:
    for _ in range(3):
        bench.aggregator.open_round(task="air")
        bench.aggregator.open_round()
        bench.run(60)
    assert sorted((i.task, i.round) for i, _ in bench.aggregator.seen.bodies) == [
        (task, number) for task in ("air", "default") for number in (1, 2, 3)
    ]
    assert bench.home.rounds.outbox() == [] and bench.participant.problem == ""
    assert len(bench.sent(5)) == 1, "one session serves all"
    rows = {row.name: row for row in bench.home.tasks.all()}
    assert {name: row.takes for name, row in rows.items()} == dict.fromkeys(rows, "records")
    assert bench.home.tasks.owner() == "default"
    assert bench.home.record_names("air") == ("air",)


def test_what_is_recorded_without_a_name_feeds_one_task_for_good(tmp_path: Path) -> None:
    """A task that came later and trains on such things too gets nothing not meant for it."""
    bench = make_bench(tmp_path / "home")
    bench.home.interactions.add([("anna", "film-2")])
    for _ in range(2):
        bench.aggregator.open_round(task="air")
        bench.aggregator.open_round()
        bench.run(60)
    assert {job.manifest.task for job in bench.jobs} == {"default"}
    declined = parts(bench, "air")
    assert [part.outcome for part in declined] == [RoundOutcome.DECLINED] * 2
    assert "recorded nothing for it: device.record(item, task='air')" in declined[0].detail
    # The enrolled task is gone, and still nobody else gets what was recorded for it.
    serve(bench, ("air", "all"))
    bench.aggregator.open_round(task="air")
    bench.run(60)
    assert outcomes(bench, "air")[-1] is RoundOutcome.DECLINED
    bench.home.interactions.add([("anna", "film-3")], "air")
    bench.aggregator.open_round(task="air")
    bench.run(60)
    assert outcomes(bench, "air")[-1] is RoundOutcome.TRAINED
    rows = {f"film-{n}": n for n in range(ITEMS)}
    for task, film in (("air", 3), ("default", 2)):
        names = bench.home.record_names(task)
        assert [each.tolist() for each in bench.home.interactions.positives(rows, names)] == [
            [film]
        ]


def test_a_task_whose_data_the_app_does_not_give_is_declined_before_anything_is_fetched(
    tmp_path: Path,
) -> None:
    bench = make_bench(tmp_path / "home")
    samples = LocalData({"x": np.zeros((2, 3), np.float32)})
    bench.given = {"default": lambda: samples}
    bench.restart()
    for _ in range(2):
        bench.aggregator.open_round(task="air", method="fedavg")
        bench.aggregator.open_round(method="fedavg")
        bench.run(60)
    chunks = [topic for topic in bench.broker.filters if "/chunk/" in topic]
    assert chunks == []
    assert outcomes(bench, "air") == [RoundOutcome.DECLINED] * 2
    assert "given no data" in parts(bench, "air")[1].detail
    told = [said.reason for which, said in bench.aggregator.seen.reports if which.task == "air"]
    assert told == ["no-data"] * 2, "with the terms fetched, and before"
    assert outcomes(bench, "default") == [RoundOutcome.TRAINED] * 2
    # Once it has learnt what the task trains on, a round costs its manifest alone.
    fetched = bench.chunks_of("air")
    bench.aggregator.open_round(task="air", method="fedavg")
    bench.run(60)
    assert bench.chunks_of("air") == fetched
    # It is a task of another generation: it may train on something else now.
    bench.home.interactions.add([("anna", "film-3")], "air")
    bench.aggregator.generations["air"] = bench.aggregator.generation + 5
    bench.aggregator.open_round(task="air")
    bench.run(60)
    assert outcomes(bench, "air")[-1] is RoundOutcome.TRAINED


def test_labels_choose_among_the_tasks(bench: Bench) -> None:
    bench.aggregator.standing = Standing({"site": "north"}, (("default", "all"),))
    bench.aggregator.forget_sessions()
    bench.aggregator.publish_standing()
    bench.run(60)
    assert set(bench.participant.rounds) == {"default"}
    bench.aggregator.open_round(task="air", deadline_seconds=600)
    bench.aggregator.open_round()
    bench.run(60)
    assert outcomes(bench, "air") == [] and outcomes(bench, "default") == [RoundOutcome.TRAINED]
    # The operator gave it another label.
    bench.aggregator.standing = Standing({"site": "south"}, BOTH)
    (handle,) = bench.aggregator._handles
    bench.aggregator.tell_standing(handle, bench.aggregator._handles[handle][1])
    bench.run(1)
    assert set(bench.participant.rounds) == {"air", "default"}
    assert outcomes(bench, "air") == [RoundOutcome.TRAINED]
    # After a restart it goes on from there, and listens to nothing else before it is told anew.
    bench.aggregator.standing = Standing({}, ())
    bench.aggregator.tell_standing(handle, bench.aggregator._handles[handle][1])
    bench.run(1)
    assert bench.participant.rounds == {}
    assert "serves no task for this device" in bench.participant.problem
    bench.restart()
    assert bench.participant.rounds == {}


def test_a_wish_at_enrolment_and_the_apps_choice_go_before_what_is_served(bench: Bench) -> None:
    bench.home.database.row("UPDATE membership SET is_wish = 1")
    bench.restart()
    bench.run(1)
    assert set(bench.participant.rounds) == {"default"} and bench.participant.problem == ""
    samples = LocalData({"x": np.zeros((2, 3), np.float32)})
    bench.given = {"air": lambda: samples}
    bench.restart()
    assert set(bench.participant.rounds) == {"air", "default"}, "data by name is a wish, too"
    bench.given, bench.chosen = None, ("air",)
    bench.restart()
    bench.run(1)
    assert set(bench.participant.rounds) == {"air"}
    bench.chosen = ("water",)
    bench.restart()
    bench.run(1)
    assert bench.participant.problem.startswith("the aggregator serves no task 'water'")


def test_the_earlier_deadline_is_trained_first(bench: Bench) -> None:
    bench.train_seconds = {"air": 10.0, "default": 10.0}
    bench.set_connected(False)
    bench.aggregator.open_round(deadline_seconds=100)
    bench.aggregator.open_round(task="air", deadline_seconds=50)
    bench.set_connected(True)
    bench.run(60)
    assert [job.manifest.task for job in bench.jobs] == ["air", "default"]
    assert outcomes(bench, "default") == outcomes(bench, "air") == [RoundOutcome.TRAINED]


def test_a_round_that_passed_while_another_task_was_trained_is_made_up_for(bench: Bench) -> None:
    """The longer one comes first each time, and the other's rounds lie wholly within it."""
    bench.train_seconds = {"air": 40.0, "default": 1.0}
    for _ in range(12):
        bench.aggregator.open_round(task="air", deadline_seconds=95)
        opens = bench.now_seconds + 5
        bench.agenda.append((opens, lambda: bench.aggregator.open_round(deadline_seconds=20)))
        bench.run(100)
    trained = {
        task: outcomes(bench, task).count(RoundOutcome.TRAINED) for task in bench.train_seconds
    }
    assert trained["air"] == 12 and trained["default"] >= 6


def test_a_days_seconds_bound_the_training_over_tasks_and_restarts(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "home", TrainingOptions(seconds_a_day=50))
    bench.home.interactions.add([("anna", "film-1")], "air")
    bench.train_seconds = {"air": 10.0, "default": 10.0}
    for number in range(4):
        bench.aggregator.open_round(task="air", deadline_seconds=60)
        bench.aggregator.open_round(deadline_seconds=60)
        bench.run(100)
        if number == 1:
            bench.restart()
    ended = outcomes(bench, "air") + outcomes(bench, "default")
    assert ended.count(RoundOutcome.TRAINED) == 5 and ended.count(RoundOutcome.OVER_BUDGET) == 3
    assert bench.home.spent.day() == int(bench.now_seconds) // 86_400
    assert bench.home.spent.so_far().seconds == pytest.approx(50, abs=1)
    assert "seconds_a_day" in parts(bench, "air")[-1].detail
    bench.run(86_400)
    bench.aggregator.open_round()
    bench.run(100)
    assert outcomes(bench, "default")[-1] is RoundOutcome.TRAINED


def test_a_training_that_a_crash_interrupts_is_spent_all_the_same(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "home", TrainingOptions(seconds_a_day=50))
    bench.train_seconds = {"default": 20.0}
    bench.aggregator.open_round()
    bench.run(60)
    bench.aggregator.open_round(deadline_seconds=600)
    while bench.participant.rounds["default"].job is None:
        assert bench.settle_but_train()
    assert bench.participant.turn() is bench.participant.rounds["default"]
    bench.restart()
    assert bench.home.spent.so_far().seconds == 40
    bench.run(60)
    assert outcomes(bench, "default") == [RoundOutcome.TRAINED, RoundOutcome.OVER_BUDGET]


def test_a_first_training_says_what_trainings_take_here(tmp_path: Path) -> None:
    """The task's ``train_seconds`` is more than the day has, and far more than a training takes."""
    bench = make_bench(tmp_path / "home", TrainingOptions(seconds_a_day=600))
    for seconds in (0.1, 0.1, 700.0, 700.0, 700.0):
        bench.train_seconds = {"default": seconds}
        bench.aggregator.open_round(deadline_seconds=3600, train_seconds=1800.0)
        bench.run(3700)
    assert outcomes(bench, "default") == [RoundOutcome.TRAINED] * 3 + [RoundOutcome.OVER_BUDGET] * 2
    assert "700.2 s of this day's 600 s" in parts(bench, "default")[-1].detail
    # One may have been held up; two in three say what a training takes.
    for expected in (RoundOutcome.TRAINED, RoundOutcome.OVER_BUDGET):
        bench.run(86_400)
        bench.aggregator.open_round(deadline_seconds=3600, train_seconds=1800.0)
        bench.run(3700)
        assert outcomes(bench, "default")[-1] is expected
    assert "would take about 700.0 s" in parts(bench, "default")[-1].detail
    # With the task, what a training takes is another.
    bench.train_seconds = {"default": 0.1}
    bench.aggregator.generation += 1
    bench.aggregator.open_round(deadline_seconds=3600, train_seconds=1800.0)
    bench.run(3700)
    assert outcomes(bench, "default")[-1] is RoundOutcome.TRAINED


def test_first_trainings_that_crash_spend_a_day_and_no_more(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "home", TrainingOptions(seconds_a_day=600))
    bench.aggregator.open_round(deadline_seconds=7200, train_seconds=250.0)
    bench.train_seconds = {"default": 240.0}
    for _ in range(3):
        bench.agenda = [(bench.now_seconds + 120, bench.home.close)]
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            bench.run(600)
        bench.restart()
    bench.run(600)
    assert len(bench.jobs) == 3 and outcomes(bench, "default") == [RoundOutcome.OVER_BUDGET]


def test_what_was_spent_under_a_clock_far_ahead_is_of_today_and_of_no_day_to_come(
    tmp_path: Path,
) -> None:
    bench = make_bench(tmp_path / "home", TrainingOptions(seconds_a_day=50))
    bench.train_seconds = {"default": 50.0}
    for ahead in (3 * 86_400.0, 0.0):
        bench.aggregator.offset_seconds = ahead
        bench.aggregator.rotate_descriptor(lifetime_seconds=30 * 86_400)
        bench.restart()
        bench.aggregator.open_round()
        bench.run(100)
    assert outcomes(bench, "default") == [RoundOutcome.TRAINED, RoundOutcome.OVER_BUDGET]
    for _ in range(5):
        bench.run(86_400)
        bench.aggregator.open_round()
        bench.run(100)
    assert outcomes(bench, "default")[2:] == [RoundOutcome.TRAINED] * 5


def test_a_days_bytes_bound_what_is_fetched_and_sent(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "home", TrainingOptions(bytes_a_day=40_000))
    for number in range(40):
        bench.aggregator.open_round(deadline_seconds=60)
        bench.run(100)
        if number == 5:
            bench.restart()
    ended = outcomes(bench, "default")
    trained = ended.count(RoundOutcome.TRAINED)
    assert 5 < trained < 39 and ended.count(RoundOutcome.OVER_BUDGET) == 40 - trained
    assert "bytes_a_day" in parts(bench, "default")[-1].detail
    bench.participant.budget.save()
    spent = bench.home.spent.so_far()
    # Manifests still come, and answers to what was sent: small things that no round is made of.
    assert 30_000 < spent.bytes < 80_000


def test_a_task_that_is_replaced_begins_anew_and_one_that_is_gone_is_cleaned_up(
    bench: Bench,
) -> None:
    bench.aggregator.open_round(task="air")
    bench.run(60)
    bench.home.attachments.save("air", b"a" * 32, b"content")
    assert bench.home.models.learner("air", "scatter") is not None
    # Other items altogether: a new generation may, and the users' vectors are of the old ones.
    bench.aggregator.catalogues["air"] = Catalogue(
        tuple(f"song-{n}" for n in range(ITEMS)), tuple(f"Song {n}" for n in range(ITEMS))
    )
    bench.aggregator.generations["air"] = bench.aggregator.generation + 5
    bench.aggregator.open_round(task="air")
    bench.run(60)
    assert outcomes(bench, "air") == [RoundOutcome.TRAINED] * 2
    assert [job.fresh for job in bench.jobs] == [False, True]
    assert bench.home.models.learner("air", "fedavg") is None, "another method's state is no state"
    serve(bench, ("default", "all"))
    assert bench.home.attachments.ids("air") == set()
    assert bench.home.models.model("air") is not None, "to recommend with, offline"
    serve(bench, *BOTH)
    bench.aggregator.open_round(task="air")
    bench.run(60)
    assert outcomes(bench, "air")[-1] is RoundOutcome.TRAINED
