"""Any value that a declaration allows, for property-based tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from hypothesis import reject
from hypothesis import strategies as st

from device_sdk.fields import As, Length, OneOf, Rising, Such, Within, hints_of
from device_sdk.wire.arrays.exchange import is_tensor_name
from device_sdk.wire.codec.message import Record, is_name
from device_sdk.wire.publish.content import ContentHead
from device_sdk.wire.publish.manifest import RoundManifest
from device_sdk.wire.publish.receipts import Receipt, Verdict
from device_sdk.wire.publish.task_messages import TaskTerms
from device_sdk.wire.seal.placement import is_cell

_LABEL = r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?"
_SUCH: dict[object, str] = {
    is_name: r"[a-z0-9]([a-z0-9._-]{0,22}[a-z0-9])?",
    is_tensor_name: r"[a-z][a-z0-9_]{0,9}(\.[a-z0-9_]{1,9}){0,2}",
    is_cell: rf"{_LABEL}(\.{_LABEL}){{0,3}}(:[1-9][0-9]{{0,3}})?",
}
"""By the test of a text, an expression of texts that pass it."""
_MOST = 3
"""Of an array's items, and of a byte string's bytes beyond the least: quick is enough."""


def messages() -> Iterator[type[Record]]:
    """Every class of messages that there is."""
    waiting: list[type[Record]] = [Record]
    while waiting:
        found = waiting.pop().__subclasses__()
        waiting += found
        # With slots a dataclass is made a second time: the first stays behind.
        yield from (e for e in found if "MOST_BYTES" in vars(e) and _is_named(e))


def _is_named(kind: type[Record]) -> bool:
    return getattr(sys.modules[kind.__module__], kind.__name__) is kind


def any_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a declared type."""
    bare, *beside = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    bare = next((each.kind for each in beside if isinstance(each, As)), bare)
    origin, inside = get_origin(bare), get_args(bare)
    length = next((each for each in beside if isinstance(each, Length)), Length(0, _MOST))
    most = length.least if length.most is None else min(length.most, length.least + _MOST)
    such = [each.test for each in beside if isinstance(each, Such)]
    for each in beside:
        if isinstance(each, OneOf):
            return st.sampled_from(each.known)
    if bare is str:
        return _texts(such, length)
    if bare is bytes:
        return st.binary(min_size=length.least, max_size=most)
    if bare in (int, float):
        return _numbers(bare, next((e for e in beside if isinstance(e, Within)), Within()))
    if bare in (bool, NoneType):
        return st.booleans() if bare is bool else st.none()
    if origin in (Union, UnionType):
        return st.one_of(map(any_of, inside))
    if origin is tuple:
        items = st.lists(any_of(inside[0]), min_size=length.least, max_size=most)
        order = next((each for each in beside if isinstance(each, Rising)), None)
        return items.map(tuple) if order is None else items.map(lambda found: _rising(found, order))
    if origin is Mapping:
        sizes = {"min_size": length.least, "max_size": most}
        found = st.dictionaries(any_of(inside[0]), any_of(inside[1]), **sizes)
        return found.filter(lambda each: all(test(each) for test in such))
    if isinstance(bare, type) and issubclass(bare, Enum):
        return st.sampled_from(bare)
    return _records(bare)


def _texts(such: list[Callable[[Any], object]], length: Length) -> st.SearchStrategy[str]:
    drawn = st.text(min_size=length.least, max_size=max(length.least, 6))
    for test in such:
        pattern = _SUCH.get(test) or test.__self__.pattern  # type: ignore[attr-defined]
        drawn = st.from_regex(pattern, fullmatch=True)
    return drawn.filter(lambda text: _fits(text, length) and all(test(text) for test in such))


def _fits(text: str, length: Length) -> bool:
    least, most = length.bounds
    return least <= len(text.encode()) <= most


def _numbers(kind: type, within: Within) -> st.SearchStrategy[Any]:
    if kind is int:
        low, high = max(within.least, -(2**63)), min(within.most, 2**64 - 1)
        return st.integers(int(low), int(high)).filter(within.__contains__)
    low, high = max(within.least, -1e300), min(within.most, 1e300)
    return st.floats(low, high).filter(within.__contains__)


def _rising(found: list[Any], order: Rising) -> tuple[Any, ...]:
    marks = {getattr(each, order.by) if order.by else each: each for each in found}
    return tuple(marks[mark] for mark in sorted(marks))


@st.composite
def _records(draw: st.DrawFn, kind: Any) -> Any:
    fields: Mapping[str, Any] = getattr(kind, "__dataclass_fields__", {})
    drawn = {
        name: draw(any_of(hint))
        for name, hint in hints_of(kind).items()
        if name not in fields or fields[name].init
    }
    # What fields ask of each other.
    if kind is Receipt and drawn["verdict"] is not Verdict.REFUSED:
        drawn["reason"] = ""
    if kind is TaskTerms:
        drawn["attachments"] = tuple(replace(each, cohort="") for each in drawn["attachments"])
    if kind in (RoundManifest, ContentHead):
        drawn["length"] = draw(st.integers(len(drawn["chunks"]), len(drawn["chunks"]) * 65_536))
    if kind is RoundManifest:
        times = ("opened_unix_seconds", "deadline_unix_seconds")
        drawn |= zip(times, sorted(drawn[each] for each in times), strict=True)
    try:
        return kind(**drawn)
    except ValueError:
        reject()
