"""From a decrypted update to a verdict: decode, check, commit in groups, absorb, receipt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from aggregator.events import about
from aggregator.guard import GuardedBinding
from aggregator.refusals import Refusals
from aggregator.rounds.evaluator import Evaluator
from aggregator.rounds.late import Ages, Sent
from aggregator.rounds.model_parts import ModelParts
from aggregator.shared import TaskShared
from aggregator.store.reports import KEPT_ROUNDS
from aggregator.store.rows import (
    NOTED,
    DeviceEvaluation,
    LastParticipation,
    LoggedUpdate,
    RoundRow,
    StoredReport,
    StoredVerdict,
)
from device_sdk.wire.arrays import exchange
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import decode, encode
from device_sdk.wire.publish.receipts import (
    Receipt,
    RecordType,
    UpdateMessage,
    Verdict,
    read_contribution,
    read_update,
    update_digest,
)
from device_sdk.wire.publish.report import (
    Report,
    ReportedOutcome,
    known_reason,
)
from device_sdk.wire.seal.admission import TokenBuckets

# How often one device may ask for what was decided before.

_BURST = 64.0
_PER_SECOND = 1.0


class Repeats:
    """Answers that cost work and change nothing, bounded for each device.

    A device whose receipts are lost sends its updates again, with growing waits, and is answered
    each time. One that goes on beyond ``_BURST`` answers and one a second is not heard for a
    while: :meth:`exhausted` is asked before a message is decrypted. Only what a session's envelope
    proved to be a device's own is charged to it, so nobody can silence another.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._buckets = TokenBuckets(_BURST, _PER_SECOND, clock)

    def exhausted(self, device_id: bytes) -> bool:
        """Whether the device has to wait before it is heard again."""
        return self._buckets.is_empty(device_id)

    def answered(self, device_id: bytes) -> bool:
        """An update of the device was answered, or refused, without being new.

        Whether that was the last answer for a while.
        """
        if not self.exhausted(device_id):
            self._buckets.take(device_id)
        return self.exhausted(device_id)


_UPDATE = int(RecordType.UPDATE)
_NOTHING = LastParticipation()
_COUNTED = Verdict.COUNTED  # named for every update: an enum looks its members up each time


class Settled(NamedTuple):
    """A verdict, to be sent to the device."""

    device_id: bytes
    receipt: Receipt


class OpenRounds(Protocol):
    """What there is to know of a task's rounds where updates come in; see
    :class:`~aggregator.rounds.machine.RoundMachine`."""

    failed: bool
    """Whether the task is held, and takes none."""

    @property
    def current(self) -> RoundRow | None:
        """The round that takes updates."""

    @property
    def elapsed_seconds(self) -> float:
        """Since it opened, by the monotonic clock."""

    @property
    def generation(self) -> int: ...
    def find_open(self, generation: int, number: int) -> RoundRow | None: ...
    def next_number(self) -> int: ...
    def awaits(self, device_id: bytes) -> bool: ...
    def is_selected(self, device_id: bytes) -> bool: ...
    def selects(self, row: RoundRow, device_id: bytes) -> bool: ...
    def since_opening_seconds(self, row: RoundRow) -> float: ...
    def heard_of(self, device_id: bytes, counted_seconds: float | None = None) -> None: ...
    def came_late(self, row: RoundRow, device_id: bytes, *, updates: bool) -> None: ...
    def reload_hold(self) -> None: ...


class Absorbs(Protocol):
    """Where a task's updates go; see :class:`~aggregator.rounds.aggregation.Aggregation`."""

    def read_each(
        self, row: RoundRow, sent: Sequence[Sent]
    ) -> list[exchange.Update | WireError]: ...
    def next_seq(self) -> int: ...
    def try_each(
        self, row: RoundRow, group: Sequence[tuple[LoggedUpdate, exchange.Update]]
    ) -> Mapping[int, str]: ...
    def keep(
        self, row: RoundRow, group: Sequence[tuple[LoggedUpdate, exchange.Update]], heard: int
    ) -> list[LoggedUpdate]: ...
    def absorb(
        self, row: RoundRow, group: Sequence[tuple[LoggedUpdate, exchange.Update]]
    ) -> Collection[int]: ...


