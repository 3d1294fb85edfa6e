"""A fleet's rounds with evaluations: figures as of one place, once each, through crashes.

Twenty devices in memory, on a home on disk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregator.rounds.machine import RoundClosed, RoundEvent
from aggregator.serve.assembly import World, assemble
from aggregator.serve.service import Parts
from aggregator.store import Store
from aggregator.store.evaluations import EvaluatedVersion
from aggregator.store.reports import OutcomeCount
from aggregator.store.rows import DeviceRow
from aggregator.task.file import read_task
from device_sdk.evaluation.metrics import METRICS, RankMetric
from device_sdk.evaluation.report import Evaluation, EvaluationReport, write_evaluations
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.receipts import (
    RecordType,
    UpdateIdentity,
    with_report,
    write_update,
)
from device_sdk.wire.publish.report import Details, Report, ReportedOutcome
from tests.fakes.crashes import Crash, CrashingDatabase
from tests.fakes.homes import ITEMS, WIDTH, command, make_home
from tests.fakes.outputs import output_of
from tests.fakes.scatter_updates import one_user

DEVICES = [bytes([index]) * 16 for index in range(20)]
ROUND = "quorum = 3\ndeadline_seconds = 100.0\nresume_grace_seconds = 0.0"
Ranks = Mapping[bytes, np.ndarray]


class Fleet:
    """A serving home, its devices, and the clock of both."""

    def __init__(
        self, folder: Path, evaluation: str, round_lines: str = ROUND, scatter: str = ""
    ) -> None:
        # Two metrics: what most of these tests have devices say.
        asked = "" if "metrics" in evaluation else 'metrics = ["hr10", "ndcg10"]\n'
        more = f"{scatter}\n[evaluation]\n{asked}{evaluation}\n"
        self.home = make_home(folder, "mqtt://127.0.0.1:1", round_lines, more)
        with self.store() as store, store.database.transaction():
            for name in DEVICES:
                store.devices.add(DeviceRow(name, name * 2, name, name * 2, 0, name[:8], 0, 1))
        self.now = float(int(time.time()) + 10)
        self.body = update_body()
        self.parts: Parts
        self.start()

    @contextmanager
    def store(self) -> Iterator[Store]:
        store = self.home.open_store()
        try:
            yield store
        finally:
            store.database.close()

    def start(self) -> None:
        self.database = CrashingDatabase(self.home.database)
        self.database.left = 0
        world = World(lambda: self.now, lambda: self.now, np.random.default_rng(1))
        task = read_task(self.home.task_file)
        self.parts = assemble(self.home, Store(self.database), task, world)

    def restart(self) -> None:
        self.parts.store.database.close()
        self.start()

    def tick(self) -> list[RoundEvent]:
        events = []
        while (event := self.parts.first.rounds.tick()) is not None:
            events.append(event)
            if isinstance(event, RoundClosed) and not self.parts.tasks.between_rounds(
                self.parts.first
            ):
                self.parts.first.upkeep.between_rounds()
        return events

    def send(
        self,
        device: bytes,
        said: EvaluationReport | bytes | None,
        trained: bool = True,
        rounds_ago: int = 0,
    ) -> Any:
        """A contribution to the open round: its update, if the device trained, and what it found
        out."""
        row = self.parts.first.rounds.current
        assert row is not None
        evaluation = write_evaluations(said) if isinstance(said, EvaluationReport) else said or b""
        outcome = (
            (ReportedOutcome.TRAINED, "") if trained else (ReportedOutcome.DECLINED, "not-now")
        )
        report = Report(*outcome, Details("1", "1", "linux", "k=8"), evaluation)
        identity = UpdateIdentity(device, "default", row.generation, row.round - rounds_ago)
        content = with_report(encode(report), self.body if trained else b"")
        return self.parts.inbox.offer(
            device, write_update(identity, content), RecordType.CONTRIBUTION
        )

    def commit(self) -> None:
        self.parts.first.ingest.commit()

    def play(self, ranks: Ranks, others: tuple[bytes, ...] = ()) -> None:
        """A whole round: these devices train and evaluate, those train."""
        self.tick()
        for device, found in ranks.items():
            assert self.send(device, ranked(found)) is None
        for device in others:
            assert self.send(device, None) is None
        self.commit()
        self.now += 101
        self.tick()

    @property
    def evaluated(self) -> list[EvaluatedVersion]:
        return self.parts.first.store.evaluations.latest(100)

    def said(self) -> int:
        row = self.parts.store.database.row("SELECT count(*) FROM device_evaluations")
        assert row is not None
        return int(row[0])

    def set(self, before: str, after: str) -> None:
        text = self.home.task_file.read_text()
        assert before in text
        self.home.task_file.write_text(text.replace(before, after))


def update_body(width: int = WIDTH) -> bytes:
    """Of a device that trains eight of a model's columns."""
    rng = np.random.default_rng(0)
    rows = np.sort(rng.choice(ITEMS, 4, replace=False))
    tensors = one_user(
        width, rows, rng.standard_normal(4), rng.standard_normal(WIDTH), range(WIDTH)
    )
    return encode_scatter_update(Update(1, tensors), width, "float32")


