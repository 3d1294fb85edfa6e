"""States of the method, as named arrays in numpy's own file format, never pickled."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.store.database import Database
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


class Checkpoints:
    """Table ``checkpoints``: at most one of each kind."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, checkpoint: MethodCheckpoint) -> None:
        """Replace the checkpoint of this kind; a version makes the partial one void."""
        if checkpoint.kind == "version":
            self.drop_partial()
        self._database.execute(
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?)",
            (
                checkpoint.kind,
                checkpoint.round,
                checkpoint.seq,
                checkpoint.version,
                pack_state(checkpoint.state),
            ),
        )

    def get(self, kind: Kind) -> MethodCheckpoint | None:
        """The checkpoint of this kind."""
        row = self._database.row("SELECT * FROM checkpoints WHERE kind = ?", (kind,))
        if row is None:
            return None
        _, round_number, seq, version, packed = row
        return MethodCheckpoint(kind, round_number, seq, version, unpack_state(packed))

    def drop_partial(self) -> None:
        """Forget the checkpoint within a round."""
        self._database.execute("DELETE FROM checkpoints WHERE kind = 'partial'")


def pack_state(state: State) -> bytes:
    """The bytes of named arrays, the same for the same arrays."""
    file = io.BytesIO()
    for name in sorted(state):
        label = name.encode()
        file.write(len(label).to_bytes(2, "little") + label)
        np.lib.format.write_array(file, np.asarray(state[name]), allow_pickle=False)
    return file.getvalue()


def unpack_state(data: bytes) -> dict[str, NDArray[Any]]:
    """The inverse of :func:`pack_state`. Raises ValueError for bytes it did not write."""
    file = io.BytesIO(data)
    state: dict[str, NDArray[Any]] = {}
    while size := file.read(2):
        name = file.read(int.from_bytes(size, "little")).decode()
        state[name] = np.lib.format.read_array(file, allow_pickle=False)
    return state
