"""What devices found out about versions: what each said, while it is needed, and the figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from aggregator.evaluation import Evaluated, Figure
from aggregator.store.database import TableOfTask
from aggregator.store.devices import STAYS
from aggregator.store.rows import DeviceEvaluation
from aggregator.store.schema import or_replace
from device_sdk.evaluation.report import STAGES, Stage

_AT_ONCE = 1000  # of at most 4 KiB each


def _key(said: tuple[int, DeviceEvaluation]) -> tuple[int, bytes]:
    return said[0], said[1].device_id


@dataclass(frozen=True, slots=True)
class EvaluatedVersion:
    """All figures of one version, the fleet's before those of its parts. ``round``: the last one
    that evaluated it."""

    version: int
    round: int
    figures: tuple[Figure, ...]


class Evaluations(TableOfTask):
    """A task's rows of the tables ``device_evaluations`` and ``figures``."""

    def note(self, said: Iterable[tuple[int, DeviceEvaluation]]) -> None:
        """Versions, and what devices say of them; inside the transaction that settles these
        devices. What a device says of a version again, in a later round, takes the place of what it
        said before; of a device that was revoked nothing is kept."""
        self._database.execute_many(
            f"INSERT INTO device_evaluations SELECT ?1, ?2, ?3, ?4, ?5 WHERE {STAYS} "
            f"{or_replace('device_evaluations')}",
            [(self._task, version, *each) for version, each in sorted(said, key=_key)],
        )

    def said(self, version: int) -> Iterator[DeviceEvaluation]:
        """One at a time, by device."""
        last = b""
        page = "AND device_id > ? ORDER BY device_id LIMIT ?"
        while found := list(
            self._all(DeviceEvaluation, "device_evaluations", page, last, _AT_ONCE, version=version)
        ):
            yield from found
            last = found[-1].device_id

    def forget(self, before_version: int) -> int:
        """Delete what devices said of versions before this one; how many."""
        return self._delete("device_evaluations", "AND version < ?", before_version)

    def put(self, version: int, round_number: int, figures: Sequence[Figure]) -> None:
        """A version's figures, in the place of those that it had; inside a transaction."""
        self._delete("figures", version=version)
        for each in figures:
            self._put("figures", each, version=version, round=round_number)

    def latest(self, most: int = 1) -> list[EvaluatedVersion]:
        """The newest versions that have figures, the newest first."""
        query = "SELECT DISTINCT version FROM figures WHERE task = ? ORDER BY version DESC LIMIT ?"
        versions = [row[0] for row in self._database.rows(query, (self._task, most))]
        return [self._of(version) for version in versions]

    def history(self, stage: Stage, metric: str) -> list[Evaluated]:
        """What versions are compared by (:attr:`Figure.comparable`) of the fleet's figures of one
        metric, the oldest first."""
        query = (
            "SELECT version, round, COALESCE(typical, value) FROM figures "
            "WHERE task = ? AND stage = ? AND metric = ? AND part = '' AND value IS NOT NULL "
            "ORDER BY version"
        )
        return [Evaluated(*row) for row in self._database.rows(query, (self._task, stage, metric))]

    def find(self, version: int) -> EvaluatedVersion | None:
        """A version's; None where it has no figures."""
        found = self._of(version)
        return found if found.figures else None

    def _of(self, version: int) -> EvaluatedVersion:
        number = self._value("round", "figures", version=version)
        found = self._all(Figure, "figures", "ORDER BY metric, part", version=version)
        return EvaluatedVersion(
            version, number or 0, tuple(sorted(found, key=lambda each: STAGES.index(each.stage)))
        )
