"""Log lines: as text, or as JSON objects."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from aggregator.events import task_of_line
from device_sdk.system.printable import PrintableFormatter

OTHER = "other"
"""The event of what libraries log."""


class LogForm(StrEnum):
    """What a line is."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """From which level on something is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class JsonFormatter(PrintableFormatter):
    """An object a line: ``ts``, ``level``, ``event``, ``task`` where it is about one, the event's
    fields, ``message`` (the text), and ``traceback`` where there is one; in ASCII, for whatever
    encoding standard error has. ``always``: what each object has too."""

    def __init__(self, always: Mapping[str, object]) -> None:
        super().__init__()
        self._always = dict(always)

    def format(self, record: logging.LogRecord) -> str:
        text, _, below = super().format(record).partition("\n")
        event, task = getattr(record, "event", OTHER), getattr(record, "about", "")
        fields = getattr(record, "fields", {"logger": record.name})
        said = {
            "ts": _moment(record.created),
            "level": record.levelname.lower(),
            "event": event,
            **({"task": task} if task else {}),
            **self._always,
            **fields,
            "message": text,
            **({"traceback": below} if below else {}),
        }
        return json.dumps(said, allow_nan=False)


def _moment(unix_seconds: float) -> str:
    """RFC 3339, to the millisecond."""
    moment = datetime.fromtimestamp(unix_seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def add_task(record: logging.LogRecord) -> bool:
    """A filter of handlers: what a record is ``about``; formats of text begin the message with
    ``%(task)s``."""
    task = task_of_line()
    record.about, record.task = task, f"{task}: " if task else ""
    return True


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What a process logs."""

    form: LogForm = LogForm.TEXT
    level: LogLevel = LogLevel.INFO

    def start(self, handler: logging.Handler, text: str, **always: object) -> None:
        """From now on, in the place of what was before. ``text``: the format of a line of text;
        ``always``: what each JSON object has."""
        as_json = self.form is LogForm.JSON
        handler.setFormatter(JsonFormatter(always) if as_json else PrintableFormatter(text))
        handler.addFilter(add_task)
        logging.basicConfig(level=self.level.upper(), handlers=[handler], force=True)
        logging.captureWarnings(True)


USUAL_LOG = LogSettings()
