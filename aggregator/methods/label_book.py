"""What devices shared in mutual learning: public samples, soft labels, and means of these."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.state import COUNT, Entry, RestoreError, State, Stateful, part, unpack

_OWNER_DIGITS = 32
_MARK_DIGITS = 16


class PublicBook(Stateful):
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

    def coded(self, owner: str) -> State:
        """Raises KeyError for an owner that shares nothing."""
        return self._held[owner][1]

    def put(self, owner: str, mark: str, coded: State) -> None:
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

    def restored(self, state: State) -> PublicBook:
        """The book that ``state()`` was taken of; raises RestoreError."""
        book = PublicBook()
        for owner, marked in _by_owner(state).items():
            mark = min(marked).partition(".")[0]
            coded = part(f"{mark}.", marked)
            if len(mark) != _MARK_DIGITS or len(coded) != len(marked):
                raise RestoreError(f"the state's public samples of {owner} have no usable mark")
            book.put(owner, mark, coded)
        return book


class LabelBook(Stateful):
    """Coded soft labels by owner, with the count of closed rounds when they came."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, dict[str, NDArray[Any]]]] = {}

    def put(self, owner: str, closed: int, coded: State) -> None:
        """Replace the owner's soft labels; arrays are copied."""
        self._held[owner] = (closed, {name: array.copy() for name, array in coded.items()})

    def drop(self, owner: str) -> None:
        """Forget an owner, where it is known."""
        self._held.pop(owner, None)

    def since(self, closed: int) -> dict[str, State]:
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

    def restored(self, state: State) -> LabelBook:
        """The book that ``state()`` was taken of; raises RestoreError."""
        book = LabelBook()
        for owner, coded in _by_owner(state).items():
            came = unpack({"came": COUNT}, {n: coded.pop(n) for n in ("came",) if n in coded})
            if not coded:
                raise RestoreError(f"the state lacks the soft labels of {owner}")
            book.put(owner, int(came["came"]), coded)
        return book


class LabelMeans(Stateful):
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

    def restored(self, state: State) -> LabelMeans:
        """The means that ``state()`` was taken of; raises RestoreError."""
        schema = {
            "sum": Entry(np.float64, ("samples", "classes")),
            "count": Entry(np.int64, least=1),
        }
        found = LabelMeans()
        for owner, own in _by_owner(state).items():
            arrays = unpack(schema, own)
            found._sums[owner], found._counts[owner] = arrays["sum"], int(arrays["count"])
        return found


def _by_owner(state: State) -> dict[str, dict[str, NDArray[Any]]]:
    found: dict[str, dict[str, NDArray[Any]]] = {}
    for key, array in state.items():
        owner, _, name = key.partition(".")
        if len(owner) != _OWNER_DIGITS or not name:
            raise RestoreError(f"the state's {key!r} names no owner")
        found.setdefault(owner, {})[name] = array
    return found