class _Staged(NamedTuple):
    """Attributes:
    row: of the update's own round.
    arrived_seconds: after that one's opening.
    age: None where it is the open round; see :class:`~aggregator.rounds.late.Ages`.
    """

    update: UpdateMessage
    row: RoundRow
    arrived_seconds: float
    age: int | None = None


_Said = tuple[int, DeviceEvaluation]
"""A version, and what a device says of it."""
_TOO_LATE = "what it found out about a version came when the figures of that one were made"
_Key = tuple[int, bytes]
"""Round and device: all that tells apart what is staged of a generation."""


def _key(update: UpdateMessage) -> _Key:
    return update.identity.round, update.identity.device_id


class _Decided(NamedTuple):
    staged: _Staged
    verdict: StoredVerdict
    logged: LoggedUpdate | None
    decoded: exchange.Update | None
    """With ``logged``, where it is to be counted."""
    report: Report | None
    said: _Said | None
    width: int


class Ingest:
    """Stages a task's updates by :meth:`judge`, decides them by :meth:`commit`.

    Who may say something now is judged as it comes. What is in it is read when the group is
    committed: many bodies at once cost a fraction of each by itself. No receipt leaves before what
    it says is on disk, and none says ``counted`` before the update was absorbed.
    """

    def __init__(
        self,
        shared: TaskShared,
        rounds: OpenRounds,
        aggregation: Absorbs,
        evaluator: Evaluator,
        parts: ModelParts,
    ) -> None:
        self._task, self._store, self._registry = shared.task, shared.store, shared.registry
        self._refusals, self._unix_clock = shared.refusals, shared.unix_clock
        self._widths_of = GuardedBinding(shared.task.binding).widths_of
        self._rounds = rounds
        self._aggregation = aggregation
        self._evaluator = evaluator
        self.parts = parts
        self._ages, self._most_age = Ages(shared.store), shared.task.round.most_age
        self._staged: dict[_Key, _Staged] = {}  # to be decided in the open round
        self._rivals: dict[_Key, UpdateMessage] = {}  # other bodies than those, the last of each
        self._in_doubt = False  # whether a commit failed, and what became of it was not asked
        self.counted = 0
        """Updates counted since the start."""
        self.widths: dict[int, int] = {}
        """Updates of the current round by the width that the device trained."""
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """Of the reports since the start, by outcome and reason."""
        self._seen: dict[bytes, LastParticipation] = {}
        # By what it is of: the report, and what it says of its round's version.
        self._late: dict[tuple[object, ...], tuple[StoredReport, list[_Said]]] = {}
        self._late_rounds: dict[bytes, int] = {}  # by device, the newest round it was late for
        # Of updates without a verdict yet, what they say of their rounds' versions; None once it is
        # written down.
        self._early: dict[_Key, _Said | None] = {}

    def __len__(self) -> int:
        return len(self._staged)

    def judge(self, update: UpdateMessage) -> Settled | None:
        """Judge an update. What is known already is settled at once, the rest is staged."""
        identity = update.identity
        row = self._rounds.find_open(identity.generation, identity.round)
        if row is None:
            return self._offer_for_closed(update)
        return self._offer_for_open(update, row)

    def commit(self) -> list[Settled]:
        """Make what is staged durable, absorb it, and settle it; in the order it came. Where that
        fails, it stays staged, and :meth:`sift` comes before the next try."""
        row = self._rounds.current
        if not self._staged or row is None:
            if self._late or any(self._early.values()):
                with self._store.database.transaction():
                    self.save_seen()
            return []
        self._in_doubt = True
        decided = self._decide(list(self._staged.values()), row)
        group = [
            (each.logged, each.decoded)
            for each in decided
            if each.logged is not None and each.decoded is not None
        ]
        now_unix_seconds = int(self._unix_clock())
        told = [(each.staged, each.report) for each in decided if each.report is not None]
        tried = self._aggregation.try_each(row, group)
        bad = [(logged, tried[logged.seq]) for logged, _ in group if logged.seq in tried]
        good = [each for each in group if each[0].seq not in tried] if bad else group
        with self._store.database.transaction(shared=True):
            here = sum(each.staged.age is None for each in decided)
            bodies = self._aggregation.keep(row, good, here)
            bodies += [logged for logged, _ in bad]
            self._store.log.append(bodies, [each.verdict for each in decided])
            for logged, why in bad:
                self._store.log.quarantine(logged, row.generation, why)
            if told:
                kept = [each for each in told if self._keeps_reports_of(each[0].row)]
                self._store.reports.add([_stored(each.update, report) for each, report in kept])
                for each, report in kept:
                    self._tell(each.update, report, now_unix_seconds)
            self._note_said(
                each.said
                for each in decided
                if each.said is not None and _key(each.staged.update) not in self._early
            )
            self.save_seen()
        found = [(self._rivals.get(_key(each.staged.update)), each.verdict) for each in decided]
        rivals = [self._repeat(rival, verdict) for rival, verdict in found if rival is not None]
        self._in_doubt = False
        self.abandon()
        failed = {*tried, *self._aggregation.absorb(row, good)}
        if failed:
            self._rounds.reload_hold()
        return [self._settle(each, failed, now_unix_seconds) for each in decided] + rivals

    def abandon(self) -> None:
        """Forget what is staged: it gets no receipt, and is sent again."""
        self._staged.clear()
        self._rivals.clear()

    def sift(self) -> list[Settled]:
        """After a commit that failed: settle what is staged and has a verdict in the store all the
        same, that of a commit whose outcome was not known, or of another process."""
        if not self._in_doubt:
            return []
        found = []
        for staged in self._staged.values():
            identity = staged.update.identity
            known = self._store.log.verdict(identity.generation, identity.round, identity.device_id)
            if known is not None:
                found.append((staged, known))
        self._in_doubt = False
        for staged, known in found:
            del self._staged[_key(staged.update)]
            self._rivals.pop(_key(staged.update), None)  # it is sent again
            self._heard(staged, known.seconds if known.reason is None else None)
        return [_known(staged.update, known) for staged, known in found]

    def save_seen(self) -> None:
        """Write down what devices told, and which were counted before this group; inside a
        transaction."""
        here = self._registry.by_id  # of who was revoked since, nothing is kept
        self._store.participations.note(
            {each: row for each, row in self._seen.items() if here(each)}
        )
        self._store.reports.add([report for report, _ in self._late.values()])
        self._note_said(each for _, said in self._late.values() for each in said)
        self._note_said(filter(None, self._early.values()))
        self._store.database.when_kept(self._forget_seen)

    def _note_said(self, said: Iterable[_Said]) -> None:
        """Write down what devices found out about versions; inside a transaction."""
        dropped = self._evaluator.note(said) if self._task.evaluation is not None else []

        def kept() -> None:
            for each in dropped if self._most_age >= 0 else ():
                self._refusals.note_reason("evaluation-late", each.device_id, _TOO_LATE)

        self._store.database.when_kept(kept)

    def _forget_seen(self) -> None:
        self._seen.clear()
        self._late.clear()
        self._early = dict.fromkeys(self._early)

    def follow(self, other: Ingest) -> None:
        """Go on with the counts of the same task's ingest before this one."""
        self.counted, self._seen = other.counted, other._seen
        self.outcomes, self._late = other.outcomes, other._late
        self._late_rounds, self._early = other._late_rounds, other._early

    def round_opened(self) -> None:
        """Begin the counts of a round."""
        self.widths.clear()
        oldest = self._rounds.next_number() - 1 - self._most_age
        self._early = {key: said for key, said in self._early.items() if key[0] >= oldest}

    def _offer_for_open(self, update: UpdateMessage, row: RoundRow) -> Settled | None:
        if self._is_staged(update):
            return None
        if not self._rounds.awaits(update.identity.device_id):
            # Rare: it was heard of before, or it has no part in this round.
            refused = self._judge_unexpected(update, row)
            if refused is not None:
                return refused
        elapsed_seconds = max(0.0, self._rounds.elapsed_seconds)
        self._stage(_Staged(update, row, min(row.length_seconds, elapsed_seconds)))
        return None

    def _is_staged(self, update: UpdateMessage) -> bool:
        staged = self._staged.get(_key(update))
        # The same again: its receipt is about to be sent. Another is judged when the group is
        # committed: what is only staged may never be.
        if staged is not None and staged.update.body_sha256 != update.body_sha256:
            self._rivals[_key(update)] = update
        return staged is not None

    def _stage(self, staged: _Staged) -> None:
        if self._rounds.failed:
            # No verdict is known, and none can be found: the device sends it again later.
            raise WireError("not-served", "the task is held: its method's code failed")
        self._staged[_key(staged.update)] = staged

    def _decide(self, staged: Sequence[_Staged], row: RoundRow) -> list[_Decided]:
        """Read and check what devices sent: to be counted, noted or refused, in the order it came.

        Nothing is written, and what is to be counted has the numbers that follow in the log.
        """
        reports: list[Report | WireError | None] = [_told(each.update) for each in staged]
        # Empty only where a report says that there is nothing, and is right.
        sent = [
            Sent(each.update.body, each.update.identity.device_id, each.row.round, each.age)
            for each, report in zip(staged, reports, strict=True)
            if not isinstance(report, WireError) and (each.update.body or report is None)
        ]
        read = self._aggregation.read_each(row, sent) if sent else []
        updates = iter(zip(read, self._widths_of(read), strict=True))
        seq = self._aggregation.next_seq()
        decided: list[_Decided] = []
        for each, report in zip(staged, reports, strict=True):
            update, own, arrived_seconds = each.update, each.row, each.arrived_seconds
            device_id = update.identity.device_id
            decoded, said, reason, width = None, None, None, 0
            try:
                if isinstance(report, WireError):
                    raise report
                if update.body or report is None:
                    found, width = next(updates)
                    decoded = _good(found)
                else:
                    reason = NOTED
                said = None if report is None else self._said(own, device_id, width, report)
            except WireError as error:
                reason, decoded = error.reason, None
                self._refusals.note(error, device_id)
            logged = None
            if decoded is not None:
                logged = LoggedUpdate(seq, own.round, device_id, arrived_seconds, update.body)
                seq += 1
            verdict = StoredVerdict(
                own.generation,
                own.round,
                device_id,
                update.body_sha256,
                reason,
                arrived_seconds,
            )
            kept = None if isinstance(report, WireError) else report
            decided.append(_Decided(each, verdict, logged, decoded, kept, said, width))
        return decided

    def _judge_unexpected(self, update: UpdateMessage, row: RoundRow) -> Settled | None:
        identity = update.identity
        known = self._store.log.verdict(identity.generation, identity.round, identity.device_id)
        if known is not None:
            return self._repeat(update, known)
        if self._rounds.is_selected(identity.device_id):
            return None
        device = self._registry.by_id(identity.device_id)
        if device is not None and not self._task.selector.admits(device.labels):
            return self._refuse(update, "not-eligible")
        joined_later = device is not None and device.first_round > row.opening
        return self._refuse(update, "joined-later" if joined_later else "not-selected")

    def _offer_for_closed(self, update: UpdateMessage) -> Settled | None:
        identity = update.identity
        if self._is_staged(update):
            return None
        known = self._store.log.verdict(identity.generation, identity.round, identity.device_id)
        if known is not None:
            return self._repeat(update, known)
        row = self._store.rounds.find(identity.round)
        generation = self._rounds.generation
        if identity.generation > generation or (
            identity.generation == generation and identity.round >= self._rounds.next_number()
        ):
            return self._refuse(update, "unknown-round")
        if row is None or row.generation != identity.generation or row.forgotten:
            # By the mark that was set when the verdicts were deleted, and by no clock.
            return _settled(update, Verdict.FORGOTTEN)
        updates = bool(update.body) or update.report is None
        may_count = updates and self._may_count_late(row, identity.device_id)
        if may_count and self._rounds.current is None:
            # There is no verdict until a round is open that could say; it comes again.
            self._note_early(update, row)
            return None
        try:
            age = self._counts_late(row, identity.device_id) if may_count else None
        except WireError:
            self._note_early(update, row)
            raise
        if age is not None:
            self._stage(_Staged(update, row, self._rounds.since_opening_seconds(row), age))
            return None
        self._note_late(update, row)
        # Once, when it comes for the first time: copies say nothing of how long the device takes.
        if row.round > self._late_rounds.get(identity.device_id, 0):
            self._late_rounds[identity.device_id] = row.round
            self._rounds.came_late(row, identity.device_id, updates=updates)
        if not updates:
            return _settled(update, Verdict.NOTED)
        self._refusals.note_reason("late", identity.device_id)
        return _settled(update, Verdict.LATE)

    def _may_count_late(self, row: RoundRow, device_id: bytes) -> bool:
        """Whether a device's update of a closed round may count in a later one."""
        rounds = self._rounds
        return self._most_age >= 0 and bool(row.threshold) and rounds.selects(row, device_id)

    def _counts_late(self, row: RoundRow, device_id: bytes) -> int | None:
        """The age of a device's update of a closed round, where it counts in the open one; None
        where it is too late. Raises ``WireError`` where another one of the device's has to count
        first."""
        current = self._rounds.current
        age = self._ages.of(current, row.round) if current and current.threshold else None
        if age is None or age > self._most_age:
            return None
        late = (each.update for each in self._staged.values() if each.age is not None)
        if device_id in self._ages.brought or any(e.identity.device_id == device_id for e in late):
            # A device trains one round after the other: whoever kept many back makes no version
            # alone.
            raise WireError("one-at-a-time", "another update of an earlier round is in this one")
        return age

    def _said(self, row: RoundRow, device_id: bytes, width: int, report: Report) -> _Said | None:
        """What a device found out about the version of its round; None for nothing."""
        if not report.evaluation:
            return None
        option = "" if report.details is None else report.details.option
        part = self.parts.told(option, width)
        said = self._evaluator.read(row, device_id, part, report.evaluation)
        return None if said is None else (row.version, said)

    def _keeps_reports_of(self, row: RoundRow) -> bool:
        return row.round > self._rounds.next_number() - 1 - KEPT_ROUNDS

    def _note_late(self, update: UpdateMessage, row: RoundRow) -> None:
        """Why a device was too late for a round is worth as much as why it failed in one.

        Written with the next group. A device is heard once on a round that had selected it, while
        the round's reports are kept.
        """
        identity = update.identity
        kept = self._keeps_reports_of(row)
        if update.report is None or not kept or not self._rounds.selects(row, identity.device_id):
            return
        if self._store.reports.has(identity.generation, identity.round, identity.device_id):
            return
        try:
            report = read_told(update)
            said = self._said(row, identity.device_id, 0, report)
        except WireError as error:
            self._refusals.note(error, identity.device_id)
            return
        stored = _stored(update, report)
        if stored[:3] not in self._late:
            is_new = _key(update) not in self._early
            self._late[stored[:3]] = stored, [said] if said is not None and is_new else []
            self._tell(update, report, int(self._unix_clock()))

    def _note_early(self, update: UpdateMessage, row: RoundRow) -> None:
        """An update that comes again has no verdict yet. What it says of its round's version is
        written down now: nobody waits for a device that was heard of a later round meanwhile."""
        if update.report is None or _key(update) in self._early or self._evaluator.is_done(row):
            return
        try:
            said = self._said(row, update.identity.device_id, 0, read_told(update))
        except WireError:
            return  # it is refused for that once it has a verdict
        if said is not None:
            self._early[_key(update)] = said

    def _tell(self, update: UpdateMessage, report: Report, now_unix_seconds: int) -> None:
        outcome = report.outcome.value, known_reason(report.reason)
        self._store.database.when_kept(lambda: self.outcomes.update([outcome]))
        identity = update.identity
        known = self._seen.get(identity.device_id, _NOTHING)
        if identity.round >= (known.round or 0):
            self._seen[identity.device_id] = LastParticipation(
                known.counted_unix_seconds,
                known.width,
                now_unix_seconds,
                identity.round,
                encode(report.without_evaluation()) if report.evaluation else update.report,
            )

    def _repeat(self, update: UpdateMessage, known: StoredVerdict) -> Settled:
        """The stored verdict, for the same update again."""
        settled = _known(update, known)
        if settled.receipt.verdict is Verdict.CONFLICT:
            self._refusals.note_reason("conflict", update.identity.device_id)
        return settled

    def _refuse(self, update: UpdateMessage, reason: str) -> Settled:
        self._refusals.note_reason(reason, update.identity.device_id)
        return _settled(update, Verdict.REFUSED, reason)

    def _heard(self, staged: _Staged, counted_seconds: float | None = None) -> None:
        """A device had its verdict, in the open round or, of an earlier one, beside it."""
        device_id = staged.update.identity.device_id
        if staged.age is None:
            self._rounds.heard_of(device_id, counted_seconds)
            return
        self._rounds.came_late(staged.row, device_id, updates=counted_seconds is not None)
        if counted_seconds is not None:
            self._ages.brought.add(device_id)

    def _settle(self, decided: _Decided, failed: Collection[int], now_unix_seconds: int) -> Settled:
        staged, logged, reason = decided.staged, decided.logged, decided.verdict.reason
        update = staged.update
        self._early.pop(_key(update), None)
        device_id = update.identity.device_id
        digest = update_digest(update.identity, update.content_sha256)
        if reason == NOTED:
            self._heard(staged)
            return Settled(device_id, Receipt(digest, Verdict.NOTED))
        if logged is not None and logged.seq in failed:
            reason = "quarantined"
            self._refusals.note_reason(reason, device_id)
        if reason is not None or logged is None or decided.decoded is None:
            self._heard(staged)
            return Settled(device_id, Receipt(digest, Verdict.REFUSED, reason or "refused"))
        self._heard(staged, logged.arrived_seconds)
        width = decided.width
        if width:
            self.widths[width] = self.widths.get(width, 0) + 1
        self.counted += 1
        known = self._seen.get(device_id, _NOTHING)
        self._seen[device_id] = LastParticipation(now_unix_seconds, width or None, *known[2:])
        return Settled(device_id, Receipt(digest, _COUNTED))