def ranked(ranks: np.ndarray, stages: tuple[Any, ...] = ("global",)) -> EvaluationReport:
    found = []
    for stage in stages:
        for name in ("hr10", "ndcg10"):
            metric = METRICS[name]
            assert isinstance(metric, RankMetric)
            found.append(Evaluation(stage, name, metric.measure(ranks)))
    return EvaluationReport(tuple(found))


def central(metric_name: str, ranks: Ranks) -> float:
    """The figure of all users of all devices in one place."""
    metric = METRICS[metric_name]
    assert isinstance(metric, RankMetric)
    return metric.value(metric.measure(np.concatenate(list(ranks.values()))))


def drawn(seed: int, devices: list[bytes] = DEVICES) -> dict[bytes, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 40, rng.integers(3, 9)) for name in devices}


def hits(share: float) -> dict[bytes, np.ndarray]:
    """Of each device's ten users, so many find their item first."""
    return {name: np.where(np.arange(10) < round(10 * share), 0, 50) for name in DEVICES}


def test_twenty_devices_make_the_figure_of_all_their_data_and_what_each_said_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(tmp_path, "least_devices = 2")
    ranks = drawn(0)
    fleet.play(ranks)
    (found,) = fleet.evaluated
    assert (found.version, found.round) == (0, 1)
    for figure in found.figures:
        assert figure.value == pytest.approx(central(figure.metric, ranks), abs=1e-12)
        assert (figure.devices, figure.capped) == (20, 0)
        own = [central(figure.metric, {name: each}) for name, each in ranks.items()]
        assert figure.median == pytest.approx(np.median(own))
        assert figure.worst_tenth == pytest.approx(np.percentile(own, 10))
    assert fleet.said() == 0
    (row,) = [row for row in fleet.parts.first.store.versions.all() if row.version == 0]
    values = {each.metric: each.value for each in found.figures}
    compared = {f"{each.metric}.typical": each.comparable for each in found.figures}
    assert row.metrics == values | compared and min(compared.values()) > 0
    told = json.loads(output_of(capsys, fleet.home, "evaluations", "--json"))
    assert (told["best"], told["best_by"]) == (0, "hr10")
    assert told["versions"][0]["figures"][0]["value"] == found.figures[0].value
    assert len(told["versions"][0]["figures"][0]["deciles"]) == 9
    assert "evaluation   version 0: hr10 " in output_of(capsys, fleet.home, "status")
    assert "0 (best)" in output_of(capsys, fleet.home, "evaluations")


def test_a_figure_of_fewer_devices_than_asked_for_is_not_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(tmp_path, "least_devices = 5")
    fleet.play(drawn(0, DEVICES[:4]), tuple(DEVICES[4:]))
    assert fleet.evaluated == [] and fleet.said() == 0
    told = output_of(capsys, fleet.home, "evaluations")
    assert "no version has a figure yet" in told and "5 devices (evaluation.least_devices)" in told


