"""A task's item catalogue: which external item id stands for which row of the item matrix.

The catalogue's id is the SHA-256 of its bytes. Items are only ever appended, so a row never changes
its item.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from device_sdk.fields import Length
from device_sdk.wire.codec.message import Record

MOST_ITEMS = 2_000_000
MOST_ID_BYTES = 256
NO_CATALOGUE = bytes(32)
"""The catalogue id of a task without one."""


@dataclass(frozen=True, slots=True)
class Catalogue(Record):
    """External ids of rows 0, 1, ... and titles for people."""

    items: Annotated[tuple[Annotated[str, Length(1, MOST_ID_BYTES)], ...], Length(1, MOST_ITEMS)]
    """External ids, in the order of rows, each once."""
    titles: Annotated[tuple[Annotated[str, Length(0, 512)], ...], Length(1, MOST_ITEMS)]
    """As many; empty where there is none."""
    rows: Mapping[str, int] = field(init=False, repr=False, compare=False)
    """Row of each id."""

    MOST_BYTES = 64 << 20

    def check(self) -> None:
        if len(self.titles) != len(self.items):
            raise ValueError(f"{len(self.titles)} titles for {len(self.items)} items")
        rows: dict[str, int] = {}
        for row, item in enumerate(self.items):
            first = rows.setdefault(item, row)
            if first != row:
                raise ValueError(f"row {row} repeats the item id of row {first}")
        object.__setattr__(self, "rows", rows)

    def __len__(self) -> int:
        return len(self.items)

    def extends(self, older: Catalogue) -> bool:
        """Whether every row of ``older`` is still the same item here."""
        return self.items[: len(older)] == older.items


def catalogue_id(content: bytes) -> bytes:
    """32 bytes: SHA-256 of the content."""
    return hashlib.sha256(content).digest()
