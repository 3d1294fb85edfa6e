"""A task's item catalogue: which external item id stands for which row of the item matrix.

Bytes: canonical CBOR {items: [text ...], titles: [text ...]}, in the order of rows. The catalogue's
id is the SHA-256 of these bytes. Items are only ever appended, so a row never changes its item.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import Record

MAX_CATALOGUE_BYTES = 64 << 20
MOST_ITEMS = 2_000_000
MOST_ID_BYTES = 256
MOST_TITLE_BYTES = 512
NO_CATALOGUE = bytes(32)
"""The catalogue id of a task without one."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """External ids of rows 0, 1, ... and titles for people (empty where there is none).

    Raises ValueError, naming the row, for an empty, overlong or repeated id, an overlong title, or
    another number of titles than ids.
    """

    items: tuple[str, ...]
    titles: tuple[str, ...]
    rows: Mapping[str, int] = field(init=False, repr=False, compare=False)
    """Row of each id."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.items) <= MOST_ITEMS:
            raise ValueError(f"{len(self.items)} items; expected 1 to {MOST_ITEMS}")
        if len(self.titles) != len(self.items):
            raise ValueError(f"{len(self.titles)} titles for {len(self.items)} items")
        rows: dict[str, int] = {}
        for row, (item, title) in enumerate(zip(self.items, self.titles, strict=True)):
            if not item or len(item.encode()) > MOST_ID_BYTES:
                raise ValueError(f"row {row}: an item id has 1 to {MOST_ID_BYTES} bytes")
            if len(title.encode()) > MOST_TITLE_BYTES:
                raise ValueError(f"row {row}: a title has at most {MOST_TITLE_BYTES} bytes")
            first = rows.setdefault(item, row)
            if first != row:
                raise ValueError(f"row {row} repeats the item id of row {first}")
        object.__setattr__(self, "rows", rows)

    def __len__(self) -> int:
        return len(self.items)

    def extends(self, older: Catalogue) -> bool:
        """Whether every row of ``older`` is still the same item here."""
        return self.items[: len(older)] == older.items

    def to_bytes(self) -> bytes:
        """The content that travels."""
        return cbor.encode({"items": list(self.items), "titles": list(self.titles)})


def catalogue_id(content: bytes) -> bytes:
    """32 bytes: SHA-256 of the content."""
    return hashlib.sha256(content).digest()


def read_catalogue(content: bytes) -> Catalogue:
    """Parse a catalogue's content. Raises ``WireError``."""
    record = Record(cbor.decode(content, limit_bytes=MAX_CATALOGUE_BYTES), ("items", "titles"))
    items, titles = (
        tuple(text for text in values if isinstance(text, str))
        for values in (record.array("items", MOST_ITEMS), record.array("titles", MOST_ITEMS))
    )
    if len(items) != len(record.array("items", MOST_ITEMS)) or len(titles) != len(
        record.array("titles", MOST_ITEMS)
    ):
        raise WireError("bad-field", "items and titles must be texts")
    try:
        return Catalogue(items, titles)
    except ValueError as error:
        raise WireError("bad-field", str(error)) from error
