"""What one hostile sender does to the next version, under every method there is: little."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.errors import MethodFault
from aggregator.methods.attention import AttentionMethod, AttentionSettings
from aggregator.methods.bounds import Bounding, UpdateBounds
from aggregator.methods.fedavg import FedAvgMethod
from aggregator.methods.guard import GuardedBinding
from aggregator.methods.method import Binding, Method, Refused
from aggregator.methods.mutual import MutualMethod, MutualSettings
from aggregator.methods.prototypes import PrototypesMethod, PrototypesSettings
from aggregator.methods.scatter import ScatterMethod, ScatterSettings, initial_items
from aggregator.methods.shared_model import SharedModelMethod, SharedModelSettings
from aggregator.methods.teacher_logits import TeacherLogitsMethod
from aggregator.store.checkpoints import pack_state, unpack_state
from device_sdk.artifact.flat_layout import flat_layout
from device_sdk.methods.labels import LabelKnowledge
from device_sdk.methods.mutual.contract import (
    MutualTraining,
    SampleEntry,
    encode_samples,
    encode_soft_labels,
    samples_mark,
)
from device_sdk.methods.prototypes.contract import PrototypesTraining, encode_prototypes
from device_sdk.methods.registry import METHODS
from device_sdk.methods.state import Entry, Schema
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining, encode_knowledge
from device_sdk.wire.arrays.exchange import Broadcast, Update
from device_sdk.wire.arrays.factored import MOST_USERS
from tests.fakes.scatter_updates import ONE_WIDTH, one_user, users

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
    told = {"width": 0, "mixture": False, "loss": 0.5}
    return Case(
        lambda: AttentionMethod(START, [LAYOUT], AttentionSettings()),
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

    return Case(
        lambda: ScatterMethod(first, ScatterSettings(least_squares=ONE_WIDTH)),
        honest,
        lie,
        lambda method, opened: np.asarray(opened.tensors["items"], np.float64),
        # The length of an item at rest. One that nobody else names is where its only user says,
        # within seven such lengths; all others together move by less than four.
        0.6,
        60.0,
    )


def test_a_shortened_pull_of_an_item_that_was_not_heard_of_lately_stays_short() -> None:
    """The mean over an item's users who were heard: of one, and of what its update counts for."""
    case, longest = CASES["scatter"], {}
    for size in (1.0, 1e3, 1e5):
        method = case.make()
        for number in range(1, 41):
            method.open_round(number)
            for d in range(HONEST):
                rng = np.random.default_rng([number, d])
                method.absorb(case.honest(number, d, rng))
            if number == 40:
                pulls, vector = np.array([[-size]]), np.ones((1, WIDTH))
                update = factored(number, np.array([RARE]), pulls, vector, 1, EVIL)
                method.check(update)
                method.absorb(update)
            method.close_round()
        items = method.open_round(41).tensors["items"].astype(np.float64)
        longest[size] = float(np.linalg.norm(items[RARE]))
    usual = float(np.median(np.linalg.norm(items[:RARE], axis=1)))
    assert longest[1e3] == pytest.approx(longest[1e5], rel=1e-3), "both were shortened alike"
    assert longest[1e5] < 4 * usual


def test_a_device_of_two_users_counts_as_two() -> None:
    """In a fleet of devices of one: as they would on two devices."""
    first = initial_items(ITEMS, WIDTH, 0.1, np.random.default_rng(0))
    found = []
    for together in (True, False):
        method = ScatterMethod(first, ScatterSettings(least_squares=ONE_WIDTH))
        for number in (1, 2, 3):
            method.open_round(number)
            rng = np.random.default_rng(number)
            rows = [np.sort(rng.choice(ITEMS, 5, replace=False)) for _ in range(HONEST)]
            vectors = np.eye(WIDTH)[np.arange(HONEST) % WIDTH] + near(rng, (HONEST, WIDTH), 0.2)
            sent = [
                one_user(WIDTH, own, -np.ones(5), u) for own, u in zip(rows, vectors, strict=True)
            ]
            if together:
                every = np.union1d(rows[0], rows[1])
                has = np.stack([np.isin(every, own) for own in rows[:2]], axis=1)
                both = users(every, -has.astype(np.float32), vectors[:2])
                sent[:2] = [both | {"counts": has.sum(axis=1)}]
            for place, tensors in enumerate(sent):
                update = Update(number, tensors, sender=sender(place))
                method.check(update)
                method.absorb(update)
            method.close_round()
        found.append(method.items)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-5)


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
    "models of a stranger": averaging(Averaging, START),
    "differences of a stranger": replace(averaging(Differences, np.zeros(P)), bound=6.0 * ROUNDS),
    "what moved a stranger's shared model": moved_case(),
    "weights of a stranger": weighted_case(),
    "whole numbers of a stranger": whole_case(),
    "prototypes by samples": prototypes_case(weights="samples"),
    "trained prototypes": prototypes_case(trained=True),
    "teacher logits by samples": teacher_logits_case(weights="samples"),
}


