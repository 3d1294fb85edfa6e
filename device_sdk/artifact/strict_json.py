"""JSON without what one reader takes otherwise than another."""

from __future__ import annotations

import json
from typing import Never

from device_sdk.artifact.errors import ArtifactError


def canonical(value: object) -> bytes:
    """UTF-8 JSON with sorted keys and no insignificant white space."""
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode("utf-8")
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"the manifest cannot be written as JSON: {error}") from None


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
