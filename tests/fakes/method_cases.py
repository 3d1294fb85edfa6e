"""Every method there is, with honest and hostile devices: what tests of all methods go over."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aggregator.methods.attention import AttentionMethod, AttentionSettings
from aggregator.methods.bounds import UpdateBounds
from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.method import Method, Refused
from aggregator.methods.mutual import MutualMethod, MutualSettings
from aggregator.methods.prototypes import PrototypesMethod, PrototypesSettings
from aggregator.methods.scatter import ScatterMethod, ScatterSettings, initial_items
from aggregator.methods.shared_model import SharedModelMethod, SharedModelSettings
from aggregator.methods.teacher_logits import TeacherLogitsMethod
from device_sdk.artifact.flat_layout import FlatLadder, flat_layout
from device_sdk.methods.labels import LabelKnowledge
from device_sdk.methods.mutual.contract import (
    MutualTraining,
    SampleEntry,
    encode_samples,
    encode_soft_labels,
    samples_mark,
)
from device_sdk.methods.prototypes.contract import PrototypesTraining, encode_prototypes
from device_sdk.methods.state import Entry, Schema
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining, encode_knowledge
from device_sdk.wire.arrays.exchange import Broadcast, Update
from device_sdk.wire.arrays.factored import MOST_USERS
from tests.fakes.ladders import ladder_method, movable_method
from tests.fakes.scatter_updates import ONE_WIDTH, users

P, CLASSES, WIDTH, ITEMS = 24, 4, 6, 12
LAYOUT = flat_layout({"a.weight": (4, 5), "a.bias": (4,)})
START = np.random.default_rng(5).standard_normal(P).astype(np.float32)
HONEST = 8
EVIL = "ff" * 16
ROUNDS = 5


class Averaging(Method):
    """A stranger's, who thinks of nobody hostile: the mean of models, weighted by what is said."""

    ADDED = ("sum", "weight")
    _sum: np.ndarray
    _weight: float

    def __init__(self) -> None:
        self._model = START.copy()

    def tell(self) -> Broadcast:
        return Broadcast(self._round_id, self._version, {"model": self._model.copy()})

    def require(self, update: Update) -> None:
        model = update.tensors.get("model")
        if model is None or model.dtype != np.float32 or model.shape != (P,):
            raise Refused("bad-tensors", "expected a model")
        if not isinstance(update.metadata.get("samples"), int):
            raise Refused("bad-metadata", "expected samples")

    def add(self, update: Update) -> None:
        weight = float(update.metadata["samples"])
        self._sum += weight * update.tensors["model"]
        self._weight += weight

    def step(self) -> dict[str, float]:
        self._model = (self._sum / self._weight).astype(np.float32)
        return {}

    def schema(self) -> Schema:
        return {
            "model": Entry(np.float32, (P,)),
            "sum": Entry(np.float64, (P,)),
            "weight": Entry(np.float64),
        }


class Differences(Averaging):
    """Another's: the mean of differences, which are named as the model is."""

    def step(self) -> dict[str, float]:
        self._model = (self._model + self._sum / self._weight).astype(np.float32)
        return {}


class Moved(SharedModelMethod):
    """Another's, of one line: the mean of what training moved."""

    def step(self) -> dict[str, float]:
        self._model = self._model + self.mean
        return {}


class Weighted(Averaging):
    """Another's: weighted by a number of its own making, which is no count."""

    def require(self, update: Update) -> None:
        super().require(Update(update.round_id, update.tensors, {"samples": 1}, update.sender))
        if not isinstance(update.metadata.get("weight"), float):
            raise Refused("bad-metadata", "expected a weight")

    def add(self, update: Update) -> None:
        weight = float(update.metadata["weight"])
        self._sum += weight * update.tensors["model"]
        self._weight += weight


