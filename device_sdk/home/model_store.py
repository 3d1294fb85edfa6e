"""What a device learns from and with: item matrices, catalogues, its users' vectors, its k."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

from numpy.typing import NDArray

from device_sdk.home.database import HomeStore, pack_arrays, unpack_arrays

# Attachments that were fetched, by content id: one that is offered again is not fetched again.


class AttachmentStore(HomeStore):
    """A task's contents under the ids that signed heads gave them."""

    def save(self, task: str, content_id: bytes, content: bytes) -> None:
        """Keep a content until it is no longer offered."""
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT OR REPLACE INTO attachment VALUES (?, ?, ?)", (task, content_id, content)
            )

    def content(self, task: str, content_id: bytes) -> bytes | None:
        """The content of an id; None where it is not here."""
        row = self._database.row(
            "SELECT content FROM attachment WHERE task = ? AND id = ?", task, content_id
        )
        return None if row is None else bytes(row[0])

    def ids(self, task: str) -> set[bytes]:
        """All of a task that is here."""
        rows = self._database.rows("SELECT id FROM attachment WHERE task = ?", task)
        return {bytes(row[0]) for row in rows}

    def keep_only(self, task: str, offered: Collection[bytes]) -> None:
        """Forget what the task no longer offers."""
        gone = self.ids(task) - set(offered)
        if gone:
            with self._database.transaction() as sql:
                sql.executemany(
                    "DELETE FROM attachment WHERE task = ? AND id = ?",
                    [(task, each) for each in gone],
                )


State = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class StoredModel:
    """What this device predicts with.

    ``artifact_id`` None: the arrays of the last broadcast that it trained on. Otherwise parameters
    and buffers of this artifact, as they were after the device's last training.
    """

    task: str
    generation: int
    round: int
    version: int
    catalogue_id: bytes
    arrays: Mapping[str, NDArray[Any]]
    artifact_id: bytes | None = None


# Measured anew when there is this much more to train on, or training was late so often in a row.
_GROWTH = 1.5
_MOST_MISSES = 2


@dataclass(frozen=True, slots=True)
class CapabilityRow:
    """The largest option that was measured to fit a task's time; ``conditions`` says under which.

    Attributes:
        option: the number of columns, or the artifact's id in hexadecimal.
        size: triples or samples that the device had then.
        placement: who does work that either end may do, ``device`` or ``aggregator`` (attention's
            mixing of neighbours), and ``placed_size`` with how much of it that was measured; None
            where there is no such question.
        misses: rounds since in which training took too long, one after another.
        p90_seconds: a round's training with that option, 90th percentile.
    """

    task: str
    conditions: str
    option: str
    size: int
    placement: str | None
    placed_size: int | None
    misses: int
    reason: str
    p90_seconds: float | None

    def holds(self, conditions: str, size: int) -> bool:
        """Whether it needs no measuring anew."""
        return (
            self.conditions == conditions
            and size <= _GROWTH * self.size
            and self.misses < _MOST_MISSES
        )

    def after(self, *, late: bool) -> CapabilityRow:
        """The row after one more round."""
        return replace(self, misses=self.misses + 1 if late else 0)


