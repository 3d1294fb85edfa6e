"""PFLlib's split of Fashion-MNIST over devices whose classes differ, rebuilt.

After ``dataset/generate_FashionMNIST.py noniid - dir`` and ``dataset/utils/dataset_utils.py`` of
https://github.com/TsingZ0/PFLlib: the publisher's two parts joined, each class dealt out in
Dirichlet shares, three quarters of a device's pictures to train with. The draws are those of
``numpy.random.seed(1)``, in their order, and so the rows are theirs; what was published was perhaps
drawn by an earlier version, which wanted at least 40 pictures a device, as this draw has.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.datasets.vmnist import read_pictures

DEVICES: Final = 20
_ALPHA, _TRAIN, _SEED = 0.1, 0.75, 1

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Pictures:
    """``x`` float32 [n, 1, 28, 28] in -1 to 1, and classes ``label`` int64 [n]."""

    x: NDArray[np.float32]
    label: NDArray[np.int64]

    def at(self, rows: Rows) -> Pictures:
        """Those rows."""
        return Pictures(self.x[rows], self.label[rows])


@dataclass(frozen=True, slots=True)
class DevicePictures:
    """Of a device: what it trains on, what is held back of that to choose by, what it is judged
    by."""

    train: Pictures
    validation: Pictures
    test: Pictures


def load_fashion(root: Path, held: float = 0.2) -> list[DevicePictures]:
    """The devices of the split, ``held`` of what each trains on held back to choose by.

    Raises FileNotFoundError where ``root/fashion-mnist`` lacks a file.
    """
    parts = [read_pictures(root / "fashion-mnist", part) for part in ("train", "t10k")]
    x = np.concatenate([images for images, _ in parts])[:, None] * np.float32(2) - np.float32(1)
    whole = Pictures(x, np.concatenate([labels for _, labels in parts]))
    found = []
    for train, test in deal(whole.label):
        kept = len(train) - round(held * len(train))
        found.append(DevicePictures(whole.at(train[:kept]), whole.at(train[kept:]), whole.at(test)))
    return found


def deal(labels: NDArray[np.int64]) -> list[tuple[Rows, Rows]]:
    """Rows to train with and rows to be judged by, of each device."""
    rng = np.random.RandomState(_SEED)  # PFLlib's draws are this generator's
    dealt: list[list[int]] = [[]]
    while min(map(len, dealt)) < 1:
        dealt = [[] for _ in range(DEVICES)]
        for one in range(int(labels.max()) + 1):
            rows = np.flatnonzero(labels == one)
            rng.shuffle(rows)
            shares = rng.dirichlet(np.repeat(_ALPHA, DEVICES))
            # A device that has its even share already gets no more.
            shares = shares * [len(each) < len(labels) / DEVICES for each in dealt]
            ends = (np.cumsum(shares / shares.sum()) * len(rows)).astype(int)[:-1]
            for each, more in zip(dealt, np.split(rows, ends), strict=True):
                each += more.tolist()
    found = []
    for each in dealt:
        mixed = np.asarray(each)[rng.permutation(len(each))]
        count = len(each) - int(_TRAIN * len(each))
        found.append((mixed[count:], mixed[:count]))
    return found
