"""Which tasks there are, and what the operator wants of them."""

from __future__ import annotations

from aggregator.errors import AggregatorError
from aggregator.store.database import Table
from aggregator.store.rows import TaskRow
from aggregator.store.schema import TABLES
from device_sdk.wire.seal.announcement import MOST_TASKS

FIRST = 1
"""The number of the task whose file has the fleet's tables."""

_KEPT = ("tasks", "task_facts", "publications")
TASK_TABLES = tuple(
    name for name, shape in TABLES.items() if "task" in shape.columns and name not in _KEPT
)
"""What is deleted of a task that is retired; its publications are cleared from the broker first."""


def require_room(tasks: int) -> None:
    """For one beside so many. Raises AggregatorError where devices can be told of no more."""
    if tasks >= MOST_TASKS:
        raise AggregatorError(
            f"a fleet has at most {MOST_TASKS} tasks: tessera-aggregator task retire makes room"
        )


class Tasks(Table):
    """Which there are."""

    def all(self) -> list[TaskRow]:
        """Every task that is not retired, the first one first."""
        return list(self._all(TaskRow, "tasks", "AND state != 'retired' ORDER BY task"))

    def named(self, name: str) -> TaskRow | None:
        """The task of this name, a retired one too."""
        return self._find(TaskRow, "tasks", name=name)

    def find(self, number: int) -> TaskRow:
        """The task of this number. Raises LookupError."""
        row = self._find(TaskRow, "tasks", task=number)
        if row is None:
            raise LookupError(f"there is no task number {number}")
        return row

    def key_epochs(self) -> set[int]:
        """Epochs of the group keys under which something of a task is published."""
        query = "SELECT DISTINCT value FROM task_facts WHERE name = 'key_epoch'"
        return {self._database.from_any(row[0]) for row in self._database.rows(query)}

    def add(self, name: str, file: str, text: str) -> int:
        """A new task, or a retired one that begins anew; its number.

        Raises AggregatorError where there are as many as devices can be told of.
        """
        require_room(len(self.all()))
        known = self.named(name)
        if known is None:
            self._database.execute(
                "INSERT INTO tasks (task, name, state, file, unwritten) "
                "SELECT max(task) + 1, ?, 'active', ?, ? FROM tasks",
                (name, file, text),
            )
            known = self.named(name)
            assert known is not None
        else:
            begun = {"served": None, "request": None, "problem": None}
            self.change(known.number, state="active", file=file, unwritten=text, **begun)
        return known.number

    def change(self, number: int, **to: str | None) -> None:
        """Set a task's ``state``, ``name``, ``file``, ``served``, ``unwritten``, ``request`` or
        ``problem``."""
        self._change("tasks", to, task=number)

    def erase(self, number: int) -> None:
        """Delete what was learnt, in a transaction; only the name and generation stay."""
        for table in TASK_TABLES:
            self._delete(table, task=number)
