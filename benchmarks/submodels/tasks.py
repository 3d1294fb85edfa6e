"""What a fleet learns: a model at several sizes, data by device, and what its models are worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor, nn

import export
from benchmarks.datasets.air import CLASSES, FEATURES, AirPart, load_air
from benchmarks.datasets.click import ClickSettings, load_clicks
from benchmarks.datasets.vmnist import (
    Images,
    Labels,
    VmnistPart,
    changed,
    load_vmnist,
    read_pictures,
)
from benchmarks.submodels.experiment import SHARES, Data, Experiment, Kind
from device_sdk import Trainer
from device_sdk.methods.local_steps import epoch_batches, predict_all
from export.models.fields import FieldEmbedding, SampleFields, example_fields
from export.models.gru_classifier import GruClassifier, gru_recipe
from export.models.next_item import PADDING, NextItem, next_item_loss, next_scores

Samples = Mapping[str, NDArray[Any]]
Held = Literal["validation", "test"]
HELD: tuple[Held, ...] = ("validation", "test")


@dataclass(frozen=True)
class Dealt:
    """What the devices hold.

    Attributes:
        devices: each one's training samples.
        judge: what the model of a rung's trainer is worth on held-out samples: the mean over some
            devices' own, all by default, or over samples that all have in common.
        timed: a batch to be timed.
        popular: where items are recommended, what the most watched are worth, the same for all.
        others: nobody's samples in the fleet, to train a model on that the fleet begins with.
    """

    devices: Sequence[Samples]
    judge: Callable[[Trainer, Held, Sequence[int] | None], float]
    timed: Samples
    popular: Mapping[Held, float] = field(default_factory=dict)
    others: Samples = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """``write`` a ladder of a kind, by seed, into a folder, given ``Dealt.others``, and of pictures
    what is its own; ``deal`` its samples to the devices; ``least``: samples of a device that takes
    part."""

    write: Callable[..., None]
    deal: Callable[[Path, Experiment], Dealt]
    least: int


def rows_of(samples: Samples) -> int:
    """How many there are."""
    return len(next(iter(samples.values())))


def joined(parts: Sequence[Samples]) -> Samples:
    """All of them, one after the other."""
    return {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}


def _write_ladder(
    kind: Kind,
    make: Callable[[int], nn.Module],
    width: int,
    loss: Callable[..., Any],
    batch: Mapping[str, Tensor],
    folder: Path,
    *,
    predict: Any = None,
    optimizer: export.Optimizer = export.Sgd(lr=0.1),  # noqa: B008
    whole: Sequence[str] = (),
) -> None:
    """The model at the shares of ``SHARES`` of its ranks or width. All batch entries have a first
    axis of their own number of samples."""
    export.submodels(
        make if kind == "widths" else make(width),
        loss,
        batch,
        ranks=SHARES if kind == "ranks" else (),
        widths=[round(width * share) for share in SHARES] if kind == "widths" else (),
        whole=whole,
        optimizer=optimizer,
        dynamic={name: {0: "batch"} for name in batch},
        predict=predict,
        directory=folder,
        verify=False,
    )


def _by_device(
    parts: Sequence[Samples], score: Callable[[Trainer, Samples], NDArray[np.float64]]
) -> Callable[[Trainer, Sequence[int] | None], float]:
    """The mean over devices, each of which holds one of ``parts``, of the mean of its samples'
    scores."""

    def judge(trainer: Trainer, devices: Sequence[int] | None) -> float:
        chosen = [parts[d] for d in (range(len(parts)) if devices is None else devices)]
        whole = joined(chosen)
        ends = np.cumsum([rows_of(each) for each in chosen])[:-1]
        return float(np.mean([own.mean() for own in np.split(score(trainer, whole), ends)]))

    return judge


def _judging(
    held: Mapping[Held, Callable[[Trainer, Sequence[int] | None], float]],
) -> Callable[[Trainer, Held, Sequence[int] | None], float]:
    return lambda trainer, part, devices: held[part](trainer, devices)


def _is_right(label: str) -> Callable[[Trainer, Samples], NDArray[np.float64]]:
    """Of each sample, whether the class that ``label`` says has the largest of ``logits``."""

    def score(trainer: Trainer, samples: Samples) -> NDArray[np.float64]:
        given = {name: array for name, array in samples.items() if name != label}
        found = predict_all(trainer, given, "logits").argmax(axis=1)
        right: NDArray[np.float64] = (found == samples[label]).astype(np.float64)
        return right

    return score


# Pictures in ten classes.

PICTURES_WIDTH = 32


class Network(nn.Module):
    """Two convolutions and a hidden layer: [b, 1, 28, 28] to [b, outputs]."""

    def __init__(self, width: int, outputs: int = 10) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.second = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.hidden = nn.Linear(98 * width, 4 * width)
        self.head = nn.Linear(4 * width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        seen = functional.max_pool2d(functional.relu(self.first(x)), 2)
        seen = functional.max_pool2d(functional.relu(self.second(seen)), 2)
        found: Tensor = self.head(functional.relu(self.hidden(seen.flatten(1))))
        return found


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["x"])
    return functional.cross_entropy(logits, batch["label"]), {"logits": logits}


SOFT = "soft"
"""Of a sample, what another model says of each class [10]; zeros where none is asked."""


def _taught_loss(weight: float, temperature: float) -> Callable[..., Any]:
    """With the divergence from ``SOFT``, up to what no step moves, so many times (Hinton et al.
    2015, Distilling the knowledge in a neural network, section 2)."""

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        own, found = _loss(model, batch)
        says = functional.log_softmax(found["logits"] / temperature, dim=1)
        apart = -(batch[SOFT] * says).sum(1).mean()
        return own + weight * temperature**2 * apart, found

    return loss


def write_pictures(
    kind: Kind,
    seed: int,
    folder: Path,
    _: Samples,
    *,
    whole: Sequence[str] = (),
    taught: float = 0.0,
    temperature: float = 1.0,
) -> None:
    """The network at the shares of ``SHARES``; see :class:`Experiment`."""
    torch.manual_seed(seed)
    batch = {"x": torch.rand(32, 1, 28, 28), "label": torch.arange(32) % 10}
    loss: Callable[..., Any] = _loss
    if taught:
        batch[SOFT], loss = torch.full((32, 10), 0.1), _taught_loss(taught, temperature)
    _write_ladder(kind, Network, PICTURES_WIDTH, loss, batch, folder, whole=whole)


def _samples(of: tuple[Images, Labels], rows: NDArray[np.int64] | list[int]) -> Samples:
    return {"x": of[0][rows][:, None], "label": of[1][rows]}


def _deal_pictures(
    run: Experiment,
    rng: np.random.Generator,
    train: tuple[Images, Labels],
    held: tuple[Images, Labels],
    others: Samples,
) -> Dealt:
    """Pictures to the devices, class by class in Dirichlet shares; half of those held back to
    validate and half to test, for all devices: accuracy."""
    rows: list[list[int]] = [[] for _ in range(run.devices)]
    for label in range(10):
        own = rng.permutation(np.flatnonzero(train[1] == label))
        shares = np.cumsum(rng.dirichlet(np.full(run.devices, run.skew)))
        ends = (shares[:-1] * len(own)).astype(int)
        for mine, part in zip(rows, np.split(own, ends), strict=True):
            mine.extend(part.tolist())
    halves = np.split(rng.permutation(len(held[1])), 2)
    judged = dict(zip(HELD, (_samples(held, half) for half in halves), strict=True))

    def accuracy(trainer: Trainer, part: Held, _: Sequence[int] | None) -> float:
        return float(_is_right("label")(trainer, judged[part]).mean())

    devices = [_samples(train, mine) for mine in rows]
    timed = {name: array[:32] for name, array in judged["validation"].items()}
    return Dealt(devices, accuracy, timed, others=others)


@cache
def deal_fashion(root: Path, run: Experiment) -> Dealt:
    """Fashion-MNIST's pictures."""
    train, held = (read_pictures(root / "fashion-mnist", part) for part in ("train", "t10k"))
    return _deal_pictures(run, np.random.default_rng(run.seed), train, held, {})