def test_a_version_of_two_rounds_has_figures_once_and_counts_each_device_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aggregator")
    fleet = Fleet(tmp_path, "", ROUND.replace("quorum = 3", "quorum = 15"))
    first, second = drawn(0, DEVICES[:8]), drawn(1, DEVICES[4:14])
    fleet.play(first)  # eight updates: no quorum, and version 0 goes into the next round
    # Nothing is shown that the next round's figures could be held against.
    assert fleet.evaluated == [] and "hr10" not in caplog.text
    assert fleet.said() == 8
    fleet.restart()
    fleet.play(second)
    (found,) = fleet.evaluated
    assert (found.version, found.round) == (0, 2)
    ranks = {**first, **second}
    assert found.figures[0].devices == len(ranks) == 14
    assert found.figures[0].value == pytest.approx(central("hr10", ranks), abs=1e-12)
    assert fleet.said() == 0  # version 1 was made
    assert caplog.text.count("version 0: hr10 ") == 1
    (line,) = [each for each in caplog.records if vars(each).get("event") == "evaluated"]
    assert vars(line)["fields"]["version"] == 0
    assert vars(line)["fields"]["figures"] == [
        {
            "stage": each.stage,
            "metric": each.metric,
            "part": each.part or None,
            "value": each.value,
            "devices": each.devices,
        }
        for each in found.figures
    ]


def test_what_was_decided_is_not_said_again(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "")
    fleet.tick()
    for device, ranks in drawn(0).items():
        assert fleet.send(device, ranked(ranks)) is None
    fleet.commit()
    same = fleet.send(DEVICES[0], ranked(drawn(0)[DEVICES[0]]))
    assert same.receipt.verdict.value == "counted"
    # The same update with other figures: what was counted stays counted, and the figures too.
    other = fleet.send(DEVICES[1], ranked(np.zeros(500, np.int64)))
    assert other.receipt.verdict.value == "counted"
    fleet.now += 101
    fleet.tick()
    for device in DEVICES:  # whatever comes for a round that is over
        again = fleet.send(device, ranked(np.zeros(500, np.int64)), rounds_ago=1)
        assert again.receipt.verdict.value == "counted"
    assert fleet.said() == 0
    (found,) = [each for each in fleet.evaluated if each.version == 0]
    assert found.figures[0].value == pytest.approx(central("hr10", drawn(0)), abs=1e-12)


def test_what_comes_late_changes_no_figure(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "")
    ranks = drawn(0, DEVICES[:10])
    fleet.play(ranks)
    late = fleet.send(DEVICES[15], ranked(np.zeros(500, np.int64)), rounds_ago=1)
    assert late.receipt.verdict.value == "late"
    fleet.commit()
    assert fleet.said() == 0
    fleet.play(drawn(1))
    before = next(each for each in fleet.evaluated if each.version == 0)
    assert before.figures[0].value == pytest.approx(central("hr10", ranks), abs=1e-12)


def test_a_device_that_cannot_train_may_still_have_evaluated(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "")
    fleet.tick()
    ranks = drawn(0)
    for place, (device, found) in enumerate(ranks.items()):
        assert fleet.send(device, ranked(found), trained=place > 4) is None
    fleet.commit()
    fleet.now += 101
    fleet.tick()
    assert fleet.evaluated[0].figures[0].devices == 20


def test_impossible_counts_are_refused_with_their_update(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "")
    fleet.tick()
    honest = drawn(0)
    for device in DEVICES[1:]:
        assert fleet.send(device, ranked(honest[device])) is None
    said = bytearray(write_evaluations(ranked(np.zeros(5, np.int64))))
    at = bytes(said).index(b"\x02\x00\x05\x00\x05")  # hr10: two cells, 5 users and 5 hits
    said[at + 4] = 9
    assert fleet.send(DEVICES[0], bytes(said)) is None
    (refused,) = [
        each
        for each in fleet.parts.first.ingest.commit()
        if each.receipt.verdict.value == "refused"
    ]
    assert (refused.device_id, refused.receipt.reason) == (DEVICES[0], "bad-statistics")
    fleet.now += 101
    fleet.tick()
    assert fleet.evaluated[0].figures[0].devices == 19


