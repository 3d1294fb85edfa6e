"""Something to begin with: a task and made-up data in a folder, and the command that runs them."""

from __future__ import annotations

import shlex
from pathlib import Path

from aggregator.errors import AggregatorError

_ITEMS = 400
_TASK = """\
# A fleet that learns to recommend. `serve` reads such a file too; `tessera-aggregator init` writes
# one with every key explained.

[task]
name = "films"
method = "scatter"          # each device trains as many of the factors' columns as it can
catalogue = "catalogue.tsv"  # one item a line

[round]
share = 0.5                 # of the devices in each round
quorum = 5
deadline_seconds = 300

[scatter]
columns = 32

[evaluation]                # each user's latest film is held back: where does it rank?
metrics = ["hr10_all", "ndcg10_all"]
"""
_DATA = '''\
"""Made-up tastes: what each virtual device learns from. Put your own data in their place."""

import numpy as np

ITEMS = 400


def devices(count, rng):
    """For each device the films of its user, oldest first, as rows of the catalogue.

    A generator: a device's data is made when it is asked for, and need not be in a list.
    """
    genres = rng.dirichlet(np.full(ITEMS, 0.1), size=6)
    for _ in range(count):
        likes = 0.9 * genres[rng.integers(len(genres))] + 0.1 / ITEMS
        yield rng.choice(ITEMS, size=30, replace=False, p=likes / likes.sum())
'''


def write_example(folder: Path) -> str:
    """Write ``task.toml``, ``catalogue.tsv`` and ``data.py`` into a new or empty folder; the
    command that runs them.

    Raises AggregatorError where there is something in the folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AggregatorError(f"{folder} is there, and not empty: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"film-{row}\tFilm {row}\n" for row in range(_ITEMS))
    (folder / "catalogue.tsv").write_text("".join(lines), encoding="utf-8")
    (folder / "task.toml").write_text(_TASK, encoding="utf-8")
    (folder / "data.py").write_text(_DATA, encoding="utf-8")
    task, data = str(folder / "task.toml"), f"{folder / 'data.py'}:devices"
    return shlex.join(["tessera-aggregator", "simulate", task, "--data", data, "--devices", "300"])
