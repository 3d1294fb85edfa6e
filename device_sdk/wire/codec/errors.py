"""The one error that the wire raises for input it refuses."""

from __future__ import annotations

import re
from typing import Annotated

from device_sdk.fields import Length, Such

_SLUG = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
Slug = Annotated[
    str, Length(1, 64), Such(_SLUG.fullmatch, "lower-case words joined by '-', such as bad-tag")
]


class WireError(Exception):
    """Input from the other end (or from the network between) was refused.

    ``reason`` is a short, stable, machine-readable slug ("bad-tag", "replayed") under which
    refusals are counted and reported; it never holds anything the sender chose. The message is
    for people: what was wrong and what was expected.

    A programming error of the local caller (a key of the wrong length, say) is a ``ValueError``,
    never a ``WireError``: it must not be counted as the peer's fault.
    """

    def __init__(self, reason: str, message: str) -> None:
        if not _SLUG.fullmatch(reason):
            raise ValueError(
                f"reason {reason!r} is not a slug: expected lower-case words joined by '-', "
                'such as "bad-tag"'
            )
        super().__init__(message)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason}: {super().__str__()}"

    def __reduce__(self) -> tuple[type[WireError], tuple[str, str]]:
        """Errors cross process borders in the tools; the default would lose ``reason``."""
        return (WireError, (self.reason, str(self.args[0])))
