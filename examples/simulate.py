"""MovieLens on virtual devices, a user on each: a task file, and the functions that give the data.

    python -m examples.simulate out/films          # writes out/films/task.toml and its catalogue
    tessera-aggregator simulate out/films/task.toml --data examples.simulate:ml_100k \\
        --devices 943 --rounds 20 --speeds k:8,16,32,64

TESSERA_DATA names the folder that holds ml-100k, or ml-1m with ``--data ml-1m``. Without any data
set, ``tessera-aggregator simulate --example films`` makes some up.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from device_sdk.interactions import Interactions, read_interactions
from device_sdk.system.command_line import print_any_text
from examples.datasets.movielens import DatasetError, Ratings, Rows, data_root, load_ml_100k

_TASK = """\
[task]
name = "{name}"
catalogue = "catalogue.tsv"

[round]
share = 0.5
quorum = 10

[evaluation]  # each user's latest film is held back
"""


def ml_100k(devices: int, rng: np.random.Generator) -> list[list[str]]:
    """The films that each of the first users of MovieLens 100K rated, oldest first."""
    return _by_user(data_root() / "ml-100k" / "u.data")[:devices]


def ml_100k_in_file_order(devices: int, rng: np.random.Generator) -> list[list[str]]:
    """The same, but that films of one second come as they stand in the file."""
    ratings = load_ml_100k(data_root())
    return _of_one_second(ratings, np.arange(len(ratings.item)))[:devices]


def ml_100k_highest_last(devices: int, rng: np.random.Generator) -> list[list[str]]:
    """The same, but that of films of one second the last is the one of the highest number."""
    ratings = load_ml_100k(data_root())
    return _of_one_second(ratings, ratings.item)[:devices]


def ml_100k_lowest_last(devices: int, rng: np.random.Generator) -> list[list[str]]:
    """The same, but that of films of one second the last is the one of the lowest number."""
    ratings = load_ml_100k(data_root())
    return _of_one_second(ratings, -ratings.item)[:devices]


def _of_one_second(ratings: Ratings, order: Rows) -> list[list[str]]:
    """Of each user the films by their seconds; those of one by ``order`` int64 [ratings]."""
    rows = np.lexsort((order, ratings.timestamp))
    user, item = ratings.user[rows], ratings.item[rows]
    found = Interactions(user, item, ratings.user_ids, ratings.item_ids)
    return [
        [found.item_ids[item] for item in found.items_of(user).tolist()]
        for user in range(len(found.user_ids))
    ]


def ml_1m(devices: int, rng: np.random.Generator) -> list[list[str]]:
    """Likewise of MovieLens 1M; in the file's order where it has no times."""
    return _by_user(_ratings_1m(data_root() / "ml-1m"))[:devices]


def _by_user(path: Path) -> list[list[str]]:
    """Of each user of a file, by their numbers."""
    found = read_interactions(path)
    users = sorted(range(len(found.user_ids)), key=lambda row: int(found.user_ids[row]))
    return [[found.item_ids[item] for item in found.items_of(user).tolist()] for user in users]


def _ratings_1m(folder: Path) -> Path:
    for name in ("ratings.dat", "ratings_no_timestamp.dat"):
        if (folder / name).is_file():
            return folder / name
    raise DatasetError(
        f"{folder / 'ratings.dat'} is missing: set TESSERA_DATA to the folder that holds ml-1m"
    )


def _catalogue(data: str) -> list[str]:
    """Lines of id and title."""
    if data == "ml-100k":
        ratings = load_ml_100k(data_root())
        return [
            f"{id}\t{title}" for id, title in zip(ratings.item_ids, ratings.titles, strict=True)
        ]
    return sorted(read_interactions(_ratings_1m(data_root() / "ml-1m")).item_ids, key=int)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the task; returns the exit status."""
    print_any_text()
    parser = argparse.ArgumentParser(
        prog="python -m examples.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="for task.toml and catalogue.tsv")
    parser.add_argument("--data", choices=("ml-100k", "ml-1m"), default="ml-100k")
    options = parser.parse_args(arguments)
    try:
        lines = _catalogue(options.data)
    except DatasetError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 1
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "catalogue.tsv").write_text(
        "".join(f"{line}\n" for line in lines), encoding="utf-8"
    )
    (options.folder / "task.toml").write_text(_TASK.format(name=options.data))
    function, users = ("ml_100k", 943) if options.data == "ml-100k" else ("ml_1m", 6040)
    print(
        f"tessera-aggregator simulate {options.folder / 'task.toml'} "
        f"--data examples.simulate:{function} --devices {users} --rounds 20"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
