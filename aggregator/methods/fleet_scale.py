"""What is usual in a fleet: running medians in which every device has one voice."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.method import StateError
from aggregator.methods.saved_state import require_array, require_count

__all__ = ["LEAST_VOICES", "FleetScale"]

LEAST_VOICES = 3
"""Voices of which one that lies cannot choose the median."""
_WINDOW = 256
"""Updates that are looked back on: few enough that medians follow norms as the model settles."""
_SENDER_BYTES = 16
_PARTS = ("named", "senders", "places", "values")

Voice = tuple[int, tuple[float, ...]]


class FleetScale:
    """Medians of a few measures of an update, over the devices heard of in the last 256 updates.

    Of each device its latest update counts: one that takes part in every round, while others come
    now and then, is no more than one voice. Updates without a sender are voices of their own.

    Args:
        measures: how many numbers an update is described by.

    Values are noted as they came, before anything was scaled down, in the order of the commits, so
    the same updates in the same order give the same medians. A round that is given up leaves no
    trace: its updates are absorbed again by the next.
    """

    def __init__(self, measures: int) -> None:
        self._measures = measures
        self._settled: dict[str, Voice] = {}
        self._settled_count = 0
        self.begin()

    @property
    def known(self) -> bool:
        """Whether there are voices enough for a median that no single device chooses."""
        return len(self._voices) >= LEAST_VOICES

    def note(self, sender: str, values: Sequence[float]) -> None:
        """Take note of an accepted update: finite values, one a measure, none below 0."""
        self._count += 1
        name = sender or str(self._count)
        self._drop(name)
        self._voices[name] = (self._count, tuple(values))
        for ordered, value in zip(self._ordered, values, strict=True):
            insort(ordered, value)
        while True:
            oldest = next(iter(self._voices))
            if self._voices[oldest][0] > self._count - _WINDOW:
                return
            self._drop(oldest)

    def median(self, measure: int) -> float:
        """Of one measure, the lower of two in the middle; 0 where nothing is known."""
        ordered = self._ordered[measure]
        return ordered[(len(ordered) - 1) // 2] if ordered else 0.0

    def begin(self) -> None:
        """A round begins: forget what came since the last one that ended."""
        self._voices = dict(self._settled)
        self._count = self._settled_count
        self._ordered = [
            sorted(values[measure] for _, values in self._voices.values())
            for measure in range(self._measures)
        ]

    def settle(self) -> None:
        """The round made a version: what came in it stays."""
        self._settled, self._settled_count = dict(self._voices), self._count

    def state(self) -> dict[str, NDArray[Any]]:
        """As ``settled.*`` and ``recent.*`` n voices, the oldest first: ``named`` bool [n],
        ``senders`` uint8 [n, 16] (zeros for those that have none), ``places`` int64 [n] and
        ``values`` float64 [n, measures]; with ``count`` int64 scalar, the updates noted so far."""
        return {
            **{f"settled.{k}": v for k, v in self._packed(self._settled).items()},
            "settled.count": np.asarray(self._settled_count, dtype=np.int64),
            **{f"recent.{k}": v for k, v in self._packed(self._voices).items()},
            "recent.count": np.asarray(self._count, dtype=np.int64),
        }

    @classmethod
    def from_state(cls, measures: int, state: Mapping[str, NDArray[Any]]) -> FleetScale:
        """One that continues from ``state()``; an empty state is a fresh start, as where the option
        was just turned on. Raises StateError for anything else."""
        found = cls(measures)
        if not state:
            return found
        wanted = {f"{when}.{p}" for when in ("settled", "recent") for p in (*_PARTS, "count")}
        if set(state) != wanted:
            raise StateError(f"the fleet's scale holds {sorted(state)}; expected {sorted(wanted)}")
        found._settled, found._settled_count = found._unpacked("recent", state)
        found.begin()
        found._settled, found._settled_count = found._unpacked("settled", state)
        return found

    def _drop(self, name: str) -> None:
        voice = self._voices.pop(name, None)
        if voice is not None:
            for ordered, value in zip(self._ordered, voice[1], strict=True):
                del ordered[bisect_left(ordered, value)]

    def _packed(self, voices: Mapping[str, Voice]) -> dict[str, NDArray[Any]]:
        named = np.asarray([len(name) == 2 * _SENDER_BYTES for name in voices], dtype=np.bool_)
        senders = np.zeros((len(voices), _SENDER_BYTES), dtype=np.uint8)
        for row, name in enumerate(voices):
            if named[row]:
                senders[row] = np.frombuffer(bytes.fromhex(name), dtype=np.uint8)
        values = np.asarray([values for _, values in voices.values()], dtype=np.float64)
        return {
            "named": named,
            "senders": senders,
            "places": np.asarray([place for place, _ in voices.values()], dtype=np.int64),
            "values": values.reshape(len(voices), self._measures),
        }

    def _unpacked(
        self, when: str, state: Mapping[str, NDArray[Any]]
    ) -> tuple[dict[str, Voice], int]:
        named, senders, places, values = (state[f"{when}.{part}"] for part in _PARTS)
        count = require_count(state[f"{when}.count"], f"{when} count of updates")
        size = len(places) if places.ndim else 0
        require_array(places, f"{when} places", np.int64, (size,))
        require_array(named, f"{when} named", np.bool_, (size,))
        require_array(senders, f"{when} senders", np.uint8, (size, _SENDER_BYTES))
        require_array(values, f"{when} values", np.float64, (size, self._measures))
        if not np.isfinite(values).all() or (values < 0).any():
            raise StateError(f"the {when} values are not all finite and at least 0")
        if (np.diff(places) <= 0).any() or not (
            (places > max(0, count - _WINDOW)) & (places <= count)
        ).all():
            raise StateError(f"the {when} places do not rise within the last {_WINDOW} updates")
        voices = {
            (sender.tobytes().hex() if has else str(place)): (place, tuple(row))
            for has, sender, place, row in zip(
                named.tolist(), senders, places.tolist(), values.tolist(), strict=True
            )
        }
        if len(voices) != size:
            raise StateError(f"a device has two of the {when} voices")
        return voices, count
