"""The versions that rounds made: what is known of each, and the model of those that are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from aggregator.errors import AggregatorError
from aggregator.evaluation import typical_name
from aggregator.store.database import Database, TableOfTask
from aggregator.store.facts import TaskFacts
from aggregator.store.rows import StoredCheckpoint, VersionRow
from aggregator.store.schema import packed
from device_sdk.artifact import safetensors
from device_sdk.artifact.errors import ArtifactError
from device_sdk.methods.state import State

Kind = Literal["version", "partial"]


# States of the method, as safetensors.


@dataclass(frozen=True, slots=True)
class MethodCheckpoint:
    """``state`` holds everything up to update ``seq`` of the log.

    A ``version`` is what a round made (its log starts anew, so ``seq`` is 0). A ``partial`` lies
    within the open round ``round``.
    """

    kind: Kind
    round: int
    seq: int
    version: int
    state: State


class Checkpoints(TableOfTask):
    """A task's rows of the table ``checkpoints``: at most one of each kind."""

    def put(self, checkpoint: MethodCheckpoint) -> None:
        """Replace the checkpoint of this kind; a version makes the partial one void."""
        if checkpoint.kind == "version":
            self.drop_partial()
        made = checkpoint
        stored = made.kind, made.round, made.seq, made.version, pack_state(made.state)
        self._put("checkpoints", StoredCheckpoint(*stored))

    def get(self, kind: Kind) -> MethodCheckpoint | None:
        found = self._find(StoredCheckpoint, "checkpoints", kind=kind)
        if found is None:
            return None
        state = unpack_state(found.state)
        return MethodCheckpoint(kind, found.round, found.seq, found.version, state)

    def version(self) -> int:
        """The model's, without reading it; 0 before the first."""
        query = "SELECT version FROM checkpoints WHERE task = ? AND kind = 'version'"
        return next((int(found) for (found,) in self._database.rows(query, (self._task,))), 0)

    def drop_partial(self) -> None:
        self._delete("checkpoints", kind="partial")


def pack_state(state: State) -> bytes:
    """The bytes of named arrays, the same for the same arrays."""
    return safetensors.encode({name: np.asarray(state[name]) for name in sorted(state)})


def unpack_state(data: bytes) -> dict[str, NDArray[Any]]:
    """The inverse of :func:`pack_state`. Raises ValueError for bytes it did not write."""
    try:
        tensors = safetensors.decode(data).tensors
    except ArtifactError as error:
        raise ValueError(f"a stored state is damaged: {error}") from None
    return {name: array.copy() for name, array in tensors.items()}


@dataclass(frozen=True, slots=True)
class Ranking:
    """By what the best version is named."""

    metric: str
    higher_is_better: bool


