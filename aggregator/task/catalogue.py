"""The operator's list of items: a text file with one item a line, ``id`` or ``id<TAB>title``."""

from __future__ import annotations

from pathlib import Path

from aggregator.errors import AggregatorError
from aggregator.store import Store
from device_sdk.wire.publish.catalogue import Catalogue, read_catalogue


def read_catalogue_file(path: Path) -> Catalogue:
    """Row 0 is the first line. Raises AggregatorError, naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AggregatorError(f"the catalogue {path} cannot be read: {error}") from None
    parts = [line.partition("\t") for line in lines]
    try:
        return Catalogue(
            tuple(item.strip() for item, _, _ in parts),
            tuple(title.strip() for _, _, title in parts),
        )
    except ValueError as error:
        raise AggregatorError(
            f"the catalogue {path} is not usable: {error} (row 0 is line 1)"
        ) from None


def stored_catalogue(store: Store) -> Catalogue | None:
    """The catalogue that the model's rows belong to; None before the first ``serve``."""
    content = store.facts.catalogue
    return None if content is None else read_catalogue(content)


def read_continued_catalogue(path: Path, store: Store) -> Catalogue:
    """The file's catalogue. Raises AggregatorError also when a stored row would change its item.

    Items are appended, never moved or removed: devices and the model know them by their rows.
    """
    catalogue, known = read_catalogue_file(path), stored_catalogue(store)
    if known is not None and not catalogue.extends(known):
        raise AggregatorError(
            f"the catalogue does not begin with the {len(known)} items that it had: append new "
            "items at the end, and keep those that are no longer offered"
        )
    return catalogue
