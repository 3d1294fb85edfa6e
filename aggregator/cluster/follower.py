"""A task's open round, as a worker sees it in the store, and what this worker has of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from aggregator.cluster.orders import ServedTask
from aggregator.errors import MethodFault
from aggregator.events import LogEvent
from aggregator.guard import GuardedBinding, GuardedMethod
from aggregator.rounds.attendance import RoundTimes
from aggregator.rounds.late import Sent, decode_each
from aggregator.rounds.machine import hold_failed
from aggregator.shared import TaskShared
from aggregator.store.cluster import RoundOver
from aggregator.store.rows import LoggedUpdate, RoundRow, ShareRow
from aggregator.store.versions import pack_state, unpack_state
from aggregator.task.cluster import WorkerSlot
from device_sdk.methods.state import RestoreError, State
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.placement import shard_of

_EPOCH_BITS, _COUNT_BITS = 20, 32
_BYTES_PER_SECOND = 4e6
"""What a worker writes at full load, about."""


class ShareKeeper:
    """Takes in a task's updates on a worker: into the method's sums, or as bodies where the round
    cannot be one.

    What is tried is in sums of which nobody takes anything before the commit is done
    (:meth:`absorb`). Where that never comes, whatever went wrong, they are thrown away, and the
    next group begins with what the store has.

    Whatever the round, an update is absorbed here before it is counted: one that cannot be is
    refused, as long as its device was told nothing else.

    ``epoch``: of this worker's start.
    """

    def __init__(self, served: ServedTask, shared: TaskShared, slot: int, epoch: int) -> None:
        self._served, self._store = served, shared.store
        self._binding = GuardedBinding(served.task.binding)
        self._artifacts = served.artifacts()
        self._slot, self._epoch = slot, epoch
        self._method: GuardedMethod | None = None  # with what was committed, and nothing else
        self._tried: GuardedMethod | None = None  # with the group that is being committed
        self._items = 0
        self._commits = 0
        self._counted = self._heard = self._logged = 0
        self._state_bytes = 0
        self._kept: tuple[int, int, bytes] | None = None
        self.committed: tuple[int, int, bytes] | None = None
        """Round, commit and the state that the store has of this worker, for whoever asks."""

    @property
    def pause_seconds(self) -> float:
        """Between two commits, so that what is written stays within bounds."""
        return self._state_bytes / _BYTES_PER_SECOND

    def begin(self, row: RoundRow) -> bool:
        """Make the round's method, with what this slot has committed of the round; whether the
        store has what it takes, and the round is of the task as it is known here."""
        self._method = self._tried = None
        served, store = self._served, self._store
        version = store.checkpoints.get("version")
        if row.generation != served.generation or version is None or version.version != row.version:
            return False
        if store.fleet.tasks.find(served.number).served != served.task.text:
            return False
        share = store.shares.find(row.round, self._slot)
        try:
            method = self._made(row, version.state, share)
        except RestoreError as error:
            LogEvent.ROUND_LEFT_ALONE.log(round=row.round, problem=error)
            return False
        except (MethodFault, ValueError) as error:
            self.hold(error)
            return False
        self._commits = self._counted = self._heard = 0
        self._state_bytes = 0
        self._kept = self.committed = None
        if share is not None:
            self._commits, self._counted, self._heard = share.commits, share.counted, share.heard
        self._method = method
        return True

    def _made(self, row: RoundRow, version: State, share: ShareRow | None) -> GuardedMethod:
        """The round's method, with what is in the store of this slot."""
        rng = np.random.default_rng([self._store.fleet.facts.seed, 0])
        method = self._binding.build(row.items, rng, self._artifacts)
        method.restore(version)
        method.open_round(row.round)
        self._items = self._binding.items_of(method)
        if share is not None and share.state is not None:
            method.merge(unpack_state(share.state))
        return method

    def hold(self, error: Exception) -> None:
        """The method's code failed: its task is held, for all workers."""
        self._method = self._tried = None
        with self._store.database.transaction():
            hold_failed(self._store, self._served.task, error)

    def read_each(self, row: RoundRow, sent: Sequence[Sent]) -> list[Update | WireError]:
        """Raises RoundOver where the round is of another task by now."""
        method = self._committed_method(row)
        return method.take_each(decode_each(self._binding, sent, self._items))

    def _committed_method(self, row: RoundRow) -> GuardedMethod:
        """Raises RoundOver where the round is of another task by now."""
        if self._method is None and not self.begin(row):
            raise RoundOver
        assert self._method is not None
        return self._method

    def next_seq(self) -> int:
        """Numbers that no other worker gives out, nor this slot after another start."""
        place = (self._slot << _EPOCH_BITS) + self._epoch
        return (place << _COUNT_BITS) + self._logged + 1

    def try_each(
        self, row: RoundRow, group: Sequence[tuple[LoggedUpdate, Update]]
    ) -> Mapping[int, str]:
        """Raises RoundOver as :meth:`read_each` does."""
        method = self._committed_method(row)
        self._method, self._tried = None, method
        self._logged += len(group)
        try:
            method.absorb_each([update for _, update in group])
        except MethodFault:
            failed = self._absorb_anew(row, group)
            if not failed:
                raise  # no update's fault
            return failed
        return {}

    def _absorb_anew(
        self, row: RoundRow, group: Sequence[tuple[LoggedUpdate, Update]]
    ) -> Mapping[int, str]:
        """What cannot be absorbed may leave half of itself behind: what is left of the group is
        absorbed into what was committed before.

        Once for all that fail by themselves, and once more to see that nothing fails without them.
        """
        failed: dict[int, str] = {}
        known = -1
        while len(failed) > known:
            known = len(failed)
            method = self._begun_anew(row)
            for logged, update in group:
                if logged.seq in failed:
                    continue
                try:
                    method.absorb(update)
                except MethodFault as error:
                    failed[logged.seq] = str(error)
                    LogEvent.UPDATE_QUARANTINED.log(
                        error,
                        update=logged.seq,
                        device=logged.device_id,
                        why=failed[logged.seq],
                        round=row.round,
                    )
                    method = self._begun_anew(row)
        return failed

    def _begun_anew(self, row: RoundRow) -> GuardedMethod:
        """Raises RoundOver as :meth:`read_each` does."""
        self._method = None
        self._method, self._tried = None, self._committed_method(row)
        return self._tried

    def keep(
        self, row: RoundRow, group: Sequence[tuple[LoggedUpdate, Update]], heard: int
    ) -> list[LoggedUpdate]:
        """Raises RoundOver where the round takes no more."""
        assert self._tried is not None
        if not self._store.rounds.is_open(row.round):
            raise RoundOver
        self._counted += len(group)
        self._heard += heard
        self._commits += 1
        state = pack_state(self._tried.share()) if self._tried.adds_up else None
        self._store.shares.put(
            ShareRow(
                row.round,
                self._slot,
                self._epoch,
                self._commits,
                self._counted,
                self._heard,
                state,
            )
        )
        self._state_bytes = len(state or b"")
        self._kept = None if state is None else (row.round, self._commits, state)
        return [] if self._tried.adds_up else [logged for logged, _ in group]

    def absorb(
        self, row: RoundRow, group: Sequence[tuple[LoggedUpdate, Update]]
    ) -> Collection[int]:
        """The commit is done: the coordinator may have it from here."""
        self._method, self._tried = self._tried, None
        self.committed = self._kept
        return ()


