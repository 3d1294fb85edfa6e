"""A task's evaluation: what devices say in a round becomes the figures of the round's version."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from aggregator.evaluation import (
    FLEET,
    DeviceReport,
    Evaluated,
    Figure,
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
from aggregator.store.rows import DeviceEvaluation, RoundRow
from aggregator.task.evaluation import EvaluationSettings, metric_of, named
from device_sdk.evaluation.report import ALONE, read_evaluations, write_evaluations
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.manifest import evaluates_in, is_control


@dataclass
class Evaluator:
    """Notes what devices say, sums it up when their round ends, and tells when to stop.

    What single devices said lies in the store until another version follows: a round without quorum
    leaves its version to the next one, in which a device that evaluates it again counts once all
    the same. A version's figures are made once, with the last of its rounds: of two that follow
    each other, subtraction would give those of the few devices that came in between. ``parts``:
    capacity classes that devices may name, beside ``k=N``. ``settings`` None: the task asks for no
    evaluation.
    """

    store: TaskStore
    task: str
    settings: EvaluationSettings | None
    _stopped: tuple[int, Evaluated | None] | None = field(default=None, init=False)

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

    def note(self, row: RoundRow, said: Iterable[DeviceEvaluation]) -> None:
        """Write down what was read; inside the transaction that settles it."""
        self.store.evaluations.note(row.version, said)

    def round_closes(self, row: RoundRow, *, made: bool, revoked: Iterable[bytes]) -> str:
        """Sum up what was said of the round's version, but for those ``revoked``; inside the
        transaction that closes it.

        ``made``: another version follows; only then are figures made. To be called before that one
        is committed, since it is then that what was said is deleted, and that older models are
        dropped. What to say of it, once it is committed; empty for nothing.
        """
        self._stopped = None
        figures = (
            self._figures(row.version, set(revoked)) if made and self.settings is not None else []
        )
        if figures:
            self.store.evaluations.put(row.version, row.round, figures)
            self.store.versions.note_metrics(row.version, _metrics(figures))
        if not figures or self.settings is None:
            return ""
        metric = metric_of(self.settings.ranking)
        told = (in_a_line(figures), what_it_brings(figures, metric), what_serves(figures, metric))
        return f"version {row.version}: {'; '.join(filter(None, told))}"

    def _figures(self, version: int, revoked: set[bytes]) -> list[Figure]:
        assert self.settings is not None
        said = self.store.evaluations.said(version)
        reports = self._reports(each for each in said if each.device_id not in revoked)
        return summarise(reports, self.settings.rules)

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

        To be called between rounds, ``version`` being the newest.
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
        if self._stopped is None or self._stopped[0] != version:
            facts = self.store.facts
            history = [
                each
                for each in self.store.evaluations.history(*named(settings.ranking.metric))
                if facts.replaced_at <= each.version < version
            ]
            self._stopped = (
                version,
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