def test_every_registered_method_is_a_case() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"][METHODS].keys() == CASES.keys()


def played(case: Case, seed: int, evil: Sequence[Update | None], restarts: bool = False) -> Any:
    """What is handed on after the rounds; ``evil`` each round's update of the hostile device."""
    method = case.make()
    taken = 0
    for number, one in enumerate(evil, 1):
        opened = method.open_round(number)
        updates = [
            case.honest(number, d, np.random.default_rng([seed, number, d])) for d in range(HONEST)
        ]
        for place, update in enumerate([*([one] if one is not None else []), *updates]):
            try:
                method.check(update)
            except Refused:
                assert update is one, "an honest update is never refused"
                continue
            method.absorb(update)
            taken += update is one
            if restarts and place == 2:
                again = case.make()
                again.restore(unpack_state(pack_state(method.state())))
                method = again
        method.close_round()
    opened = method.open_round(len(evil) + 1)
    return case.handed_on(method, opened), taken, method


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
@settings(max_examples=10, deadline=None)
@given(data=st.data(), seed=st.integers(0, 999))
def test_one_hostile_sender_moves_what_others_are_handed_by_a_few_contributions_out_of_all(
    name: str, data: st.DataObject, seed: int
) -> None:
    case = {**CASES, **OTHERS}[name]
    # From the first round on, or in the last ones alone.
    first = data.draw(st.integers(1, ROUNDS))
    rounds = [1] * (name == "mutual") + list(range(first, ROUNDS + 1))
    comes = [
        case.hostile(number, data) if number in rounds else None for number in range(1, ROUNDS + 1)
    ]
    without, _, _ = played(case, seed, [None] * ROUNDS)
    found, _, method = played(case, seed, comes)
    assert np.isfinite(found).all()
    moved = float(np.linalg.norm(found - without))
    assert moved <= case.bound * case.contribution / (HONEST + 1) + 1e-3
    again, _, _ = played(case, seed, comes, restarts=True)
    assert again.tobytes() == found.tobytes(), "a restart within each round changes no bit"
    method.state()  # every number of it finite


def test_whatever_a_stranger_s_check_takes_no_value_reaches_it_that_is_not_finite() -> None:
    one = Averaging()
    one.open_round(1)
    for value in (np.nan, np.inf):
        with pytest.raises(Refused) as caught:
            one.check(Update(1, model_of(np.full(P, value)), {"samples": 1}, EVIL))
        assert caught.value.reason == "bad-values"


def test_an_honest_fleet_s_updates_reach_the_method_as_they_are() -> None:
    """All of a size: to the bit."""

    class Seen(Averaging):
        def add(self, update: Update) -> None:
            seen.append(update)
            super().add(update)

    seen: list[Update] = []
    case = replace(averaging(Averaging, START), make=Seen)
    played(case, 1, [None] * ROUNDS)
    assert len(seen) == HONEST * ROUNDS
    for number in range(1, ROUNDS + 1):
        for d in range(HONEST):
            sent = case.honest(number, d, np.random.default_rng([1, number, d]))
            got = seen[(number - 1) * HONEST + d]
            assert got.tensors["model"].tobytes() == sent.tensors["model"].tobytes()
            assert dict(got.metadata) == dict(sent.metadata)