class RoundFollower:
    """A task's round, as the store has it, and whom it waits for on this worker's shards.

    It waits for those of the devices here (:class:`HeldRegistry`) that the round selects.
    ``leaving`` is called while the round before is still the current one, which is over. A round
    that is held is followed once it is let go.
    """

    failed = False

    def __init__(
        self, shared: TaskShared, slot: WorkerSlot, keeper: ShareKeeper, leaving: Callable[[], None]
    ) -> None:
        self._task, self._selector = shared.task.name, shared.task.selector
        self._store, self._registry = shared.store, shared.registry
        self._times = RoundTimes(shared.clock, shared.unix_clock)
        self._slot = slot
        self._keeper = keeper
        self._leaving = leaving
        self._heard: set[bytes] = set()
        self._came_late: dict[bytes, float | None] = {}
        self._latest: RoundRow | None = None
        self.current: RoundRow | None = None
        self.silent: frozenset[bytes] = frozenset()
        """Devices that the round before waited for in vain."""

    @property
    def generation(self) -> int:
        return self._store.facts.generation

    @property
    def elapsed_seconds(self) -> float:
        return math.inf if self.current is None else self._times.since_opening_seconds(self.current)

    def next_number(self) -> int:
        return self._latest.round + 1 if self._latest else 1

    def refresh(self) -> bool:
        """Look at the store; whether another round is followed from now on, or none."""
        latest = self._store.rounds.latest()
        self._latest = latest[0] if latest else None
        row = self._latest
        if row is not None and (row.closed_unix_seconds is not None or row.held is not None):
            row = None
        known = self.current
        if known is not None and row is not None and row.round == known.round:
            self.current = row
            return False
        if known is not None:
            self._leaving()
            self.silent = frozenset(self._selected(known)) - self._heard
            self.current, self._heard = None, set()
        if row is None or not self._keeper.begin(row):
            return known is not None
        judged = self._store.log.judged(row.generation, row.round)
        self._heard = {each for each in judged if self._is_ours(each)}
        self._times.since_opening_seconds(row)
        self.current = row
        return True

    def find_open(self, generation: int, number: int) -> RoundRow | None:
        """Raises ``WireError`` for one that is open, and not known here yet."""
        for _ in range(2):
            row = self.current
            if row is not None and (row.generation, row.round) == (generation, number):
                return row
            if number < self.next_number():
                break
            self.refresh()  # perhaps it opened a moment ago
        latest = self._latest
        if latest and latest.round == number and latest.closed_unix_seconds is None:
            raise WireError("not-served", "the round is not known to this worker yet")
        return None

    def awaits(self, device_id: bytes) -> bool:
        is_new = device_id not in self._heard and self._is_ours(device_id)
        return is_new and self.is_selected(device_id)

    def is_selected(self, device_id: bytes) -> bool:
        return self.current is not None and self.selects(self.current, device_id)

    def selects(self, row: RoundRow, device_id: bytes) -> bool:
        return self._registry.is_selected(device_id, self._task, row, self._selector.admits)

    def heard_of(self, device_id: bytes, counted_seconds: float | None = None) -> None:
        self._heard.add(device_id)

    def came_late(self, row: RoundRow, device_id: bytes, *, updates: bool) -> None:
        """For the coordinator, who waits for it again: nothing waits until it is written down."""
        if self.selects(row, device_id):
            seconds = self._times.late_seconds(row) if updates else None
            if seconds is not None or device_id not in self._came_late:
                self._came_late[device_id] = seconds

    def save_late(self) -> None:
        """Write down who came late; inside a transaction."""
        if self._came_late:
            self._store.late.add(self._came_late)
            self._came_late.clear()

    def since_opening_seconds(self, row: RoundRow) -> float:
        return self._times.since_opening_seconds(row)

    def reload_hold(self) -> None:
        """The coordinator holds rounds."""

    def _selected(self, row: RoundRow) -> Iterable[bytes]:
        found = self._registry.selected(self._task, row, self._selector.admits)
        return filter(self._is_ours, found)

    def _is_ours(self, device_id: bytes) -> bool:
        """Whether its shard is this worker's: others are heard too, and nobody waits for them."""
        of = self._slot.of
        return of == 1 or shard_of(device_id) % of == self._slot.place
