"""Signals that ask a process to end, while something must not be cut short by them."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held_signals() -> Iterator[Callable[[], bool]]:
    """What asks the process to end waits until the block is over, and then comes to whom it came
    to before, whatever handlers a library has put in their place. The block gets a function that
    says whether something waits.

    Threads that are started inside never get such signals: those of libraries have no use for
    them. Nothing is held on Windows, nor outside of the main thread, which handles signals alone.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield lambda: bool(signal.sigpending() & set(_ENDING))
    finally:
        for each in _ENDING:
            handler = signal.getsignal(each)
            if handler is not None:
                signal.signal(each, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
