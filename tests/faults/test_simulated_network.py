"""Both ends as a state machine over a network that drops, reorders, doubles and repeats.

Sessions, replay windows, outboxes, parts of long updates, rounds and verdicts are the product's; a
rule moves one message, kills one process, or lets time pass. At any moment what devices were told
must be what the aggregator's log says, and at the end the oracle of the long runs judges.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from device_sdk.wire.publish.receipts import RecordType
from device_sdk.world import Pace
from tests.attacks.stage import Stage
from tests.faults.known import known_body, known_long_body
from tests.faults.oracle import check_verdicts, judge

DEVICES, ITEMS = 3, 420
_PACE = Pace(answer_seconds=2.0, fetch_seconds=2.0, reopen_seconds=1.0, most_seconds=20.0)
_ROUND = "quorum = 2\ndeadline_seconds = 40\npause_seconds = 3\nresume_grace_seconds = 5"
# Thousands of commits: where there is a file system in memory, on that.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
_PLACES = st.integers(0, 2**16)


def _body(place: int, generation: int, number: int) -> bytes:
    make: Callable[[int, int, int], bytes] = known_body
    if place == 0:
        make = partial(known_long_body, items=ITEMS)  # travels in parts
    return make(place, generation, number)


class NetworkMachine(RuleBasedStateMachine):
    """Three devices, an aggregator, and a broker without scruples."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.stage = Stage(self.folder, DEVICES, _ROUND, pace=_PACE, body=_body, items=ITEMS)
        self.version = 0

    def teardown(self) -> None:
        if not hasattr(self, "stage"):
            return
        stage = self.stage
        if not stage.aggregator_alive:
            stage.start_aggregator()
        for device in stage.devices:
            if not device.alive:
                device.start()
            device.set_connected(True)
        # What was lost on the way comes again by itself; no new updates at the very end.
        counted = stage.parts.first.ingest.counted
        stage.run_until(lambda: stage.parts.first.ingest.counted >= counted + DEVICES, 600.0)
        stage.run_until(lambda: stage.parts.first.rounds.current is None, 600.0)
        stage.close()
        judgement = judge(stage.fleet)
        assert judgement.lost == judgement.twice == 0
        shutil.rmtree(self.folder)

    def _index(self, drawn: int) -> int:
        return drawn % len(self.stage.broker.under_way)

    @precondition(lambda self: self.stage.broker.under_way)
    @rule(drawn=_PLACES)
    def deliver_any(self, drawn: int) -> None:
        self.stage.deliver(self.stage.broker.under_way.pop(self._index(drawn)))

    @precondition(lambda self: self.stage.broker.under_way)
    @rule(count=st.integers(1, 40))
    def deliver_in_order(self, count: int) -> None:
        for _ in range(min(count, len(self.stage.broker.under_way))):
            self.stage.deliver(self.stage.broker.under_way.pop(0))
            self.work()

    @precondition(lambda self: self.stage.broker.under_way)
    @rule(drawn=_PLACES)
    def drop(self, drawn: int) -> None:
        self.stage.broker.under_way.pop(self._index(drawn))

    @precondition(lambda self: self.stage.broker.under_way)
    @rule(drawn=_PLACES)
    def double(self, drawn: int) -> None:
        place = self._index(drawn)
        self.stage.broker.under_way.insert(place, self.stage.broker.under_way[place])

    @precondition(lambda self: self.stage.broker.seen)
    @rule(back=st.integers(0, 60))
    def repeat_something_old(self, back: int) -> None:
        seen = self.stage.broker.seen
        self.stage.broker.publish(*seen[-1 - back % len(seen)])

    @rule()
    def work(self) -> None:
        if self.stage.aggregator_alive:
            self.stage.service.turn()
        for device in self.stage.devices:
            device.turn()

    @rule(seconds=st.sampled_from([0.1, 2.5, 10.0, 45.0]))
    def time_passes(self, seconds: float) -> None:
        self.stage.now_seconds += seconds
        self.work()

    @rule(seconds=st.sampled_from([1.0, 10.0, 60.0]))
    def all_goes_well_for_a_while(self, seconds: float) -> None:
        self.stage.run(seconds)

    @rule(seconds=st.sampled_from([10.0, 60.0]))
    def receipts_are_lost_for_a_while(self, seconds: float) -> None:
        # Rounds close on updates whose devices know of no verdict, and ask again.
        self.stage.drop = lambda parcel: parcel.payload[1:2] == bytes([RecordType.RECEIPT])
        self.stage.run(seconds)
        self.stage.drop = lambda parcel: False

    @rule(place=st.integers(0, DEVICES - 1))
    def device_dies_or_starts(self, place: int) -> None:
        device = self.stage.devices[place]
        if device.alive:
            device.kill()
        else:
            device.start()

    @rule(place=st.integers(0, DEVICES - 1))
    def device_loses_or_finds_the_broker(self, place: int) -> None:
        device = self.stage.devices[place]
        if device.alive:
            device.set_connected(not device.connected)

    @rule()
    def aggregator_dies_or_starts(self) -> None:
        if self.stage.aggregator_alive:
            self.stage.kill_aggregator()
        else:
            self.stage.start_aggregator()

    @rule()
    def broker_restarts(self) -> None:
        self.stage.broker.restart()
        if self.stage.aggregator_alive:
            self.stage.link.disconnect()
            self.stage.link.connect()
        for device in self.stage.devices:
            if device.alive:
                device.set_connected(True)

    @invariant()
    def promises_hold(self) -> None:
        if not hasattr(self, "stage"):
            return
        fleet = self.stage.fleet
        database = sqlite3.connect(f"file:{fleet.aggregator.database}?mode=ro", uri=True)
        commits, different = database.execute(
            "SELECT count(*), count(DISTINCT device_id || round) FROM audit"
        ).fetchone()
        database.close()
        assert commits == different == len(check_verdicts(fleet))
        if self.stage.aggregator_alive:
            version = self.stage.parts.first.aggregation.version
            assert version >= self.version
            self.version = version


def test_the_promise_over_a_network_without_scruples() -> None:
    run_state_machine_as_test(
        NetworkMachine,
        settings=settings(
            max_examples=5, stateful_step_count=40, phases=[Phase.explicit, Phase.generate]
        ),
    )
