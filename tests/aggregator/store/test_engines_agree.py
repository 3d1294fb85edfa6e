"""Every method of every table, by chance and in any order: both engines say and hold the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregator.errors import AggregatorError
from aggregator.evaluation import Figure
from aggregator.home import copy_store
from aggregator.store import STORE_FAILURES, Store, create_database
from aggregator.store.devices import DevicesSought
from aggregator.store.facts import AttachmentBook, CohortKey, PublishedContent
from aggregator.store.facts import SealedContent as Sealed
from aggregator.store.reports import Reports
from aggregator.store.rows import (
    DeviceEvaluation,
    DeviceRow,
    Habit,
    LastParticipation,
    LoggedUpdate,
    RoundRow,
    ShareRow,
    StoredReport,
    StoredVerdict,
    VersionRow,
)
from aggregator.store.schema import TABLES
from aggregator.store.versions import MethodCheckpoint, Ranking
from device_sdk.wire.seal.broadcast import GroupKey
from device_sdk.wire.seal.enrolment_message import EnrolmentCode
from tests.servers.fixtures import MakeDatabase

STEPS, AT_ONCE = 700, 50
Action = Callable[[Store], Any]


class Chance:
    """Draws an action: values of few kinds, so that rows meet. It knows no store."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def below(self, limit: int) -> int:
        return int(self._rng.integers(limit))

    def one(self, *values: Any) -> Any:
        return values[self.below(len(values))]

    def name(self) -> bytes:
        """Of a device, a code, a key."""
        return bytes([self.below(5)]) * 16

    def text(self) -> str:
        return str(self.one("", "a", "B", "é ∞", "z\n'\"%s?$1", "10"))

    def blob(self) -> bytes:
        return self._rng.bytes(self.one(0, 3, 40, 5000))

    def real(self) -> float:
        return float(self.one(0.0, -1.5, 1e300, self._rng.random()))

    def number(self) -> int:
        return int(self.one(0, 1, 2, 77, 2**62))

    def round(self) -> RoundRow:
        return RoundRow(
            self.below(8), 1, self.below(4), self.real(), self.real(), self.blob(),
            int(self.one(0, 2**64 - 1)), self.below(9), 0, opening=self.below(9),
        )  # fmt: skip

    def update(self) -> LoggedUpdate:
        return LoggedUpdate(self.below(40), self.below(8), self.name(), self.real(), self.blob())

    def verdict(self) -> StoredVerdict:
        reason = self.one(None, "noted", "late")
        return StoredVerdict(1, self.below(8), self.name(), self.blob(), reason, self.real())

    def report(self) -> StoredReport:
        reason = self.one("", "disk", "error")
        details = (self.text(), "1", "x", "k=8", self.real(), self.number())
        told = details if self.below(2) else (None,) * 6
        return StoredReport(1, self.below(8), self.name(), "trained", reason, *told)

    def participation(self) -> LastParticipation:
        def maybe(value: Any) -> Any:
            return self.one(None, value)

        return LastParticipation(
            maybe(self.number()), maybe(8), maybe(5), maybe(self.below(8)), maybe(self.blob())
        )

    def figure(self) -> Figure:
        value = self.one(float("nan"), self.real())
        metric, part = self.one("auc", "loss"), self.one("", "k=8")
        return Figure("global", metric, part, 3, self.real(), 0, value, value, value, (0.5, 1.0))

    def state(self) -> dict[str, Any]:
        return {"w": self._rng.normal(size=(2, self.below(4))).astype(np.float32)}


