"""Strict reading of JSON objects: every key known, every value of the type it should have."""

from __future__ import annotations

import json
from typing import Never

from device_sdk.artifact.errors import ArtifactError
from device_sdk.fields import Fields

_ABSENT = object()


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


class JsonFields(Fields):
    """A JSON object, named by ``where``; ArtifactError where it is none."""

    __slots__ = ()
    fault = ArtifactError

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise ArtifactError(f"{where}: expected an object, found {value!r:.80}")
        super().__init__(value, where)

    def name(self, key: str) -> str:
        """The key with the object it is of."""
        return f"{self.where}: {key!r:.80}"

    def optional(self, key: str) -> object:
        """The value of a key that may be missing (then None, as which it must not be spelled)."""
        value = self.take(key, _ABSENT)
        if value is None:
            raise ArtifactError(f"{self.where}: leave {key!r} out instead of null")
        return None if value is _ABSENT else value
