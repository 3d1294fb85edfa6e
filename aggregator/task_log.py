"""Which task a log line is about: it is named in front of the line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_TASK = ContextVar("task", default="")


@contextmanager
def about(task: str) -> Iterator[None]:
    """What is logged meanwhile, by whatever part, is about this task; empty: about none."""
    token = _TASK.set(task)
    try:
        yield
    finally:
        _TASK.reset(token)


def add_task(record: logging.LogRecord) -> bool:
    """A filter of handlers whose formatters begin the message with ``%(task)s``."""
    task = _TASK.get()
    record.task = f"{task}: " if task else ""
    return True
