"""MovieLens as clicks: who, which movie, their attributes, and whether the rating was high.

The experiment of papers/afd, section 3.1: users with at least 10 and movies with more than 15
ratings, 2,000 users, a click is a rating of 4 or 5.

* The paper's 3,300 movies cannot be had: 3,115 movies of MovieLens 1M have more than 15 ratings.
  All of these are in. The 2,000 users are drawn at random (all 6,040 have at least 20 ratings).
* The ratings here have no times: each user's are split at random, 70 % to train, 10 % to validate,
  20 % to test.
* ``most_ratings`` of a user are kept, drawn at random, so that a run takes minutes; the paper does
  not say how many samples it used.

All of it follows from one seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.datasets.movielens import AGES, OCCUPATIONS, MovieLens, read_1m

_LIKED = 4
_FEWEST_USERS = 50

Samples = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ClickSettings:
    """What is drawn from MovieLens, and how it lies on the devices.

    Attributes:
        users: how many users, of those with at least ``least_by_user`` ratings.
        most_by_movie_refused: movies with at most so many ratings, among all users, are left out.
        most_ratings: kept of each user; 0 for all.
        history: length of the list of other movies that the user liked, for models that read it.
        devices: to which users are dealt, whole. Each device draws its share of each age group
            (Dirichlet with ``concentration``), so devices differ in size and in taste.
        seed: of all draws.
    """

    users: int = 2000
    least_by_user: int = 10
    most_by_movie_refused: int = 15
    most_ratings: int = 100
    history: int = 10
    devices: int = 4
    concentration: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ClickDevice:
    """One device's samples, as batch entries of the click models, and the users behind them.

    ``categories`` int64 [n, 5] (user, movie, gender, age, occupation), ``genres`` float32 [n, 18],
    ``numbers`` float32 [n, 1] (the movie's year), ``history`` int64 [n, length] (movies, -1 where
    there is none), ``label`` int64 [n]. The user of a sample is its first category.
    """

    train: Samples
    validation: Samples
    test: Samples


@dataclass(frozen=True, slots=True, eq=False)
class Clicks:
    """The devices, and the number of values of each categorical field, in order."""

    devices: tuple[ClickDevice, ...]
    sizes: tuple[tuple[str, int], ...]


def load_clicks(root: Path, settings: ClickSettings) -> Clicks:
    """MovieLens 1M's clicks, from ``ml-1m`` below ``root``.

    Raises FileNotFoundError, naming the file, and what :func:`clicks_of` does.
    """
    return clicks_of(read_1m(root), settings)


def clicks_of(data: MovieLens, settings: ClickSettings) -> Clicks:
    """Choose, split and deal out; raises ValueError where fewer users than asked for have enough
    ratings."""
    choosing, thinning, splitting, past, dealing = (
        np.random.default_rng(child) for child in np.random.SeedSequence(settings.seed).spawn(5)
    )
    ratings = _choose(data.ratings, settings, choosing)
    if settings.most_ratings:
        ratings = _thin(ratings, settings.most_ratings, thinning)
    users, user = np.unique(ratings[:, 0], return_inverse=True)
    movies, movie = np.unique(ratings[:, 1], return_inverse=True)
    people = data.people[users]
    label = (ratings[:, 2] >= _LIKED).astype(np.int64)
    part = _split(user, splitting)
    samples: dict[str, NDArray[Any]] = {
        "categories": np.column_stack([user, movie, people[user]]),
        "genres": data.genres[movies][movie],
        "numbers": data.years[movies][movie][:, None],
        "history": _histories(user, movie, (part == 0) & (label == 1), settings.history, past),
        "label": label,
    }
    device = _deal(people[:, 1], settings, dealing)[user]
    sizes = (
        ("user", len(users)),
        ("movie", len(movies)),
        ("gender", 2),
        ("age", len(AGES)),
        ("occupation", OCCUPATIONS),
    )
    devices = tuple(
        ClickDevice(*(_rows(samples, (device == place) & (part == which)) for which in range(3)))
        for place in range(settings.devices)
    )
    return Clicks(devices, sizes)


def _rows(samples: Samples, chosen: NDArray[np.bool_]) -> Samples:
    return {name: array[chosen] for name, array in samples.items()}


def _choose(
    ratings: NDArray[np.int64], settings: ClickSettings, rng: np.random.Generator
) -> NDArray[np.int64]:
    by_movie = np.bincount(ratings[:, 1])
    ratings = ratings[by_movie[ratings[:, 1]] > settings.most_by_movie_refused]
    able = np.flatnonzero(np.bincount(ratings[:, 0]) >= settings.least_by_user)
    if len(able) < settings.users:
        raise ValueError(
            f"{len(able)} users have at least {settings.least_by_user} ratings; "
            f"{settings.users} were asked for"
        )
    return ratings[np.isin(ratings[:, 0], rng.choice(able, settings.users, replace=False))]


def _thin(ratings: NDArray[np.int64], most: int, rng: np.random.Generator) -> NDArray[np.int64]:
    place = _place_within(ratings[:, 0], rng)
    return ratings[place < most]


def _split(user: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """0 train, 1 validation, 2 test: within each user 70, 10 and 20 %, test at least one."""
    place, count = _place_within(user, rng), np.bincount(user)[user]
    test = np.maximum(1, np.round(0.2 * count))
    validation = np.round(0.1 * count)
    return np.where(place < test, 2, np.where(place < test + validation, 1, 0))


def _place_within(user: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Each rating's place in a random order of its user's ratings, from 0."""
    order = np.lexsort((rng.random(len(user)), user))
    _, first, count = np.unique(user[order], return_index=True, return_counts=True)
    place = np.empty(len(user), dtype=np.int64)
    place[order] = np.arange(len(user)) - np.repeat(first, count)
    return place


def _histories(
    user: NDArray[np.int64],
    movie: NDArray[np.int64],
    liked: NDArray[np.bool_],
    length: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """For each sample movies that its user liked in training, never the sample's own.

    A sample's own movie would tell that it was liked; one entry less for liked ones would tell it
    too. So all samples of a user bring the same number along: all the liked but one, up to
    ``length``, drawn at random.
    """
    order = np.flatnonzero(liked)[np.argsort(user[liked], kind="stable")]
    bounds = np.searchsorted(user[order], np.arange(int(user.max()) + 2))
    histories = np.full((len(user), length), -1, dtype=np.int64)
    for sample in range(len(user)):
        own = movie[order[bounds[user[sample]] : bounds[user[sample] + 1]]]
        taken = min(length, max(0, len(own) - 1))
        shuffled = rng.permutation(own)
        others = shuffled[shuffled != movie[sample]]
        histories[sample, :taken] = others[:taken]
    return histories


def _deal(
    age: NDArray[np.int64], settings: ClickSettings, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Each user's device, int64 [users]."""
    while True:
        device = np.empty(len(age), dtype=np.int64)
        for group in range(len(AGES)):
            members = rng.permutation(np.flatnonzero(age == group))
            shares = rng.dirichlet(np.full(settings.devices, settings.concentration))
            cuts = np.round(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
            for place, part in enumerate(np.split(members, cuts)):
                device[part] = place
        fewest = min(_FEWEST_USERS, len(age) // (2 * settings.devices))
        if np.bincount(device, minlength=settings.devices).min() >= fewest:
            return device