class Whole(Averaging):
    """Another's: whole numbers, in thousandths."""

    bounds = UpdateBounds(values=("model",))

    def __init__(self) -> None:
        self._model = START * 1000

    def require(self, update: Update) -> None:
        model = update.tensors.get("model")
        if model is None or model.dtype != np.int64 or model.shape != (P,):
            raise Refused("bad-tensors", "expected a model of whole numbers")
        if not isinstance(update.metadata.get("samples"), int):
            raise Refused("bad-metadata", "expected samples")


def sender(place: int) -> str:
    return f"{place + 1:032x}"


@dataclass(frozen=True)
class Case:
    """A method at its defaults: what its devices send, and what of a version others are handed.

    ``bound``: how far one sender may move that, in lengths of the honest devices' largest
    contribution (of a vector that a round hands on, in the same), divided by their number. Three
    contributions of one sender of n that comes in each round add up: what is told moves, and with
    it what is usual, to at most 3 / (n - 3) of one at rest, and to twice that on the way.
    """

    make: Callable[[], Method]
    honest: Callable[[int, int, np.random.Generator], Update]
    hostile: Callable[[int, st.DataObject], Update]
    handed_on: Callable[[Method, Broadcast], np.ndarray]
    contribution: float
    bound: float


def hostile_array(data: st.DataObject, shape: tuple[int, ...], most: float = 3e38) -> np.ndarray:
    kind = data.draw(st.sampled_from(["all", "one", "flip", "mixed", "nan"]))
    sizes = st.sampled_from([0.0, 1e-30, 1.0, 6e4, 1e12, 3e38])
    size = min(data.draw(sizes), most) * data.draw(st.sampled_from([-1, 1]))
    found = np.full(shape, size, np.float32)
    if kind == "one":
        found = np.zeros(shape, np.float32)
        found.reshape(-1)[:1] = size
    if kind == "flip":
        found = np.resize(-START, shape).astype(np.float32)
    if kind == "mixed":
        found *= np.resize([1, -1, 0.5], shape).astype(np.float32)
    if kind == "nan":
        found.reshape(-1)[:1] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    return found


samples = st.sampled_from([1, 100, 3200, 1 << 31, 1 << 40, 1 << 62])


def near(rng: np.random.Generator, shape: tuple[int, ...], spread: float) -> np.ndarray:
    """One of honest devices' deviations: all of one length, about, as the bounds are of medians."""
    found = rng.standard_normal(shape)
    found *= spread * (1 + 0.2 * rng.random()) / np.linalg.norm(found)
    return found.astype(np.float32)


def model_of(values: np.ndarray) -> dict[str, np.ndarray]:
    return {"model": values.astype(np.float32)}


def averaging(kind: type[Averaging], about: np.ndarray) -> Case:
    return Case(
        kind,
        lambda r, d, rng: Update(
            r, model_of(about + near(rng, (P,), 0.1)), {"samples": 40 + d}, sender(d)
        ),
        lambda r, data: Update(
            r, model_of(hostile_array(data, (P,))), {"samples": data.draw(samples)}, EVIL
        ),
        lambda method, opened: np.asarray(opened.tensors["model"], np.float64),
        0.12,
        9.0,
    )


def moved_case() -> Case:
    def sent(r: int, values: np.ndarray, who: str) -> Update:
        return Update(r, {"moved": model_of(values)["model"]}, {}, who)

    return replace(
        averaging(Averaging, np.zeros(P)),
        make=lambda: Moved(START, LAYOUT, SharedModelSettings()),
        honest=lambda r, d, rng: sent(r, near(rng, (P,), 0.1), sender(d)),
        hostile=lambda r, data: sent(r, hostile_array(data, (P,)), EVIL),
        bound=6.0 * ROUNDS,
    )


def weighted_case() -> Case:
    weights = st.sampled_from([0.0, 1.0, 8.0, -8.0, -1e9, 1e300, -1e300])
    return replace(
        averaging(Weighted, START),
        honest=lambda r, d, rng: Update(
            r, model_of(START + near(rng, (P,), 0.1)), {"weight": 1.0 + d / 10}, sender(d)
        ),
        hostile=lambda r, data: Update(
            r, model_of(hostile_array(data, (P,))), {"weight": data.draw(weights)}, EVIL
        ),
    )


