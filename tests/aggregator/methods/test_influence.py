"""What one hostile sender does to the next version, under every method there is: little."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.errors import MethodFault
from aggregator.guard import GuardedBinding
from aggregator.methods.bounds import Sized, TensorBounding, UpdateBounds
from aggregator.methods.method import Binding, Method, Refused
from aggregator.methods.prototypes import PrototypesMethod, PrototypesSettings
from aggregator.methods.scatter import ScatterMethod, ScatterSettings, initial_items
from aggregator.store.versions import pack_state, unpack_state
from device_sdk.methods.labels import LabelKnowledge
from device_sdk.methods.prototypes.contract import PrototypesTraining, encode_prototypes
from device_sdk.methods.registry import METHODS
from device_sdk.methods.state import Entry, Schema
from device_sdk.wire.arrays.exchange import Broadcast, Update
from tests.fakes.method_cases import (
    CASES,
    EVIL,
    HONEST,
    ITEMS,
    OTHERS,
    RARE,
    ROUNDS,
    START,
    WIDTH,
    Averaging,
    Case,
    P,
    averaging,
    factored,
    model_of,
    near,
    sender,
)
from tests.fakes.scatter_updates import ONE_WIDTH, one_user, users


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
        told = method.open_round(41).tensors
        items = told["items"].astype(np.float64) * told["strengths"]
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
    stage = TensorBounding(UpdateBounds(rows=("codes",), values=("codes",)))
    for place in range(HONEST):
        codes = np.full((3, 2), most >> 4)
        stage.note(Sized(Update(1, {"codes": codes}, {}, sender(place))))
    stage.look_again()
    odd = np.array([[1, 2**53 + 1], [most, most], [-most, 0]])
    held = stage.judged(Sized(Update(1, {"codes": odd}, {}, EVIL))).update.tensors["codes"]
    assert held.dtype == np.int64 and held[0].tolist() == odd[0].tolist()
    limit = 3.0 * math.sqrt(2) * (most >> 4)
    np.testing.assert_allclose(np.linalg.norm(held[1:].astype(float), axis=1), limit, rtol=1e-9)
    assert (held[1] > 0).all() and held[2, 0] < 0


def test_a_count_that_stands_alone_stays_an_array() -> None:
    stage = TensorBounding(UpdateBounds())
    for place in range(HONEST):
        stage.note(Sized(Update(1, {"users": np.array(3)}, {}, sender(place))))
    stage.look_again()
    sent = Sized(Update(1, {"users": np.array(999)}, {}, EVIL))
    held = stage.judged(sent).update.tensors["users"]
    assert held.shape == () and held.dtype == np.int64 and held <= 9


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
        acted = {"clipped": 1.0, "fewer_samples": 1.0} if number == 3 else {}
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
