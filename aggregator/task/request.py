"""What the operator wants of a task: asked for in the store, done by ``serve`` between two rounds.

A task's file and its row change together: the row says what the file is to hold before the file
does, and :func:`write_task_files` makes it so, after a crash too.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from aggregator.errors import AggregatorError
from aggregator.store import Store
from device_sdk.system.files import write_atomically


@dataclass(frozen=True, slots=True)
class ReplaceRequest:
    """A task is to be replaced by what the file ``text`` says.

    ``warm_start``: the model that it begins with where names and shapes fit, as
    :meth:`~aggregator.task.warm_start.WarmStart.read` takes it; None for one of its own. ``now``:
    not after the open round has ended. ``file``: a digest of the task's own file when that was
    asked (:func:`file_digest`): what is edited in it later would be overwritten. Empty: unknown.
    ``back_to``: the version that is gone back to by it, if one is.
    """

    text: str
    warm_start: str | None = None
    now: bool = False
    file: str = ""
    back_to: int | None = None

    @property
    def version(self) -> int | None:
        """The task's own version that it begins with, where one is named by its number."""
        said = self.warm_start
        return int(said) if said is not None and said.isdecimal() else None

    def write(self) -> str:
        """As it is stored."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, stored: str) -> ReplaceRequest:
        """The inverse of :meth:`write`."""
        return cls(**json.loads(stored))


def file_digest(path: Path) -> str:
    """Of a task's file as it is; of one that cannot be read as of an empty one."""
    try:
        content = path.read_bytes()
    except OSError:
        content = b""
    return hashlib.sha256(content).hexdigest()


def write_task_files(folder: Path, store: Store) -> None:
    """Bring the task files below the home's ``folder`` to what the store says that they hold.

    Each in a transaction, so that of a command and ``serve`` one does it. Raises AggregatorError
    where one cannot be written, after all others.
    """
    problem: AggregatorError | None = None
    for due in store.tasks.all():
        if due.unwritten is None:
            continue
        try:
            with store.database.transaction():
                row = store.tasks.find(due.number)
                if row.unwritten is not None:
                    _write(folder / row.file, row.unwritten)
                    store.tasks.change(row.number, unwritten=None)
        except AggregatorError as error:
            problem = problem or error
    if problem is not None:
        raise problem


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        raise AggregatorError(
            f"{path} cannot be written: {error}; serve does it when it can be"
        ) from None