def whole_case() -> Case:
    def sent(r: int, values: np.ndarray, count: int, who: str) -> Update:
        most = np.float64(2**62)
        whole = np.clip(np.nan_to_num(values.astype(np.float64) * 1000), -most, most)
        return Update(r, {"model": np.rint(whole).astype(np.int64)}, {"samples": count}, who)

    return replace(
        averaging(Whole, START),
        honest=lambda r, d, rng: sent(r, START + near(rng, (P,), 0.1), 40 + d, sender(d)),
        hostile=lambda r, data: sent(r, hostile_array(data, (P,)), data.draw(samples), EVIL),
        handed_on=lambda method, opened: np.asarray(opened.tensors["model"], np.float64) / 1000,
    )


def attention_case() -> Case:
    told = {"mixture": False, "loss": 0.5}
    return Case(
        lambda: AttentionMethod(START, FlatLadder((LAYOUT,)), AttentionSettings()),
        lambda r, d, rng: Update(
            r,
            {"vector": START + near(rng, (P,), 0.1)},
            {**told, "samples": 40 + d},
            sender(d),
        ),
        lambda r, data: Update(
            r,
            {"vector": hostile_array(data, (P,), 6e4)},
            {**told, "samples": data.draw(samples), "loss": data.draw(st.floats(-1e12, 1e12))},
            EVIL,
        ),
        lambda method, opened: np.asarray(opened.tensors["global"], np.float64),
        0.12,
        9.0,
    )


def prototypes_case(**chosen: Any) -> Case:
    centres = np.random.default_rng(9).standard_normal((CLASSES, WIDTH))
    labels = np.arange(CLASSES)

    def sent(r: int, values: np.ndarray, count: int, who: str) -> Update:
        counts = np.full(CLASSES, min(count, 2**31 - 1))
        means = np.clip(np.nan_to_num(values.astype(np.float32)), -6e4, 6e4)
        return Update(r, encode_prototypes(LabelKnowledge(labels, counts, means)), sender=who)

    training = PrototypesTraining(CLASSES, width=WIDTH)
    return Case(
        lambda: PrototypesMethod(PrototypesSettings(training, **chosen), np.random.default_rng(3)),
        lambda r, d, rng: sent(
            r,
            centres + np.stack([near(rng, (WIDTH,), 0.1) for _ in labels]),
            20 + d,
            sender(d),
        ),
        lambda r, data: sent(r, hostile_array(data, (CLASSES, WIDTH)), data.draw(samples), EVIL),
        lambda method, opened: np.asarray(opened.tensors["prototypes"], np.float64),
        # Of all labels together.
        0.12 * math.sqrt(CLASSES),
        # In the first round nothing is told yet, and lengths are all there is to go by: what that
        # lets through is a third of it two rounds later. What a server trains has no formula.
        60.0 if chosen.get("trained") else 20.0,
    )


def fedavg_case() -> Case:
    def sent(r: int, values: np.ndarray, count: int, who: str) -> Update:
        tensors = {"w.w": values.astype(np.float32).reshape(4, 6)}
        return Update(r, tensors, {"samples": count, "loss": 0.5}, who)

    return Case(
        lambda: FedAvgMethod({"w": START.reshape(4, 6)}),
        lambda r, d, rng: sent(r, near(rng, (P,), 0.1), 40 + d, sender(d)),
        lambda r, data: sent(r, hostile_array(data, (P,)), data.draw(samples), EVIL),
        lambda method, opened: np.asarray(opened.tensors["w.w"], np.float64),
        0.12,
        # Each round adds to the last.
        6.0 * ROUNDS,
    )


def ranks_case() -> Case:
    """As ``fedavg``, of which half of the devices train a part of rank 2."""
    small = {"w.net.w.left": (4, 2), "w.net.w.right": (2, 6)}
    return ladder_case(lambda: ladder_method((4, 6), ranks=(2,)), small)


