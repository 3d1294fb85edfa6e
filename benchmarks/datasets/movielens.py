"""MovieLens as its publisher ships it: ratings, who gave them, and what the movies are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from device_sdk.tables.text import open_table

GENRES = (
    *("Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary"),
    *("Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi"),
    *("Thriller", "War", "Western"),
)
AGES = (1, 18, 25, 35, 45, 50, 56)
"""Where MovieLens 1M's age groups begin."""
OCCUPATIONS = 21
_YEAR = re.compile(r"\((\d{4})\)\s*$")


@dataclass(frozen=True, slots=True, eq=False)
class MovieLens:
    """One of the data sets, its attributes in tables whose rows are the publisher's ids.

    Attributes:
        ratings: int64 [n, 3]: user, movie, rating of 1 to 5.
        people: int64 [largest user + 1, 3]: gender, age group, occupation.
        genres: float32 [largest movie + 1, 18], 0 or 1.
        years: float32 [largest movie + 1], 1920 to 2000 scaled to -1 to 1; 0 where unknown.
    """

    ratings: NDArray[np.int64]
    people: NDArray[np.int64]
    genres: NDArray[np.float32]
    years: NDArray[np.float32]


def read_1m(root: Path) -> MovieLens:
    """Read ``ml-1m`` below ``root``; raises FileNotFoundError, naming the file."""
    names = ("ratings_no_timestamp.dat", "users.dat", "movies.dat")
    ratings, users, movies = _files(root / "ml-1m", names, "MovieLens 1M", "1m")
    people, listed = open_table(users).rows(), open_table(movies).rows()
    return MovieLens(
        _numbers(ratings, 3),
        _people([(p[0], p[1], AGES.index(int(p[2])), int(p[3])) for p in people]),
        *_movies([(m[0], _titled_year(m[1]), m[2].split("|")) for m in listed]),
    )


def read_100k(root: Path) -> MovieLens:
    """Read ``ml-100k`` below ``root``; raises FileNotFoundError, naming the file.

    Ages are put into MovieLens 1M's groups, and its genre "unknown" is none.
    """
    names = ("u.data", "u.user", "u.item", "u.occupation")
    ratings, users, movies, jobs = _files(root / "ml-100k", names, "MovieLens 100K", "100k")
    people, listed = list(open_table(users).rows()), open_table(movies).rows()
    job = {name: place for place, name in enumerate(jobs.read_text(encoding="ascii").split())}
    group = [int(np.searchsorted(AGES, int(p[1]), side="right")) - 1 for p in people]
    return MovieLens(
        _numbers(ratings, 4)[:, :3],
        _people([(p[0], p[2], age, job[p[3]]) for p, age in zip(people, group, strict=True)]),
        *_movies([(m[0], _dated_year(m[2]), _flagged(m[5:])) for m in listed]),
    )


def _files(folder: Path, names: tuple[str, ...], title: str, page: str) -> list[Path]:
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder / name} is missing: unpack {title} "
                f"(https://grouplens.org/datasets/movielens/{page}/) there, or point TESSERA_DATA "
                "elsewhere"
            )
    return [folder / name for name in names]


def _numbers(path: Path, columns: int) -> NDArray[np.int64]:
    """A file of nothing but whole numbers, as the publisher separates them."""
    text = path.read_text(encoding="ascii").replace("::", " ")
    return np.fromstring(text, dtype=np.int64, sep=" ").reshape(-1, columns)


def _people(rows: list[tuple[str, str, int, int]]) -> NDArray[np.int64]:
    """Of user, gender, age group and occupation."""
    table = np.zeros((max(int(row[0]) for row in rows) + 1, 3), dtype=np.int64)
    for user, gender, age, occupation in rows:
        table[int(user)] = ("MF".index(gender), age, occupation)
    return table


def _movies(
    rows: list[tuple[str, float, list[str]]],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Genres and years, of movie, scaled year and genres."""
    count = max(int(row[0]) for row in rows) + 1
    genres = np.zeros((count, len(GENRES)), dtype=np.float32)
    years = np.zeros(count, dtype=np.float32)
    for movie, year, listed in rows:
        years[int(movie)] = year
        genres[int(movie), [GENRES.index(genre) for genre in listed]] = 1
    return genres, years


def _titled_year(title: str) -> float:
    year = _YEAR.search(title)
    if year is None:
        raise ValueError(f"the movie {title!r} is named without its year")
    return (int(year[1]) - 1960) / 40


def _dated_year(date: str) -> float:
    """Of 01-Jan-1995; one movie of MovieLens 100K has no date."""
    return (int(date[-4:]) - 1960) / 40 if date else 0.0


def _flagged(flags: list[str]) -> list[str]:
    """The first flag is "unknown"; the others are ``GENRES`` in their order."""
    return [genre for genre, flag in zip(GENRES, flags[1:], strict=True) if flag == "1"]
