"""Updates whose contents anybody can work out, and a method whose sums are exact."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.bounds import Sized
from aggregator.methods.method import Arrays, Method, late_weight
from aggregator.methods.scatter import ScatterBinding, ScatterMethod, ScatterTable
from aggregator.methods.scatter_loss import LeastSquaresLoss
from aggregator.task.file import Task
from device_sdk.artifact import Artifact
from device_sdk.artifact.submodels import Submodel
from device_sdk.methods.scatter.contract import (
    STRENGTHS,
    decode_scatter_update,
    encode_scatter_update,
)
from device_sdk.wire.arrays.exchange import Scalar, Update
from tests.fakes.scatter_updates import ONE_WIDTH, of_gradient, one_user

__all__ = [
    "CHECK_UNIT",
    "ITEMS",
    "MOST_DEVICES",
    "WIDTH",
    "KnownBinding",
    "known_binding",
    "known_body",
    "known_check_value",
    "known_long_body",
    "served_late",
]

ITEMS, WIDTH = 64, 66
MOST_DEVICES = WIDTH - 2
_CHECK_COLUMN, _NOISE_COLUMN = 0, WIDTH - 1
CHECK_UNIT = 2.0**-10
"""Of the check column: its sums stay within what a broadcast's float16 holds."""


def known_check_value(place: int, generation: int, round_number: int) -> int:
    """What one device adds to the check column in one round: a whole number within +-1,000."""
    name = f"{place} {generation} {round_number}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:4], "little") % 2001 - 1000


def known_body(place: int, generation: int, round_number: int) -> bytes:
    """The update of device ``place`` for a round, in float32.

    Row ``round % ITEMS`` gets: in the first column the check value in units of 2^-10, in the
    device's own column 1, so that the sums show how often each device was counted; in the last
    column a fraction, whose sum in floats would depend on the order of addition.
    """
    if not 0 <= place < MOST_DEVICES:
        raise ValueError(f"device {place}; the method has room for {MOST_DEVICES}")
    check = known_check_value(place, generation, round_number)
    noise = np.random.default_rng([place, generation, round_number]).standard_normal()
    vector = (check * CHECK_UNIT, 1.0, noise)
    columns = (_CHECK_COLUMN, 1 + place, _NOISE_COLUMN)
    tensors = one_user(WIDTH, [round_number % ITEMS], [1.0], vector, columns)
    return encode_scatter_update(Update(round_number, tensors), WIDTH, "float32")


def known_long_body(place: int, generation: int, round_number: int, items: int) -> bytes:
    """The same contents among zeros for all of ``items`` rows: too long for one envelope from 400
    rows on."""
    short = decode_scatter_update(
        known_body(place, generation, round_number), round_number, ITEMS, WIDTH
    ).tensors
    values = np.zeros((items, WIDTH), np.float32)
    values[short["rows"]] = short["pulls"] @ short["factor"]
    tensors = of_gradient(range(items), values)
    return encode_scatter_update(Update(round_number, tensors), WIDTH, "float32")


class _AsTheyAre(LeastSquaresLoss):
    """Each column of the items says what it said."""

    def turned(self, items: NDArray[np.float32]) -> NDArray[np.float32]:
        return items

    def told(self, items: NDArray[np.float32]) -> tuple[Arrays, Mapping[str, Scalar]]:
        tensors, settings = super().told(items)
        return {**tensors, "items": items, STRENGTHS: np.ones(WIDTH, np.float16)}, settings


class KnownSums(ScatterMethod):
    """The scatter method, but that a version is the one before plus the sums, undivided.

    All columns but the last hold whole numbers of units far below 2^24, which float32 adds exactly.
    An update of an earlier version counts whole in these, so that everybody can tell how often it
    did; in the last column for less, so that the bits tell how old it was taken to be.
    """

    TAKES_LATE = True

    def sized(self, updates: Iterable[Update]) -> Iterator[list[Sized]]:
        return super().sized(map(_aged, updates))

    def _new_loss(self) -> LeastSquaresLoss:
        return _AsTheyAre(self._shape, ONE_WIDTH, self._spread)

    def step(self) -> dict[str, float]:
        """See :class:`~aggregator.methods.method.Method`."""
        fade = np.ones(WIDTH)
        fade[_NOISE_COLUMN] = 0.7  # keep the fraction small, and the bits in motion
        self._items = (self._items * fade + self.gradient).astype(np.float32)
        return {}


def _aged(update: Update) -> Update:
    if not update.age:
        return update
    factor = update.tensors["factor"].copy()
    factor[:, _NOISE_COLUMN] *= np.float32(late_weight(update.age))
    return replace(update, tensors={**update.tensors, "factor": factor})


class KnownBodies(KnownSums):
    """The same of which no round adds up: the updates are held until it closes."""

    keeps = True


class KnownBinding(ScatterBinding):
    """Scatter's messages with :class:`KnownSums` behind them, beginning at zero."""

    method_class: ClassVar[type[KnownSums]] = KnownSums

    def __init__(self) -> None:
        # Sums that anybody can work out are of updates as they came.
        super().__init__(
            "scatter",
            ScatterTable(
                least_squares=ONE_WIDTH,
                clip_multiple=0.0,
                row_multiple=0.0,
                columns=WIDTH,
                spread=0.1,
            ),
        )

    def why_no_staleness(self, ladder: Sequence[Submodel] = ()) -> str:
        """Its sums are of whatever came."""
        return ""

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> Method:
        """See :class:`~aggregator.methods.method.Binding`."""
        return self.method_class(np.zeros((items, WIDTH), np.float32), self.settings)


class KnownBodiesBinding(KnownBinding):
    """The same with :class:`KnownBodies`."""

    method_class = KnownBodies


def known_binding(*, adds_up: bool) -> KnownBinding:
    """One whose rounds add up as soon as three devices were heard of, or one whose never do."""
    return KnownBinding() if adds_up else KnownBodiesBinding()


def served_late(task: Task, *, late: bool) -> Task:
    """The task; where ``late``, rounds close at their quorum, and what comes after counts in one of
    the next."""
    if not late:
        return task
    early = replace(task.round, wanted=task.round.quorum, over_select=1000.0)
    return replace(task, round=replace(early, late="staleness", most_stale=8))
