"""A task's evaluation: what devices say in a round becomes the figures of the round's version."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from aggregator.evaluation import (
    FLEET,
    DeviceReport,
    Evaluated,
    Figure,
    as_json,
    figure_name,
    in_a_line,
    stalled_since,
    summarise,
    typical_name,
    what_it_brings,
    what_serves,
)
from aggregator.events import LogEvent
from aggregator.store import TaskStore
from aggregator.store.evaluations import EvaluatedVersion
from aggregator.store.rows import DeviceEvaluation, RoundRow
from aggregator.task.evaluation import EvaluationSettings, metric_of, named
from device_sdk.evaluation.report import ALONE, read_evaluations, write_evaluations
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.manifest import evaluates_in, is_control

_LOGGED = ("stage", "metric", "part", "value", "devices")
"""What a log line has of a figure."""


@dataclass
class Evaluator:
    """Notes what devices say, sums it up when nothing more is to come, and tells when to stop.

    What single devices said lies in the store until their version's figures are made: a round
    without quorum leaves its version to the next one, in which a device that evaluates it again
    counts once all the same. A version's figures are made once: of two that follow each other,
    subtraction would give those of the few devices that came in between. So they wait for who comes
    late and counts, and are made in the order of the versions: what was decided by them stays.
    Where the best version is asked for because rounds have stopped, those without figures get none.

    ``settings`` None: the task asks for no evaluation. ``most_age``: of how many versions ago
    updates count (:attr:`~aggregator.task.file.RoundSettings.most_age`).
    """

    store: TaskStore
    task: str
    settings: EvaluationSettings | None
    most_age: int = -1
    # Of the newest version, and of how far figures are made: also after a transaction that failed.
    _stopped: tuple[tuple[int, int | None], Evaluated | None] | None = field(
        default=None, init=False
    )

    def read(
        self, row: RoundRow, device_id: bytes, part: str, data: bytes
    ) -> DeviceEvaluation | None:
        """What a device says in a round, to be noted; None where nobody asked it. What it says of a
        model that it trains alone is left out where it is not of the control arm, which nobody
        chooses, and which may have become smaller since the round opened.

        Raises ``WireError`` for what no device writes, and for statistics that no data has.
        """
        said = read_evaluations(data)
        if self.settings is None or not data:
            return None
        terms = self.settings.terms
        if not evaluates_in(terms, row.seed, self.task, row.round, device_id):
            return None
        asked = tuple(each for each in said.results if each.stage != ALONE)
        if asked != said.results and not is_control(terms, self.task, device_id):
            data = write_evaluations(replace(said, results=asked, rounds=0))
        return DeviceEvaluation(device_id, part, data)

    def asks(self, row: RoundRow, device_ids: Iterable[bytes]) -> list[bytes]:
        """Those of devices that a round had selected that it asked for an evaluation."""
        if self.settings is None:
            return []
        terms, seed = self.settings.terms, row.seed
        return [
            each for each in device_ids if evaluates_in(terms, seed, self.task, row.round, each)
        ]

    def note(self, said: Iterable[tuple[int, DeviceEvaluation]]) -> list[DeviceEvaluation]:
        """Write down what was read, each with the version that it is of; inside the transaction
        that settles it. What is of a version whose figures are made is dropped: a list of that."""
        told = list(said)
        first = self._first if told else 0
        self.store.evaluations.note([each for each in told if each[0] >= first])
        return [each for version, each in told if version < first]

    def is_done(self, row: RoundRow) -> bool:
        """Whether the figures of a round's version are made."""
        return row.version < self._first

    @property
    def _first(self) -> int:
        """Of the versions whose figures are to be made."""
        return self.store.facts.evaluated_from or 0

    def begin(self, version: int) -> None:
        """A process begins, with this version as the newest."""
        if self.store.facts.evaluated_from is None:
            self.store.facts.evaluated_from = version  # a program before made figures at once

    def is_due(self, newest: int) -> bool:
        """Whether a version before the ``newest`` has no figures yet, and may get some."""
        first = self.store.facts.evaluated_from
        return first is not None and first < newest and not self.stopped(newest)

    def settle(
        self, newest: int, waits: Callable[[RoundRow], bool], revoked: Collection[bytes]
    ) -> list[EvaluatedVersion]:
        """Make the figures of versions before the ``newest``, the oldest first, up to one of which
        more is to be heard, without what those ``revoked`` said; inside a transaction.

        ``waits``: whether a round of before may still bring something. To be called before the
        newest version is committed, since it is then that older models are dropped. What to
        :meth:`tell`, once that is committed.
        """
        facts, found = self.store.facts, []
        while self.is_due(newest):
            version = facts.evaluated_from or 0
            rounds = self.store.rounds.of_version(version)
            young = self.settings is not None and newest - version <= self.most_age
            if young and any(map(waits, rounds)):
                break
            # A version that a rollback or new items ended has none.
            if any((row.next_version or 0) > version for row in rounds):
                found += self._sum_up(version, rounds[-1].round, revoked)
            self._drop_before(version + 1)
        return found

    def tell(self, found: Iterable[EvaluatedVersion]) -> None:
        """Log what versions' figures are."""
        settings = self.settings
        metric = "" if settings is None else metric_of(settings.ranking)
        has_control = settings is not None and settings.has_control
        for each in found:
            brings = what_it_brings(each.figures, metric, asked=has_control)
            told = (in_a_line(each.figures), brings, what_serves(each.figures, metric))
            LogEvent.EVALUATED.log(
                version=each.version,
                found="; ".join(filter(None, told)),
                figures=[{key: as_json(one)[key] for key in _LOGGED} for one in each.figures],
            )

    def _drop_before(self, version: int) -> None:
        self.store.facts.evaluated_from = version
        self.store.evaluations.forget(version)

    def _sum_up(
        self, version: int, round_number: int, revoked: Collection[bytes]
    ) -> list[EvaluatedVersion]:
        """The version with its figures, where it has any."""
        settings = self.settings
        figures = [] if settings is None else self._figures(settings, version, revoked)
        if not figures:
            return []
        self.store.evaluations.put(version, round_number, figures)
        self.store.versions.note_metrics(version, _metrics(figures))
        return [EvaluatedVersion(version, round_number, tuple(figures))]

    def _figures(
        self, settings: EvaluationSettings, version: int, revoked: Collection[bytes]
    ) -> list[Figure]:
        said = self.store.evaluations.said(version)
        reports = self._reports(each for each in said if each.device_id not in revoked)
        return summarise(reports, settings.rules)

    def _reports(self, said: Iterable[DeviceEvaluation]) -> Iterator[DeviceReport]:
        for each in said:
            try:
                yield DeviceReport(each.part, read_evaluations(each.report))
            except WireError as error:
                # A later version of this program knew a metric, and this one does not.
                LogEvent.EVALUATION_LEFT_OUT.log(problem=error)

    # -- early stopping ----------------------------------------------------------------------------

    def stopped(self, version: int) -> bool:
        """Whether no further round is to open, ``version`` being the newest.

        It follows from the stored figures of the versions before: nothing else is kept of it, and
        other settings are another answer.
        """
        return self._stall(version) is not None

    def stop(self, version: int) -> None:
        """Ask, once, for the best version to become the newest, where rounds have come to a stop.

        To be called between rounds or while they rest, ``version`` being the newest. What was said
        of versions that have no figures yet is dropped: the decision stays.
        """
        facts, stall = self.store.facts, self._stall(version)
        if stall is None:
            if facts.stopped_at is not None:
                facts.stopped_at = None
            return
        if facts.stopped_at == stall.version or self.settings is None:
            return
        versions = self.store.versions
        best = versions.ranked(self.settings.ranking)
        with self.store.database.transaction():
            facts.stopped_at = stall.version
            self._drop_before(max(version, facts.evaluated_from or 0))
            if best:
                versions.ask_for(best[0].version)
        LogEvent.EARLY_STOPPED.log(
            metric=self.settings.ranking.metric,
            version=stall.version,
            value=stall.value,
            rounds=self.settings.early_stopping,
            best=best[0].version if best else None,
        )

    def _stall(self, version: int) -> Evaluated | None:
        settings = self.settings
        if settings is None or not settings.early_stopping:
            return None
        facts = self.store.facts
        known = version, facts.evaluated_from
        if self._stopped is None or self._stopped[0] != known:
            history = [
                each
                for each in self.store.evaluations.history(*named(settings.ranking.metric))
                if facts.replaced_at <= each.version < version
            ]
            self._stopped = (
                known,
                stalled_since(
                    history,
                    higher_is_better=settings.ranking.higher_is_better,
                    most_rounds=settings.early_stopping,
                    least_improvement=settings.least_improvement,
                ),
            )
        return self._stopped[1]


def _metrics(figures: Iterable[Figure]) -> dict[str, float]:
    """The fleet's, by name; and of those that versions are compared by where there are enough
    devices (:attr:`~aggregator.evaluation.Figure.typical`)."""
    found: dict[str, float] = {}
    for each in figures:
        if each.part != FLEET:
            continue
        name = figure_name(each.stage, each.metric)
        both = {name: each.value, typical_name(name): each.typical}
        found |= {key: value for key, value in both.items() if not math.isnan(value)}
    return found