def test_whole_numbers_that_are_within_bounds_stay_as_they_are_beside_one_that_is_not() -> None:
    most = np.iinfo(np.int64).max
    stage = Bounding(UpdateBounds(rows=("codes",), values=("codes",)))
    for place in range(HONEST):
        codes = np.full((3, 2), most >> 4)
        stage.note(Update(1, {"codes": codes}, {}, sender(place)), {})
    stage.look_again()
    odd = np.array([[1, 2**53 + 1], [most, most], [-most, 0]])
    held = stage.bounded(Update(1, {"codes": odd}, {}, EVIL), {}, {}).tensors["codes"]
    assert held.dtype == np.int64 and held[0].tolist() == odd[0].tolist()
    limit = 3.0 * math.sqrt(2) * (most >> 4)
    np.testing.assert_allclose(np.linalg.norm(held[1:].astype(float), axis=1), limit, rtol=1e-9)
    assert (held[1] > 0).all() and held[2, 0] < 0


def test_what_counts_for_less_is_said_in_the_round_s_metrics() -> None:
    one = Averaging()
    for number in (1, 2, 3):
        one.open_round(number)
        for d in range(HONEST):
            rng = np.random.default_rng([number, d])
            one.absorb(
                Update(number, model_of(START + near(rng, (P,), 0.1)), {"samples": 40}, sender(d))
            )
        if number == 3:
            one.absorb(Update(3, model_of(START * 99), {"samples": 3200}, EVIL))
        summary = one.close_round()
        acted = {"shortened": 1.0, "fewer_samples": 1.0} if number == 3 else {}
        assert dict(summary.metrics) == acted


def test_averaging_says_how_many_claims_count_for_less() -> None:
    case = CASES["fedavg"]
    method = case.make()
    for number in (1, 2):
        method.open_round(number)
        for d in range(HONEST):
            method.absorb(case.honest(number, d, np.random.default_rng([number, d])))
        values = near(np.random.default_rng(number), (4, 6), 0.1)
        claim = {"samples": 3200, "loss": 0.5}
        method.absorb(Update(number, {"w.w": values}, claim, EVIL))
        assert method.close_round().metrics["fewer_samples"] == 1
        assert method.lowered == {EVIL: "samples 3,200 as 132"}


def test_in_a_fleet_of_two_either_is_trusted_and_nothing_is_bounded() -> None:
    one = Averaging()
    for number in (1, 2, 3):
        one.open_round(number)
        one.absorb(Update(number, model_of(START), {"samples": 1}, sender(0)))
        one.absorb(Update(number, model_of(START + 1e6), {"samples": 3}, sender(1)))
        assert not one.close_round().metrics
    np.testing.assert_allclose(one._model, START + 0.75e6, rtol=1e-5)


def test_numbers_of_a_kind_are_left_alone_where_a_method_says_so() -> None:
    class Kinds(Averaging):
        bounds = UpdateBounds(exact=("layout",))

        def add(self, update: Update) -> None:
            kinds.append(update.metadata["layout"])
            super().add(update)

    kinds: list[Any] = []
    one = Kinds()
    for number in (1, 2, 3):
        one.open_round(number)
        for d in range(HONEST):
            layout = 900 if d == 0 else 0
            one.absorb(Update(number, model_of(START), {"samples": 4, "layout": layout}, sender(d)))
        one.close_round()
    assert kinds.count(900) == 3


def test_bad_states_of_the_stage_are_refused_and_change_nothing() -> None:
    one = Averaging()
    one.open_round(1)
    for d in range(3):
        one.absorb(Update(1, model_of(START), {"samples": 4}, sender(d)))
    good = one.state()
    other = Averaging()
    other.restore(good)
    assert pack_state(other.state()) == pack_state(good)
    for bad in (
        {n: a for n, a in good.items() if n != "bounding.scales.round"},
        {**good, "bounding.more": np.zeros(1)},
        {**good, "held.more": np.zeros(1)},
        {**good, "bounding.fewer": np.asarray(-1)},
    ):
        with pytest.raises(ValueError):
            other.restore(bad)
    assert pack_state(other.state()) == pack_state(good)


