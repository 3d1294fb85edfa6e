"""The state machine of rounds: open, collecting, closed. Deadline and quorum decide."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aggregator.errors import MethodFault
from aggregator.methods.method import RoundSummary
from aggregator.rounds.aggregation import Aggregation
from aggregator.rounds.attendance import Attendance
from aggregator.rounds.evaluator import Evaluator
from aggregator.shared import TaskShared
from aggregator.store import STORE_FAILURES
from aggregator.store.rounds import RoundRow
from aggregator.task.file import RoundSettings
from device_sdk.wire.arrays.exchange import Broadcast
from device_sdk.wire.publish.manifest import EVERYONE
from device_sdk.wire.seal.keys import draw

# How long the next round collects.

LAST_ROUNDS = 5
_QUANTILE = 0.9
_MOST_LATE_IN_A_ROUND = 20_000


def deadline_seconds(settings: RoundSettings, arrivals: Sequence[NDArray[np.float32]]) -> float:
    """Seconds until the deadline of a round that opens now.

    ``arrivals``: seconds after the opening at which the updates of the last rounds arrived, late
    ones included (without them a deadline that cut off the slow would go on shrinking). With
    ``adaptive_deadline`` it is their 90th percentile, over all of these rounds together, times the
    margin, within the configured bounds.

    An arrival counts for no more than ``settings.deadline_seconds``. Each device has one a round,
    so a part of the fleet moves the result by its share: while fewer than a tenth of the arrivals
    are of devices that lie, it is no longer than the slowest honest one's, times the margin.
    """
    if not settings.adaptive_deadline:
        return settings.deadline_seconds
    known = [times for times in arrivals[:LAST_ROUNDS] if len(times)]
    if not known:
        return settings.deadline_seconds
    capped = np.minimum(np.concatenate(known), settings.deadline_seconds)
    wanted = float(np.quantile(capped, _QUANTILE)) * settings.deadline_margin
    return float(np.clip(wanted, settings.least_deadline_seconds, settings.deadline_seconds))


class LateArrivals:
    """When devices came that missed the last rounds' ends: the first time of each device a round.

    In memory: after a restart, deadlines know of no late device until one is late again.
    """

    def __init__(self) -> None:
        self._since_round = 0
        self._seconds: dict[int, dict[bytes, float]] = {}

    def round_opens(self, number: int) -> None:
        """Forget all but the last rounds before this one."""
        self._since_round = number - LAST_ROUNDS
        for old in [each for each in self._seconds if each < self._since_round]:
            del self._seconds[old]

    def note(self, number: int, device_id: bytes, seconds: float) -> None:
        """A device's update for round ``number`` came ``seconds`` after the round's opening."""
        if number < self._since_round:
            return
        first = self._seconds.setdefault(number, {})
        # Beyond the bound the slow are many enough to decide the deadline.
        if len(first) < _MOST_LATE_IN_A_ROUND:
            first.setdefault(device_id, seconds)

    def seconds(self) -> NDArray[np.float32]:
        """All of them, of all these rounds."""
        return np.array(
            [each for first in self._seconds.values() for each in first.values()], np.float32
        )


_LOG = logging.getLogger(__name__)
_REST_SECONDS = 10 * 365 * 86_400


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """A round was opened and its publication stored."""

    row: RoundRow
    carried: int
    """Updates of rounds without quorum that it begins with."""


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """A round ended. ``next_version`` None: without quorum."""

    row: RoundRow
    summary: RoundSummary
    next_version: int | None
    silent: frozenset[bytes] = frozenset()
    """Devices that it selected and heard nothing of."""


@dataclass(frozen=True, slots=True)
class RoundHeld:
    """A round could not be closed or, if it has not begun, not be published."""

    row: RoundRow
    why: str


RoundEvent = RoundOpened | RoundClosed | RoundHeld


class SealRound(Protocol):
    """Seals and stores a round's publication; called inside the transaction that opens it."""

    def __call__(self, row: RoundRow, broadcast: Broadcast) -> None: ...


