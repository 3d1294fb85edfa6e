"""The state machine of rounds: open, collecting, closed. Quorum, deadline and habits decide."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from aggregator.errors import MethodFault, PacketsTooSmall
from aggregator.events import LogEvent
from aggregator.methods.method import RoundSummary
from aggregator.rounds.aggregation import Aggregation
from aggregator.rounds.attendance import Attendance, RoundTimes, asked_share
from aggregator.rounds.evaluator import Evaluator
from aggregator.shared import TaskShared
from aggregator.store import STORE_FAILURES, TaskStore
from aggregator.store.rows import RoundRow
from aggregator.task.file import RoundSettings, Task
from device_sdk.system.printable import in_words
from device_sdk.wire.arrays.exchange import Broadcast
from device_sdk.wire.publish.manifest import EVERYONE
from device_sdk.wire.publish.report import Reason
from device_sdk.wire.seal.keys import draw

# A task is held: its rounds stand still until somebody has looked, and nothing committed is lost.
#
# Where a round is open or being closed it is that round that is held; else it is the next one.


def hold(store: TaskStore, why: str) -> None:
    """Hold the task, and say why; inside a transaction."""
    latest = store.rounds.latest()
    if latest and latest[0].unfinished:
        store.rounds.hold(latest[0].round, why)
    else:
        store.facts.unpublished = why


def hold_failed(store: TaskStore, task: Task, error: Exception) -> None:
    """Hold the task for what failed in its affairs, in its method's code above all; inside a
    transaction. The log has the traceback."""
    what = str(error) if isinstance(error, MethodFault) else in_words(error)
    why = (
        f"{what}. Nothing that was committed is lost. Mend or change the package that offers the "
        f"method {task.binding.method_name!r} and restart serve, which tries it again; or replace "
        "the task"
    )
    LogEvent.TASK_HELD.log(error, why=why)
    hold(store, why)
    store.facts.failed = True


def held(store: TaskStore) -> str | None:
    """Why the task is held; None where it is not."""
    latest = store.rounds.latest()
    return store.facts.unpublished or (latest[0].held if latest else None)


def let_go(store: TaskStore) -> int:
    """Let it go on, without what is in quarantine; inside a transaction. How many updates those
    were."""
    latest = store.rounds.latest()
    store.facts.unpublished, store.facts.failed = None, False
    if latest:
        store.rounds.hold(latest[0].round, None)
    return store.log.drop_quarantined()


def try_again(store: TaskStore) -> None:
    """A life begins, perhaps of a program that was mended: what failed may succeed now. All else
    that holds a task is the operator's to judge, and holds on."""
    if store.facts.failed and not store.log.quarantined():
        with store.database.transaction():
            let_go(store)


HARM = frozenset(
    each.value
    for each in (
        Reason.STEP_TOO_LONG,
        Reason.CRASHED,
        Reason.OUT_OF_MEMORY,
        Reason.NOT_FINITE,
        Reason.DOES_NOT_FIT,
        Reason.BAD_CONTENT,
    )
)
"""What says something of the artifact, the version or the settings: of the device, its data, its
network or its owner speak the others."""
_WATCHED_ROUNDS = 2
_BEFORE_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Rollout:
    """How a round went: ``took`` devices were heard of, or fell silent; ``failed`` by reason."""

    took: int
    failed: dict[str, int]
    silent: int = 0

    def why_to_stop(self, settings: RoundSettings) -> str | None:
        """In words, for the operator; None where rounds may go on."""
        bad = self.silent + sum(self.failed.values())
        least = settings.abort_devices
        if not least or self.took < least or bad < settings.abort_share * self.took:
            return None
        said = [f"{count} failed ({reason})" for reason, count in sorted(self.failed.items())]
        said += [f"{self.silent} fell silent"] if self.silent else []
        return (
            f"of {self.took} devices that took it {', '.join(said)}: {settings.abort_share:.0%} or "
            "more of them (round.abort_share). Devices keep a harmful artifact out by themselves; "
            "see status and devices for who failed. Have the task replaced by one that is right "
            "(task replace), or go back to a good version (rollback) and release it"
        )


def rollout_of(store: TaskStore, row: RoundRow, missing: Collection[bytes]) -> Rollout:
    """Of a round that was just closed; ``missing``: selected devices that were not heard of.

    A device that is not heard of may sleep. Only where the task was replaced, and in its first
    rounds after that, those who took part until then and were not heard of since are counted.
    Numbers that are not finite may come of a device's own data: where another's training came
    right, they say nothing of the task.
    """
    failed = store.reports.reasons(row.generation, row.round)
    harm = {reason: count for reason, count in failed.items() if reason in HARM}
    if store.log.counted(row.generation, row.round):
        harm.pop(Reason.NOT_FINITE.value, None)
    silent = _fell_silent(store, row, missing)
    return Rollout(store.log.heard(row.generation, row.round) + silent, harm, silent)


