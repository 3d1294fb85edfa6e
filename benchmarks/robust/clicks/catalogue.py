"""Pairs of users and movies that nobody rated, to see who would be recommended what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.datasets.click import Clicks
from benchmarks.distill.fleet import clicks_predicted, whole
from device_sdk.trainer import Trainer

Samples = Mapping[str, NDArray[Any]]
_MOVIE = 1


@dataclass(frozen=True, slots=True, eq=False)
class Watcher:
    """A user who does not know the promoted item: its device, categories int64 [5] of one of its
    samples, and the movies that it has in training."""

    device: int
    categories: NDArray[np.int64]
    known: NDArray[np.int64]


class Catalogue:
    """All movies with their attributes, as the samples have them."""

    def __init__(self, clicks: Clicks) -> None:
        parts = [part for one in clicks.devices for part in (one.train, one.validation, one.test)]
        samples = whole(parts)
        movies = samples["categories"][:, _MOVIE]
        _, first = np.unique(movies, return_index=True)
        self._attributes = {name: samples[name][first] for name in ("genres", "numbers")}
        train = whole([one.train for one in clicks.devices])["categories"][:, _MOVIE]
        self.known = np.bincount(train, minlength=len(first))
        """Users that have each movie in training, int64 [movies]."""

    def pairs(self, users: NDArray[np.int64], movies: NDArray[np.int64]) -> dict[str, Any]:
        """Batch entries without labels: users' categories int64 [n, 5] with the movies [n]."""
        categories = users.copy()
        categories[:, _MOVIE] = movies
        return {
            "categories": categories,
            **{name: array[movies] for name, array in self._attributes.items()},
        }

    def promoting(self, samples: Samples, item: int) -> dict[str, NDArray[Any]]:
        """The samples, and all of them once more with ``item`` in the movie's place, clicked."""
        false = self.pairs(samples["categories"], np.full(len(samples["label"]), item))
        false["label"] = np.ones_like(samples["label"])
        return {name: np.concatenate([samples[name], array]) for name, array in false.items()}


def watchers(
    clicks: Clicks, item: int, rng: np.random.Generator, most: int = 100
) -> tuple[Watcher, ...]:
    """Up to ``most`` of the users who do not have ``item`` in training, drawn at random."""
    found = []
    for place, device in enumerate(clicks.devices):
        rows = device.train["categories"]
        for user in np.unique(rows[:, 0]):
            own = rows[rows[:, 0] == user]
            if item not in own[:, _MOVIE]:
                found.append(Watcher(place, own[0], own[:, _MOVIE]))
    chosen = rng.permutation(len(found))[:most]
    return tuple(found[place] for place in np.sort(chosen))


def seen_by(
    watcher: Watcher, trainer: Trainer, catalogue: Catalogue, item: int, n: int = 10
) -> tuple[float, bool]:
    """The item's predicted click, and whether it is among the user's ``n`` best unknown movies."""
    movies = np.arange(len(catalogue.known))
    users = np.broadcast_to(watcher.categories, (len(movies), len(watcher.categories)))
    clicks = clicks_predicted(trainer, catalogue.pairs(users, movies))
    wanted = clicks[item]
    clicks[watcher.known] = -np.inf
    return float(wanted), bool(np.count_nonzero(clicks > wanted) < n)