class Versions(TableOfTask):
    """A task's. A row stays when its model is dropped."""

    def __init__(self, database: Database, task: int, facts: TaskFacts) -> None:
        super().__init__(database, task)
        self._facts = facts

    def add(self, row: VersionRow, model: Mapping[str, NDArray[Any]] | None) -> None:
        """A version that was made; inside the transaction that makes it. ``bytes`` is set here."""
        stored = None if model is None else pack_state(model)
        size = 0 if stored is None else len(stored)
        # A home that was set back to a backup makes numbers again.
        self._put("versions", row, bytes=size, awaited=0, model=stored)

    def find(self, version: int) -> VersionRow | None:
        """What is known of a version."""
        return self._find(VersionRow, "versions", version=version)

    def all(self) -> list[VersionRow]:
        """All that is known of the versions, the newest first."""
        return list(self._all(VersionRow, "versions", "ORDER BY version DESC"))

    def kept(self) -> list[VersionRow]:
        """Those whose models are kept, the newest first."""
        kept = "AND model IS NOT NULL ORDER BY version DESC"
        return list(self._all(VersionRow, "versions", kept))

    def ranked(self, ranking: Ranking | None) -> list[VersionRow]:
        """Those that are kept and have the figure, the best first; of equals the older.

        None without a ranking, and none of before another model took the task over: figures of two
        models are no measure of each other.
        """
        return _ranked(self._comparable(), ranking)

    def best(self, ranking: Ranking | None) -> int | None:
        """The first of :meth:`ranked`; None where there is none."""
        return next((row.version for row in self.ranked(ranking)), None)

    def model(self, version: int) -> dict[str, NDArray[Any]]:
        """The model of a version that is kept. Raises AggregatorError where it is gone."""
        stored = self._value("model", "versions", version=version)
        if stored is None:
            raise self._gone(str(version))
        return unpack_state(stored)

    def named(self, name: str, ranking: Ranking | None) -> VersionRow:
        """The kept version that a person named: ``latest``, ``best`` or its number.

        Raises AggregatorError, which names those that are kept.
        """
        kept = self.kept()
        if not kept and self.all():
            raise AggregatorError(
                "the task's method keeps no model at the aggregator: each device has its own, "
                "which its app can take out with Device.model()"
            )
        if name == "best":
            if ranking is None:
                raise AggregatorError(
                    "no metric says which version is best: evaluate it, with [evaluation] in the "
                    "task file, or take latest or a number"
                )
            if best := self.ranked(ranking):
                return best[0]
            raise self._unranked(ranking)
        found = kept if name == "latest" else [row for row in kept if str(row.version) == name]
        if not found:
            raise self._gone(name)
        return found[0]

    def note_metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        """Add figures to a version's, or replace those of the same names. Nothing where the version
        is unknown."""
        row = self.find(version)
        if row is not None:
            to = {"metrics": packed({**row.metrics, **metrics})}
            self._change("versions", to, version=version)

    def pin(self, version: int, *, pinned: bool) -> None:
        """Keep a version's model whatever else is dropped, or no longer."""
        self._change("versions", {"pinned": int(pinned)}, version=version)

    def prune(
        self,
        last: int,
        best: int,
        ranking: Ranking | None,
        before: int,
        wanted: int | None = None,
    ) -> int:
        """Drop all models but the ``last`` newest, the ``best`` ones, the pinned, the awaited and
        the ``wanted``; how many. To make room for version ``before``: one of that number will be
        replaced. Where the best ones are kept, so is each whose figures are still to be made.

        While a model that took the task over has fewer than ``best`` figures, the best versions of
        before it stay in the places that are left.
        """
        # No column behind the model, which would have all of it read.
        there = "AND version != ? AND model IS NOT NULL ORDER BY version DESC"
        rows = list(self._all(_Kept, "versions", there, before))
        stay = {row.version for row in rows[:last]}
        stay |= {row.version for row in rows if row.pinned}
        judged_from = self._facts.judged_from
        present = [row for row in rows if row.version >= judged_from]
        older = [row for row in rows if row.version < judged_from]
        ranked = _ranked(present, ranking) + _ranked(older, ranking)
        stay |= {row.version for row in ranked[:best]}
        evaluated_from = self._facts.evaluated_from
        if best and ranking is not None and evaluated_from is not None:
            stay |= {row.version for row in rows if row.version >= evaluated_from}
        stay |= {each for each in (self.awaited(), wanted) if each is not None}
        gone = [row for row in rows if row.version not in stay]
        self._database.execute_many(
            "UPDATE versions SET model = NULL WHERE task = ? AND version = ?",
            [(self._task, row.version) for row in gone],
        )
        return len(gone)

    # -- going back --------------------------------------------------------------------------------

    def ask_for(self, version: int | None) -> None:
        """Ask that a version's model becomes the next one; None: no longer."""
        self._facts.dropped_rollback = None
        self._change("versions", {"awaited": 0})
        if version is not None:
            self._change("versions", {"awaited": 1}, version=version)

    def drop_request(self, why: str) -> None:
        """What was asked for, if anything was, does not come to pass: the operator is to see."""
        wanted = self.awaited()
        if wanted is not None:
            self.ask_for(None)
            self._facts.dropped_rollback = (
                f"version {wanted}'s model did not become the next version: {why}"
            )

    def awaited(self) -> int | None:
        """The version whose model is to become the next one."""
        found = self._value("version", "versions", awaited=1)
        return None if found is None else int(found)

    def _comparable(self) -> list[VersionRow]:
        return [row for row in self.kept() if row.version >= self._facts.judged_from]

    def _unranked(self, ranking: Ranking) -> AggregatorError:
        first = self._facts.judged_from
        of = f" of the present model ({first} and later)" if first else ""
        figures = sorted({name for row in self._comparable() for name in row.metrics})
        others = f" (there are figures of {', '.join(figures)})" if figures else ""
        return AggregatorError(
            f"no kept version{of} has a figure of {ranking.metric!r} yet, by which "
            f"evaluation.best_by names the best{others}; take latest or a number"
        )

    def _gone(self, name: str) -> AggregatorError:
        kept = [f"{row.version}" for row in reversed(self.kept())]
        if not kept:
            return AggregatorError("the task has no version yet: it is made by serve")
        return AggregatorError(
            f"there is no version {name!r}, or its model was dropped; kept are {', '.join(kept)} "
            "(see tessera-aggregator models)"
        )


class _Kept(NamedTuple):
    """What decides whether a model stays."""

    version: int
    metrics: Mapping[str, float]
    pinned: bool


_Row = TypeVar("_Row", VersionRow, _Kept)


def _ranked(rows: Sequence[_Row], ranking: Ranking | None) -> list[_Row]:
    if ranking is None:
        return []
    name, sign = ranking.metric, -1.0 if ranking.higher_is_better else 1.0
    known = [row for row in rows if name in row.metrics]

    def place(row: _Row) -> tuple[float, int]:
        return sign * row.metrics.get(typical_name(name), row.metrics[name]), row.version

    return sorted(known, key=place)
