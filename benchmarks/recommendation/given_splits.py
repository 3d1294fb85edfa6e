"""The published leave-one-out splits of MovieLens, with their negatives."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.recommendation.split import LeaveOneOut, hold_out_validation

DATA_SETS = ("ml-100k", "ml-1m")
SplitKind = Literal["test", "validation"]
_NEGATIVES = 99
# Of the validation items and their negatives: the same for every setting that is compared.
_VALIDATION_SEED = 12345


def has_times(name: str) -> bool:
    """Whether the split's training data says when: only ``ml-100k`` does here."""
    return name == "ml-100k"


def load_split(root: Path, name: str) -> LeaveOneOut:
    """Read ``ml-100k/leave_one_out`` or ``ml-1m/ncf`` (He et al. 2017) below ``root``.

    Item rows are the files' ids, from 0. Training items come in order of time where it is known,
    else in the file's. Raises FileNotFoundError with the path, ValueError for another name or for
    files that are not as published.
    """
    if name == "ml-100k":
        folder, first, users, items = root / name / "leave_one_out", 1, 943, 1682
        train_name = "ml-100k.train.rating"
    elif name == "ml-1m":
        folder, first, users, items = root / name / "ncf", 0, 6040, 3706
        train_name = "ml-1m.train.rating.reconstructed"
    else:
        raise ValueError(f"data set {name!r} is unknown; expected one of {', '.join(DATA_SETS)}")
    train = np.loadtxt(folder / train_name, dtype=np.int64)
    test = np.loadtxt(folder / f"{name}.test.rating", dtype=np.int64)
    train[:, :2] -= first
    test[:, :2] -= first
    held_out = _by_user(test, users)
    negatives = _negatives(folder / f"{name}.test.negative", first, held_out)
    if has_times(name):
        train = train[np.argsort(train[:, 3], kind="stable")]
    train = train[np.argsort(train[:, 0], kind="stable")]
    bounds = np.searchsorted(train[:, 0], np.arange(1, users))
    rows = tuple(np.ascontiguousarray(part) for part in np.split(train[:, 1], bounds))
    return LeaveOneOut(items, rows, held_out, negatives)


def load_split_of(root: Path, name: str, kind: SplitKind) -> LeaveOneOut:
    """As :func:`load_split`; for ``validation`` the training data split once more, always alike."""
    whole = load_split(root, name)
    if kind == "test":
        return whole
    rng = np.random.default_rng(_VALIDATION_SEED)
    return hold_out_validation(whole.train, whole.items, rng, latest=has_times(name))


def _by_user(test: NDArray[np.int64], users: int) -> NDArray[np.int64]:
    if sorted(test[:, 0].tolist()) != list(range(users)):
        raise ValueError(f"the test file does not name each of {users} users once")
    held_out = np.empty(users, dtype=np.int64)
    held_out[test[:, 0]] = test[:, 1]
    return held_out


def _negatives(
    path: Path, first: int, held_out: NDArray[np.int64]
) -> tuple[NDArray[np.int64], ...]:
    """Lines of ``(user,item)<tab>id<tab>id...``; the first 99 ids count."""
    found: dict[int, NDArray[np.int64]] = {}
    with path.open(encoding="ascii") as lines:
        for line in lines:
            key, *ids = line.split()
            user, item = (int(number) - first for number in key.strip("()").split(","))
            if held_out[user] != item:
                raise ValueError(f"{path} is about another test item of user {user}")
            found[user] = np.asarray(ids[:_NEGATIVES], dtype=np.int64) - first
    return tuple(found[user] for user in range(len(held_out)))