@cache
def deal_digits(root: Path, run: Experiment) -> Dealt:
    """V-MNIST, 400 pictures a device to train with, 200 to validate and 400 to test: accuracy."""

    def samples(part: VmnistPart) -> Samples:
        return {"x": part.x, "label": part.y}

    fleet = load_vmnist(root, np.random.default_rng(run.seed))
    held: dict[Held, Any] = {
        "validation": _by_device([samples(d.validation) for d in fleet], _is_right("label")),
        "test": _by_device([samples(d.test) for d in fleet], _is_right("label")),
    }
    timed = {name: array[:32] for name, array in samples(fleet[0].validation).items()}
    return Dealt([samples(each.train) for each in fleet], _judging(held), timed)


# Adapters on a transformer that knows upright digits.

_RANK, _PATCH, _FEATURES, _HEADS, _BLOCKS = 8, 7, 64, 4, 3
_UPRIGHT, _EPOCHS = 6000, 12
_TURNED, _ASKED = 4000, 2000
"""Digits that devices train with, and that are held back."""


class _Block(nn.Module):
    """Attention and a network of two layers, each behind a norm and added to what came: [b, t, d]
    to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        split = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        added: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return added


class Transformer(nn.Module):
    """Patches of a picture [b, 1, 28, 28], a vector each, to [b, 10] (after Dosovitskiy et al.
    2021, An image is worth 16x16 words, with the mean over patches before the head)."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(_PATCH**2, _FEATURES)
        self.place = nn.Parameter(0.02 * torch.randn((28 // _PATCH) ** 2, _FEATURES))
        self.blocks = nn.Sequential(*(_Block(_FEATURES, _HEADS) for _ in range(_BLOCKS)))
        self.norm, self.head = nn.LayerNorm(_FEATURES), nn.Linear(_FEATURES, 10)

    def forward(self, x: Tensor) -> Tensor:
        side = 28 // _PATCH
        cut = (
            x.reshape(-1, side, _PATCH, side, _PATCH)
            .transpose(2, 3)
            .reshape(-1, side**2, _PATCH**2)
        )
        found: Tensor = self.head(self.norm(self.blocks(self.patch(cut) + self.place)).mean(1))
        return found


def write_adapters(kind: Kind, seed: int, folder: Path, others: Samples) -> None:
    """The transformer, trained on the others' samples and frozen, with adapters of the ranks 1, 2,
    4 and 8 on all of its linear layers; the head is trained whole beside them."""
    torch.manual_seed(seed)
    model, rng = Transformer(), np.random.default_rng([seed, 3])
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    for each in epoch_batches(others, 64, _EPOCHS, rng):
        adam.zero_grad()
        _loss(model, {name: torch.from_numpy(array) for name, array in each.items()})[0].backward()
        adam.step()

    def make(rank: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        return export.lora(model, rank, trained=("head",), generator=generator)

    batch = {"x": torch.rand(32, 1, 28, 28), "label": torch.arange(32) % 10}
    _write_ladder(kind, make, _RANK, _loss, batch, folder, optimizer=export.Adam(lr=1e-3))


@cache
def deal_turned(root: Path, run: Experiment) -> Dealt:
    """MNIST's digits turned by any angle, some to train with, to validate and to test; and upright
    ones that are no device's."""
    rng = np.random.default_rng(run.seed)
    train, held = (read_pictures(root / "mnist", part) for part in ("train", "t10k"))

    def turned(of: tuple[Images, Labels], rows: NDArray[np.int64]) -> tuple[Images, Labels]:
        return changed(of[0][rows], "rotated", of[0], rng), of[1][rows]

    order, asked = rng.permutation(len(train[1])), rng.permutation(len(held[1]))[:_ASKED]
    devices, others = order[:_TURNED], order[_TURNED : _TURNED + _UPRIGHT]
    return _deal_pictures(
        run, rng, turned(train, devices), turned(held, asked), _samples(train, others)
    )


# The air of twelve stations.

_HIDDEN = 64


def write_air(kind: Kind, seed: int, folder: Path, _: Samples) -> None:
    """A GRU at the shares of ``SHARES``."""

    def make(width: int) -> nn.Module:
        return GruClassifier(len(FEATURES), width, CLASSES, seed=seed)

    model = GruClassifier(len(FEATURES), _HIDDEN, CLASSES, seed=seed)
    recipe = gru_recipe(model)
    _write_ladder(
        kind, make, _HIDDEN, recipe.loss, recipe.example_batch, folder, predict=recipe.predict
    )


@cache
def _air(root: Path) -> Any:
    return load_air(root)


@cache
def deal_air(root: Path, run: Experiment) -> Dealt:
    """A station's first two years to train with, the third to validate and the last to test, each
    by the hour of its own: accuracy."""

    def samples(part: AirPart) -> Samples:
        return {"x": part.x, "y": part.y}

    fleet = _air(root)
    held: dict[Held, Any] = {
        "validation": _by_device([samples(each.validation) for each in fleet], _is_right("y")),
        "test": _by_device([samples(each.test) for each in fleet], _is_right("y")),
    }
    timed = {name: array[:32] for name, array in samples(fleet[0].validation).items()}
    return Dealt([samples(each.train) for each in fleet], _judging(held), timed)


# Which movies a user likes.

_DIM = 16


class LikesMovie(nn.Module):
    """Fields and movies that the user liked before (see ``SampleFields``) to two logits [b, 2]: a
    network on the fields' vectors and the mean of the history's. It knows no user by name."""

    def __init__(self, fields: SampleFields, dim: int) -> None:
        super().__init__()
        self.embedding = FieldEmbedding(fields, dim)
        self.hidden = nn.Linear((len(fields.names) + 1) * dim, 4 * dim)
        self.head = nn.Linear(4 * dim, 2)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        embedded, earlier, mask = self.embedding.with_history(dict(batch))
        liked = (mask.unsqueeze(1) @ earlier) / (mask.sum(1).reshape(-1, 1, 1) + 1)
        # A field's numbers lie apart, so that a narrower model has the first of each.
        seen = torch.cat([embedded, liked], 1).transpose(1, 2).flatten(1)
        found: Tensor = self.head(functional.relu(self.hidden(seen)))
        return found


def _liked(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch), batch["label"])


def _like(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    logits = model(batch)
    return {"score": logits[:, 1] - logits[:, 0]}


_LIKES = SampleFields(
    (("movie", 3706), ("gender", 2), ("age", 7), ("occupation", 21)),
    (("genres", 18),),
    ("year",),
    "movie",
)


def write_clicks(kind: Kind, seed: int, folder: Path, _: Samples) -> None:
    """:class:`LikesMovie` at the shares of ``SHARES``."""
    torch.manual_seed(seed)
    batch = example_fields(_LIKES, batch=16, history=10)
    batch["label"] = torch.arange(16) % 2
    _write_ladder(
        kind, lambda dim: LikesMovie(_LIKES, dim), _DIM, _liked, batch, folder, predict=_like
    )


@cache
def deal_clicks(root: Path, run: Experiment) -> Dealt:
    """MovieLens 1M, a user a device: 70 % of its ratings to train with, 10 to validate, 20 to test.
    AUC within each user that has both kinds."""
    settings = ClickSettings(users=run.devices, devices=1, seed=run.seed)
    (everybody,) = load_clicks(root, settings).devices

    def by_user(samples: Samples) -> list[Samples]:
        users = samples["categories"][:, 0]
        rows = [np.flatnonzero(users == user) for user in range(run.devices)]
        known = {**samples, "categories": samples["categories"][:, 1:]}
        return [{name: array[own] for name, array in known.items()} for own in rows]

    parts = {"validation": everybody.validation, "test": everybody.test}
    held = {part: by_user(samples) for part, samples in parts.items()}

    def judge(trainer: Trainer, part: Held, devices: Sequence[int] | None) -> float:
        chosen = held[part] if devices is None else [held[part][d] for d in devices]
        whole = dict(joined(chosen))
        label = whole.pop("label")
        scores = predict_all(trainer, whole, "score") if len(label) else label
        ends = np.cumsum([rows_of(each) for each in chosen])[:-1]
        pairs = zip(np.split(label, ends), np.split(scores, ends), strict=True)
        found = [value for value in (auc(*pair) for pair in pairs) if not np.isnan(value)]
        return float(np.mean(found)) if found else float("nan")

    timed = {name: array[:32] for name, array in everybody.train.items()}
    timed["categories"] = timed["categories"][:, 1:]
    return Dealt(by_user(everybody.train), judge, timed)


def auc(label: NDArray[np.int64], scores: NDArray[np.float32]) -> float:
    """The share of pairs of a sample of each kind that are in order; NaN where there is none."""
    liked, others = scores[label == 1], scores[label == 0]
    if not len(liked) or not len(others):
        return float("nan")
    ahead = liked[:, None] - others
    return float((ahead > 0).mean() + 0.5 * (ahead == 0).mean())


# What a user watches next.

_ITEMS, _FULL, _LENGTH = 1682, 64, 31
_LEFT = 5
"""Items of a user to test, and as many to validate."""


def write_next_items(kind: Kind, seed: int, folder: Path, _: Samples) -> None:
    """GRU4Rec at the shares of ``SHARES`` of its width, or of its layers' rank."""
    example = torch.randint(1, _ITEMS + 1, (8, _LENGTH), generator=torch.Generator().manual_seed(0))

    def make(width: int) -> nn.Module:
        return NextItem(_ITEMS, width, seed=seed)

    _write_ladder(
        kind, make, _FULL, next_item_loss, {"items": example}, folder, predict=next_scores
    )


@cache
def deal_next_items(root: Path, run: Experiment) -> Dealt:
    """MovieLens 100K, a user a device, in the order of the ratings' times: the last five items are
    to test, the five before to validate, the rest to train: HR@10 of each given all before it,
    among all items but those."""
    ratings = np.loadtxt(root / "ml-100k" / "u.data", dtype=np.int64)
    ratings = ratings[np.lexsort((ratings[:, 1], ratings[:, 3]))]
    by_user = [ratings[ratings[:, 0] == user, 1] for user in range(1, run.devices + 1)]

    def windows(items: NDArray[np.int64]) -> NDArray[np.int64]:
        starts = range(len(items), 0, -(_LENGTH - 1))
        return np.stack([_padded(items[max(0, end - _LENGTH) : end]) for end in starts])

    left = {"validation": range(2 * _LEFT, _LEFT, -1), "test": range(_LEFT, 0, -1)}
    contexts = {
        part: np.stack([_padded(each[:-n]) for each in by_user for n in counts])
        for part, counts in left.items()
    }

    def hit_ratio(scores: NDArray[Any], part: Held, users: Sequence[int]) -> float:
        hits = 0
        wanted = [(by_user[user], n) for user in users for n in left[part]]
        for (items, n), own in zip(wanted, scores, strict=True):
            found = own[items[-n] - 1]
            others = np.delete(own, items[:-n] - 1)
            # Ties count against the model.
            hits += int((others >= found).sum() <= 10)
        return hits / len(wanted)

    def judge(trainer: Trainer, part: Held, devices: Sequence[int] | None) -> float:
        users = range(run.devices) if devices is None else devices
        rows = [user * _LEFT + place for user in users for place in range(_LEFT)]
        given = {"items": contexts[part][rows]}
        return hit_ratio(predict_all(trainer, given, "scores"), part, users)

    known = [each[: -2 * _LEFT] for each in by_user]
    watched = np.bincount(np.concatenate(known) - 1, minlength=_ITEMS)
    alike = np.broadcast_to(watched, (run.devices * _LEFT, _ITEMS))
    popular = {part: hit_ratio(alike, part, range(run.devices)) for part in HELD}
    devices = [{"items": windows(each)} for each in known]
    return Dealt(devices, judge, {"items": contexts["test"][:8]}, popular)


def _padded(items: NDArray[np.int64]) -> NDArray[np.int64]:
    latest = items[-_LENGTH:]
    return np.concatenate([np.full(_LENGTH - len(latest), PADDING), latest])


TASKS: Mapping[Data, Task] = {
    "air": Task(write_air, deal_air, 1),
    "clicks": Task(write_clicks, deal_clicks, 1),
    "next-item": Task(write_next_items, deal_next_items, 1),
    "digits": Task(write_pictures, deal_digits, 1),
    "fashion": Task(write_pictures, deal_fashion, 32),
    "lora": Task(write_adapters, deal_turned, 16),
}
