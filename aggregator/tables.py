"""A table of a TOML file, read one typed key at a time; every refusal names the key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from aggregator.errors import TaskError


class TomlTable:
    """The keys of one table. :meth:`finish` refuses those that nobody asked for."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path
        self._known: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def table(self, key: str) -> TomlTable:
        """A table below this one, empty when the file has none."""
        value = self._take(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "must be a table")
        return TomlTable(value, self._name(key))

    def text(self, key: str, default: str | None = None) -> str:
        """A text that is not empty. Without ``default`` it must be there."""
        value = self._take(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, str) or not value:
            raise self.error(key, "must be a text that is not empty")
        return value

    def optional_text(self, key: str) -> str | None:
        """A text, or None when the key is absent."""
        return self.text(key) if key in self._values else self._take(key, None)

    def plain_text(self, key: str, default: str) -> str:
        """A text, which may be empty."""
        value = self._take(key, default)
        if not isinstance(value, str):
            raise self.error(key, "must be a text")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of texts that are not empty; empty when the key is absent."""
        value = self._take(key, [])
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            raise self.error(key, "must be a list of texts")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str) -> str:
        """One of ``choices``."""
        value = self.text(key, default)
        if value not in choices:
            raise self.error(key, f"is {value!r}; expected one of {', '.join(choices)}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def integer(self, key: str, default: int, *, least: int, most: int = 2**31) -> int:
        """A whole number in ``least`` to ``most``."""
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(key, f"is {value!r}; expected a whole number from {least} to {most}")
        return value

    def number(
        self,
        key: str,
        default: float,
        *,
        least: float | None = None,
        above: float | None = None,
        most: float = 1e12,
    ) -> float:
        """A finite number, at least ``least``, above ``above`` and at most ``most``."""
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, f"is {value!r}; expected a number")
        number = float(value)
        if not math.isfinite(number) or number > most:
            raise self.error(key, f"is {number}; expected at most {most:g}")
        if (least is not None and number < least) or (above is not None and number <= above):
            bound = f"above {above:g}" if above is not None else f"at least {least:g}"
            raise self.error(key, f"is {number}; expected {bound}")
        return number

    def finish(self) -> None:
        """Refuse keys that were never asked for: a misspelt key must not be ignored."""
        for key in self._values:
            if key not in self._known:
                known = ", ".join(sorted(self._known)) or "no keys"
                raise self.error(key, f"is unknown here; known are: {known}")

    def error(self, key: str, what: str) -> TaskError:
        """An error that names ``key`` in full."""
        return TaskError(f"{self._name(key)} {what}")

    def _take(self, key: str, default: Any) -> Any:
        self._known.add(key)
        return self._values.get(key, default)

    def _name(self, key: str) -> str:
        return ".".join(part for part in (self._path, key) if part)
