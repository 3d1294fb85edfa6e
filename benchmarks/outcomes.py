"""What runs found, kept as one JSON file a run so that a stopped benchmark resumes."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import Field, asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar


class _Record(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


class _Run(_Record, Protocol):
    """A measured run as data, whose key changes with every setting."""

    @property
    def key(self) -> str: ...


RunT = TypeVar("RunT", bound=_Run)
OutcomeT = TypeVar("OutcomeT", bound=_Record)


class OutcomeFolder(ABC, Generic[RunT, OutcomeT]):
    """Outcomes by the key of their run, in ``folder``, which is made when needed.

    A benchmark says how a file is called and how an outcome is read back.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, run: RunT) -> OutcomeT | None:
        """The stored outcome, or None where there is none under the run's key."""
        path = self._path(run)
        if not path.exists():
            return None
        return self.decoded(json.loads(path.read_text(encoding="utf-8"))["outcome"])

    def save(self, run: RunT, outcome: OutcomeT) -> None:
        """Write the outcome, and what was run, whole or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(run)
        content = {**self.described(run), "outcome": asdict(outcome)}
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(content, indent=1, sort_keys=True), encoding="utf-8")
        partial.replace(path)

    def found_or_made(self, run: RunT, make: Callable[[], OutcomeT] | None) -> OutcomeT | None:
        """The stored outcome; where there is none, that of ``make``, which is then stored.

        None where nothing is stored and ``make`` is None: nothing may be run.
        """
        outcome = self.load(run)
        if outcome is None and make is not None:
            outcome = make()
            self.save(run, outcome)
        return outcome

    @abstractmethod
    def prefix(self, run: RunT) -> str:
        """What stands before the key in a file's name, for people who look for one."""

    @abstractmethod
    def decoded(self, fields: dict[str, Any]) -> OutcomeT:
        """The outcome whose fields, as JSON has them, are these."""

    def described(self, run: RunT) -> dict[str, Any]:
        """What stands beside the outcome in its file, for people who read one."""
        return {"experiment": asdict(run)}

    def _path(self, run: RunT) -> Path:
        return self._folder / f"{self.prefix(run)}-{run.key}.json"
