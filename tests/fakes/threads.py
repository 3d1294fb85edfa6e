"""What runs beside a test, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tests.fakes.waiting import PATIENCE_SECONDS

Made = TypeVar("Made")


@contextmanager
def on_thread(
    work: Callable[[Callable[[Made], None], Callable[[], bool]], None],
) -> Iterator[Made]:
    """``work(ready, stopping)`` until the block ends, and ``stopping()`` is true.

    The block begins when ``work`` calls ``ready`` with what is there; its errors come out here.
    """
    stopping, ready = threading.Event(), threading.Event()
    made: list[Made] = []
    errors: list[BaseException] = []

    def take(one: Made) -> None:
        made.append(one)
        ready.set()

    def run() -> None:
        try:
            work(take, stopping.is_set)
        except BaseException as error:
            errors.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        if made:
            yield made[0]
    finally:
        stopping.set()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
        if errors:
            raise errors[0]