def fleet_action(of: Chance) -> Action:
    """Something that concerns no single task."""
    name, text, number, blob = of.name(), of.text(), of.number(), of.blob()
    if (what := of.below(30)) < 4:
        row = DeviceRow(name, blob, name * 2, bytes(32), 0, name, of.below(3), 1, None, {"a": text})
        return lambda store: store.devices.add(row)
    counts = {str(of.one("late", "old", "bad")): of.below(5) for _ in range(3)}
    key = GroupKey(of.below(5), bytes(32))
    code = EnrolmentCode(bytes(16), name[:8], bytes(16), 0, 0)
    content = PublishedContent((1, of.below(3)), of.below(3), text)
    messages = [(f"t/{of.below(6)}", of.blob()) for _ in range(2)]
    content_id = f"{of.below(3):02x}"
    sought = DevicesSought(
        of.one("", text, "A", "00", "0"),
        {of.one("a", text): text} if of.below(2) else {},
        str(of.one("", "active", "silent", "revoked", "on two machines")),
        of.one(None, 1, 2),
        {"a": [text, "b"]} if of.below(2) else {},
        of.below(4),
        of.below(4),
    )
    actions: tuple[Action, ...] = (
        lambda store: store.devices.sought(sought, number % 2, 3),
        lambda store: sorted(store.devices.states(sought).items()),
        lambda store: sorted(store.devices.called(of_none(text) or name.hex()[:3]), key=repr),
        lambda store: (store.devices.seen([name]), store.devices.clashes([name])),
        lambda store: store.devices.note_clashes({name: number}),
        lambda store: list(store.devices.all()),
        lambda store: store.devices.find(name),
        lambda store: store.devices.revoke(name, number),
        lambda store: store.devices.set_labels(name, {text: text}),
        lambda store: store.devices.set_name(name, of_none(text)),
        lambda store: store.tokens.add(code, 1, number, of_none(name), text),
        lambda store: store.tokens.find(name[:8]),
        lambda store: store.tokens.note_stranger(name[:8], b"k"),
        lambda store: store.tokens.bind(name[:8], blob),
        lambda store: sorted(store.tokens.tried_by_strangers(), key=repr),
        lambda store: store.tokens.unused(2),
        lambda store: store.tokens.usable(2),
        lambda store: store.tokens.withdraw(name[:8]),
        lambda store: store.tokens.bind(blob[:8], blob),
        lambda store: (store.secrets.issue(number, blob, 50), store.secrets.descriptors()),
        lambda store: (store.secrets.issue(number + 1, blob, number), store.secrets.descriptors()),
        lambda store: store.secrets.forget(number),
        lambda store: (store.secrets.add_group_key(key), store.secrets.group_keys()),
        lambda store: store.secrets.drop_group_keys([0, 1]),
        lambda store: (store.refusals.add(counts), store.refusals.all()),
        lambda store: (store.retained.topics(), sorted(store.retained.superseded())),
        lambda store: (store.retained.message("t/1"), store.retained.cleared("t/1")),
        lambda store: (store.contents.put(content_id, content, messages), store.contents.all()),
        lambda store: (store.contents.keep(1, [content_id]), store.contents.used_by(1)),
    )  # fmt: skip
    return actions[what - 4]


def of_none(value: Any) -> Any:
    """None in the place of what is empty."""
    return value or None


def facts_action(of: Chance) -> Action:
    task, number, text, blob, real = of.one(1, 2), of.number(), of.text(), of.blob(), of.real()

    def write(store: Store) -> Any:
        facts = store.task(task).facts
        store.facts.generation, store.facts.root_fingerprint = number, blob
        store.facts.rotation_due, store.facts.served_seconds = bool(number), real
        facts.label, facts.catalogue, facts.key_epoch = text, blob, number
        book = AttachmentBook(blob, {text: CohortKey(blob, text)}, {"00": Sealed(3, text)})
        store.task(task).facts.attachments = book
        return store.task(task).facts.attachments == book

    def read(store: Store) -> Any:
        facts = store.task(task).facts
        fleet = (store.facts.generation, store.facts.rotation_due, store.facts.served_seconds)
        return (*fleet, facts.label, facts.catalogue, facts.key_epoch, store.tasks.key_epochs())

    return of.one(write, read, lambda store: store.task(task).facts.clear())  # type: ignore[no-any-return]


