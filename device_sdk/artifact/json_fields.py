"""Strict reading of JSON objects: every key known, every value of the type it should have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Never

from device_sdk.artifact.errors import ArtifactError


def decoded(data: bytes, what: str, max_bytes: int) -> object:
    """JSON without duplicate keys, NaN or infinity. Raises ArtifactError for anything else."""
    if len(data) > max_bytes:
        raise ArtifactError(f"{what} has {len(data)} bytes; at most {max_bytes} are read")
    try:
        value: object = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise ArtifactError(f"{what} is nested too deeply") from None
    except ArtifactError:
        raise
    except ValueError as error:
        raise ArtifactError(f"{what} is not JSON: {error}") from None
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ArtifactError("a JSON object names the same key twice")
    return found


def _refuse_constant(text: str) -> Never:
    raise ArtifactError(f"{text} is no JSON number")


class JsonFields:
    """A JSON object whose keys are taken one by one; `end` refuses what is left over."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise ArtifactError(f"{where}: expected an object, found {_kind(value)}")
        self._left: dict[str, object] = dict(value)
        self.where = where

    def take(self, key: str) -> object:
        """The value of a key that must be there."""
        if key not in self._left:
            raise ArtifactError(f"{self.where}: {key!r} is missing")
        return self._left.pop(key)

    def optional(self, key: str) -> object:
        """The value of a key that may be missing (then None, as which it must not be spelled)."""
        if key in self._left and self._left[key] is None:
            raise ArtifactError(f"{self.where}: leave {key!r} out instead of null")
        return self._left.pop(key, None)

    def text(self, key: str) -> str:
        """A string."""
        value = self.take(key)
        if not isinstance(value, str):
            raise ArtifactError(f"{self.where}: {key!r} is a string, not {_kind(value)}")
        return value

    def integer(self, key: str) -> int:
        """An integer (true and false are none)."""
        value = self.take(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ArtifactError(f"{self.where}: {key!r} is an integer, not {_kind(value)}")
        return value

    def boolean(self, key: str) -> bool:
        """True or false."""
        value = self.take(key)
        if not isinstance(value, bool):
            raise ArtifactError(f"{self.where}: {key!r} is true or false, not {_kind(value)}")
        return value

    def items(self, key: str) -> Sequence[object]:
        """A list."""
        value = self.take(key)
        if not isinstance(value, list):
            raise ArtifactError(f"{self.where}: {key!r} is a list, not {_kind(value)}")
        return value

    def mapping(self, key: str) -> dict[str, object]:
        """An object."""
        value = self.take(key)
        if not isinstance(value, dict):
            raise ArtifactError(f"{self.where}: {key!r} is an object, not {_kind(value)}")
        return value

    def peek(self, key: str) -> object:
        """The value of a key, or None, left in place: for error messages."""
        return self._left.get(key)

    def rest_as_text(self) -> dict[str, str]:
        """All remaining keys, each of which must hold a string."""
        return {key: self.text(key) for key in list(self._left)}

    def end(self) -> None:
        """Refuse keys that nobody took."""
        if self._left:
            raise ArtifactError(f"{self.where}: unknown keys {', '.join(sorted(self._left)[:5])}")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
