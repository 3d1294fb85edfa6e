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
from numpy.typing import NDArray

from benchmarks.harness import default_data_folder
from device_sdk.system.command_line import print_any_text
from examples.datasets.movielens import DatasetError, data_root, load_ml_100k

Rows = NDArray[np.int64]
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
    ratings = load_ml_100k(data_root())
    order = np.lexsort((np.arange(len(ratings.user)), ratings.timestamp))
    return _by_user(ratings.user[order], ratings.item[order], ratings.item_ids)[:devices]


def ml_1m(devices: int, rng: np.random.Generator) -> list[list[str]]:
    """Likewise of MovieLens 1M; in the file's order where it has no times."""
    table = _ratings_1m(default_data_folder() / "ml-1m")
    items, item = np.unique(table[:, 1], return_inverse=True)
    time = table[:, 3] if table.shape[1] > 3 else np.arange(len(table))
    order = np.argsort(time, kind="stable")
    ids = tuple(str(number) for number in items.tolist())
    return _by_user(table[order, 0], item[order], ids)[:devices]


def _by_user(user: Rows, item: Rows, ids: Sequence[str]) -> list[list[str]]:
    order = np.argsort(user, kind="stable")
    parts = np.split(item[order], np.flatnonzero(np.diff(user[order])) + 1)
    return [[ids[row] for row in rows.tolist()] for rows in parts]


def _ratings_1m(folder: Path) -> Rows:
    """User, item, rating and, where the file has it, time: int64 [ratings, 3 or 4]."""
    for name in ("ratings.dat", "ratings_no_timestamp.dat"):
        if (folder / name).is_file():
            text = (folder / name).read_text(encoding="latin-1")
            columns = 1 + text.partition("\n")[0].count("::")
            return np.array(text.replace("::", " ").split(), dtype=np.int64).reshape(-1, columns)
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
    table = _ratings_1m(default_data_folder() / "ml-1m")
    return [str(number) for number in np.unique(table[:, 1]).tolist()]


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