def tasks_action(of: Chance) -> Action:
    name, text, number = of.one("air", "sea"), of.text(), of.one(1, 2, 3)
    actions: tuple[Action, ...] = (
        lambda store: store.tasks.add(name, text, text),
        lambda store: (store.tasks.all(), store.tasks.named(name)),
        lambda store: store.tasks.change(number, state="retired"),
        lambda store: store.tasks.change(number, served=of_none(text)),
        lambda store: (store.tasks.change(number, unwritten=text), store.tasks.find(number)),
        lambda store: store.tasks.erase(number),
    )
    return of.one(*actions)  # type: ignore[no-any-return]


def rounds_action(of: Chance) -> Action:
    task, number, row, real = of.one(1, 2), of.below(8), of.round(), of.real()
    held = of_none(of.text())
    ended = dataclasses.replace(row, closed_unix_seconds=real, participants=3, metrics={"a": real})
    actions: tuple[Action, ...] = (
        lambda store: store.task(task).rounds.add(row),
        lambda store: store.task(task).rounds.add(row),
        lambda store: store.task(task).rounds.close(ended),
        lambda store: store.task(task).rounds.give_up(number, real),
        lambda store: store.task(task).rounds.hold(number, held),
        lambda store: (store.task(task).rounds.find(number), store.task(task).rounds.played(1)),
        lambda store: store.task(task).rounds.latest(3),
        lambda store: store.task(task).rounds.forget_verdicts(real, 0.1),
    )
    return of.one(*actions)  # type: ignore[no-any-return]


def log_action(of: Chance) -> Action:
    task, update, number, name, text = of.one(1, 2), of.update(), of.below(8), of.name(), of.text()
    updates = [of.update() for _ in range(of.below(3))]
    verdicts = [of.verdict() for _ in range(of.below(3))]
    actions: tuple[Action, ...] = (
        lambda store: store.task(task).log.append(updates, verdicts),
        lambda store: store.task(task).log.append([update], verdicts),
        lambda store: store.task(task).log.verdict(1, number, name),
        lambda store: sorted(store.task(task).log.judged(1, number)),
        lambda store: sorted(store.task(task).log.verdicts(1, number).items()),
        lambda store: list(store.task(task).log.after(number)),
        lambda store: (
            sorted(store.task(task).log.came(1, number)),
            store.task(task).log.last_seq(),
            store.task(task).log.median_seconds(1, number),
        ),
        lambda store: sorted(store.task(task).log.came(1, number, [update.device_id])),
        lambda store: store.task(task).log.quarantine(update, 1, text),
        lambda store: sorted(store.task(task).log.quarantined()),
        lambda store: store.task(task).log.drop_quarantined(),
        lambda store: of_none(number) or store.task(task).log.clear(),
    )
    return of.one(*actions)  # type: ignore[no-any-return]


def rounded(mean: float | None) -> str:
    """Engines add up in orders of their own."""
    return "" if mean is None else f"{mean:.9g}"