def test_one_liar_of_twenty_weighs_no_more_than_its_cap(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "sample_cap = 2.0")
    fleet.tick()
    for device, ranks in hits(0.3).items():
        most = Evaluation("global", "hr10", np.array([2.0**31 - 1] * 2))
        lie = EvaluationReport((most,))
        assert fleet.send(device, lie if device == DEVICES[7] else ranked(ranks)) is None
    fleet.commit()
    fleet.now += 101
    fleet.tick()
    figure = next(each for each in fleet.evaluated[0].figures if each.metric == "hr10")
    assert (figure.capped, figure.median) == (1, 0.3)
    assert figure.value == pytest.approx((19 * 3 + 20) / (190 + 20))


def test_whom_nobody_asked_is_not_heard(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "share = 0.5\nevery_rounds = 2")
    fleet.play(drawn(0))
    assert fleet.evaluated == []
    fleet.play(drawn(1))
    (found,) = fleet.evaluated
    assert found.round == 2
    assert 3 <= found.figures[0].devices <= 17


def test_no_control_arm_is_advised_where_the_method_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(tmp_path, "")
    fleet.play(drawn(0))
    capsys.readouterr()
    assert command(fleet.home, "evaluations") == 0
    shown = capsys.readouterr().out
    assert "hr10" in shown and "control" not in shown


def test_of_who_is_not_of_the_control_arm_all_but_its_second_model_is_heard(
    tmp_path: Path,
) -> None:
    fleet = Fleet(tmp_path, "")
    fleet.tick()
    for device, ranks in drawn(0).items():
        said = ranked(ranks, ("global", "alone") if device in DEVICES[:8] else ("global",))
        assert fleet.send(device, said) is None
    fleet.commit()
    fleet.now += 101
    fleet.tick()
    (found,) = fleet.evaluated
    assert {each.stage for each in found.figures} == {"global"}
    assert {each.devices for each in found.figures} == {20}
    assert {each.control_devices for each in found.figures} == {0}


def test_what_a_device_said_goes_with_it_though_it_waits_to_be_written(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "", f"{ROUND}\nshare = 1.0")

    def told(device: bytes) -> list[int]:
        database = fleet.parts.store.database
        return [
            database.row(f"SELECT count(*) FROM {table} WHERE device_id = ?", (device,))[0]
            for table in ("reports", "device_evaluations")
        ]

    fleet.tick()
    ranks = drawn(0)
    for device, found in list(ranks.items())[:10]:
        assert fleet.send(device, ranked(found)) is None
    fleet.commit()
    assert told(DEVICES[3]) == told(DEVICES[4]) == [1, 1]
    for device, found in list(ranks.items())[10:]:
        assert fleet.send(device, ranked(found)) is None
    for gone in (DEVICES[3], DEVICES[13]):
        assert command(fleet.home, "revoke", gone.hex()) == 0
    fleet.commit()
    assert told(DEVICES[3]) == told(DEVICES[13]) == [0, 0]
    assert told(DEVICES[4]) == told(DEVICES[14]) == [1, 1]
    fleet.now += 101
    fleet.tick()
    for gone in (DEVICES[3], DEVICES[13]):
        del ranks[gone]
    assert fleet.evaluated[0].figures[0].value == pytest.approx(central("hr10", ranks), abs=1e-12)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", range(1, 6))