def dealt_case() -> Case:
    """Likewise one of two dealt slices."""
    chosen = FedAvgSettings(slices="dealt", deals=2)
    return ladder_case(lambda: movable_method(2, 1, chosen), {"w.net.w": (2, 3)})


def ladder_case(make: Callable[[], Method], small: dict[str, tuple[int, ...]]) -> Case:
    """Of a method on two rungs, and the shapes of the smaller one's tensors."""
    shapes = {1: small, 2: {"w.net.w": (4, 6)}}

    def sent(r: int, rung: int, tensors: dict[str, np.ndarray], count: int, who: str) -> Update:
        metadata = {"samples": count, "loss": 0.5, "rung": rung}
        bias = {"w.net.b": np.zeros(6, np.float32)}
        return Update(r, {**tensors, **bias}, metadata, who)

    def honest(r: int, d: int, rng: np.random.Generator) -> Update:
        rung = 1 + d % 2
        moved = {name: near(rng, shape, 0.1) for name, shape in shapes[rung].items()}
        return sent(r, rung, moved, 40 + d, sender(d))

    def hostile(r: int, data: st.DataObject) -> Update:
        rung = data.draw(st.sampled_from([1, 2]))
        moved = {name: hostile_array(data, shape) for name, shape in shapes[rung].items()}
        return sent(r, rung, moved, data.draw(samples), EVIL)

    return Case(
        make,
        honest,
        hostile,
        lambda method, opened: np.asarray(opened.attachments["rung2"].tensors["w.net.w"], float),
        # A factor's move counts as the full model moves by it: more than it moved itself, where the
        # singular values are above 1.
        0.12 * 3,
        # Of what only half of the devices train a share is twice as large.
        2 * 6.0 * ROUNDS,
    )


RARE = ITEMS - 1
"""An item that one honest device names, in the first round alone."""


def factored(
    r: int, rows: np.ndarray, pulls: np.ndarray, factor: np.ndarray, count: int, who: str
) -> Update:
    tensors = users(rows, pulls, factor)
    tensors |= {"users": np.asarray(count), "counts": np.full(len(rows), min(count, 3))}
    return Update(r, tensors, sender=who)


def least_squares_case() -> Case:
    """Devices of a user or two, each with half of the items: their pulls are of a size, and their
    vectors point in all directions."""
    first = initial_items(ITEMS, WIDTH, 0.1, np.random.default_rng(0))

    def honest(r: int, d: int, rng: np.random.Generator) -> Update:
        count = 1 + d % 2
        rows = np.array([i for i in range(RARE) if (i + d) % 3] + [RARE] * (r == 1 and d == 0))
        factor = np.roll(np.eye(WIDTH), d, axis=1)[:count] + near(rng, (count, WIDTH), 0.1)
        pulls = -np.ones((len(rows), count)) / math.sqrt(count) + near(rng, (len(rows), count), 0.1)
        return factored(r, rows, pulls, factor, count, sender(d))

    def lie(r: int, data: st.DataObject) -> Update:
        count = data.draw(st.sampled_from([1, 2, WIDTH, MOST_USERS]))
        height = min(count, WIDTH)
        every = [np.arange(ITEMS), np.array([RARE]), np.empty(0, np.int64)]
        rows = every[data.draw(st.integers(0, 2))]
        pulls, factor = np.ones((len(rows), height)), np.ones((height, WIDTH))
        if data.draw(st.booleans()):
            # Within what is taken, and as far as it goes.
            pulls *= data.draw(st.sampled_from([-1e5, -1.0, 1.0, 1e3]))
            factor *= data.draw(st.sampled_from([0.1, 1.0, 30.0]))
        else:
            pulls = hostile_array(data, pulls.shape) if len(rows) else pulls
            factor = hostile_array(data, factor.shape)
        return factored(r, rows, pulls, factor, count, EVIL)

    def handed_on(method: Method, opened: Broadcast) -> np.ndarray:
        """The items but for a turn, which changes no score: the root of their products."""
        items = opened.tensors["items"].astype(np.float64) * opened.tensors["strengths"]
        left, lengths, _ = np.linalg.svd(items, full_matrices=False)
        return (left * lengths) @ left.T

    return Case(
        lambda: ScatterMethod(first, ScatterSettings(least_squares=ONE_WIDTH)),
        honest,
        lie,
        handed_on,
        # The length of an item at rest. One that nobody else names is where its only user says,
        # within seven such lengths; all others together move by less than four.
        0.6,
        60.0,
    )


