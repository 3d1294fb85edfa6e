"""Write the tables of messages' fields in docs/ from what their classes declare.

    python tests/vectors/generate_message_tables.py [--check]

A table stands behind ``<!-- fields: NAME -->``, up to the next empty line. ``--check`` writes
nothing and fails when a file would change.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from device_sdk.evaluation.report import EvaluationTerms, PackedReport
from device_sdk.fields import DeclaredField, entries_of
from device_sdk.wire.codec.message import NAME_WORDS
from device_sdk.wire.publish.content import ContentHead
from device_sdk.wire.publish.manifest import RoundManifest
from device_sdk.wire.publish.receipts import Receipt
from device_sdk.wire.publish.report import Details, Report
from device_sdk.wire.publish.task_messages import (
    BroadcastHead,
    OfferedArtifact,
    OfferedAttachment,
    Standing,
    TaskTerms,
)
from device_sdk.wire.seal.announcement import Presence, ServedTasks, Successor
from device_sdk.wire.seal.descriptor import DescriptorBody
from device_sdk.wire.seal.enrolment_message import EnrolAnswer, Grant, ProvenRequest
from device_sdk.wire.seal.handshake import OpenRequest, SessionReply
from device_sdk.wire.seal.placement import Placement
from tests.vectors.written import write

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = tuple(
    sorted(
        [
            *DOCS.glob("wire*.md"),
            *DOCS.glob("wire*/*.md"),
            *DOCS.glob("task-messages*/*.md"),
            DOCS / "task-messages.md",
        ]
    )
)
KINDS: tuple[type[Any], ...] = (
    BroadcastHead, ContentHead, DescriptorBody, Details, EnrolAnswer, EvaluationTerms, Grant,
    OfferedArtifact, OfferedAttachment, OpenRequest, PackedReport, Placement, Presence,
    ProvenRequest, Receipt, Report, RoundManifest, ServedTasks, SessionReply, Standing, Successor,
    TaskTerms,
)  # fmt: skip
_BY_NAME = {kind.__name__: kind for kind in KINDS}
_TABLE = re.compile(r"<!-- fields: (\w+) -->\n(?:\|.*\n)*")


def table(kind: type[Any]) -> str:
    """A row for each field, by its key: what it is, when it is left out, what it means."""
    entries = entries_of(kind)
    if not getattr(kind, "IS_ROW", False):
        entries = tuple(sorted(entries, key=lambda entry: entry.key))
    meanings = dict(_meanings(kind))
    rows = [
        f"| `{each.key}` | {_type(each, kind)} | {meanings.get(each.name, '')} |"
        for each in entries
    ]
    return "\n".join(["| field | type | |", "|---|---|---|", *rows]) + "\n"


def _type(entry: DeclaredField, kind: type[Any]) -> str:
    words = entry.kind.words.replace(NAME_WORDS, "a name").replace("|", "\\|")
    if getattr(kind, "IS_ROW", False) or entry.required:
        return words
    usual = None if entry.default is None else entry.kind.plain(entry.default)
    return f"{words}; left out where {_spelt(usual)}"


def _spelt(usual: Any) -> str:
    if usual is None:
        return "there is none"
    if isinstance(usual, bytes) and usual:
        return f"it is 0x{usual.hex()}"
    if isinstance(usual, (str, list, dict, bytes)):
        return f"it is {usual or 'empty'}"
    return f"it is {str(usual).lower()}"


def _meanings(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """What stands below each field of a class and of those it extends."""
    for each in reversed(kind.__mro__):
        if not each.__module__.startswith("device_sdk.") or "Declared" in each.__name__:
            continue
        (tree,) = ast.parse(inspect.getsource(each)).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = " ".join(str(ast.literal_eval(below.value)).split())
                text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")
                yield ast.unparse(field.target), text.replace("|", "\\|")


def text(page: Path) -> str:
    """A page with its tables as they should be."""
    found = page.read_text(encoding="utf-8")
    return _TABLE.sub(lambda at: f"<!-- fields: {at[1]} -->\n{table(_BY_NAME[at[1]])}", found)


if __name__ == "__main__":
    sys.exit(max(write(page, text(page)) for page in PAGES))
