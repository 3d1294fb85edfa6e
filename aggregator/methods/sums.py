"""Sums of integers: the same bits in any order, after any restart, over any number of shards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.state import (
    COUNT,
    Entry,
    Schema,
    State,
    Stateful,
    part,
    prefixed,
    unpack,
)

MOST_UPDATES = 1 << 24
"""Of a round that adds up."""
_MOST_UNITS = 1 << 38
"""Of one update in one cell: so many from each of so many updates stay within 2^62."""
_LEAST_BOUND = 2.0**-60
"""Smaller ones are taken for this: the square of any such value is 0 in float32."""

_ROUNDING = 1.5 * 2.0**52
_ROUNDING_BITS = np.float64(_ROUNDING).view(np.int64)

Ints = NDArray[np.int64]


class RefusedShare(ValueError):
    """A share of a later round, or that was summed at another scale."""


class Additive(Stateful):
    """Something that follows a task's rounds, of which a part may be added up over shards.

    ``ADDED`` names what the open round adds up: entries of the schema, or single counts, which are
    zero when a round begins; of integers where shards may make it. Whatever of ``PARTS`` is
    additive follows by itself; the rest is the same on every shard. A subclass's are beside its
    parents'.
    """

    ADDED: ClassVar[tuple[str, ...]] = ()

    def _schema(self) -> Schema:
        return dict.fromkeys(self._declared("ADDED"), COUNT)

    def begin(self, round_id: int) -> None:
        """A round begins: what came since the last one that made a version is forgotten."""
        schema = self._schema()
        for name in self._declared("ADDED"):
            entry = schema[name]
            zero = np.zeros(cast("tuple[int, ...]", entry.shape), dtype=entry.dtype)
            setattr(self, f"_{name}", zero if entry.shape else zero.item())
        for _, held in self._additive_parts():
            held.begin(round_id)

    def look_again(self) -> None:
        """Judge by this round's updates too, all of which were noted."""
        for _, held in self._additive_parts():
            held.look_again()

    def settle(self) -> None:
        """The round made a version: what came in it stays."""
        for _, held in self._additive_parts():
            held.settle()

    def share(self) -> dict[str, NDArray[Any]]:
        """What came since the round opened, as named arrays (copies)."""
        added = self._declared("ADDED")
        found = {name: np.array(getattr(self, f"_{name}"), dtype=np.int64) for name in added}
        for name, held in self._additive_parts():
            found.update(prefixed(f"{name}.", held.share()))
        return found

    def merge(self, share: State) -> None:
        """Add what another shard absorbed: in any order and grouping, the same bits.

        Raises :class:`~device_sdk.methods.state.RestoreError` for arrays that do not fit and
        RefusedShare for those of a later round or another scale, and changes nothing then.
        """
        self._add(self._read(share))

    def _read(self, share: State) -> dict[str, Any]:
        """The arrays of ``share``, checked; those of a part under its name."""
        parts = dict(self._additive_parts())
        schema = self._schema()
        own = {n: a for n, a in share.items() if n.split(".")[0] not in parts or "." not in n}
        added = self._declared("ADDED")
        entries = {name: schema[name] for name in added}
        found: dict[str, Any] = unpack(entries, own)
        for name, held in parts.items():
            found[name] = held._read(part(f"{name}.", share))
        return found

    def _add(self, found: Mapping[str, Any]) -> None:
        """Add what :meth:`_read` returned."""
        for name in self._declared("ADDED"):
            array, own = found[name], getattr(self, f"_{name}")
            setattr(self, f"_{name}", own + (array if array.ndim else array.item()))
        for name, held in self._additive_parts():
            held._add(found[name])

    def _additive_parts(self) -> list[tuple[str, Additive]]:
        found = [(name, getattr(self, f"_{name}")) for name in self._declared("PARTS")]
        return [(name, held) for name, held in found if isinstance(held, Additive)]


