"""Rounds, ingest and log against an oracle, with crashes before and after any commit.

And under any calendar: it jumps by days and months, while verdicts age by the time served alone."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aggregator.home import AggregatorHome
from aggregator.keys.folder import Lives
from aggregator.methods.bounds import Sized
from aggregator.methods.method import Binding, Method, late_weight
from aggregator.methods.scatter import ScatterBinding, ScatterMethod, initial_items
from aggregator.rounds.machine import RoundClosed, RoundOpened
from aggregator.serve.assembly import World, assemble
from aggregator.serve.service import Parts
from aggregator.store import Store
from aggregator.store.rows import DeviceRow
from aggregator.task.file import Task, read_task
from device_sdk.artifact import Artifact
from device_sdk.artifact.submodels import Submodel
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.receipts import (
    Receipt,
    UpdateIdentity,
    Verdict,
    update_digest,
    write_update,
)
from tests.fakes.crashes import Crash, CrashingDatabase
from tests.fakes.homes import ITEMS, WIDTH, make_home
from tests.fakes.scatter_updates import one_user

DEVICES = [bytes([index]) * 16 for index in range(8)]
QUORUM = 3
DEADLINE_SECONDS = 100.0
DAY_SECONDS = 86_400.0
FIVE_YEARS = 5 * 365 * 86_400
KEPT_SECONDS = 30 * DAY_SECONDS
FARTHEST_SECONDS = (-400 * DAY_SECONDS, 400 * DAY_SECONDS)
ROUND = f"""quorum = {QUORUM}
deadline_seconds = {DEADLINE_SECONDS}
resume_grace_seconds = 0.0
share = 0.8"""


def _body(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    columns = np.sort(rng.choice(WIDTH, 3, replace=False)).astype(np.int64)
    rows = np.sort(rng.choice(ITEMS, 4, replace=False)).astype(np.int64)
    tensors = one_user(WIDTH, rows, rng.standard_normal(4), rng.standard_normal(3), columns)
    return encode_scatter_update(Update(1, tensors), WIDTH, "float32")


BODIES = [_body(seed) for seed in range(6)]
BAD_BODY = b"\x01" + BODIES[0][1:-1]


class Oracle:
    """What must be, in terms of the method alone: no store, no crash."""

    def __init__(self, binding: Binding, method: Method) -> None:
        self.binding = binding
        self.method = method
        self.version = 0
        self.versions: dict[int, int] = {}
        """Of rounds, by their numbers."""
        self.log: list[Update] = []
        self.verdicts: dict[tuple[int, bytes], tuple[bytes, str | None]] = {}
        self.closed_seconds: dict[int, float] = {}
        self.forgotten: set[int] = set()

    def opened(self, number: int) -> None:
        self.versions[number] = self.version
        self.method.open_round(number)
        for update in self.log:
            self.method.absorb(update)

    def accepted(self, number: int, device: bytes, body: bytes) -> None:
        update = self.binding.decode(body, number, ITEMS, device.hex())
        if number != max(self.versions):
            update = replace(update, age=self.version - self.versions[number])
        self.log.append(update)
        self.method.absorb(update)
        self.verdicts[(number, device)] = (body, None)

    def closed(self) -> bool:
        """Whether there is a new version."""
        if len(self.log) < QUORUM:
            return False
        self.version = self.method.close_round().version
        self.log.clear()
        return True


class RoundMachine(RuleBasedStateMachine):
    """Eight devices, two clocks that rules move, and a process that dies.

    ``now``: seconds that pass for everybody; ``offset``: what the calendar is wrong by.
    """

    template: Path
    started: int
    most_stale = -1
    """Versions ago that an update of a closed round may be of; -1: none counts."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.home = AggregatorHome(self.folder / "home")
        shutil.copytree(self.template, self.home.folder)
        self.now = float(self.started)
        self.offset = 0.0
        self.chance = np.random.default_rng(7)
        self.pending: list[tuple[int, bytes, bytes]] = []
        self.rivals: set[bytes] = set()
        """Devices that sent another body than the one of theirs that is pending."""
        self.start()
        binding = self.parts.first.task.binding
        seed = self.parts.store.facts.seed
        self.oracle = Oracle(binding, binding.build(ITEMS, np.random.default_rng([seed, 0])))
        self.tick()

    def teardown(self) -> None:
        if hasattr(self, "parts"):
            self.parts.store.database.close()
            shutil.rmtree(self.folder)

    def start(self) -> None:
        self.database = CrashingDatabase(self.home.database)
        rng = np.random.default_rng(1)
        world = World(lambda: self.now, self.unix, rng, self.chance.bytes)
        task = self.served(read_task(self.home.task_file))
        self.parts: Parts = assemble(self.home, Store(self.database), task, world)

    def served(self, task: Task) -> Task:
        return task

    def unix(self) -> float:
        return self.now + self.offset

    def pass_the_deadline(self) -> None:
        current = self.parts.first.rounds.current
        assert current is not None
        self.now += DEADLINE_SECONDS
        self.offset += max(0.0, current.deadline_unix_seconds - self.unix())

    def die(self) -> None:
        self.parts.store.database.close()
        self.pending.clear()
        self.rivals.clear()
        self.start()

    def open_number(self) -> int | None:
        return (
            None
            if self.parts.first.rounds.current is None
            else self.parts.first.rounds.current.round
        )

    def tick(self) -> None:
        while (event := self.parts.first.rounds.tick()) is not None:
            if isinstance(event, RoundOpened):
                self.oracle.opened(event.row.round)
            else:
                assert isinstance(event, RoundClosed)
                made = self.closed(event.row.round)
                assert (event.next_version is not None) == made
                if made:
                    assert event.next_version == self.oracle.version

    def closed(self, number: int) -> bool:
        self.oracle.closed_seconds[number] = self.now
        return self.oracle.closed()

    @rule(days=st.sampled_from([-400.0, -31.0, -0.01, 0.01, 31.0, 400.0]))
    def the_calendar_jumps(self, days: float) -> None:
        self.commit()
        # Keys outlive no more than five years of any calendar.
        self.offset = float(np.clip(self.offset + days * DAY_SECONDS, *FARTHEST_SECONDS))
        self.tick()

    @rule(days=st.sampled_from([0.0, 0.0, 1.0, 11.0, 29.0]))
    def housekeeping(self, days: float) -> None:
        self.commit()
        self.now += days * DAY_SECONDS
        self.tick()
        self.parts.housekeeping.turn()

    @rule(seconds=st.sampled_from([0.5, 10.0, DEADLINE_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.commit()
        self.now += seconds
        self.tick()

    @rule(
        device=st.sampled_from(DEVICES),
        body=st.sampled_from([*BODIES, BAD_BODY]),
        behind=st.sampled_from([0, 0, 0, 0, 1, 1, 2, 5, -1]),
    )
    def send(self, device: bytes, body: bytes, behind: int) -> None:
        current = self.parts.first.rounds.current
        assert current is not None
        number = current.round - behind
        if number < 1:
            return
        identity = UpdateIdentity(device, "default", current.generation, number)
        selected = self.parts.first.rounds.is_selected(device)
        earlier = next((b for n, d, b in self.pending if (n, d) == (number, device)), None)
        known = self.oracle.verdicts.get((number, device))
        counts_late = behind > 0 and self.counts_late(number, device)
        if counts_late and earlier is None and known is None and self.has_brought(device):
            with suppress(WireError):
                settled = self.parts.inbox.offer(device, write_update(identity, body))
                # Its verdicts may have been deleted.
                assert settled is not None and settled.receipt.verdict is Verdict.FORGOTTEN
                self.oracle.forgotten.add(number)
            return
        settled = self.parts.inbox.offer(device, write_update(identity, body))
        if earlier is not None:
            assert settled is None
            self.rivals |= {device} if body != earlier else set()
            return
        if settled is not None and settled.receipt.verdict is Verdict.FORGOTTEN:
            assert self.now - self.oracle.closed_seconds[number] >= KEPT_SECONDS
            self.oracle.forgotten.add(number)
            self.expect(settled.receipt, identity, body, Verdict.FORGOTTEN)
        elif number in self.oracle.forgotten:
            raise AssertionError(f"after it was forgotten: {settled}")
        elif known is not None and known[0] != body:
            self.expect(settled and settled.receipt, identity, body, Verdict.CONFLICT)
        elif known is not None:
            verdict = Verdict.COUNTED if known[1] is None else Verdict.REFUSED
            self.expect(settled and settled.receipt, identity, body, verdict, known[1] or "")
        elif counts_late:
            assert settled is None
            self.pending.append((number, device, body))
        elif behind > 0:
            self.expect(settled and settled.receipt, identity, body, Verdict.LATE)
        elif behind < 0:
            expected = (Verdict.REFUSED, "unknown-round")
            self.expect(settled and settled.receipt, identity, body, *expected)
        elif not selected:
            expected = (Verdict.REFUSED, "not-selected")
            self.expect(settled and settled.receipt, identity, body, *expected)
        else:
            assert settled is None
            self.pending.append((number, device, body))

    def counts_late(self, number: int, device: bytes) -> bool:
        """Whether an update of a closed round counts in the open one, if its device has brought no
        other."""
        row = self.parts.store.first.rounds.find(number)
        age = self.oracle.version - self.oracle.versions[number]
        return (
            age <= self.most_stale
            and row is not None
            and self.parts.first.rounds.selects(row, device)
        )

    def has_brought(self, device: bytes) -> bool:
        number = self.open_number()
        found = {(each.round_id, each.sender) for each in self.oracle.log}
        found |= {(of, sender.hex()) for of, sender, _ in self.pending}
        return any(of != number and sender == device.hex() for of, sender in found)

    @rule(
        devices=st.lists(st.sampled_from(DEVICES), min_size=1, max_size=3, unique=True),
        body=st.sampled_from(BODIES),
    )
    def several_arrive(self, devices: list[bytes], body: bytes) -> None:
        for device in devices:
            self.send(device, body, 0)
        self.commit()

    @staticmethod
    def expect(
        receipt: Receipt | None,
        identity: UpdateIdentity,
        body: bytes,
        verdict: Verdict,
        reason: str = "",
    ) -> None:
        assert receipt is not None
        assert (receipt.verdict, receipt.reason) == (verdict, reason)
        assert receipt.digest == update_digest(identity, hashlib.sha256(body).digest())

    @rule()
    def commit(self) -> None:
        settled = self.parts.first.ingest.commit()
        decided, rivals = settled[: len(self.pending)], settled[len(self.pending) :]
        assert {each.device_id for each in rivals} == self.rivals
        assert {each.receipt.verdict for each in rivals} <= {Verdict.CONFLICT}
        for each, (_, device, body) in zip(decided, self.pending, strict=True):
            wanted = Verdict.REFUSED if body == BAD_BODY else Verdict.COUNTED
            assert (each.device_id, each.receipt.verdict) == (device, wanted)
        self.settle_pending()
        self.tick()

    def settle_pending(self) -> None:
        for number, device, body in self.pending:
            try:
                self.oracle.accepted(number, device, body)
            except WireError as error:
                self.oracle.verdicts[(number, device)] = (body, error.reason)
        self.pending.clear()
        self.rivals.clear()

    @rule()
    def crash_between(self) -> None:
        """Staged updates are gone, and nobody was told of them."""
        self.die()

    @precondition(lambda self: self.pending)
    @rule(when=st.sampled_from(["before", "after"]))
    def crash_at_a_commit(self, when: str) -> None:
        self.database.left, self.database.when = 1, when
        try:
            self.parts.first.ingest.commit()
            raise AssertionError("the crash did not come")
        except Crash:
            pass
        if when == "after":
            self.settle_pending()
        self.die()
        self.tick()

    @rule(when=st.sampled_from(["before", "after"]))
    def crash_at_the_end_of_a_round(self, when: str) -> None:
        self.commit()
        self.pass_the_deadline()
        number = self.open_number()
        self.database.left, self.database.when = 1, when
        try:
            self.parts.first.rounds.tick()
            raise AssertionError("the crash did not come")
        except Crash:
            pass
        self.die()
        assert self.open_number() == (number if when == "before" else None)
        if when == "after":
            assert number is not None
            self.closed(number)
        self.tick()

    @rule(when=st.sampled_from(["before", "after"]))
    def crash_at_the_opening(self, when: str) -> None:
        self.commit()
        self.pass_the_deadline()
        event = self.parts.first.rounds.tick()
        assert isinstance(event, RoundClosed)
        assert (event.next_version is not None) == self.closed(event.row.round)
        self.database.left, self.database.when = 1, when
        try:
            self.parts.first.rounds.tick()
            raise AssertionError("the crash did not come")
        except Crash:
            pass
        self.die()
        if when == "after":
            assert self.open_number() == event.row.round + 1
            self.oracle.opened(event.row.round + 1)
        self.tick()

    @invariant()
    def same_bits(self) -> None:
        if not hasattr(self, "oracle") or self.open_number() is None:
            return
        ours, theirs = self.parts.first.aggregation.state(), self.oracle.method.state()
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            assert ours[name].tobytes() == array.tobytes(), name
        assert self.parts.first.aggregation.version == self.oracle.version
        assert self.parts.first.aggregation.participants == len(self.oracle.log)


class Discounting(ScatterMethod):
    """Scatter, where what is old counts for less: the bits tell how old it was taken to be."""

    TAKES_LATE = True

    def sized(self, updates: Iterable[Update]) -> Iterator[list[Sized]]:
        return super().sized(map(self._aged, updates))

    @staticmethod
    def _aged(update: Update) -> Update:
        weight = np.float32(late_weight(update.age))
        tensors = {**update.tensors, "pulls": update.tensors["pulls"] * weight}
        return replace(update, tensors=tensors) if update.age else update


class DiscountingBinding(ScatterBinding):
    """Builds that method."""

    __slots__ = ()

    def why_no_staleness(self, ladder: Sequence[Submodel] = ()) -> str:
        return ""

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> Method:
        return Discounting(initial_items(items, WIDTH, 0.1, rng), self.settings)


class StaleRoundMachine(RoundMachine):
    """The same where updates of closed rounds count in the open one."""

    most_stale = 2

    def served(self, task: Task) -> Task:
        binding = DiscountingBinding(task.binding.method_name, task.binding.settings)
        settings = replace(task.round, late="staleness", most_stale=self.most_stale)
        return replace(task, binding=binding, round=settings)


@pytest.mark.parametrize("machine", [RoundMachine, StaleRoundMachine])
def test_rounds_agree_with_the_oracle(tmp_path: Path, machine: type[RoundMachine]) -> None:
    more = "[store]\ncheckpoint_updates = 2"
    home = make_home(
        tmp_path, "mqtt://127.0.0.1:1", ROUND, more, lives=Lives(FIVE_YEARS, FIVE_YEARS)
    )
    store = home.open_store()
    with store.database.transaction():
        for device in DEVICES:
            row = DeviceRow(device, device * 2, device, device * 2, 0, device[:8], 0, 1)
            store.devices.add(row)
    machine.started = store.facts.generation
    store.database.close()
    machine.template = home.folder
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=25))
