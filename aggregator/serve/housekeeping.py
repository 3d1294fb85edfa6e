"""What has to be done now and then, and between rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from aggregator.errors import AggregatorError
from aggregator.events import LogEvent
from aggregator.publish.mirror import ChunkMirror
from aggregator.rounds.aggregation import Aggregation
from aggregator.rounds.evaluator import Evaluator
from aggregator.shared import Shared, TaskShared
from aggregator.task.file import read_continued_catalogue, stored_catalogue
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.chunks import Reassembler
from device_sdk.wire.seal.session_table import SessionTable

_SWEEP_SECONDS = 10.0
_SEEN_SECONDS = 1.0
_FORGET_SECONDS = 60.0
_DAY_SECONDS = 86_400.0


class Upkeep:
    """A task's: takes in new items and older versions, and forgets verdicts."""

    def __init__(self, shared: TaskShared, aggregation: Aggregation, evaluator: Evaluator) -> None:
        self._store = shared.store
        self._evaluator = evaluator
        self._catalogue = shared.task.catalogue
        self._verdict_seconds = shared.task.store.verdict_days * _DAY_SECONDS
        self._aggregation = aggregation
        self._catalogue_stamp: tuple[int, int] | None = None  # of no file that was looked at

    def forget(self, served_seconds: float) -> None:
        """Delete what is old enough, inside a transaction."""
        self._store.rounds.forget_verdicts(served_seconds, self._verdict_seconds)

    def begin(self, *, in_a_round: bool) -> None:
        """What the operator asked for while nobody served, an older version or a catalogue with new
        items: taken in now, or after the round.

        Inside a transaction: raises AggregatorError, maybe after an older version was taken in,
        where the catalogue is not usable and no round needs to go on without it.
        """
        if not in_a_round:
            self._go_back()
        if self._catalogue is None:
            return
        if not in_a_round and not self._aggregation.participants:
            self._take_in(self._catalogue)
            return
        try:
            found = len(read_continued_catalogue(self._catalogue, self._store))
        except AggregatorError as error:
            LogEvent.CATALOGUE_REFUSED.log(problem=error)
            return
        if found > self._aggregation.items:
            LogEvent.CATALOGUE_WAITS.log(items=found, model_items=self._aggregation.items)

    def between_rounds(self) -> None:
        """Take in an older version that the operator wants back, and items that he appended to the
        catalogue.

        Not while updates wait that were made for the present version. A file that is not usable is
        reported and left alone: a running fleet does not stop for a slip of the pen.
        """
        self._go_back()
        if self._catalogue is None or self._aggregation.participants:
            return
        if file_stamp(self._catalogue) == self._catalogue_stamp:
            return
        try:
            self._take_in(self._catalogue)
        except AggregatorError as error:
            LogEvent.CATALOGUE_REFUSED.log(problem=error)

    def _go_back(self) -> None:
        self._evaluator.stop(self._aggregation.version)
        if self._aggregation.goes_back and not self._aggregation.participants:
            latest = self._store.rounds.latest()
            self._aggregation.go_back(latest[0].round if latest else 0)

    def _take_in(self, path: Path) -> None:
        """Make the file's catalogue the current one, and lengthen the model if it has new items."""
        self._catalogue_stamp = file_stamp(path)
        catalogue = read_continued_catalogue(path, self._store)
        if stored_catalogue(self._store) == catalogue:
            return
        latest = self._store.rounds.latest()
        with self._store.database.transaction():
            self._store.facts.catalogue = encode(catalogue)
            if len(catalogue) > self._aggregation.items:
                self._aggregation.grow(len(catalogue), latest[0].round if latest else 0)
                LogEvent.CATALOGUE_GREW.log(items=len(catalogue))


class Housekeeping:
    """Sweeps memory, saves counters, and erases; ``tasks`` gives each task's upkeep.

    Verdicts age by the monotonic clock alone, over all the time that ``serve`` has run: a calendar
    that jumps a month ahead for a moment would delete what must be kept.
    """

    def __init__(
        self,
        shared: Shared,
        tasks: Callable[[], Iterable[Upkeep]],
        table: SessionTable,
        reassembler: Reassembler,
        mirror: ChunkMirror | None,
    ) -> None:
        self._mirror = mirror
        self._store, self._refusals, self._clock = shared.store, shared.refusals, shared.clock
        self._registry = shared.registry
        self._next_seen_seconds = self._clock() + _SEEN_SECONDS
        self._tasks = tasks
        self._table = table
        self._reassembler = reassembler
        self._next_sweep_seconds = self._clock() + _SWEEP_SECONDS
        self._next_forget_seconds = self._counted_seconds = self._clock()
        self._erase_due = True  # what a process before this one deleted and did not erase
        self._next_erase_seconds = self._clock()

    def turn(self) -> None:
        """To be called often; does something every second, every ten, or every minute."""
        now = self._clock()
        if now >= self._next_seen_seconds:
            self._next_seen_seconds = now + _SEEN_SECONDS
            self._registry.save_seen()
        if now >= self._next_sweep_seconds:
            self._next_sweep_seconds = now + _SWEEP_SECONDS
            self._table.sweep()
            self._reassembler.expire()
            if self._mirror is not None:
                self._mirror.watch()
            with self._store.database.transaction():
                self._refusals.save(self._store.refusals)
                problem = (self._mirror.problem if self._mirror else "") or None
                if problem != self._store.facts.mirror_problem:
                    self._store.facts.mirror_problem = problem
        if self._erase_due and now >= self._next_erase_seconds:
            self._erase_due = not self._store.database.erase_deleted()
            if self._erase_due:
                self._next_erase_seconds = now + _SWEEP_SECONDS
        if now >= self._next_forget_seconds:
            self._next_forget_seconds = now + _FORGET_SECONDS
            self._forget(now)

    def something_was_deleted(self) -> None:
        """Updates, a key, a publication: erased from the disk in the next turn, or soon."""
        self._erase_due = True

    def _forget(self, now: float) -> None:
        served = self._store.facts.served_seconds + (now - self._counted_seconds)
        with self._store.database.transaction():
            self._store.facts.served_seconds = served
            for upkeep in self._tasks():
                upkeep.forget(served)
        self._counted_seconds = now


def file_stamp(path: Path) -> tuple[int, int]:
    """Another one where the file was written since; zeros where there is none."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)