def _good(found: exchange.Update | WireError) -> exchange.Update:
    if isinstance(found, WireError):
        raise found
    return found


def _told(update: UpdateMessage) -> Report | WireError | None:
    if update.report is None:
        return None
    try:
        return read_told(update)
    except WireError as error:
        return error


def read_told(update: UpdateMessage) -> Report:
    """A contribution's report. Raises ``WireError``, also for one that trained and sends nothing,
    or sends something and did not train."""
    report = decode(Report, update.report or b"")
    if (report.outcome is ReportedOutcome.TRAINED) is not bool(update.body):
        raise WireError("bad-field", "an update goes with what was trained, and with nothing else")
    return report


def _stored(update: UpdateMessage, report: Report) -> StoredReport:
    identity = update.identity
    return StoredReport.of(identity.generation, identity.round, identity.device_id, report)


def _known(update: UpdateMessage, known: StoredVerdict) -> Settled:
    """What to say of an update of which the store has a verdict, or one of another body."""
    if known.body_sha256 != update.body_sha256:
        return _settled(update, Verdict.CONFLICT)
    verdict = {None: Verdict.COUNTED, NOTED: Verdict.NOTED}.get(known.reason, Verdict.REFUSED)
    return _settled(update, verdict, (known.reason or "") if verdict is Verdict.REFUSED else "")


