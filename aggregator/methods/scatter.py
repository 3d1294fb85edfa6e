"""The aggregator's half of scatter aggregation: item gradients of unequal widths into one matrix.

Method: "Compute-adaptive, model-heterogeneous federated recommendation" (the patent in our papers),
step 4: each device's gradient is scattered to the full width K, zero elsewhere, and averaged.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.bounds import Judged, Limits, NormBounding, Sized
from aggregator.methods.fleet import Measured, bounded_rows, euclidean_norm, measured_each
from aggregator.methods.method import (
    Arrays,
    Binding,
    Method,
    ModelMismatch,
    Refused,
    fitted,
)
from aggregator.methods.robust import (
    HeldUpdates,
    Multiple,
    Robust,
    RobustRule,
    TrimShare,
    touched_means,
)
from aggregator.methods.scatter_loss import (
    BprLoss,
    LeastSquaresLoss,
    LeastSquaresSettings,
    RoundSum,
    ScatterLoss,
)
from aggregator.methods.server_optimizer import OptimizerSettings
from aggregator.methods.summing import SummingMethod, finite
from aggregator.methods.sums import Additive, FixedPointSum
from device_sdk.artifact import Artifact
from device_sdk.evaluation.report import SERVED, Stage
from device_sdk.fields import Declared, Within
from device_sdk.methods.scatter.contract import (
    SOLVE,
    BprTraining,
    LossName,
    decode_scatter_update,
    decode_scatter_updates,
)
from device_sdk.methods.state import Entry, Schema, State
from device_sdk.wire.arrays.exchange import Broadcast, Update
from device_sdk.wire.arrays.sparse import MAX_WIDTH
from device_sdk.wire.codec.errors import WireError

# Holds every item's vector to the length that is usual for items touched as often.
#
# In a factorisation of rankings the length of an item's vector stands for its popularity, and so
# does the number of devices that touch its row: the more users like it, the more send it. Whoever
# promotes an item, with pushes that are honest by size, makes a vector longer than its touches
# explain.

_ALIKE = 64
"""Items whose median is compared with, the nearest in number of touches."""

Floats = NDArray[np.float32]
Counts = NDArray[np.int64]


class ItemNorms(Additive):
    """Counts who touches a row, and scales down rows that are too long for it.

    The items that were touched are ranked by how many accepted updates did so, ever, and divided
    into groups of about 64 neighbours. A row may be ``multiple`` times as long as the median of its
    group.

    Args:
        multiple: of the group's median Euclidean norm.
        items: rows of the matrix.

    A round that is given up leaves no trace. Memory is two integers an item.
    """

    FRESH = True
    ADDED = ("recent",)

    def __init__(self, multiple: float, items: int) -> None:
        self._multiple = multiple
        self._items = items
        self._settled: Counts = np.zeros(items, dtype=np.int64)
        self._recent: Counts = np.zeros(items, dtype=np.int64)
        self.count = 0
        """Rows that the last call of :meth:`bounded` scaled down."""

    def note(self, rows: Counts) -> None:
        """An accepted update touched these distinct rows."""
        self._recent[rows] += 1

    def bounded(self, matrix: Floats) -> Floats:
        """``matrix`` [items, K] with the rows that are too long scaled down."""
        touches = self._settled + self._recent
        order = np.argsort(touches, kind="stable")[np.count_nonzero(touches == 0) :]
        norms = np.linalg.norm(matrix.astype(np.float64), axis=1)
        limits = np.full_like(norms, np.inf)
        for group in np.array_split(order, max(1, len(order) // _ALIKE)):
            usual = np.median(norms[group]) if len(group) else 0.0
            # Where most are still zero, there is no scale.
            limits[group] = self._multiple * usual if usual > 0 else np.inf
        bounded, self.count = bounded_rows(matrix, norms, limits)
        return bounded

    def settle(self) -> None:
        self._settled = self._settled + self._recent
        self._recent = np.zeros_like(self._settled)

    def grow(self, items: int) -> None:
        """Append ``items`` rows that nobody has touched."""
        fresh = np.zeros(items, dtype=np.int64)
        self._items += items
        self._settled = np.concatenate([self._settled, fresh])
        self._recent = np.concatenate([self._recent, fresh])

    def _schema(self) -> Schema:
        return dict.fromkeys(("settled", "recent"), Entry(np.int64, (self._items,), least=0))


# What a task file may choose about scatter aggregation.


@dataclass(frozen=True, slots=True)
class ScatterSettings(Declared):
    """Settings of a scatter task.

    Attributes:
        loss: ``least-squares`` solves for each user in closed form and steps by the exact pull of
            all unseen items; ``bpr`` descends along triples with drawn negatives (the patent's).
        least_squares: of ``least-squares``: its weights, and how wide the model gets.
        aggregator: of ``bpr``: ``mean`` divides each column's sum by the participants (the
            patent's), ``coverage`` by those of them that drew the column.
        optimizer: of ``bpr``: the server's, on the averaged gradient. Its ``decay`` holds for the
            devices' user_learning_rate as well, so that both sides of the product settle together.
        clip_norm: an update with a larger Euclidean norm is scaled down to it; 0 for no limit.
        clip_multiple: likewise for more than so many times the fleet's median norm; 0 for no limit.
            See :class:`~aggregator.methods.fleet.FleetScale`.
        row_multiple: likewise for each row of an update, against the fleet's median row.
        outlier_multiple: 3, say: an update so far out of line counts as one of no rows; 0: none
            does. See :class:`~aggregator.methods.fleet.Outliers`.
        item_multiple: 1.25, say: an item's vector longer than so many medians of those touched as
            often is scaled down; 0: no limit. See
            :class:`ItemNorms`.
        robust: how a cell's values become one; all but ``none`` keep a round's updates in memory
            until it closes. See :class:`~aggregator.methods.robust.RobustRule`.
        trim_share: what ``trimmed`` leaves out at either end.
        training: of ``bpr``: what the broadcast tells the devices.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    loss: LossName = "least-squares"
    least_squares: LeastSquaresSettings = field(default_factory=LeastSquaresSettings)
    aggregator: Literal["mean", "coverage"] = "coverage"
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    clip_norm: Annotated[float, Within(0)] = 0.0
    clip_multiple: Multiple = 4.0
    row_multiple: Multiple = 16.0
    outlier_multiple: Multiple = 0.0
    item_multiple: Multiple = 0.0
    robust: Robust = "none"
    trim_share: TrimShare = 0.1
    training: BprTraining = field(default_factory=BprTraining)


# Far above any gradient of a model that trains, far below what could overflow a sum of them.
_LARGEST_VALUE = 1e12
# float32 holds it, and no value above 1e11 hides in a smaller sum, however it was rounded.
_SMALL_SQUARES = 1e20
_ADDED_TOGETHER = 1 << 16
"""Values: what is made of more does not stay in a core's cache."""
# A dtype compares with another at once, with a scalar type only after making one of it.
_INT64 = np.dtype(np.int64)


def initial_items(items: int, columns: int, spread: float, rng: np.random.Generator) -> Floats:
    """A random item matrix, float32 [items, columns], normal with standard deviation ``spread``."""
    return np.float32(spread) * rng.standard_normal((items, columns), dtype=np.float32)


class ScatterMethod(SummingMethod):
    """Keeps the item matrix V; see :class:`~aggregator.methods.method.Method` for the calls.

    Args:
        items: V to start from, float32 [items, K]; see :func:`initial_items`.
        settings: of the task.
        spread: standard deviation of what columns are begun with that a model gets later.
        seed: of those draws.

    Memory is that of a few matrices like V, however many updates are absorbed; held ones come on
    top.
    Raises ValueError when ``items`` is no finite, non-empty float32 matrix.
    """

    PARTS = ("loss", "touches", "total")
    ADDED = ("drawn", "trained")
    _loss: ScatterLoss
    _drawn: Counts
    _trained: int
    _robust: NDArray[np.float64] | None
    _total: FixedPointSum | None = None

    def __init__(
        self,
        items: Floats,
        settings: ScatterSettings | None = None,
        spread: float = 0.01,
        seed: int = 0,
    ) -> None:
        if items.dtype != np.float32 or items.ndim != 2 or items.size == 0:
            raise ValueError(
                f"items is {items.dtype} {items.shape}; expected float32 of [items, K], not empty"
            )
        if not np.isfinite(items).all():
            raise ValueError("items holds values that are not finite")
        self._settings = chosen = settings if settings is not None else ScatterSettings()
        self._items = items.copy()
        self._columns, self._spread, self._seed = items.shape[1], spread, seed
        self._rule = RobustRule(chosen.robust, chosen.trim_share)
        self._loss = self._new_loss()
        self._items = self._loss.turned(self._items)
        self._touches = (
            ItemNorms(chosen.item_multiple, len(items)) if chosen.item_multiple else None
        )
        multiples = chosen.clip_multiple, chosen.row_multiple, chosen.outlier_multiple
        self._bounding = NormBounding(
            Limits(chosen.clip_norm, *multiples),
            length=euclidean_norm(items),
            others=self._loss.MEASURES,
        )
        if self._rule.holds:
            self._held = HeldUpdates(self._loss.unfolded)
        self.begin(0)

    @property
    def items(self) -> Floats:
        """V, float32 [items, K]: a copy."""
        return self._items.copy()

    @property
    def model_arrays(self) -> dict[str, Floats]:
        """``items``: V, float32 [items, K]; of least squares ``solve`` too, a0 and lambda."""
        return {"items": self.items, **self._loss.model()}

    @property
    def derived(self) -> frozenset[str]:
        """See :class:`~aggregator.methods.method.Method`."""
        return frozenset((SOLVE,))

    def fits(self, name: str, array: NDArray[Any]) -> bool:
        """Of least squares items of any width, where it grows."""
        chosen = self._settings
        grows = chosen.loss == "least-squares" and chosen.least_squares.most_columns
        if name == "items" and grows and array.ndim == 2:
            return len(array) == len(self._items) and 0 < array.shape[1] <= MAX_WIDTH
        return super().fits(name, array)

    def begin_with(self, model: Arrays) -> None:
        """Takes ``items``. Of a shorter catalogue: those behind its end stay as they are."""
        given = model.get("items")
        rows = len(given) if given is not None and given.ndim == 2 else len(self._items)
        if rows > len(self._items):
            raise ModelMismatch(
                f"'items' holds {rows} vectors, the catalogue has {len(self._items)} items"
            )
        width = self._shape[1]
        if self._settings.loss == "least-squares" and given is not None and given.ndim == 2:
            width = given.shape[1]  # a version's own: it may have been another one then
            if not 1 <= width <= MAX_WIDTH:
                raise ModelMismatch(f"'items' has {width} columns; expected 1 to {MAX_WIDTH}")
        found = fitted({"items": (rows, width)}, model, self.derived)["items"]
        self._items = self._of_width(width)
        self._items = np.concatenate([found, self._items[rows:]])
        before, self._loss = self._loss, self._new_loss()
        self._loss.go_on_from(before)
        self._items = self._loss.turned(self._items)
        self.begin(self._round_id)

    def tell(self) -> Broadcast:
        """``items`` and the devices' training settings."""
        tensors, settings = self._loss.told(self._items.copy())
        return Broadcast(self._round_id, self._version, tensors, settings)

    def require(self, update: Update) -> None:
        """Refuses with reason ``bad-tensors``, ``bad-columns``, ``bad-rows``, ``bad-values``,
        ``bad-users`` or ``bad-counts``."""
        tensors = update.tensors
        if tensors.keys() != self._loss.TENSORS:
            wanted = ", ".join(sorted(self._loss.TENSORS))
            raise Refused(
                "bad-tensors",
                f"expected exactly the tensors {wanted}: the loss is {self._settings.loss}",
            )
        items, width = self._items.shape
        columns, rows = self._loss.columns(update), tensors["rows"]
        _check_indices("bad-columns", columns, width)
        if len(columns) == 0:
            raise Refused("bad-columns", "an update must train at least one column")
        _check_indices("bad-rows", rows, items)
        squares = self._loss.squares(update)
        # A small sum of squares, a fifth of the cost, settles the common case. NaN fails both.
        if squares <= self._small_squares:
            return
        values = self._loss.values(update)
        if not float(np.abs(values).max(initial=0.0)) <= self._most_value:
            raise Refused("bad-values", "a value is not finite or is absurdly large")

    def sound_together(self, updates: Sequence[Update]) -> bool:
        every_column, every_row = [], []
        for update in updates:
            tensors = update.tensors
            if tensors.keys() != self._loss.TENSORS:
                return False
            columns, rows = self._loss.columns(update), tensors["rows"]
            if not (columns.dtype == rows.dtype == _INT64 and columns.ndim == rows.ndim == 1):
                return False
            try:
                good = len(columns) and self._loss.squares(update) <= self._small_squares
            except Refused:
                return False
            if not good:
                return False
            every_column.append(columns)
            every_row.append(rows)
        items, width = self._items.shape
        return _all_rise(every_column, width) and _all_rise(every_row, items)

    def sized(self, updates: Iterable[Update]) -> Iterator[list[Sized]]:
        for group in _alike((update, self._loss.values(update)) for update in updates):
            values = np.concatenate([values for _, values in group])
            found = measured_each(values, [len(values) for _, values in group])
            yield [
                self._sized(update, values, one)
                for (update, values), one in zip(group, found, strict=True)
            ]

    def _sized(self, update: Update, values: Floats, found: Measured) -> Sized:
        others = self._loss.measures(update)
        factor = self._loss.factor(others)
        return Sized(update, values=values, found=found, others=others, factor=factor)

    def begin_sums(self) -> None:
        self._loss.begin_sums()
        self._total = FixedPointSum(self._shape, min(self._bounding.most_pull(), self._most_value))

    def sum_up(self, judged: Sequence[Judged]) -> None:
        assert self._total is not None
        self._note(judged)
        for one in judged:
            self._loss.absorb(one)
        self._add_to(self._total, judged)

    def sum_held(self, judged: Iterable[Judged], largest: float) -> None:
        self._total = FixedPointSum(self._shape, min(largest, self._bounding.most_pull()))
        every: list[Judged] = []
        each = []
        for one in judged:
            self._note([one])
            every.append(one._replace(values=_NO_VALUES))
            if self._rule.holds:
                each.append((_rows(one), self._loss.columns(one.update), one.values))
            else:
                self._add_to(self._total, [one])
        self._loss.absorb_held(every, self._rule)
        if self._rule.holds:
            self._robust = touched_means(each, self._shape, self._rule)

    def _note(self, judged: Sequence[Judged]) -> None:
        """Who trained which columns, and touched which rows."""
        updates = [one.update for one in judged]
        if self._touches is not None:
            for one in judged:
                self._touches.note(_rows(one))
        np.add.at(self._drawn, np.concatenate([self._loss.columns(each) for each in updates]), 1)
        self._trained += sum(map(self._loss.trained, updates))

    def _add_to(self, total: FixedPointSum, judged: Sequence[Judged]) -> None:
        """Add what counts of updates of as many columns."""
        units = total.units(np.concatenate([one.values for one in judged]))
        width = self._items.shape[1]
        if units.shape[1] == width:
            end = 0
            for one in judged:
                rows = _rows(one)
                start, end = end, end + len(rows)
                total.array[rows] += units[start:end]
            return
        # One flat index is several times faster here than a pair of broadcast ones, and add.at of
        # one dtype adds in place.
        every = [_rows(one) for one in judged]
        columns = [self._loss.columns(one.update) for one in judged]
        flat = np.concatenate(every)[:, None] * width
        flat = flat + np.repeat(columns, [len(rows) for rows in every], axis=0)
        np.add.at(total.array.reshape(-1), flat.reshape(-1), units.reshape(-1))

    @property
    def gradient(self) -> NDArray[np.float64]:
        """The sum of what counts, float64 [items, K], when all of it was added."""
        if self._robust is not None:
            return self._robust
        assert self._total is not None
        return self._total.value

    def step(self) -> Mapping[str, float]:
        """Step 4 of the patent: the scattered gradients' means, and the loss's step along them.
        Figures: ``gradient_norm``, ``columns_mean`` trained a device, and ``bounded_items`` with
        ``item_multiple``."""
        found = RoundSum(self.gradient, self._drawn, self._participants)
        moved, said = self._loss.step(self._items, found)
        figures = {**said, "columns_mean": self._trained / self._participants}
        moved = finite("item matrix", moved)
        if self._touches is not None:
            moved = self._touches.bounded(moved)
            figures["bounded_items"] = float(self._touches.count)
        self._items = moved
        if (width := self._loss.width()) > self._shape[1]:
            self._items = self._of_width(width)
            self._loss.widen(width)
        self._items = self._loss.turned(self._items)
        return figures

    def grow(self, rows: Floats) -> None:
        """Append vectors for items that are new to the catalogue, float32 [new, K].

        Between rounds only: raises ValueError when updates of an open round are held, or when the
        vectors do not fit. The version rises, since what devices hold is no longer current.
        """
        if self._participants:
            raise ValueError("the catalogue can grow between rounds only: close this round first")
        if rows.dtype != np.float32 or rows.ndim != 2 or rows.shape[1] != self._shape[1]:
            raise ValueError(
                f"the new rows are {rows.dtype} {rows.shape}; expected float32 of "
                f"[new, {self._shape[1]}]"
            )
        if not np.isfinite(rows).all():
            raise ValueError("the new rows hold values that are not finite")
        self._items = np.concatenate([self._items, rows])
        self._loss.grow(len(rows))
        self._items = self._loss.turned(self._items)
        if self._touches is not None:
            self._touches.grow(len(rows))
        self._version += 1
        self.begin(self._round_id)

    def _of_width(self, width: int) -> Floats:
        """The items, cut to so many columns, or with new ones behind them."""
        items, had = self._shape
        rng = np.random.default_rng([self._seed, had])
        fresh = initial_items(items, max(0, width - had), self._spread, rng)
        return np.concatenate([self._items[:, :width], fresh], axis=1)

    def schema(self) -> Schema:
        width = self._shape[1]
        return {
            # The catalogue's length is the state's.
            "items": Entry(np.float32, ("items", width)),
            "drawn": Entry(np.int64, (width,), least=0),
            # As the settings have it: a model of least squares that has grown is wider.
            "columns": Entry(np.int64, least=self._columns, below=self._columns + 1),
            "seed": Entry(np.int64, least=0),
        }

    def restored(self, state: State) -> Self:
        """See :class:`~device_sdk.methods.state.Stateful`; the width is the state's."""
        items, found = state.get("items"), copy.copy(self)
        loss = self._settings.loss
        if loss == "least-squares" and items is not None and items.ndim == 2 and items.shape[1]:
            found._items = np.zeros((1, items.shape[1]), dtype=np.float32)
        return super(ScatterMethod, found).restored(state)

    def _parts_follow(self) -> None:
        self._robust = None
        self._total = FixedPointSum(self._shape) if self._adds_up else None
        if self._loss.shape != self._shape:
            # Taken back from a state, of which all else is taken back too.
            multiple = self._settings.item_multiple
            self._loss = self._new_loss()
            self._touches = ItemNorms(multiple, len(self._items)) if multiple else None

    def _new_loss(self) -> ScatterLoss:
        chosen = self._settings
        if chosen.loss == "least-squares":
            return LeastSquaresLoss(self._shape, chosen.least_squares, self._spread)
        by_column = chosen.aggregator == "coverage"
        return BprLoss(self._shape, chosen.optimizer, chosen.training, by_column=by_column)

    @property
    def _shape(self) -> tuple[int, int]:
        return (self._items.shape[0], self._items.shape[1])

    def follow(self) -> None:
        """What ``require`` takes: where no limit shortens updates, a sum of integers needs one."""
        unbounded = self._adds_up and math.isinf(self._bounding.most_pull())
        most = self._bounding.absurd_norm if unbounded else math.inf
        self._most_value = min(_LARGEST_VALUE, most)
        # No value above the most hides in a sum of squares so much smaller, however it was rounded.
        self._small_squares = min(_SMALL_SQUARES, (self._most_value / 4) ** 2)
        self._loss.bound_by(self._bounding)


_NO_VALUES: Floats = np.empty((0, 0), dtype=np.float32)


def _rows(one: Judged) -> Counts:
    """The rows of what counts; none of an outlier."""
    return one.update.tensors["rows"][: len(one.values)]


def _alike(
    valued: Iterable[tuple[Update, Floats]],
) -> Iterator[list[tuple[Update, Floats]]]:
    """Updates with their values, in groups of as many columns, each of no more values than are
    added together."""
    groups: dict[int, list[tuple[Update, Floats]]] = {}
    sizes: dict[int, int] = {}
    for update, values in valued:
        columns = values.shape[1]
        if columns in groups and sizes[columns] + values.size > _ADDED_TOGETHER:
            yield groups.pop(columns)
        if columns not in groups:
            groups[columns], sizes[columns] = [], 0
        groups[columns].append((update, values))
        sizes[columns] += values.size
    yield from groups.values()


def _all_rise(every: Sequence[Counts], bound: int) -> bool:
    """Whether each array's numbers rise strictly, from 0 to below ``bound``."""
    joined = np.concatenate(every)
    if not len(joined):
        return True
    rises = joined[1:] > joined[:-1]
    ends = np.cumsum([len(each) for each in every if len(each)][:-1], dtype=np.int64)
    rises[ends - 1] = True  # from one array to the next
    # One below 0 is a large one without its sign.
    return bool(rises.all()) and int(joined.view(np.uint64).max()) < bound


def _check_indices(reason: str, indices: NDArray[Any], bound: int) -> None:
    if indices.dtype != _INT64 or indices.ndim != 1:
        raise Refused(
            reason, f"expected int64 of one dimension, found {indices.dtype} {indices.shape}"
        )
    if len(indices) == 0:
        return
    # A search for a zero byte is a fraction of the cost of all().
    rises = b"\x00" not in (indices[1:] > indices[:-1]).tobytes()
    if not rises or indices.item(0) < 0 or indices.item(-1) >= bound:
        raise Refused(reason, f"expected increasing numbers from 0 to {bound - 1}")


@dataclass(frozen=True, slots=True)
class ScatterTable(ScatterSettings):
    """The table: the method's settings, and what the model is made with.

    Attributes:
        columns: K, the full width of the model, which with least squares it begins with.
        spread: standard deviation of a new item's vector.
    """

    columns: Annotated[int, Within(1, MAX_WIDTH)] = 128
    spread: Annotated[float, Within(0, 10, above=True)] = 0.01


_OF_ONE_LOSS: Mapping[LossName, Sequence[str]] = {
    "least-squares": ("least_squares",),
    "bpr": ("aggregator", "optimizer", "training"),
}


class ScatterBinding(Binding[ScatterTable]):
    """Factors of the catalogue's items; no artifact, or the one that devices train with."""

    __slots__ = ()
    settings_class = ScatterTable
    needs_catalogue = True
    artifacts = range(2)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Of least squares the one model: a device's vectors follow from the items alone."""
        return SERVED if self.settings.loss == "bpr" else SERVED[:1]

    def why_no_control(self, artifacts: int) -> str:
        """Alone a device knows nothing of items that its own users have not touched."""
        return (
            "alone, a device has vectors of no items but those that its users know already; "
            "simulate shows popularity to compare with"
        )

    @property
    def trains_artifacts(self) -> bool:
        """Least squares is solved in closed form."""
        return self.settings.loss == "bpr"

    @property
    def note(self) -> str:
        """Settings that differ from the default and are of the loss that is not chosen."""
        chosen, usual = self.settings, ScatterTable()
        idle = [
            f"{self.method_name}.{name}"
            for loss, names in _OF_ONE_LOSS.items()
            for name in names
            if loss != chosen.loss and getattr(chosen, name) != getattr(usual, name)
        ]
        told = f'of another loss than "{chosen.loss}", and without effect: {", ".join(idle)}'
        return told if idle else ""

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> Method:
        first = self._new_items(items, rng)
        return ScatterMethod(first, self.settings, self.settings.spread, int(rng.integers(2**62)))

    def _new_items(self, items: int, rng: np.random.Generator) -> NDArray[np.float32]:
        return initial_items(items, self.settings.columns, self.settings.spread, rng)

    def items_of(self, method: Method) -> int:
        return len(_scatter(method).items)

    def grow(self, method: Method, items: int, rng: np.random.Generator) -> None:
        one, chosen = _scatter(method), self.settings
        fresh = items - len(one.items)
        one.grow(initial_items(fresh, one.items.shape[1], chosen.spread, rng))

    def decode(self, body: bytes, round_id: int, items: int, sender: str = "") -> Update:
        """See :class:`~aggregator.methods.method.Binding`; limits must know who."""
        return decode_scatter_update(body, round_id, items, self._width, sender)

    def decode_each(
        self, bodies: Sequence[tuple[bytes, str]], round_id: int, items: int
    ) -> list[Update | WireError]:
        return decode_scatter_updates(bodies, round_id, items, self._width)

    @property
    def _width(self) -> int:
        """Of every update; 0 where the model's may grow, and a check compares with it."""
        return self.settings.columns if self.settings.loss == "bpr" else 0

    def width_of(self, update: Update) -> int:
        tensors = update.tensors
        return int(tensors["k"]) if "k" in tensors else len(tensors["columns"])


def _scatter(method: Method) -> ScatterMethod:
    if not isinstance(method, ScatterMethod):
        raise TypeError(f"expected a ScatterMethod, found {type(method).__name__}")
    return method
