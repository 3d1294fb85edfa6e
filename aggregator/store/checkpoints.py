"""States of the method, as safetensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.store.database import TableOfTask
from device_sdk.artifact import safetensors
from device_sdk.artifact.errors import ArtifactError
from device_sdk.methods.state import State

Kind = Literal["version", "partial"]


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
        numbers = checkpoint.round, checkpoint.seq, checkpoint.version
        packed = pack_state(checkpoint.state)
        values = self._task, checkpoint.kind, *numbers, packed
        self._database.insert("checkpoints", *values, replace=True)

    def get(self, kind: Kind) -> MethodCheckpoint | None:
        query = "SELECT round, seq, version, state FROM checkpoints WHERE task = ? AND kind = ?"
        row = self._database.row(query, (self._task, kind))
        if row is None:
            return None
        round_number, seq, version, packed = row
        return MethodCheckpoint(kind, round_number, seq, version, unpack_state(packed))

    def drop_partial(self) -> None:
        self._database.execute(
            "DELETE FROM checkpoints WHERE task = ? AND kind = 'partial'", (self._task,)
        )


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
