"""What a device learns from and with: item matrices, catalogues, its users' vectors, its k."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from device_sdk.home.database import Database
from device_sdk.wire.catalogue import NO_CATALOGUE
from device_sdk.wire.tensors import Codec, TensorLimits, decode_tensors, encode_tensors

__all__ = ["CapabilityRow", "ModelStore", "StoredModel"]

# Our own file, not a stranger's message: as large as the device's memory holds.
_LIMITS = TensorLimits(most_bytes=2**40)
State = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class StoredModel:
    """The arrays of the last broadcast that this device trained on."""

    task: str
    generation: int
    round: int
    version: int
    catalogue_id: bytes
    arrays: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class CapabilityRow:
    """The k that was measured for a task; ``fingerprint`` says under which conditions.

    ``triples``: how many the device had then. ``misses``: rounds since in which training took too
    long, one after another. ``step_p90_seconds``: a round's training at that k, 90th percentile.
    """

    task: str
    fingerprint: str
    k: int
    triples: int
    misses: int
    reason: str
    step_p90_seconds: float | None


class ModelStore:
    """Models, learner states, catalogues and capabilities by task."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save_model(self, model: StoredModel, codec: Codec) -> None:
        """Replace the task's model. ``codec`` must hold the arrays exactly."""
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT OR REPLACE INTO model VALUES (?, ?, ?, ?, ?, ?)",
                (
                    model.task,
                    model.generation,
                    model.round,
                    model.version,
                    model.catalogue_id,
                    encode_tensors(model.arrays, codec),
                ),
            )

    def model_mark(self, task: str) -> tuple[int, int, int] | None:
        """(generation, round, version) of the stored model, without reading its arrays."""
        row: tuple[Any, ...] | None = self._database.row(
            "SELECT generation, round, version FROM model WHERE task = ?", task
        )
        return None if row is None else (int(row[0]), int(row[1]), int(row[2]))

    def last_catalogue(self, task: str) -> tuple[int, bytes] | None:
        """(generation, catalogue id) of the stored model."""
        row: tuple[Any, ...] | None = self._database.row(
            "SELECT generation, catalogue_id FROM model WHERE task = ?", task
        )
        return None if row is None else (int(row[0]), bytes(row[1]))

    def model(self, task: str) -> StoredModel | None:
        """The task's last model."""
        row: tuple[Any, ...] | None = self._database.row(
            "SELECT task, generation, round, version, catalogue_id, arrays FROM model "
            "WHERE task = ?",
            task,
        )
        if row is None:
            return None
        task, generation, round_id, version, catalogue_id, arrays = row
        decoded = decode_tensors(arrays, limits=_LIMITS)
        return StoredModel(task, generation, round_id, version, catalogue_id, decoded)

    def save_learner(self, task: str, state: State) -> None:
        """Replace the learner's private state, users' vectors included."""
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT OR REPLACE INTO learner VALUES (?, ?)",
                (task, encode_tensors(state, Codec.FLOAT32)),
            )

    def learner(self, task: str) -> dict[str, NDArray[Any]] | None:
        """The learner's private state; None before its first round."""
        row: tuple[Any, ...] | None = self._database.row(
            "SELECT state FROM learner WHERE task = ?", task
        )
        return None if row is None else decode_tensors(row[0], limits=_LIMITS)

    def save_catalogue(self, content: bytes) -> None:
        """Keep a catalogue under its id, which is the SHA-256 of its bytes."""
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT OR IGNORE INTO catalogue VALUES (?, ?)",
                (hashlib.sha256(content).digest(), content),
            )

    def catalogue(self, catalogue_id: bytes) -> bytes | None:
        """The content of a catalogue; None where it is not here."""
        row: tuple[Any, ...] | None = self._database.row(
            "SELECT content FROM catalogue WHERE id = ?", catalogue_id
        )
        return None if row is None else bytes(row[0])

    def drop_catalogues(self, keep: bytes) -> None:
        """Forget catalogues that no model uses, but for ``keep``."""
        with self._database.transaction() as sql:
            sql.execute(
                "DELETE FROM catalogue WHERE id <> ? "
                "AND id NOT IN (SELECT catalogue_id FROM model)",
                (keep or NO_CATALOGUE,),
            )

    def capability(self, task: str) -> CapabilityRow | None:
        """What was measured for a task."""
        row: tuple[Any, ...] | None = self._database.row(
            "SELECT task, fingerprint, k, triples, misses, reason, step_p90_seconds "
            "FROM capability WHERE task = ?",
            task,
        )
        return None if row is None else CapabilityRow(*row)

    def save_capability(self, row: CapabilityRow) -> None:
        """Replace what was measured for a task."""
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT OR REPLACE INTO capability VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    row.task,
                    row.fingerprint,
                    row.k,
                    row.triples,
                    row.misses,
                    row.reason,
                    row.step_p90_seconds,
                ),
            )