def told_action(of: Chance) -> Action:
    task, number, name = of.one(1, 2), of.below(8), of.name()
    reports = [of.report() for _ in range(of.below(4))]
    seen = {of.name(): of.participation() for _ in range(of.below(4))}
    said = [DeviceEvaluation(of.name(), of.text(), of.blob()) for _ in range(of.below(4))]
    figures = [of.figure() for _ in range(of.below(3))]

    def told(store: Store) -> Reports:
        return store.task(task).reports

    actions: tuple[Action, ...] = (
        lambda store: store.task(task).reports.add(reports),
        lambda store: store.task(task).reports.add(reports),
        lambda store: store.task(task).reports.has(1, number, name),
        lambda store: (store.task(task).reports.outcomes(), store.task(task).reports.not_trained()),
        lambda store: store.task(task).reports.keep_last(number + 8),
        lambda store: store.task(task).participations.note(seen),
        lambda store: store.task(task).participations.note(seen),
        lambda store: store.task(task).participations.all(),
        lambda store: store.task(task).participations.of([name, bytes(16)]),
        lambda store: store.task(task).reports.of(name),
        lambda store: store.task(task).reports.trained(3),
        lambda store: [(r, n, rounded(s), rounded(b)) for r, n, s, b in told(store).costs()],
        lambda store: store.task(task).evaluations.find(number) is None,
        lambda store: store.task(task).evaluations.note((number, each) for each in said),
        lambda store: list(store.task(task).evaluations.said(number)),
        lambda store: store.task(task).evaluations.forget(number),
        lambda store: store.task(task).evaluations.put(number, 3, figures),
        lambda store: repr(store.task(task).evaluations.latest(2)),
        lambda store: store.task(task).evaluations.history("global", "auc"),
    )
    return of.one(*actions)  # type: ignore[no-any-return]


def model_action(of: Chance) -> Action:
    task, number, real, state = of.one(1, 2), of.below(8), of.real(), of.state()
    kind, topic, blob = of.one("version", "partial"), f"t/{of.below(6)}", of.blob()
    checkpoint = MethodCheckpoint(kind, number, 3, number, state)
    row = VersionRow(number, number, real, 3, "", "", 0, {"auc": real}, False, True, 0)
    ranking = Ranking("auc", higher_is_better=True)
    actions: tuple[Action, ...] = (
        lambda store: store.task(task).checkpoints.put(checkpoint),
        lambda store: (
            store.task(task).checkpoints.get(kind),
            store.task(task).checkpoints.version(),
        ),
        lambda store: store.task(task).versions.add(row, of_none(state)),
        lambda store: store.task(task).versions.find(number),
        lambda store: (store.task(task).versions.all(), store.task(task).versions.kept()),
        lambda store: store.task(task).versions.ranked(ranking),
        lambda store: store.task(task).versions.model(number),
        lambda store: store.task(task).versions.note_metrics(number, {"auc": real, "b": 1.0}),
        lambda store: store.task(task).versions.pin(number, pinned=bool(number % 2)),
        lambda store: store.task(task).versions.prune(1, 1, ranking, before=number),
        lambda store: store.task(task).versions.ask_for(of_none(number)),
        lambda store: store.task(task).versions.awaited(),
        lambda store: store.task(task).versions.drop_request("because"),
        lambda store: store.task(task).publications.replace("round", [(topic, blob)]),
        lambda store: store.task(task).publications.topics("round"),
        lambda store: of_none(number) or store.task(task).publications.withdraw(),
    )
    return of.one(*actions)  # type: ignore[no-any-return]


def cluster_action(of: Chance) -> Action:
    """Not the lease, nor workers: their rows hold the time, which differs."""
    task, number, name, counter = of.one(1, 2), of.below(8), of.name(), of.below(4)
    state = of.one(None, of.blob())
    share = ShareRow(number, of.below(3), 1, counter, of.below(9), of.below(9), state)
    seconds = of.below(40) / 8
    habit = Habit(of_none(seconds), counter)
    actions: tuple[Action, ...] = (
        lambda store: store.task(task).shares.put(share),
        lambda store: store.task(task).shares.find(number, share.slot),
        lambda store: store.task(task).shares.sums(),
        lambda store: [store.task(task).shares.state(e) for e in store.task(task).shares.sums()],
        lambda store: store.task(task).shares.counts(number),
        lambda store: store.task(task).shares.summed(),
        lambda store: of_none(number) or store.task(task).shares.clear(),
        lambda store: store.task(task).late.add({name: of_none(seconds)}),
        lambda store: of_none(number) or store.task(task).late.take(),
        lambda store: store.task(task).habits.put({name: habit, b"stays": habit}),
        lambda store: store.task(task).habits.all(),
        lambda store: store.task(task).habits.put({name: habit}),
        lambda store: store.task(task).habits.forget([name]),
        lambda store: (store.devices.note_seen({name: counter}), store.devices.seen()),
        lambda store: store.devices.seen_among([name]),
        lambda store: sorted(store.granted.grant({name: counter})),
        lambda store: store.granted.of(name),
        lambda store: of_none(number) or store.granted.forget([name]),
        lambda store: (store.devices.revision(), store.devices.changed_since(number)),
        lambda store: list(store.devices.by_handles([name])),
        lambda store: list(store.task(task).log.by_device()),
        lambda store: (store.task(task).log.waiting(), store.task(task).log.devices(number)),
        lambda store: store.task(task).rounds.end_entry(number, seconds),
        lambda store: store.task(task).rounds.is_open(number),
    )
    return of.one(*actions)  # type: ignore[no-any-return]


