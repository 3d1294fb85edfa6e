"""Names of tasks and cohorts: what operators choose and every message repeats."""

from __future__ import annotations

import re
from functools import lru_cache

from device_sdk.wire.codec.errors import WireError

MOST_NAME_BYTES = 64
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")


# Every message repeats the same few names.
@lru_cache(maxsize=256)
def _is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def require_name(what: str, name: str) -> None:
    """Raises ValueError unless ``name`` is 1 to 64 of a-z, 0-9, '.', '_', '-'.

    It starts and ends with a letter or digit, so it is safe as a level of a topic.
    """
    if not isinstance(name, str) or not _is_name(name):
        raise ValueError(
            f"{what} {name!r} is no name; expected 1 to {MOST_NAME_BYTES} of a-z, 0-9, '.', '_' "
            "and '-', starting and ending with a letter or digit"
        )


def read_name(what: str, raw: bytes) -> str:
    """A name received. Raises ``WireError("bad-name")``, without quoting it."""
    try:
        name = raw.decode("ascii")
        require_name(what, name)
    except ValueError:
        raise WireError("bad-name", f"the {what} is not a name") from None
    return name