class RoundMachine:
    """One round after another. ``tick`` is to be called often; it never waits."""

    def __init__(
        self,
        shared: TaskShared,
        aggregation: Aggregation,
        seal_round: SealRound,
        evaluator: Evaluator,
        attendance: Attendance | None = None,
        *,
        failed: bool = False,
    ) -> None:
        self._task, self._settings = shared.task.name, shared.task.round
        self._selector = shared.task.selector
        self._store, self._registry = shared.store, shared.registry
        self._unix_clock, self._random_bytes = shared.unix_clock, shared.random_bytes
        self._aggregation = aggregation
        self._seal_round = seal_round
        self._evaluator = evaluator
        self._attendance = Attendance() if attendance is None else attendance
        self._late = LateArrivals()
        self._began_unix = 0.0
        self._earliest_close_unix = 0.0
        self._earliest_open_unix = 0.0
        self._lacked = 0  # devices to wait for, as was said
        self._counted_at = -1
        self._eligible = 0
        self._played = self._store.rounds.played(self._store.facts.replaced_at)
        self.paused = False
        """Whether no other round opens."""
        self.unpublished: str | None = None
        """Why the next round could not be published; none opens before it is released."""
        self.current: RoundRow | None = None
        self.failed = failed
        """Whether the method's code is not called any more: its task is held, see ``TaskBoard``."""
        self._resume()

    @property
    def arrived(self) -> int:
        """Updates counted in the current round."""
        return self._attendance.counted

    @property
    def outstanding(self) -> int:
        """Selected devices that were not heard of in the current round."""
        return self._attendance.outstanding

    @property
    def generation(self) -> int:
        """See the manifest."""
        return self._store.facts.generation

    def next_number(self) -> int:
        latest = self._store.rounds.latest()
        return latest[0].round + 1 if latest else 1

    def tick(self) -> RoundEvent | None:
        """Open or close a round if it is time to; None when nothing changed."""
        if self.failed:
            return None
        now = self._unix_clock()
        row = self.current
        if row is None:
            return self._open(now) if self._may_open(now) else None
        if row.held is not None:
            return None
        if _rests(row):
            # Nobody takes part in it; it ends when rounds may go on, or for another version.
            ends = self._may_go_on() or self._aggregation.goes_back
            return self._close(row, now) if ends else None
        if row.closed_unix_seconds is not None:
            return self._close(row, now)  # nothing enters any more: a process before did not finish
        self._attendance.look(row)
        # A clock that was set back gives the round its length once more, and no year on top.
        self._began_unix = min(self._began_unix, now)
        everyone_came = not self._attendance.missing and (
            self.arrived > 0 or self._all_were_revoked(row)
        )
        over = self._left(row, now) <= 0 and not _is_within(
            self._earliest_close_unix, now, self._settings.resume_grace_seconds
        )
        # Whoever comes to a full round loses it. Without quorum, though, the next would begin full.
        full = self._aggregation.full and self._aggregation.participants >= self._settings.quorum
        return self._close(row, now) if everyone_came or over or full else None

    @property
    def stopped(self) -> bool:
        """Whether early stopping has ended the rounds."""
        return self._evaluator.stopped(self._aggregation.version)

    @property
    def rests(self) -> bool:
        """Whether nobody takes part in the current round, which lasts until rounds may go on."""
        return self.current is not None and _rests(self.current)

    def seconds_left(self) -> float | None:
        """Until the deadline of the current round; None without one."""
        if self.current is None or _rests(self.current):
            return None
        return self._left(self.current, self._unix_clock())

    def find_open(self, generation: int, number: int) -> RoundRow | None:
        """The current round, where it is the one of these numbers."""
        row = self.current
        if row is None or (row.generation, row.round) != (generation, number):
            return None
        return row

    def awaits(self, device_id: bytes) -> bool:
        """Whether a device was selected for the current round and has no verdict in it yet."""
        return device_id in self._attendance.missing

    def is_selected(self, device_id: bytes) -> bool:
        """Whether a device of the registry was selected for the current round."""
        return self.current is not None and self.selects(self.current, device_id)

    def selects(self, row: RoundRow, device_id: bytes) -> bool:
        """Whether a round, of now or before, selects a device of the registry."""
        return self._registry.is_selected(device_id, self._task, row, self._selector.admits)

    def heard_of(self, device_id: bytes, counted_seconds: float | None = None) -> None:
        """A device had its verdict; ``counted_seconds`` after the opening if it was counted."""
        self._attendance.heard_of(device_id, counted_seconds)

    def came_late(self, row: RoundRow, device_id: bytes) -> None:
        """A device's update of a closed round arrived; adaptive deadlines count it once.

        If the round had selected the device: others do not wait to be waited for.
        """
        if self.selects(row, device_id):
            seconds = max(0.0, self._unix_clock() - row.opened_unix_seconds)
            self._late.note(row.round, device_id, seconds)

    def revoked(self, device_id: bytes) -> None:
        """A device that will not be heard of."""
        self._attendance.drop(device_id)

    def labels_changed(self) -> None:
        """Devices that the task does not admit any more are not waited for."""
        if self._selector and self.current is not None:
            self._attendance.keep(self._selected(self.current))

    @property
    def eligible(self) -> int:
        """Devices that the task is for."""
        if not self._selector:
            return len(self._registry)
        if self._counted_at != self._registry.revision:
            self._counted_at = self._registry.revision
            self._eligible = self._registry.eligible(self._selector.admits)
        return self._eligible

    def follow(self, other: RoundMachine) -> None:
        """Take over what the same task's machine before this one had in memory only."""
        self._late, self._earliest_open_unix = other._late, other._earliest_open_unix
        self._lacked = other._lacked

    def _all_were_revoked(self, row: RoundRow) -> bool:
        # Where nobody is missing any more, it was heard or revoked. A round that selected nobody
        # keeps its time, and one whose devices were all refused, or could not train: the next
        # would be no different.
        return row.expected > 0 and not self._attendance.any_heard

    def reload_hold(self) -> None:
        """Look again whether the operator released the round."""
        self.unpublished = self._store.facts.unpublished
        if self.current is not None:
            self.current = self._store.rounds.find(self.current.round)

    def _left(self, row: RoundRow, now: float) -> float:
        return self._began_unix + (row.deadline_unix_seconds - row.opened_unix_seconds) - now

    def _resume(self) -> None:
        self.reload_hold()
        if self.unpublished is not None:
            _LOG.error("round %d is held: %s", self.next_number(), self.unpublished)
        latest = self._store.rounds.latest()
        row = latest[0] if latest and latest[0].unfinished else None
        if self.failed:
            self._aggregation.rest()
        else:
            self._aggregation.resume(row)
        if row is None:
            return
        self.current = self._store.rounds.find(row.round)  # resuming may have held it
        self._began_unix = row.opened_unix_seconds
        self._attendance.resume(self._store, row, self._selected(row))
        self._earliest_close_unix = self._unix_clock() + self._settings.resume_grace_seconds
        if self.current is not None and self.current.held is not None:
            _LOG.error("round %d is held: %s", row.round, self.current.held)
        else:
            _LOG.info("round %d goes on with %d updates", row.round, self._aggregation.participants)

    def _may_open(self, now: float) -> bool:
        if self.unpublished is not None or self.paused:
            return False
        if _is_within(self._earliest_open_unix, now, self._settings.pause_seconds):
            return False
        enrolled, wanted = self.eligible, self._settings.wait_for_devices
        lacked = wanted if enrolled < wanted else 0
        if lacked and lacked != self._lacked:
            # Once: each device that enrols is said anyway. A fleet that shrinks below it later
            # would stand still without a word.
            _LOG.info(
                "no round opens before %d devices are enrolled (round.wait_for_devices)%s; "
                "there are %d",
                wanted,
                f" with {self._selector}" if self._selector else "",
                enrolled,
            )
        self._lacked = lacked
        return not lacked

    def _may_go_on(self) -> bool:
        most = self._settings.most_rounds
        return (not most or self._played < most) and not self.stopped

    def _open(self, now: float) -> RoundOpened | RoundHeld:
        number = self.next_number()
        if self._may_go_on():
            threshold = min(EVERYONE, int(self._settings.share * 2**64))
            self._late.round_opens(number)
            seconds = deadline_seconds(self._settings, self._times())
        else:
            # The last version is published too, in a round that selects nobody.
            threshold, seconds = 0, float(_REST_SECONDS)
        row = RoundRow(
            round=number,
            generation=self.generation,
            version=self._aggregation.version,
            opened_unix_seconds=now,
            deadline_unix_seconds=now + seconds,
            seed=draw(self._random_bytes, 32),
            threshold=threshold,
            expected=0,
            items=self._aggregation.items,
            opening=self._store.fleet.facts.openings + 1,
        )
        missing = self._selected(row)
        row = replace(row, expected=len(missing))
        try:
            broadcast = self._aggregation.open_round(number)
            with self._store.database.transaction():
                self._store.rounds.add(row)
                self._store.late.forget(number - LAST_ROUNDS)
                self._store.fleet.facts.openings = row.opening
                self._seal_round(row, broadcast)
        except (MethodFault, *STORE_FAILURES):
            raise
        except Exception as error:
            return self._hold(row, f"it could not be published: {error}", error)
        self.current = row
        self._attendance.begin(missing)
        self._played += int(not _rests(row))
        self._began_unix, self._earliest_close_unix = now, 0.0
        self._aggregation.carry_over(row)
        self.reload_hold()
        return RoundOpened(row, self._aggregation.participants)

    def _hold(self, row: RoundRow, why: str, error: Exception) -> RoundHeld:
        # What was committed stays, and so does the service: it says what is wrong, and waits.
        _LOG.error("round %d is held: %s", row.round, why, exc_info=error)
        with self._store.database.transaction():
            if self.current is None:
                self._store.facts.unpublished = why
            else:
                self._store.rounds.hold(row.round, why)
        self._aggregation.resume(self.current)
        self.reload_hold()
        return RoundHeld(row, why)

    def _close(self, row: RoundRow, now: float) -> RoundClosed | RoundHeld:
        if not self._aggregation.gather(row, now):
            self.reload_hold()
            why = "" if self.current is None else self.current.held or ""
            return RoundHeld(row, why)
        self._attendance.look(row)
        participants = self._aggregation.participants
        summary, made = RoundSummary(row.round, row.version, participants), None
        if participants >= self._settings.quorum:
            try:
                summary = self._aggregation.close_round(self._registry.revoked_ids())
            except MethodFault:
                raise
            except Exception as error:
                return self._hold(row, f"the method could not close it: {error}", error)
            made = summary.version
        times = self._attendance.arrivals(row)
        with self._store.database.transaction():
            self._store.rounds.close(row.round, now, made, participants, summary.metrics, times)
            found = self._evaluator.round_closes(
                row,
                made=made not in (None, row.version),
                revoked=self._registry.revoked_ids(),
            )
            self._store.reports.keep_last(row.round)
            if made is None:
                self._store.checkpoints.drop_partial()
            else:
                self._aggregation.commit_version(summary)
        if found:
            _LOG.info("%s", found)
        silent = frozenset(self._attendance.missing)
        self.current = None
        self._attendance.begin(set())
        self._earliest_open_unix = now + self._settings.pause_seconds
        return RoundClosed(row, summary, made, silent=silent)

    def _selected(self, row: RoundRow) -> set[bytes]:
        return set(self._registry.selected(self._task, row, self._selector.admits))

    def _times(self) -> list[NDArray[np.float32]]:
        stored = self._store.rounds.arrivals(LAST_ROUNDS)
        if stored:
            late = (
                self._late.seconds(),
                self._store.late.seconds(self.next_number() - LAST_ROUNDS),
            )
            stored[0] = np.concatenate([stored[0], *late])
        return stored


def _rests(row: RoundRow) -> bool:
    return row.threshold == 0


def _is_within(at_unix_seconds: float, now_unix_seconds: float, seconds: float) -> bool:
    """Whether it comes within ``seconds`` from now, which is what it was set to at the most;
    further off, it was reckoned by a clock that was set back."""
    return now_unix_seconds < at_unix_seconds <= now_unix_seconds + seconds