def test_a_crash_at_any_commit_changes_no_figure(tmp_path: Path, when: str, at: int) -> None:
    fleet = Fleet(tmp_path, "")
    fleet.tick()
    fleet.database.left, fleet.database.when = at, when

    def through(step: Callable[[], object]) -> None:
        try:
            step()
        except Crash:
            fleet.restart()

    for place in range(0, 20, 10):

        def group(place: int = place) -> None:
            for device in DEVICES[place : place + 10]:
                fleet.send(device, ranked(drawn(0)[device]))
            fleet.commit()

        through(group)
        group()  # what has no receipt is sent again
    fleet.now += 101
    through(fleet.tick)
    fleet.tick()
    (found,) = [each for each in fleet.evaluated if each.version == 0]
    assert [each.devices for each in found.figures] == [20, 20]
    assert found.figures[0].value == pytest.approx(central("hr10", drawn(0)), abs=1e-12)
    assert fleet.said() == 0
    # Nor what was told: each device once, and as its newest outcome.
    store = fleet.parts.store
    assert store.first.reports.outcomes() == [OutcomeCount(1, "trained", "", len(DEVICES))]
    told = store.first.participations.all()
    assert all(told[each.device_id].report is not None for each in store.devices.all())


def test_rounds_end_where_nothing_improves_and_devices_get_the_best_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(tmp_path, "early_stopping = 2\nleast_improvement = 0.05")
    for share in (0.2, 0.5, 0.5, 0.4):  # of versions 0 to 3
        fleet.play(hits(share))
    row = fleet.parts.first.rounds.current
    assert row is not None and fleet.parts.first.rounds.rests
    versions = fleet.parts.first.store.versions
    # Version 4 came out of the last round, and nobody knows how good it is; 5 is 1 once more.
    assert row.version == 5
    np.testing.assert_array_equal(versions.model(5)["items"], versions.model(1)["items"])
    assert "stopped      nothing has improved version 1" in output_of(capsys, fleet.home, "status")
    fleet.restart()
    assert fleet.tick() == []
    assert fleet.parts.first.aggregation.version == 5
    # Who wants more of it says so.
    fleet.set("early_stopping = 2", "early_stopping = 0")
    fleet.restart()
    events = fleet.tick()
    assert isinstance(events[0], RoundClosed)
    assert not fleet.parts.first.rounds.rests
    fleet.play(hits(0.9))
    assert fleet.evaluated[0].version == 5 and fleet.evaluated[0].figures[0].value == 0.9
    # It is in force again, and has seen an improvement.
    fleet.set("early_stopping = 0", "early_stopping = 2")
    fleet.restart()
    assert not fleet.parts.first.rounds.stopped


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", range(1, 5))
def test_a_crash_while_it_comes_to_a_stop_leaves_the_best_version(
    tmp_path: Path, when: str, at: int
) -> None:
    fleet = Fleet(tmp_path, "early_stopping = 1")
    fleet.play(hits(0.5))
    for device, ranks in hits(0.4).items():
        assert fleet.send(device, ranked(ranks)) is None
    fleet.commit()
    fleet.now += 101
    fleet.database.left, fleet.database.when = at, when
    try:
        fleet.tick()
    except Crash:
        fleet.restart()
        fleet.tick()
    assert fleet.parts.first.rounds.rests
    versions = fleet.parts.first.store.versions
    assert fleet.parts.first.aggregation.version == 3
    np.testing.assert_array_equal(versions.model(3)["items"], versions.model(0)["items"])


def test_one_round_more_evaluates_the_last_version_and_the_rest_counts_as_none(
    tmp_path: Path,
) -> None:
    fleet = Fleet(tmp_path, "", f"{ROUND}\nmost_rounds = 2")
    for share in (0.5, 0.6):
        fleet.play(hits(share))
    assert fleet.parts.first.rounds.rests and fleet.evaluated[0].version == 1
    fleet.restart()
    assert fleet.tick() == [] and fleet.parts.first.rounds.rests
    fleet.set("most_rounds = 2", "most_rounds = 3")
    fleet.restart()
    fleet.play(hits(0.7))
    assert fleet.parts.first.rounds.rests
    assert (fleet.evaluated[0].version, fleet.evaluated[0].figures[0].value) == (2, 0.7)
