"""One server a home: two would both absorb, and each would undo the other's rounds.

What replaces the open round from outside (``restored``) holds the home in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aggregator.errors import AggregatorError
from aggregator.file_lock import FileLock
from aggregator.home import Home

__all__ = ["serve_lock"]


@contextmanager
def serve_lock(home: Home) -> Iterator[None]:
    """Hold the home. The system lets go of the lock when the process ends, however it does.

    Raises AggregatorError when another process holds it.
    """
    if not home.folder.is_dir():
        raise AggregatorError(
            f"{home.folder} does not exist; run tessera-aggregator init --home {home.folder} first"
        )
    lock = FileLock(home.folder / "serve.lock")
    try:
        if not lock.try_acquire():
            raise AggregatorError(f"a serve is running on {home.folder}: stop it first")
        yield
    finally:
        lock.close()
