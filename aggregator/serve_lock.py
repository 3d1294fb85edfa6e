"""One server a home: two would both absorb, and each would undo the other's rounds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from aggregator.errors import AggregatorError
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
    handle = os.open(home.folder / "serve.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock(handle)
    except OSError:
        os.close(handle)
        raise AggregatorError(f"another serve is running on {home.folder}") from None
    try:
        yield
    finally:
        os.close(handle)


def _lock(handle: int) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
