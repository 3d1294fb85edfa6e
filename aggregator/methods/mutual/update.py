"""The parts of a mutual-learning update."""

from __future__ import annotations

import re
from typing import Any

from numpy.typing import NDArray

from aggregator.methods.method import Refused
from device_sdk.wire.arrays.exchange import Update

__all__ = ["METRICS", "check_metadata", "taken_apart"]

METRICS = ("local_loss", "public_loss", "conflict_share")
"""What a device may say about its steps."""

_PUBLIC = "public."
_MARK = re.compile(r"[0-9a-f]{16}")
_LARGEST_METRIC = 1e12


def taken_apart(update: Update) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """The public samples of an update by their own names, and its other tensors."""
    public: dict[str, NDArray[Any]] = {}
    others: dict[str, NDArray[Any]] = {}
    for name, array in update.tensors.items():
        if name.startswith(_PUBLIC):
            public[name.removeprefix(_PUBLIC)] = array
        else:
            others[name] = array
    return public, others


def check_metadata(update: Update, *, shares: bool) -> None:
    """Raises Refused with reason ``bad-metadata``; ``shares``: it holds public samples."""
    odd = set(update.metadata) - {*METRICS, "mark"}
    if odd:
        raise Refused("bad-metadata", f"unknown metadata {sorted(odd)[0]!r}")
    mark = update.metadata.get("mark")
    if shares != (mark is not None):
        raise Refused("bad-metadata", "public samples, and only they, come with their mark")
    if mark is not None and not (isinstance(mark, str) and _MARK.fullmatch(mark)):
        raise Refused("bad-metadata", "the mark is not 16 hexadecimal digits")
    for name in METRICS:
        value = update.metadata.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Refused("bad-metadata", f"{name} is no number")
        if not abs(value) <= _LARGEST_METRIC:
            raise Refused("bad-metadata", f"{name} is absurdly large")
