"""Trainings that fail round after round: told in full once, then in short."""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

from device_sdk.wire.publish.report import Reason

_log = logging.getLogger("tessera.device")
_NUMBERS = re.compile(r"[-+]?\b(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf)\b")


class _Failure(NamedTuple):
    round: str
    detail: str

    def is_like(self, detail: str) -> bool:
        """Whether the words are the same; numbers in them, such as a loss, do not count."""
        return _NUMBERS.sub("", self.detail) == _NUMBERS.sub("", detail)


class FailedTrainings:
    """Of each task whose last training failed, the first of the failures that were all alike."""

    def __init__(self) -> None:
        self._first: dict[str, _Failure] = {}

    def note(self, task: str, round_: str, detail: str, reason: Reason) -> None:
        """A training failed: log it. ``round_``: which one, for people."""
        first = self._first.get(task)
        if first is not None and first.is_like(detail):
            _log.warning("%s ended as %s did: %s", round_, first.round, reason.value)
            return
        _log.warning("%s ended without an update: %s", round_, detail)
        self._first[task] = _Failure(round_, detail)

    def forget(self, task: str) -> None:
        """A training went well."""
        self._first.pop(task, None)

    def problem(self, task: str) -> str:
        """For people; empty where the last training went well."""
        first = self._first.get(task)
        return "" if first is None else f"{first.round}: {first.detail}"
