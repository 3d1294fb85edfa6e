"""MovieLens 1M's three files, made up: 60 users, 50 movies."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.datasets.movielens import AGES, GENRES


def made_up_movielens(root: Path) -> Path:
    """Writes ``ml-1m`` below ``root``, which it returns. Users above 55 have five ratings only."""
    rng = np.random.default_rng(0)
    folder = root / "ml-1m"
    folder.mkdir()
    ratings = []
    for user in range(1, 61):
        count = 5 if user > 55 else int(rng.integers(12, 40))
        for movie in rng.choice(np.arange(1, 51), size=count, replace=False):
            ratings.append(f"{user}::{movie}::{rng.integers(1, 6)}")
    (folder / "ratings_no_timestamp.dat").write_text("\n".join(ratings) + "\n")
    users = [f"{u}::{'MF'[u % 2]}::{AGES[u % 7]}::{u % 21}::00000" for u in range(1, 61)]
    (folder / "users.dat").write_text("\n".join(users) + "\n", encoding="latin-1")
    movies = [
        f"{m}::Café {m} ({1930 + m})::{GENRES[m % 18]}|{GENRES[(m + 5) % 18]}" for m in range(1, 52)
    ]
    (folder / "movies.dat").write_text("\n".join(movies) + "\n", encoding="latin-1")
    return root
