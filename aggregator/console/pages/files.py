"""Tables that are taken away, as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence


def as_csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table's head and rows. Spreadsheets take no cell of it for a formula."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_cell, head))
    writer.writerows(map(_cell, row) for row in rows)
    return text.getvalue()


def _cell(value: object) -> object:
    """Empty for what is not defined; a text that would be a formula is quoted."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, str) and value[:1] in "=+-@\t\r" and value:
        return f"'{value}"
    return value
