"""The rounds that every framework runs: which triples, from which vectors, by which steps.

NumPy alone, for the frameworks' own environments import it too. A round of scatter aggregation:
each device has one user, takes one step of BPR on its triples and sends the items' gradient; the
server moves the items by a rate times the mean of all gradients. The loss of a device, summed over
its triples (positive p, negative n), is

    weight * (softplus(-u.(p - n)) + user_l2 / 2 |u|^2 + item_l2 / 2 (|p|^2 + |n|^2)).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """What goes in, and what must come out.

    Attributes:
        items: float32 [items, k] before the first round.
        users: float32 [devices, k], likewise.
        begin: int64 [devices + 1]; the triples of device d are ``begin[d]`` to ``begin[d + 1]``.
        positive: int64 [triples], item rows; the same in every round.
        weight: float32 [triples]; likewise.
        negative: int64 [rounds, triples], item rows, drawn anew for each round.
        user_rates: float32 [devices]; a user's vector moves by this rate times its gradient.
        user_l2: see above.
        item_l2: see above.
        seed: of all of Tessera's draws.
        server_rate: the items move by this rate times the mean of the devices' gradients.
        final_items: float32 [items, k] after the last round, as Tessera found it.
        final_users: float32 [devices, k], likewise.
    """

    items: Floats
    users: Floats
    begin: Rows
    positive: Rows
    weight: Floats
    negative: Rows
    user_rates: Floats
    user_l2: float
    item_l2: float
    seed: int
    server_rate: float
    final_items: Floats
    final_users: Floats

    @property
    def devices(self) -> int:
        """The number of devices, all of which take part in every round."""
        return len(self.users)

    @property
    def rounds(self) -> int:
        """The number of rounds that there are triples for."""
        return len(self.negative)

    def part(self, device: int) -> slice:
        """Where the device's triples lie."""
        return slice(int(self.begin[device]), int(self.begin[device + 1]))

    def save(self, path: Path) -> None:
        """Write a ``.npz``."""
        arrays = {one.name: np.asarray(getattr(self, one.name)) for one in fields(self)}
        np.savez(path, **arrays)

    @classmethod
    def load(cls, path: Path) -> Workload:
        """Read what :meth:`save` wrote."""
        with np.load(path) as found:
            arrays = {one.name: found[one.name] for one in fields(cls)}
        numbers = {name: array.item() for name, array in arrays.items() if array.ndim == 0}
        return cls(**{**arrays, **numbers})

    def server_step(self, items: Floats, total: Floats) -> Floats:
        """The items after a round whose devices' gradients sum to ``total``."""
        return items - np.float32(self.server_rate / self.devices) * total

    def errors(self, items: Floats, users: Floats | None) -> Mapping[str, float]:
        """How far final ``items`` and ``users`` lie from Tessera's: the largest difference of an
        element, as a share of the largest distance that one has moved from the start to the end.

        Infinite for values that are not finite, or of another shape. ``users`` may be None where
        only their devices have them: those of all rounds but the last have moved the items.
        """
        found = {"items": _share(items, self.final_items, self.items)}
        if users is not None:
            found["users"] = _share(users, self.final_users, self.users)
        return found


def _share(found: Floats, expected: Floats, start: Floats) -> float:
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - expected).max() / np.abs(expected - start).max())


def device_step(
    items: Floats,
    user: Floats,
    triples: tuple[Rows, Rows, Floats],
    rate: np.float32,
    user_l2: float,
    item_l2: float,
) -> tuple[Floats, Rows, Floats]:
    """One device's work in NumPy, for the frameworks that leave it to the caller.

    Args:
        items: float32 [items, k].
        user: float32 [k].
        triples: positives and negatives, item rows, and weights.
        rate: of the user's step.
        user_l2: see the module.
        item_l2: likewise.

    Returns the user's new vector, the rows that the triples touch, int64 [rows], and the gradient
    of those, float32 [rows, k].
    """
    positive, negative, weight = triples
    is_touched = np.zeros(len(items), dtype=np.bool_)
    is_touched[positive] = True
    is_touched[negative] = True
    rows = np.flatnonzero(is_touched)
    place = np.empty(len(items), dtype=np.int64)
    place[rows] = np.arange(len(rows))
    liked, other = place[positive], place[negative]
    touched = items[rows]
    scores = touched @ user
    # -weight * sigmoid(-margin), without overflow on either side.
    pull = weight * np.expm1(-np.logaddexp(np.float32(0), scores[other] - scores[liked]))
    pulls = np.bincount(liked, pull, len(rows)) - np.bincount(other, pull, len(rows))
    counts = np.bincount(liked, weight, len(rows)) + np.bincount(other, weight, len(rows))
    pulls, shrunk = pulls.astype(np.float32), (item_l2 * counts).astype(np.float32)
    gradient = pulls[:, None] * user + shrunk[:, None] * touched
    moved = user - rate * (pulls @ touched + np.float32(user_l2 * weight.sum()) * user)
    return moved, rows, gradient