def bpr_case() -> Case:
    first = initial_items(ITEMS, WIDTH, 0.1, np.random.default_rng(0))

    def sent(r: int, values: np.ndarray, who: str) -> Update:
        tensors = {
            "rows": np.arange(ITEMS),
            "columns": np.arange(WIDTH),
            "values": values.astype(np.float32),
        }
        return Update(r, tensors, sender=who)

    return Case(
        lambda: ScatterMethod(first, ScatterSettings("bpr")),
        lambda r, d, rng: sent(r, near(rng, (ITEMS, WIDTH), 0.1), sender(d)),
        lambda r, data: sent(r, hostile_array(data, (ITEMS, WIDTH)), EVIL),
        lambda method, opened: np.asarray(opened.tensors["items"], np.float64),
        # Adam's steps are of the rate's size, whoever pulls: each value by at most a few rates.
        0.12,
        200.0,
    )


def teacher_logits_case(**chosen: Any) -> Case:
    training = TeacherLogitsTraining(CLASSES, **chosen)
    labels = np.arange(CLASSES)

    def sent(r: int, means: np.ndarray, count: int, who: str) -> Update:
        counts = np.full(CLASSES, min(count, 2**31 - 1))
        known = LabelKnowledge(labels, counts, means.astype(np.float32))
        return Update(r, encode_knowledge(known, training), sender=who)

    def lie(r: int, data: st.DataObject) -> Update:
        shift = data.draw(st.integers(0, CLASSES - 1))
        return sent(r, np.roll(np.eye(CLASSES), shift, axis=1), data.draw(samples), EVIL)

    def honest(r: int, d: int, rng: np.random.Generator) -> Update:
        means = 0.7 * np.eye(CLASSES) + 0.3 * rng.dirichlet(np.ones(CLASSES), CLASSES)
        return sent(r, means, 20 + d, sender(d))

    return Case(
        lambda: TeacherLogitsMethod(training),
        honest,
        lie,
        lambda method, opened: np.asarray(opened.tensors["means"], np.float64),
        # A distribution is at most so far from another, for each label.
        math.sqrt(2 * CLASSES),
        6.0,
    )


def mutual_case() -> Case:
    entries = {"x": SampleEntry("float32", (3,)), "label": SampleEntry("int64", ())}
    training = MutualTraining(CLASSES, target="label", combine="mean")

    def shared(r: int, who: str, rng: np.random.Generator) -> Update:
        drawn = {
            "x": rng.random((CLASSES, 3)).astype(np.float32),
            "label": np.arange(CLASSES, dtype=np.int64),
        }
        coded = encode_samples(drawn, "float32")
        public = {f"public.{name}": array for name, array in coded.items()}
        return Update(r, public, {"mark": samples_mark(coded)}, who)

    def labelled(r: int, who: str, means: np.ndarray) -> Update:
        coded = encode_soft_labels(means.astype(np.float32), training.label_form)["labels"]
        return Update(r, {f"labels.{sender(d)}": coded for d in range(HONEST)}, {}, who)

    def honest(r: int, d: int, rng: np.random.Generator) -> Update:
        if r == 1:
            return shared(r, sender(d), rng)
        noise = rng.dirichlet(np.ones(CLASSES), CLASSES)
        return labelled(r, sender(d), 0.7 * np.eye(CLASSES) + 0.3 * noise)

    def lie(r: int, data: st.DataObject) -> Update:
        if r == 1:
            return shared(r, EVIL, np.random.default_rng(0))
        shift = data.draw(st.integers(0, CLASSES - 1))
        return labelled(r, EVIL, np.roll(np.eye(CLASSES), shift, axis=1))

    def handed_on(method: Method, opened: Broadcast) -> np.ndarray:
        coded = [opened.tensors[f"labels.{sender(d)}"] for d in range(HONEST)]
        return np.stack([np.asarray(each, np.float64) / 255 for each in coded])

    scale = math.sqrt(2 * CLASSES * HONEST)
    settings = MutualSettings(training)
    return Case(lambda: MutualMethod(entries, settings), honest, lie, handed_on, scale, 6.0)