class Shards(Method):
    """A stranger's whose rounds are sums."""

    SHARDS = True
    ADDED = ("sum",)
    _sum: np.ndarray

    def __init__(self) -> None:
        self._model = np.zeros(P)

    def tell(self) -> Broadcast:
        return Broadcast(self._round_id, self._version, {"model": self._model.astype(np.float32)})

    def require(self, update: Update) -> None: ...

    def add(self, update: Update) -> None:
        units = update.tensors["model"].astype(np.float64) * 2**20
        self._sum = self._sum + np.rint(units).astype(np.int64)

    def step(self) -> dict[str, float]:
        self._model = self._sum / self._participants / 2**20
        return {}

    def schema(self) -> Schema:
        return {"model": Entry(np.float64, (P,)), "sum": Entry(np.int64, (P,))}


def sent(number: int, place: int) -> Update:
    rng = np.random.default_rng([number, place])
    values = START * 1e9 if place == 3 else START + near(rng, (P,), 0.1)
    return Update(number, model_of(values), {"samples": 4}, sender(place))


def test_a_stranger_s_sums_over_shards_are_bounded_to_the_same_bits_in_any_order() -> None:
    whole = Shards()
    for number in (1, 2, 3, 4):
        whole.open_round(number)
        for place in range(HONEST):
            if number < 3:
                assert not whole.adds_up, "held, and no sum"
                with pytest.raises(TypeError, match="held"):
                    whole.share()
            whole.absorb(sent(number, place))
        if number < 4:
            whole.close_round()
            version = whole.state()
    shards = []
    for places in ([7, 1, 4], [0, 3, 2], [6, 5]):
        one = Shards()
        one.restore(version)
        one.open_round(4)
        for place in places:
            one.absorb(sent(4, place))
        shards.append(one)
    first, *others = shards
    for other in others:
        assert first.adds_up
        first.merge(unpack_state(pack_state(other.share())))
    assert first.close_round() == whole.close_round()
    assert pack_state(first.state()) == pack_state(whole.state())


def test_a_device_of_one_label_speaks_of_that_label_and_no_other() -> None:
    # A list of one place is a list still, and no claim.
    width, classes, labels = 6, 10, [1] * 6 + [9]
    centres = np.random.default_rng(1).standard_normal((classes, width)).astype(np.float32)
    training = PrototypesTraining(classes, width=width)
    method = PrototypesMethod(PrototypesSettings(training), np.random.default_rng(3))
    for number in range(1, 5):
        method.open_round(number)
        for place, label in enumerate(labels):
            known = LabelKnowledge(np.array([label]), np.array([20]), centres[label][None])
            update = Update(number, encode_prototypes(known), sender=sender(place))
            method.check(update)
            method.absorb(update)
        method.close_round()
        assert method.prototypes[[1, 9]] == pytest.approx(centres[[1, 9]])
        assert not method.prototypes[3].any(), "nobody has that label"


class AveragingBinding(Binding[None]):
    """Joins a stranger's method to a task."""

    def build(self, *given: object) -> Method:
        return _built()


def _built() -> Method:
    raise NotImplementedError


def test_no_call_of_a_stranger_s_passes_the_stages_by(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="redefines absorb"):
        type("Own", (Averaging,), {"absorb": lambda self, update: None})

    class Late(Averaging):
        pass

    class Own(Averaging):
        def __init__(self) -> None:
            super().__init__()
            self.absorb = super().absorb  # type: ignore[method-assign]

    Late.absorb_each = lambda self, updates: None  # type: ignore[method-assign]
    guarded = GuardedBinding(AveragingBinding("own", None))
    monkeypatch.setattr(f"{__name__}._built", Late)
    method = guarded.build(0, np.random.default_rng(0))
    method.open_round(1)
    with pytest.raises(MethodFault, match="past the stages"):
        method.absorb_each([Update(1, model_of(START), {"samples": 1 << 40}, EVIL)])
    monkeypatch.setattr(f"{__name__}._built", Own)
    with pytest.raises(MethodFault, match="absorb is set on the object"):
        guarded.build(0, np.random.default_rng(0))