def _settled(update: UpdateMessage, verdict: Verdict, reason: str = "") -> Settled:
    digest = update_digest(update.identity, update.content_sha256)
    return Settled(update.identity.device_id, Receipt(digest, verdict, reason))


class Inbox:
    """Hands each update to its task.

    ``absent``: tasks that are not served at present and will be: their devices get no answer, and
    send again.
    """

    def __init__(self, refusals: Refusals, repeats: Repeats) -> None:
        self._refusals = refusals
        self._repeats = repeats
        self._ingests: Mapping[str, Ingest] = {}
        self._absent: frozenset[str] = frozenset()
        self._several = False

    def serve(self, ingests: Mapping[str, Ingest], absent: Iterable[str] = ()) -> None:
        """Take updates for these tasks from now on."""
        self._ingests, self._absent = ingests, frozenset(absent)
        self._several = len(ingests) + len(self._absent) > 1

    def offer(
        self, device_id: bytes, payload: bytes, record: int = RecordType.UPDATE
    ) -> Settled | None:
        """Judge an update or, by its ``record``, a contribution: a verdict, or None where it is
        staged, or not to be answered.

        Raises ``WireError`` for bytes that are no update: nothing can be said about those.
        """
        try:
            read = read_update if record == _UPDATE else read_contribution
            settled = self._judge(read(payload, device_id))
        except WireError:
            self._charge(device_id)
            raise
        if settled is not None:
            self._charge(device_id)
        return settled

    def _judge(self, update: UpdateMessage) -> Settled | None:
        task = update.identity.task
        ingest = self._ingests.get(task)
        if ingest is not None:
            if not self._several:
                return ingest.judge(update)
            with about(task):
                return ingest.judge(update)
        if task in self._absent:
            raise WireError("not-served", "an update for a task that is not served at present")
        self._refusals.note_reason("wrong-task", update.identity.device_id)
        return _settled(update, Verdict.REFUSED, "wrong-task")

    def _charge(self, device_id: bytes) -> None:
        if self._repeats.answered(device_id):
            self._refusals.note_reason("too-many-repeats", device_id)
