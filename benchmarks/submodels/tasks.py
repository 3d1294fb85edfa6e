"""What a fleet learns: a model at several sizes, data by device, and what its models are worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor, nn

import export
from benchmarks.datasets.vmnist import Images, Labels, read_pictures
from benchmarks.submodels.experiment import SHARES, Experiment
from device_sdk import Trainer
from device_sdk.methods.local_steps import predict_all
from export.models.next_item import PADDING, NextItem, next_item_loss, next_scores

Samples = Mapping[str, NDArray[Any]]
Held = Literal["validation", "test"]
HELD: tuple[Held, ...] = ("validation", "test")


@dataclass(frozen=True)
class Dealt:
    """Each device's samples; what a model is worth, by its rung's trainer; a batch to be timed."""

    devices: Sequence[Samples]
    judge: Callable[[Trainer, Held], float]
    timed: Samples


@dataclass(frozen=True)
class Task:
    """``least``: samples of a device that takes part."""

    write: Callable[[str, int, Path], None]
    deal: Callable[[Path, Experiment], Dealt]
    least: int


def rows_of(samples: Samples) -> int:
    """How many there are."""
    return len(next(iter(samples.values())))


# Pictures in ten classes.

_WIDTH = 32


class Network(nn.Module):
    """Two convolutions and a hidden layer: [b, 1, 28, 28] to [b, 10]."""

    def __init__(self, width: int = _WIDTH) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.second = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.hidden = nn.Linear(98 * width, 4 * width)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        seen = functional.max_pool2d(functional.relu(self.first(x)), 2)
        seen = functional.max_pool2d(functional.relu(self.second(seen)), 2)
        found: Tensor = self.head(functional.relu(self.hidden(seen.flatten(1))))
        return found


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["x"])
    return functional.cross_entropy(logits, batch["label"]), {"logits": logits}


def write_pictures(kind: str, seed: int, folder: Path) -> None:
    """The network at the shares of ``SHARES``."""
    torch.manual_seed(seed)
    batch = {"x": torch.rand(32, 1, 28, 28), "label": torch.arange(32) % 10}
    given: dict[str, Any] = {
        "optimizer": export.Sgd(lr=0.1),
        "dynamic": {"x": {0: "batch"}, "label": {0: "batch"}},
        "directory": folder,
        "verify": False,
    }
    if kind == "ranks":
        export.submodels(Network(), _loss, batch, ranks=SHARES, **given)
    else:
        widths = [round(_WIDTH * share) for share in SHARES]
        export.submodels(Network, _loss, batch, widths=widths, **given)


@cache
def deal_pictures(root: Path, run: Experiment) -> Dealt:
    """Fashion-MNIST's training pictures to the devices, class by class in Dirichlet shares; half of
    its test pictures to validate and half to test: accuracy."""
    train, held = (read_pictures(root / "fashion-mnist", part) for part in ("train", "t10k"))
    rng = np.random.default_rng(run.seed)

    def samples(of: tuple[Images, Labels], rows: NDArray[np.int64] | list[int]) -> Samples:
        return {"x": of[0][rows][:, None], "label": of[1][rows]}

    rows: list[list[int]] = [[] for _ in range(run.devices)]
    for label in range(10):
        own = rng.permutation(np.flatnonzero(train[1] == label))
        shares = np.cumsum(rng.dirichlet(np.full(run.devices, run.skew)))
        ends = (shares[:-1] * len(own)).astype(int)
        for mine, part in zip(rows, np.split(own, ends), strict=True):
            mine.extend(part.tolist())
    halves = np.split(rng.permutation(len(held[1])), 2)
    judged = dict(zip(HELD, (samples(held, half) for half in halves), strict=True))

    def accuracy(trainer: Trainer, part: Held) -> float:
        logits = predict_all(trainer, {"x": judged[part]["x"]}, "logits")
        return float((logits.argmax(axis=1) == judged[part]["label"]).mean())

    devices = [samples(train, mine) for mine in rows]
    timed = {name: array[:32] for name, array in judged["validation"].items()}
    return Dealt(devices, accuracy, timed)


# What a user watches next.

_ITEMS, _FULL, _LENGTH = 1682, 64, 31


def write_next_items(kind: str, seed: int, folder: Path) -> None:
    """GRU4Rec at the shares of ``SHARES`` of its width; its items' vectors are a factorisation
    already."""
    if kind != "widths":
        raise ValueError("the recommender's ladder is of widths")
    example = torch.randint(1, _ITEMS + 1, (8, _LENGTH), generator=torch.Generator().manual_seed(0))
    export.submodels(
        lambda width: NextItem(_ITEMS, width, seed=seed),
        next_item_loss,
        {"items": example},
        widths=[round(_FULL * share) for share in SHARES],
        optimizer=export.Adam(lr=1e-3),
        dynamic={"items": {0: "users"}},
        predict=next_scores,
        directory=folder,
        verify=False,
    )


@cache
def deal_next_items(root: Path, run: Experiment) -> Dealt:
    """MovieLens 100K, a user a device, in the order of the ratings' times: the last item is to
    test, the one before to validate, the rest to train: HR@10 among all items not trained on."""
    ratings = np.loadtxt(root / "ml-100k" / "u.data", dtype=np.int64)
    ratings = ratings[np.lexsort((ratings[:, 1], ratings[:, 3]))]
    by_user = [ratings[ratings[:, 0] == user, 1] for user in range(1, run.devices + 1)]

    def windows(items: NDArray[np.int64]) -> NDArray[np.int64]:
        starts = range(len(items), 0, -(_LENGTH - 1))
        return np.stack([_padded(items[max(0, end - _LENGTH) : end]) for end in starts])

    before = {"validation": 2, "test": 1}
    contexts = {
        part: np.stack([_padded(each[:-left]) for each in by_user]) for part, left in before.items()
    }

    def hit_ratio(trainer: Trainer, part: Held) -> float:
        scores = predict_all(trainer, {"items": contexts[part]}, "scores")
        hits = 0
        for each, own in zip(by_user, scores, strict=True):
            left = before[part]
            own = own.copy()
            wanted = own[each[-left] - 1]
            own[each[:-left] - 1] = -np.inf
            # Ties count against the model.
            hits += int((own >= wanted).sum() <= 10)
        return hits / len(by_user)

    devices = [{"items": windows(each[:-2])} for each in by_user]
    return Dealt(devices, hit_ratio, {"items": contexts["test"][:8]})


def popularity(root: Path, run: Experiment) -> float:
    """HR@10 of the most watched items, the same for all, on the test items."""
    counts = np.zeros(_ITEMS)
    for each in deal_next_items(root, run).devices:
        seen = each["items"][each["items"] != PADDING]
        np.add.at(counts, np.unique(seen) - 1, 1)

    class Popular:
        def predict(self, batch: Samples) -> dict[str, NDArray[np.float64]]:
            return {"scores": np.tile(counts, (rows_of(batch), 1))}

        class artifact:
            @staticmethod
            def rows(names: object) -> tuple[int, bool]:
                return 1, False

    stands_in: Any = Popular()
    return deal_next_items(root, run).judge(stands_in, "test")


def _padded(items: NDArray[np.int64]) -> NDArray[np.int64]:
    latest = items[-_LENGTH:]
    return np.concatenate([np.full(_LENGTH - len(latest), PADDING), latest])


TASKS: Mapping[str, Task] = {
    "fashion": Task(write_pictures, deal_pictures, 32),
    "next-item": Task(write_next_items, deal_next_items, 1),
}
