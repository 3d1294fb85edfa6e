"""Recommendations from the home folder alone: no broker, no aggregator, no onnxruntime."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from device_sdk.errors import NothingLearnt, UnknownUser
from device_sdk.methods.scatter.contract import SOLVE
from device_sdk.methods.scatter.least_squares import LeastSquares, Likes
from device_sdk.recommend import top_items
from device_sdk.wire.codec.message import decode
from device_sdk.wire.publish.catalogue import Catalogue
from device_sdk.world import DeviceWorld


class Recommender:
    """Scores all items for a local user: the last item matrix at full width times their vector.

    Of a least-squares model the vector is solved for on each request: what was recorded a moment
    ago counts. The matrix is read from the disk once per round, on the first request after it.
    """

    def __init__(self, world: DeviceWorld) -> None:
        self._home, self._task = world.home, world.membership.task
        self._lock = threading.Lock()
        self._mark: tuple[int, int, int] | None = None
        self._items: NDArray[np.float32] = np.empty((0, 0), np.float32)
        self._users: NDArray[np.float32] = np.empty((0, 0), np.float32)
        self._problem: LeastSquares | None = None
        self._catalogue: Catalogue | None = None
        self._catalogue_id = b""

    def recommend(self, count: int, user: str | None) -> list[tuple[str, float]]:
        """The ``count`` best items that ``user`` has not touched, as (outside id, score).

        ``user``: None for the only one here, or of several the one that is named ``default``.

        Raises :class:`UnknownUser`, :class:`NothingLearnt`, ValueError for a negative count.
        """
        with self._lock:
            return self._ranked(count, user)

    def reload(self) -> None:
        """The home's vectors are others now, in the same round."""
        with self._lock:
            self._mark = None

    def title(self, item: str) -> str:
        """The catalogue's title of an item; empty where there is none. After a ``recommend``."""
        catalogue = self._catalogue
        row = None if catalogue is None else catalogue.rows.get(item)
        return "" if catalogue is None or row is None else catalogue.titles[row]

    def _ranked(self, count: int, user: str | None) -> list[tuple[str, float]]:
        if user is None:
            found = self._home.interactions.some_users(2)
            user = found[0] if len(found) == 1 else "default"
        place = self._home.interactions.place(user)
        if place is None:
            some = ", ".join(self._home.interactions.some_users(5)) or "nobody yet"
            raise UnknownUser(
                f"nothing was recorded for the local user {user!r}; recorded here: {some}"
            )
        self._load()
        if self._mark is None:
            raise NothingLearnt(
                "no round has been trained here yet: start the device and let it take part in one"
            )
        seen = [
            row
            for item in self._home.interactions.items_of(place, self._home.record_names(self._task))
            if (row := self._row(item)) >= 0
        ]
        if not seen:
            raise NothingLearnt(
                f"nothing that was recorded for the local user {user!r} is in the task's catalogue "
                "yet"
            )
        if self._problem is not None:
            liked = Likes.of(np.unique(np.asarray(seen, dtype=np.int64)))
            (vector,) = self._problem.vectors([liked])
        elif place < len(self._users):
            vector = self._users[place]
        else:
            raise NothingLearnt(
                f"the local user {user!r} gets a vector in the next round that this device trains"
            )
        best = top_items(self._items @ vector, seen, count)
        return [(self._item(row), score) for row, score in best]

    def _load(self) -> None:
        mark = self._home.models.model_mark(self._task)
        if mark == self._mark:
            return
        # One transaction: matrix and vectors of the same round.
        with self._home.database.transaction("BEGIN"):
            model = self._home.models.model(self._task)
            state = self._home.models.learner(self._task)
        if model is None or state is None or "items" not in model.arrays:
            return
        self._items = model.arrays["items"].astype(np.float32, copy=False)
        is_solved = SOLVE in model.arrays
        self._problem = LeastSquares.of(model.arrays) if is_solved else None
        self._users = state["users"]
        if model.catalogue_id != self._catalogue_id:
            content = self._home.models.catalogue(model.catalogue_id)
            self._catalogue = None if content is None else decode(Catalogue, content)
            self._catalogue_id = model.catalogue_id
        self._mark = (model.generation, model.round, model.version)

    def _row(self, item: str) -> int:
        if self._catalogue is not None:
            return self._catalogue.rows.get(item, -1)
        is_row = item.isascii() and item.isdigit() and int(item) < len(self._items)
        return int(item) if is_row else -1

    def _item(self, row: int) -> str:
        return str(row) if self._catalogue is None else self._catalogue.items[row]