def _fell_silent(store: TaskStore, row: RoundRow, missing: Collection[bytes]) -> int:
    recent = store.rounds.latest(_WATCHED_ROUNDS + _BEFORE_ROUNDS)
    since = [each for each in recent if each.generation == row.generation and each.threshold]
    before = [each for each in recent if each.generation < row.generation and each.threshold]
    # In one round a device may be between two sessions.
    if len(since) != _WATCHED_ROUNDS or not before:
        return 0
    gone = {device for each in before for device in store.log.judged(each.generation, each.round)}
    gone &= set(missing)
    for each in since:
        gone -= set(store.log.judged(each.generation, each.round))
    return len(gone)


_REST_SECONDS = 10 * 365 * 86_400
_LOOK_SECONDS = 1.0
"""Between two looks at whether the figures of versions before the newest can be made."""
_MOST_DRAWS = 64
_DRAWN_DEVICES = 20_000
"""In all draws of a round's seed but the first; of a large fleet any draw has some that come."""


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
    in_vain: Sequence[bytes] = ()
    """Those of them that it waited for, the longest wait last."""


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
        attendance: Attendance,
        *,
        failed: bool = False,
    ) -> None:
        self._task, self._settings = shared.task.name, shared.task.round
        self._selector = shared.task.selector
        self._store, self._registry = shared.store, shared.registry
        self._clock, self._unix_clock = shared.clock, shared.unix_clock
        self._random_bytes = shared.random_bytes
        self._aggregation = aggregation
        self._seal_round = seal_round
        self._evaluator = evaluator
        self._attendance = attendance
        # By the monotonic clock: no calendar makes a round or a pause longer, or shorter.
        self._times = RoundTimes(self._clock, self._unix_clock)
        self._earliest_close_seconds = self._earliest_open_seconds = -math.inf
        self._look_seconds = -math.inf  # when to look at them next
        self._lacked = 0  # devices to wait for, as was said
        self._begins_anew = False  # what it published does not fit the broker any more
        self._no_room_at: int | None = (
            None  # the largest packet at which nothing could be published
        )
        self._counted_at = -1
        self._eligible = 0
        self._played = self._store.rounds.played(self._store.facts.replaced_at)
        self.paused = False
        """Whether no other round opens."""
        self.unpublished: str | None = None
        """Why the next round could not be published, or the last one did harm; none opens before it
        is released."""
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
    def waits_for(self) -> int:
        """Devices that the current round waits for."""
        if self.current is None:
            return 0
        return len(self._attendance.waited_for(self.elapsed_seconds))

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
        self._settle_evaluations()
        now = self._unix_clock()
        row = self.current
        if row is None:
            return self._open(now) if self._may_open() else None
        if row.held is not None:
            return None
        if self._begins_anew:
            self._begins_anew = False
            return self._close(row, now)
        if _rests(row):
            # Nobody takes part in it; it ends when rounds may go on, or for another version.
            ends = self._may_go_on() or self._aggregation.goes_back
            return self._close(row, now) if ends else None
        if row.closed_unix_seconds is not None:
            return self._close(row, now)  # nothing enters any more: a process before did not finish
        elapsed = self.elapsed_seconds
        self._attendance.look(row, elapsed)
        everyone_came = not self._attendance.missing and (
            self.arrived > 0 or self._all_were_revoked(row)
        )
        # Sessions were lost with the process before, and all come later than they would have.
        grace = self._clock() < self._earliest_close_seconds
        over = not grace and elapsed >= self._attendance.closes_seconds(elapsed, self._has_quorum)
        # Whoever comes to a full round loses it. Without quorum, though, the next would begin full.
        full = self._aggregation.full and self._aggregation.participants >= self._settings.quorum
        enough = 0 < self._settings.wanted <= self._aggregation.gathered()
        return self._close(row, now) if everyone_came or over or full or enough else None

    def begin_anew(self) -> None:
        """What the current round, if any, has published does not fit the broker's packets: it ends,
        what came for it goes into the next, and that is cut to fit."""
        self._begins_anew = self.current is not None

    @property
    def stopped(self) -> bool:
        """Whether early stopping has ended the rounds."""
        return self._evaluator.stopped(self._aggregation.version)

    @property
    def rests(self) -> bool:
        """Whether nobody takes part in the current round, which lasts until rounds may go on."""
        return self.current is not None and _rests(self.current)

    def seconds_left(self) -> float | None:
        """Until the current round closes if nobody says anything more; None without one."""
        row = self.current
        if row is None or _rests(row):
            return None
        elapsed = self.elapsed_seconds
        return self._attendance.closes_seconds(elapsed, self._has_quorum) - elapsed

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

    def came_late(self, row: RoundRow, device_id: bytes, *, updates: bool) -> None:
        """A device's update of a closed round arrived, or word that there is none.

        Where the round had selected the device: others do not wait to be waited for.
        """
        if self.selects(row, device_id):
            seconds = self._times.late_seconds(row) if updates else None
            self._attendance.came_late(device_id, seconds, self.elapsed_seconds)

    def since_opening_seconds(self, row: RoundRow) -> float:
        """How long ago a round opened, of now or before."""
        return self._times.since_opening_seconds(row)

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
        self._earliest_open_seconds = other._earliest_open_seconds
        self._times = other._times
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

    @property
    def elapsed_seconds(self) -> float:
        """Since the current round opened; infinite without one."""
        row = self.current
        return math.inf if row is None else self._times.since_opening_seconds(row)

    def _has_quorum(self) -> bool:
        return self._aggregation.gathered() >= self._settings.quorum

    def _resume(self) -> None:
        self.reload_hold()
        if self.unpublished is not None:
            LogEvent.ROUND_HELD.log(round=self.next_number(), why=self.unpublished)
        latest = self._store.rounds.latest()
        row = latest[0] if latest and latest[0].unfinished else None
        if self.failed:
            self._aggregation.rest()
        else:
            self._aggregation.resume(row)
        self._evaluator.begin(self._aggregation.version)
        if row is None:
            return
        self.current = self._store.rounds.find(row.round)  # resuming may have held it
        self._attendance.resume(self._store, row, self._selected(row))
        self._earliest_close_seconds = self._clock() + self._settings.resume_grace_seconds
        if self.current is not None and self.current.held is not None:
            LogEvent.ROUND_HELD.log(round=row.round, why=self.current.held)
        else:
            LogEvent.ROUND_GOES_ON.log(round=row.round, participants=self._aggregation.participants)

    def _may_open(self) -> bool:
        if self.unpublished is not None or self.paused:
            return False
        if self._clock() < self._earliest_open_seconds:
            return False
        if self._no_room_at is not None:
            if self._no_room_at == self._store.fleet.facts.packet_bytes:
                return False
            self._no_room_at = None
        enrolled, wanted = self.eligible, self._settings.wait_for_devices
        lacked = wanted if enrolled < wanted else 0
        if lacked and lacked != self._lacked:
            # Once: each device that enrols is said anyway. A fleet that shrinks below it later
            # would stand still without a word.
            LogEvent.DEVICES_LACKING.log(wanted=wanted, labels=self._selector, enrolled=enrolled)
        self._lacked = lacked
        return not lacked

    def _may_go_on(self) -> bool:
        most = self._settings.most_rounds
        return (not most or self._played < most) and not self.stopped

    def _open(self, now: float) -> RoundOpened | RoundHeld | None:
        number = self.next_number()
        if self._may_go_on():
            threshold = self._threshold()
            seconds = self._settings.deadline_seconds
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
        row, missing = self._drawn(row)
        try:
            broadcast = self._aggregation.open_round(number)
            with self._store.database.transaction():
                self._store.rounds.add(row)
                self._store.fleet.facts.openings = row.opening
                self._seal_round(row, broadcast)
                if self._store.facts.no_room is not None:
                    self._store.facts.no_room = None
        except (MethodFault, *STORE_FAILURES):
            raise
        except PacketsTooSmall as error:
            self._wait_for_room(str(error))
            return None
        except Exception as error:
            return self._hold(row, f"it could not be published: {error}", error)
        self.current = row
        self._times.since_opening_seconds(row)
        self._attendance.begin(number, row.length_seconds, missing)
        self._played += int(not _rests(row))
        self._earliest_close_seconds = -math.inf
        self._aggregation.carry_over(row)
        self.reload_hold()
        return RoundOpened(row, self._aggregation.participants)

    def _wait_for_room(self, why: str) -> None:
        LogEvent.ROUND_TOO_LARGE.log(why=why)  # once for each limit
        self._no_room_at = self._store.fleet.facts.packet_bytes
        self._store.facts.no_room = why
        self._aggregation.resume(None)

    def _hold(self, row: RoundRow, why: str, error: Exception) -> RoundHeld:
        # What was committed stays, and so does the service: it says what is wrong, and waits.
        LogEvent.ROUND_HELD.log(error, round=row.round, why=why)
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
        self._attendance.look_at_all(row)
        participants = self._aggregation.participants
        summary, made = RoundSummary(row.round, row.version, participants), None
        if participants >= self._settings.quorum:
            try:
                summary = self._aggregation.close_round(self._registry.revoked_ids())
            except (MethodFault, *STORE_FAILURES):
                raise
            except Exception as error:
                return self._hold(row, f"the method could not close it: {error}", error)
            made = summary.version
        # Where nobody came, what was wrong was hardly all of the devices.
        in_vain = self._attendance.in_vain(self.elapsed_seconds) if self.arrived else []
        with self._store.database.transaction():
            ended = replace(
                row,
                closed_unix_seconds=now,
                took_seconds=self.elapsed_seconds,
                next_version=made,
                participants=participants,
                metrics=summary.metrics,
            )
            self._store.rounds.close(ended)
            self._attendance.habits.save(in_vain, self._registry.by_id)
            newest, revoked = made or row.version, set(self._registry.revoked_ids())
            found = self._evaluator.settle(newest, self._brings_more, revoked)
            self._store.reports.keep_last(row.round)
            if made is None:
                self._store.checkpoints.drop_partial()
            else:
                self._aggregation.commit_version(summary)
            silent = frozenset(self._attendance.missing)
            harm = rollout_of(self._store, row, silent).why_to_stop(self._settings)
            if harm is not None:
                self._store.facts.unpublished = harm
        self._evaluator.tell(found)
        if harm is not None:
            LogEvent.ROUND_STOPPED.log(round=row.round, why=harm)
        self.current = None
        self.reload_hold()
        self._attendance.end()
        self._earliest_open_seconds = self._clock() + self._settings.pause_seconds
        return RoundClosed(row, summary, made, silent=silent, in_vain=in_vain)

    def _settle_evaluations(self) -> None:
        """Make the figures that waited for devices that came late."""
        now, newest = self._clock(), self._aggregation.version
        if now < self._look_seconds:
            return
        self._look_seconds = now + _LOOK_SECONDS
        if self._evaluator.is_due(newest):
            revoked = set(self._registry.revoked_ids())
            with self._store.database.transaction():
                found = self._evaluator.settle(newest, self._brings_more, revoked)
            self._evaluator.tell(found)
        if self.rests:
            self._evaluator.stop(newest)

    def _brings_more(self, row: RoundRow) -> bool:
        """Whether a device that a round of before asked for an evaluation may still send it.

        As long as a round waits for its devices, though it ended early. Who was heard in a later
        one is through with it: a device trains one round after the other.
        """
        elapsed = self._times.since_opening_seconds(row)
        if elapsed >= row.length_seconds or _rests(row):
            return False
        missing = self._selected(row) - self._store.log.heard_since(row.generation, row.round)
        asked = self._evaluator.asks(row, missing)
        return self._attendance.awaits_any(asked, row.round, row.length_seconds, elapsed)

    def _drawn(self, row: RoundRow) -> tuple[RoundRow, set[bytes]]:
        """The round, and whom it selects: under another seed where those that are likely to come
        would be too few for its quorum, though there are more. It would last its whole time for
        devices that sleep."""
        missing = self._selected(row)
        if 0 < row.threshold < EVERYONE:
            likely = self._attendance.likely(
                each.device_id
                for each in self._registry.devices()
                if self._selector.admits(each.labels)
            )
            enough = min(self._settings.quorum, len(likely))
            for _ in range(min(_MOST_DRAWS, _DRAWN_DEVICES // (len(self._registry) + 1))):
                if len(likely & missing) >= enough:
                    break
                other = replace(row, seed=draw(self._random_bytes, 32))
                found = self._selected(other)
                if len(likely & found) > len(likely & missing):
                    row, missing = other, found
        return replace(row, expected=len(missing)), missing

    def _selected(self, row: RoundRow) -> set[bytes]:
        return set(self._registry.selected(self._task, row, self._selector.admits))

    def _threshold(self) -> int:
        habits, admits = self._attendance.habits, self._selector.admits
        likely = sum(
            admits(each.labels) and habits.is_likely(each.device_id)
            for each in self._registry.devices()
        )
        return min(EVERYONE, int(asked_share(self._settings, likely) * 2**64))


def _rests(row: RoundRow) -> bool:
    return row.threshold == 0