KINDS = (
    *(fleet_action, facts_action, tasks_action, rounds_action),
    *(log_action, told_action, model_action, cluster_action),
)
_TIMED = ("lease", "workers")


def draw(of: Chance) -> Action:
    """One action, or a few in a transaction that is kept or taken back."""
    if of.below(6):
        return of.one(*KINDS)(of)  # type: ignore[no-any-return]
    within = [draw(of) for _ in range(of.below(4))]
    kept, shared = of.below(3) > 0, of.below(4) == 0

    def transaction(store: Store) -> Any:
        answers = []
        with store.database.transaction(shared=shared):
            answers = [answer(action, store) for action in within]
            if not kept:
                raise LookupError
        return answers

    return transaction


def answer(action: Action, store: Store) -> Any:
    """What it returns, or what kind of failure it is."""
    try:
        # What fails takes back no more than itself.
        with store.database.transaction():
            return plain(action(store))
    except STORE_FAILURES:
        return "the store would not"
    except (AggregatorError, LookupError, RuntimeError, ValueError) as error:
        return repr(error)


def plain(value: Any) -> Any:
    """Comparable: arrays by their bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, MethodCheckpoint | ShareRow):
        return [plain(getattr(value, each.name)) for each in dataclasses.fields(value)]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, tuple | list) else value


def contents(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of all tables."""
    return {table: sorted(_rows(store, table), key=repr) for table in TABLES}


def _rows(store: Store, table: str) -> Iterator[tuple[Any, ...]]:
    kinds = TABLES[table].columns
    for row in store.database.rows(f"SELECT {', '.join(kinds)} FROM {table}"):
        yield tuple(
            store.database.from_any(value) if kind == "ANY" else value
            for value, kind in zip(row, kinds.values(), strict=True)
        )


@pytest.mark.parametrize("seed", range(2))
def test_both_engines_say_and_hold_the_same(
    tmp_path: Path, make_database: MakeDatabase, seed: int
) -> None:
    one = Store(create_database(tmp_path / "store.sqlite"))
    other = Store(create_database(make_database()))
    of = Chance(seed)
    filled: set[str] = set()
    for step in range(0, STEPS, AT_ONCE):
        with one.database.transaction(), other.database.transaction():
            for place in range(AT_ONCE):
                action = draw(of)
                said, too = answer(action, one), answer(action, other)
                assert said == too, f"step {step + place}"
        held = contents(one)
        assert held == contents(other), f"by step {step + AT_ONCE}"
        filled |= {table for table, rows in held.items() if rows}
    assert len(filled) >= len(TABLES) - len(_TIMED) - 1, (
        f"the walk went past {TABLES.keys() - filled - set(_TIMED)}"
    )
    # And so does a store that the rows of either were copied to.
    for source, where in ((one, make_database()), (other, tmp_path / "copy.sqlite")):
        copy = Store(create_database(where))
        copy_store(source.database, copy.database)
        assert contents(copy) == contents(one)
        copy.database.close()
    one.database.close()
    other.database.close()
