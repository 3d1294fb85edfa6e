"""What devices shared in mutual learning: public samples, soft labels, and means of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.method import RestoreError

Arrays = Mapping[str, NDArray[Any]]
_OWNER_DIGITS = 32
_MARK_DIGITS = 16


class PublicBook:
    """Public samples in their coded form, by owner, with the mark that tells versions apart."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, dict[str, NDArray[Any]]]] = {}

    @property
    def owners(self) -> tuple[str, ...]:
        """In increasing order."""
        return tuple(sorted(self._held))

    def mark(self, owner: str) -> str:
        """Raises KeyError for an owner that shares nothing."""
        return self._held[owner][0]

    def coded(self, owner: str) -> Arrays:
        """Raises KeyError for an owner that shares nothing."""
        return self._held[owner][1]

    def put(self, owner: str, mark: str, coded: Arrays) -> None:
        """Replace what the owner shares; arrays are copied."""
        self._held[owner] = (mark, {name: array.copy() for name, array in coded.items()})

    def drop(self, owner: str) -> None:
        """Forget an owner, where it is known."""
        self._held.pop(owner, None)

    def state(self) -> dict[str, NDArray[Any]]:
        """Arrays ``<owner>.<mark>.<name>``; copies."""
        return {
            f"{owner}.{mark}.{name}": array.copy()
            for owner, (mark, coded) in self._held.items()
            for name, array in coded.items()
        }

    @classmethod
    def from_state(cls, state: Arrays) -> PublicBook:
        """The book that ``state()`` was taken of; raises RestoreError."""
        book = cls()
        marks: dict[str, str] = {}
        parts: dict[str, dict[str, NDArray[Any]]] = {}
        for key, array in state.items():
            owner, mark, name = _split(key, 3)
            if marks.setdefault(owner, mark) != mark or len(mark) != _MARK_DIGITS:
                raise RestoreError(f"the state's public samples {key!r} have no usable mark")
            parts.setdefault(owner, {})[name] = array
        for owner, coded in parts.items():
            book.put(owner, marks[owner], coded)
        return book


class LabelBook:
    """Coded soft labels by owner, with the count of closed rounds when they came."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, dict[str, NDArray[Any]]]] = {}

    def put(self, owner: str, closed: int, coded: Arrays) -> None:
        """Replace the owner's soft labels; arrays are copied."""
        self._held[owner] = (closed, {name: array.copy() for name, array in coded.items()})

    def drop(self, owner: str) -> None:
        """Forget an owner, where it is known."""
        self._held.pop(owner, None)

    def since(self, closed: int) -> dict[str, Arrays]:
        """Soft labels that came in that closed round or later, by owner."""
        return {
            owner: coded for owner, (came, coded) in sorted(self._held.items()) if came >= closed
        }

    def state(self) -> dict[str, NDArray[Any]]:
        """Arrays ``<owner>.<name>``, and ``<owner>.came`` int64 scalar; copies."""
        found: dict[str, NDArray[Any]] = {}
        for owner, (came, coded) in self._held.items():
            found[f"{owner}.came"] = np.asarray(came, dtype=np.int64)
            found.update({f"{owner}.{name}": array.copy() for name, array in coded.items()})
        return found

    @classmethod
    def from_state(cls, state: Arrays) -> LabelBook:
        """The book that ``state()`` was taken of; raises RestoreError."""
        book = cls()
        parts: dict[str, dict[str, NDArray[Any]]] = {}
        for key, array in state.items():
            owner, name = _split(key, 2)
            parts.setdefault(owner, {})[name] = array
        for owner, coded in parts.items():
            came = coded.pop("came", None)
            if came is None or came.dtype != np.int64 or came.shape != () or not coded:
                raise RestoreError(f"the state's soft labels of {owner} lack their round or labels")
            book.put(owner, int(came), coded)
        return book


class LabelMeans:
    """Means of what many devices think of each owner's samples, streamed."""

    def __init__(self) -> None:
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._counts: dict[str, int] = {}

    def add(self, owner: str, probabilities: NDArray[np.float32]) -> None:
        """One device's soft labels, [samples, classes]."""
        if owner not in self._sums:
            self._sums[owner] = np.zeros(probabilities.shape, dtype=np.float64)
            self._counts[owner] = 0
        self._sums[owner] += probabilities
        self._counts[owner] += 1

    def means(self) -> dict[str, NDArray[np.float32]]:
        """float32 [samples, classes] by owner."""
        return {
            owner: (total / self._counts[owner]).astype(np.float32)
            for owner, total in sorted(self._sums.items())
        }

    def state(self) -> dict[str, NDArray[Any]]:
        """``<owner>.sum`` float64 [samples, classes] and ``<owner>.count`` int64; copies."""
        found: dict[str, NDArray[Any]] = {}
        for owner, total in self._sums.items():
            found[f"{owner}.sum"] = total.copy()
            found[f"{owner}.count"] = np.asarray(self._counts[owner], dtype=np.int64)
        return found

    @classmethod
    def from_state(cls, state: Arrays) -> LabelMeans:
        """The means that ``state()`` was taken of; raises RestoreError."""
        found = cls()
        for key, array in state.items():
            owner, name = _split(key, 2)
            if name == "sum" and array.dtype == np.float64 and array.ndim == 2:
                found._sums[owner] = array.copy()
            elif name == "count" and array.dtype == np.int64 and array.shape == () and array > 0:
                found._counts[owner] = int(array)
            else:
                raise RestoreError(f"the state's {key!r} is no sum or count of soft labels")
        if set(found._sums) != set(found._counts):
            raise RestoreError("the state's sums and counts of soft labels do not go together")
        return found


def _split(key: str, parts: int) -> list[str]:
    found = key.split(".", parts - 1)
    if len(found) != parts or len(found[0]) != _OWNER_DIGITS:
        raise RestoreError(f"the state's {key!r} names no owner")
    return found