class ModelStore(HomeStore):
    """Models, learner states, catalogues and capabilities by task."""

    def save_model(self, model: StoredModel) -> None:
        """Replace the task's model, and forget catalogues that no model uses."""
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT OR REPLACE INTO model VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    model.task,
                    model.generation,
                    model.round,
                    model.version,
                    model.catalogue_id,
                    pack_arrays(model.arrays),
                    model.artifact_id,
                ),
            )
            sql.execute("DELETE FROM catalogue WHERE id NOT IN (SELECT catalogue_id FROM model)")

    def model_mark(self, task: str) -> tuple[int, int, int] | None:
        """(generation, round, version) of the stored model, without reading its arrays."""
        row = self._database.row(
            "SELECT generation, round, version FROM model WHERE task = ?", task
        )
        return None if row is None else (int(row[0]), int(row[1]), int(row[2]))

    def marks(self) -> dict[str, tuple[int, int, int]]:
        """:meth:`model_mark` of each task that has a model here."""
        rows = self._database.rows("SELECT task, generation, round, version FROM model")
        return {task: (generation, round_, version) for task, generation, round_, version in rows}

    def last_catalogue(self, task: str) -> tuple[int, bytes] | None:
        """(generation, catalogue id) of the stored model."""
        row = self._database.row("SELECT generation, catalogue_id FROM model WHERE task = ?", task)
        return None if row is None else (int(row[0]), bytes(row[1]))

    def model(self, task: str) -> StoredModel | None:
        """The task's last model."""
        row = self._database.row(
            "SELECT task, generation, round, version, catalogue_id, arrays, artifact FROM model "
            "WHERE task = ?",
            task,
        )
        if row is None:
            return None
        task, generation, round_id, version, catalogue_id, arrays, artifact_id = row
        return StoredModel(
            task, generation, round_id, version, catalogue_id, unpack_arrays(arrays), artifact_id
        )

    def save_learner(
        self, task: str, state: State, artifact_id: bytes | None = None, method: str | None = None
    ) -> None:
        """Replace the learner's private state, users' vectors included.

        ``artifact_id``: the artifact that the state belongs to, where it belongs to one.
        ``method``: the one whose learner it is.
        """
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT OR REPLACE INTO learner VALUES (?, ?, ?, ?)",
                (task, pack_arrays(state), artifact_id, method),
            )

    def change_learner(self, task: str, state: State) -> None:
        """Put another state in the place of the stored one, of the same learner."""
        with self._database.transaction() as sql:
            sql.execute("UPDATE learner SET state = ? WHERE task = ?", (pack_arrays(state), task))

    def artifacts(self) -> set[bytes]:
        """Ids of the artifacts that models and learners' states belong to."""
        rows = self._database.rows(
            "SELECT artifact FROM model UNION SELECT artifact FROM learner EXCEPT SELECT NULL"
        )
        return {bytes(row[0]) for row in rows}

    def learner_artifact(self, task: str) -> bytes | None:
        """The artifact that the stored learner's state belongs to."""
        row = self._database.row("SELECT artifact FROM learner WHERE task = ?", task)
        return None if row is None else row[0]

    def has_learner(self, task: str) -> bool:
        """Whether a learner of the task has left a state here."""
        return self._database.row("SELECT 1 FROM learner WHERE task = ?", task) is not None

    def learner(self, task: str, method: str | None = None) -> dict[str, NDArray[Any]] | None:
        """The learner's private state; None before its first round.

        Also None where ``method`` is given and the state is another method's: the task was replaced
        since.
        """
        row = self._database.row("SELECT state, method FROM learner WHERE task = ?", task)
        if row is None or (method is not None and row[1] != method):
            return None
        return unpack_arrays(row[0])

    def learner_tasks(self) -> list[str]:
        """Tasks whose learners have a private state."""
        return [task for (task,) in self._database.rows("SELECT task FROM learner")]

    def save_catalogue(self, content: bytes) -> None:
        """Keep a catalogue under its id, which is the SHA-256 of its bytes."""
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT OR IGNORE INTO catalogue VALUES (?, ?)",
                (hashlib.sha256(content).digest(), content),
            )

    def catalogue(self, catalogue_id: bytes) -> bytes | None:
        """The content of a catalogue; None where it is not here."""
        row = self._database.row("SELECT content FROM catalogue WHERE id = ?", catalogue_id)
        return None if row is None else bytes(row[0])

    def capability(self, task: str) -> CapabilityRow | None:
        """What was measured for a task."""
        row = self._database.row(
            "SELECT task, conditions, option, size, placement, placed_size, misses, reason, "
            "p90_seconds FROM capability WHERE task = ?",
            task,
        )
        return None if row is None else CapabilityRow(*row)

    def save_capability(self, row: CapabilityRow) -> None:
        """Replace what was measured for a task."""
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT OR REPLACE INTO capability VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", astuple(row)
            )
