"""A store whose process ends at a commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aggregator.store import SQLiteDatabase


class Crash(BaseException):
    """The process ended here."""


class CrashingDatabase(SQLiteDatabase):
    """Ends the process at the ``left``-th commit, just ``"before"`` or just ``"after"`` it."""

    left = 0
    when = ""

    @contextmanager
    def transaction(self, *, shared: bool = False) -> Iterator[None]:
        with super().transaction(shared=shared):
            yield
            self.left -= 1
            if self.left == 0 and self.when == "before":
                raise Crash
        if self.left == 0 and self.when == "after":
            raise Crash