class FixedPointSum(Additive):
    """Sums float values as whole units of ``2**-exponent``, in int64.

    Args:
        shape: of the sum.
        bound: no value that is added is larger, up to what a norm in float32 may be wrong by.

    The exponent is the largest with which values of twice the bound are below 2^38 units, so that
    MOST_UPDATES of them cannot overflow. A value is rounded to the nearest unit. The error of a sum
    of n values is therefore at most n / 2 units and, where a factor has made a value longer than
    float64, 2^-15 units a value more: below n * bound * 2^-36.
    """

    ADDED = ("sum",)

    def __init__(self, shape: tuple[int, ...], bound: float = 1.0) -> None:
        self._shape = shape
        # bound < 2 ** (its binary exponent); twice that is what such values stay below.
        self._exponent = 37 - math.frexp(max(bound, _LEAST_BOUND))[1]
        self._sum: Ints = np.zeros(shape, dtype=np.int64)

    @property
    def array(self) -> Ints:
        """The sum in units, to add :meth:`units` to in place."""
        return self._sum

    @property
    def value(self) -> NDArray[np.float64]:
        """The sum, rounded once."""
        return self.value_at(slice(None))

    def value_at(self, place: slice) -> NDArray[np.float64]:
        """Of a part of the sum."""
        return self.in_values(self._sum[place].astype(np.float64))

    def in_values(self, units: NDArray[np.float64]) -> NDArray[np.float64]:
        """What so many units are."""
        found: NDArray[np.float64] = np.ldexp(units, -self._exponent)
        return found

    def add(self, values: NDArray[np.floating], factor: float = 1.0) -> None:
        """Add ``values * factor`` of the sum's shape."""
        self._sum += self.units(values, factor)

    def add_at(self, place: slice, values: NDArray[np.floating], factor: float = 1.0) -> None:
        """As :meth:`add` to a part of a sum of one axis."""
        units = self._sum[place]
        units += self.units(values, factor)

    def add_whole(
        self, place: slice, values: NDArray[np.floating], factor: float
    ) -> NDArray[np.float64]:
        """As :meth:`add_at`; what that rounds off, in units."""
        units = self.units(values, factor)
        self._sum[place] += units
        left: NDArray[np.float64] = np.multiply(values, math.ldexp(factor, self._exponent)) - units
        return left

    def units(self, values: NDArray[np.floating], factor: float = 1.0) -> Ints:
        """``values * factor`` in units, each rounded to the nearest (of two, the even one)."""
        wide = np.multiply(values, math.ldexp(factor, self._exponent), dtype=np.float64)
        # Beside 1.5 * 2^52 a float64 has no place for a fraction: the sum is rounded, and its bits
        # are those of 1.5 * 2^52 plus the integer. A fifth of the time of rint and a conversion.
        wide += _ROUNDING
        units: Ints = wide.view(np.int64)
        units -= _ROUNDING_BITS
        return units

    def share(self) -> dict[str, NDArray[Any]]:
        """``sum`` int64, and ``exponent``: how many units are 1, as a power of two."""
        return {**super().share(), "exponent": np.asarray(self._exponent, dtype=np.int64)}

    def _read(self, share: State) -> dict[str, Any]:
        found = unpack(self._schema(), share)
        if found["exponent"] != self._exponent:
            raise RefusedShare(
                f"the share is summed at 2^-{found['exponent']}, this round at 2^-{self._exponent}"
            )
        return found

    def _schema(self) -> Schema:
        most = MOST_UPDATES * _MOST_UNITS
        return {
            "sum": Entry(np.int64, self._shape, least=-most, below=most + 1),
            "exponent": Entry(np.int64),
        }


class UnlikeSum(Additive):
    """As :class:`FixedPointSum`, for values of unlike sizes: a mean of 1e9 beside one of 1e-3.

    What a first sum rounds off, at most half a unit, is summed by a second one. The error of a sum
    of n values is below n * bound * 2^-73, but for what float64 cannot hold.
    """

    PARTS = ("coarse", "fine")

    def __init__(self, shape: tuple[int, ...], bound: float = 1.0) -> None:
        self._coarse = FixedPointSum(shape, bound)
        self._fine = FixedPointSum(shape, 0.5)
        """Of units of the other."""

    @property
    def value(self) -> NDArray[np.float64]:
        """The sum."""
        return self.value_at(slice(None))

    def value_at(self, place: slice) -> NDArray[np.float64]:
        """Of a part of the sum."""
        return self._coarse.value_at(place) + self._coarse.in_values(self._fine.value_at(place))

    def add(self, values: NDArray[np.float32], factor: float = 1.0) -> None:
        """Add ``values * factor`` of the sum's shape."""
        self.add_at(slice(None), values, factor)

    def add_at(self, place: slice, values: NDArray[np.float32], factor: float = 1.0) -> None:
        """As :meth:`add` to a part of a sum of one axis."""
        wide = values.astype(np.float64)
        self._fine.add_at(place, self._coarse.add_whole(place, wide, factor))


class CoveredMean(Additive):
    """The mean of each coordinate over the updates that have it, and have it alone: of models of
    which devices train a part each, of vectors by label. In float64, for rounds on one shard.

    Args:
        shape: of the mean, [groups, ...]. What is in a group is had together, and weighs the same.
    """

    ADDED = ("total", "weight")
    _total: NDArray[np.float64]
    _weight: Ints

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self.begin(0)

    def add(self, groups: Ints, values: NDArray[np.floating], weight: Ints | int = 1) -> None:
        """Add ``values`` [n, ...] of the n distinct ``groups``, whose weights are above 0."""
        each = np.broadcast_to(weight, groups.shape)
        scale = each.reshape(-1, *(1 for _ in self._shape[1:]))
        self._total[groups] += values.astype(np.float64) * scale
        self._weight[groups] += each

    @property
    def known(self) -> NDArray[np.bool_]:
        """Whether any update has the group, [groups]."""
        return self._weight > 0

    @property
    def value(self) -> NDArray[np.float64]:
        """Of the constructor's shape; 0 where nothing is known."""
        weight = np.maximum(self._weight, 1).reshape(-1, *(1 for _ in self._shape[1:]))
        found: NDArray[np.float64] = self._total / weight
        return found

    def _schema(self) -> Schema:
        return {
            "total": Entry(np.float64, self._shape),
            "weight": Entry(np.int64, self._shape[:1], least=0),
        }