CASES: dict[str, Case] = {
    "attention": attention_case(),
    "fedavg": fedavg_case(),
    "mutual": mutual_case(),
    "prototypes": prototypes_case(),
    "scatter": least_squares_case(),
    "teacher_logits": teacher_logits_case(),
}
"""By the name that a method is registered under."""
OTHERS: dict[str, Case] = {
    "scatter by triples": bpr_case(),
    "a ladder of submodels": ranks_case(),
    "slices that are dealt": dealt_case(),
    "models of a stranger": averaging(Averaging, START),
    "differences of a stranger": replace(averaging(Differences, np.zeros(P)), bound=6.0 * ROUNDS),
    "what moved a stranger's shared model": moved_case(),
    "weights of a stranger": weighted_case(),
    "whole numbers of a stranger": whole_case(),
    "prototypes by samples": prototypes_case(weights="samples"),
    "trained prototypes": prototypes_case(trained=True),
    "teacher logits by samples": teacher_logits_case(weights="samples"),
}


SPOILING = (np.nan, np.inf, -1.0, 0.0, 1.0, 1e12, 3e38)
DTYPES = (np.float32, np.float16, np.int64, np.int32, np.uint16, np.uint8, np.bool_)


@st.composite
def spoilt_arrays(draw: st.DrawFn, array: np.ndarray) -> np.ndarray:
    match draw(st.sampled_from(["any", "kind", "values", "one", "shape"])):
        case "any":
            shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
            return draw(hnp.arrays(st.sampled_from(DTYPES), shapes))
        case "kind":
            return array.astype(draw(st.sampled_from(DTYPES)))
        case "values" | "one" as how:
            found = array.astype(array.dtype)
            with np.errstate(invalid="ignore", over="ignore"):
                value = np.asarray(draw(st.sampled_from(SPOILING))).astype(array.dtype)
            found.reshape(-1)[: 1 if how == "one" else None] = value
            return found
        case _:
            other = [array[None], array.reshape(-1), array.reshape(-1)[:1], array.reshape(-1)[:0]]
            return draw(st.sampled_from(other))


scalars = st.one_of(
    st.integers(-(2**62), 2**62), st.booleans(), st.floats(-1e300, 1e300), st.text(max_size=3)
)


@st.composite
def spoilt_updates(draw: st.DrawFn, good: Update) -> Update:
    """A good update of which some is left out, added or changed; it may be as good as before."""
    tensors: dict[str, Any] = dict(good.tensors)
    told: dict[str, Any] = dict(good.metadata)
    for name in draw(st.lists(st.sampled_from([*tensors, "more"]), max_size=2, unique=True)):
        if name != "more" and draw(st.booleans()):
            del tensors[name]
        else:
            tensors[name] = draw(spoilt_arrays(tensors.get(name, np.zeros(2, np.float32))))
    for name in draw(st.lists(st.sampled_from([*told, "more"]), max_size=2, unique=True)):
        told.pop(name, None)
        if draw(st.booleans()):
            told[name] = draw(scalars)
    return Update(good.round_id, tensors, told, draw(st.sampled_from([good.sender, ""])))
