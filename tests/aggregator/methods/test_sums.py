"""Rounds that add up: the same bits over any shards, in any order, with any restarts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aggregator.methods import sums
from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.fleet import Voices, measured, measured_each
from aggregator.methods.method import Refused
from aggregator.methods.scatter import ScatterMethod, ScatterSettings, initial_items
from aggregator.methods.sums import MOST_UPDATES, FixedPointSum, RefusedShare, UnlikeSum
from aggregator.store.versions import pack_state, unpack_state
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.state import RestoreError
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.arrays.factored import MOST_USERS
from tests.fakes.scatter_updates import ONE_WIDTH, users

ITEMS, K = 20, 6
UNLIMITED = {"clip_multiple": 0.0, "row_multiple": 0.0}


def scatter(**chosen: Any) -> ScatterMethod:
    first = initial_items(ITEMS, K, 0.1, np.random.default_rng(0))
    chosen.setdefault("least_squares", ONE_WIDTH)
    return ScatterMethod(first, ScatterSettings(**chosen))


def scatter_update(round_id: int, device: int, scale: float = 1.0) -> Update:
    """Of one user, of a few, or of more than there are columns."""
    rng = np.random.default_rng([round_id, device])
    people = int(rng.choice([1, 1, 1, 2, 3, 40]))
    rows = np.sort(rng.choice(ITEMS, size=int(rng.integers(0, 9)), replace=False))
    k = int(rng.choice([K, *range(1, K)]))
    height = min(people, K)
    factor = np.clip(scale, 0.1, 10) * rng.standard_normal((height, K))
    tensors = users(rows, scale * rng.standard_normal((len(rows), height)), factor, k)
    counts = rng.integers(1, people + 1, len(rows))
    tensors |= {"counts": counts, "users": np.asarray(people)}
    return Update(round_id, tensors, sender=f"{device:032x}")


def bpr(**chosen: Any) -> ScatterMethod:
    return scatter(loss="bpr", **chosen)


def bpr_update(round_id: int, device: int, scale: float = 1.0) -> Update:
    rng = np.random.default_rng([round_id, device])
    rows = np.sort(rng.choice(ITEMS, size=int(rng.integers(0, 9)), replace=False))
    columns = np.sort(rng.choice(K, size=int(rng.integers(1, K + 1)), replace=False))
    values = scale * rng.standard_normal((len(rows), len(columns)))
    tensors = {"rows": rows, "columns": columns, "values": values.astype(np.float32)}
    return Update(round_id, tensors, sender=f"{device:032x}")


def averaging(**chosen: Any) -> FedAvgMethod:
    first = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    return FedAvgMethod({"w": first}, {"bn.running_var": np.ones(3, np.float32)}, _read(chosen))


def _read(chosen: dict[str, Any]) -> FedAvgSettings:
    weighting = chosen.pop("weighting", "samples")
    return FedAvgSettings(training=FedAvgTraining(weighting=weighting), **chosen)


def averaging_update(round_id: int, device: int, scale: float = 1.0, **said: Any) -> Update:
    rng = np.random.default_rng([round_id, device])
    tensors = {
        "w.w": (scale * rng.standard_normal((4, 3))).astype(np.float32),
        "b.bn.running_var": (0.1 * scale * rng.standard_normal(3)).astype(np.float32),
    }
    told = {"loss": float(rng.standard_normal()), "samples": int(rng.integers(1, 400)), **said}
    return Update(round_id, tensors, told, f"{device:032x}")


def uniform_update(round_id: int, device: int, scale: float = 1.0) -> Update:
    whole = averaging_update(round_id, device, scale)
    return Update(round_id, whole.tensors, {"loss": whole.metadata["loss"]}, whole.sender)


@dataclass(frozen=True)
class Kind:
    build: Callable[[], Any]
    update: Callable[..., Update]


KINDS = {
    "scatter": Kind(scatter, scatter_update),
    "scatter, no limits": Kind(lambda: scatter(**UNLIMITED), scatter_update),
    "scatter, fixed limit": Kind(lambda: scatter(clip_norm=0.5, **UNLIMITED), scatter_update),
    "scatter, guarded": Kind(
        lambda: scatter(item_multiple=1.25, outlier_multiple=3.0, row_multiple=1.5), scatter_update
    ),
    "scatter, median": Kind(lambda: scatter(robust="median", outlier_multiple=3.0), scatter_update),
    "scatter, trimmed": Kind(lambda: scatter(robust="trimmed"), scatter_update),
    "bpr": Kind(bpr, bpr_update),
    "bpr, mean": Kind(lambda: bpr(aggregator="mean", clip_norm=0.5), bpr_update),
    "bpr, no limits": Kind(lambda: bpr(**UNLIMITED), bpr_update),
    "bpr, guarded": Kind(
        lambda: bpr(item_multiple=1.25, outlier_multiple=3.0, row_multiple=1.5), bpr_update
    ),
    "bpr, median": Kind(lambda: bpr(robust="median", outlier_multiple=3.0), bpr_update),
    "averaging": Kind(averaging, averaging_update),
    "averaging, no limits": Kind(
        lambda: averaging(clip_multiple=0.0, samples_multiple=0.0), averaging_update
    ),
    "averaging, fixed limit": Kind(
        lambda: averaging(clip_norm=0.5, clip_multiple=0.0, samples_multiple=1.5), averaging_update
    ),
    "averaging, outliers": Kind(lambda: averaging(outlier_multiple=1.5), averaging_update),
    "averaging, uniform": Kind(lambda: averaging(weighting="uniform"), uniform_update),
    "averaging, trimmed": Kind(lambda: averaging(robust="trimmed"), averaging_update),
}


def bits(one: Any) -> bytes:
    return pack_state(one.state())


def closed(kind: Kind, chosen: list[list[Update]], shards: int = 1, seed: int = 0) -> list[Any]:
    """The summaries of rounds, and the state after each: over so many shards, in any order, with
    restarts."""
    rng = np.random.default_rng(seed)
    coordinator = kind.build()
    found: list[Any] = []
    for number, updates in enumerate(chosen, 1):
        before = coordinator.state()
        coordinator.open_round(number)
        count = shards if coordinator.adds_up else 1
        workers = [coordinator] if count == 1 else []
        for _ in range(count - len(workers)):
            worker = kind.build()
            worker.restore(unpack_state(pack_state(before)))
            worker.open_round(number)
            assert worker.adds_up
            workers.append(worker)
        order = rng.permutation(len(updates)) if seed else range(len(updates))
        for place in order:
            index = int(rng.integers(len(workers)))
            workers[index].check(updates[place])
            workers[index].absorb(updates[place])
            if seed and rng.random() < 0.1:
                again = kind.build()
                again.restore(unpack_state(pack_state(workers[index].state())))
                if workers[index] is coordinator:
                    coordinator = again
                workers[index] = again
        shares = [unpack_state(pack_state(one.share())) for one in workers] if count > 1 else []
        # Some are added up on the way.
        while shares and seed and len(shares) > 2 and rng.random() < 0.5:
            between = kind.build()
            between.restore(before)
            between.open_round(number)
            for _ in range(2):
                between.merge(shares.pop(int(rng.integers(len(shares)))))
            shares.append(between.share())
        for place in rng.permutation(len(shares)):
            coordinator.merge(shares[place])
        summary = coordinator.close_round()
        found.append((summary, bits(coordinator)))
    return found


scales = st.sampled_from([1.0, 1.0, 1.0, 0.0, 1e-6, 30.0, 500.0])


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_shards_order_and_restarts_give_the_same_bits(name: str, data: st.DataObject) -> None:
    kind = KINDS[name]
    chosen = []
    for number in range(1, 4):
        devices = data.draw(st.lists(st.integers(0, 40), min_size=3, max_size=12, unique=True))
        # Where no limit follows the fleet, what is too large is refused: another test's.
        drawn = [1.0 if "limit" in name else data.draw(scales) for _ in devices]
        chosen.append([kind.update(number, d, s) for d, s in zip(devices, drawn, strict=True)])
    alone = closed(kind, chosen)
    shards, seed = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 1 << 30))
    assert closed(kind, chosen, shards, seed) == alone


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_many_at_once_are_what_they_are_one_by_one(name: str, data: st.DataObject) -> None:
    kind = KINDS[name]
    alone, grouped = kind.build(), kind.build()
    for number in range(1, 4):
        alone.open_round(number)
        grouped.open_round(number)
        devices = data.draw(st.lists(st.integers(0, 60), min_size=3, max_size=30, unique=True))
        drawn = [1.0 if "limit" in name else data.draw(scales) for _ in devices]
        updates = [kind.update(number, d, s) for d, s in zip(devices, drawn, strict=True)]
        for update in updates:
            alone.absorb(update)
        rest = updates
        while rest:
            size = data.draw(st.integers(1, len(rest)))
            grouped.absorb_each(rest[:size])
            rest = rest[size:]
        assert bits(grouped) == bits(alone)
        assert grouped.close_round() == alone.close_round()
        assert bits(grouped) == bits(alone)


def test_groups_of_any_size_are_measured_as_each_by_itself() -> None:
    rng = np.random.default_rng(3)
    for columns in (1, 3, 16, 64):
        parts = [
            (10.0 ** rng.uniform(-9, 9) * rng.standard_normal((rows, columns))).astype(np.float32)
            for rows in (0, 1, 2, 7, 100, 0, 1000, 3, 0)
        ]
        together = measured_each(np.concatenate(parts), [len(each) for each in parts])
        for one, found in zip(map(measured, parts), together, strict=True):
            assert one[:4] == found[:4]
            assert np.array_equal(one.squares, found.squares)


def _at(array: Any, place: Any, value: Any) -> Any:
    found = np.array(array)
    found[place] = value
    return found


def _spoilt(good: Update) -> list[tuple[str, Update]]:
    """Each slip with the reason that it is refused for."""
    t: dict[str, Any] = dict(good.tensors)
    rows, name = t["rows"], "values" if "values" in t else "pulls"
    values = t[name]
    slips: list[tuple[str, dict[str, Any]]] = [
        *(("rows", {"rows": _at(rows, 0, -1)}), ("rows", {"rows": _at(rows, -1, ITEMS)})),
        *(("rows", {"rows": _at(rows, 1, rows[0])}), ("rows", {"rows": rows.astype(np.float32)})),
        *(("rows", {"rows": rows[:, None]}), ("tensors", {"rows": None})),
        *(("tensors", {"more": rows}), ("values", {name: np.array(1.0, np.float32)})),
        *(("values", {name: values[:-1]}), ("values", {name: values.astype(np.float16)})),
        *(("values", {name: _at(values, (0, 0), each)}) for each in (np.nan, -np.inf, 1e30)),
    ]
    if "columns" in t:
        none = {"columns": t["columns"][:0], name: values[:, :0]}
        slips += [("columns", {"columns": _at(t["columns"], -1, K)}), ("columns", none)]
    else:
        factor, counts, pulls = t["factor"], t["counts"], np.zeros_like(values)
        others = 0, MOST_USERS + 1, np.float32(1), t["users"][None]
        slips += [("users", {"users": np.asarray(each)}) for each in others]
        slips += [("users", {"k": np.asarray(each)}) for each in (0, K + 1, np.float32(0.5))]
        for height, people in ((K + 1, MOST_USERS), (2, 1)):  # of more rows than it may have
            wide = np.ones((len(rows), height), np.float32)
            turned = {"factor": np.ones((height, K), np.float32), "users": np.asarray(people)}
            slips += [("users", {**turned, "pulls": wide})]
        odd = _at(counts, 0, 0), _at(counts, -1, t["users"] + 1), counts[:-1]
        slips += [("counts", {"counts": each}) for each in (*odd, counts.astype(np.float32))]
        bad = np.full_like(factor, 1e5), _at(factor, (0, 0), np.nan), _at(factor, (0, 0), -np.inf)
        bad += factor.reshape(-1), np.array(1.0, np.float32), factor[:, 1:]
        slips += [("values", {"factor": each, "pulls": pulls}) for each in bad]
        slips += [("values", {"factor": factor.astype(np.float16)})]
    found = [(f"bad-{reason}", {**t, **changed}) for reason, changed in slips]
    return [
        ("bad-round", Update(good.round_id + 1, good.tensors, sender=good.sender)),
        *(
            (reason, Update(good.round_id, {n: a for n, a in tensors.items() if a is not None}))
            for reason, tensors in found
        ),
    ]


def _with_rows(make: Callable[..., Update], number: int, count: int) -> list[Update]:
    return [u for u in (make(number, d) for d in range(count)) if len(u.tensors["rows"]) > 1]


@pytest.mark.parametrize("name", ["scatter", "bpr"])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_many_are_checked_as_each_by_itself(name: str, data: st.DataObject) -> None:
    one = KINDS[name].build()
    one.open_round(1)
    updates = _with_rows(KINDS[name].update, 1, data.draw(st.integers(10, 120)))
    places = data.draw(st.lists(st.integers(0, len(updates) - 1), max_size=4, unique=True))
    for place in places:
        _, updates[place] = data.draw(st.sampled_from(_spoilt(updates[place])))
    found = one.check_each(updates)
    assert [at for at, error in enumerate(found) if error is not None] == sorted(places)
    for place in places:
        with pytest.raises(Refused) as alone:
            one.check(updates[place])
        error = found[place]
        assert error is not None
        assert (alone.value.reason, str(alone.value)) == (error.reason, str(error))


@pytest.mark.parametrize("name", ["scatter", "bpr"])
@pytest.mark.parametrize("number", [1, 2])
def test_what_does_not_fit_is_refused_by_reason_and_changes_nothing(number: int, name: str) -> None:
    """In a round that is held, and in one that adds up."""
    one = second_round(name) if number == 2 else KINDS[name].build()
    if number == 1:
        one.open_round(1)
    good = _with_rows(KINDS[name].update, number, 20)[0]
    one.check(good)
    before = bits(one)
    for reason, bad in _spoilt(good):
        with pytest.raises(Refused) as caught:
            one.check(bad)
        assert caught.value.reason == reason, bad
    assert bits(one) == before


def test_a_class_s_own_check_is_never_passed_over() -> None:
    class Wary(ScatterMethod):
        def require(self, update: Update) -> None:
            raise Refused("bad-tensors", "none is good enough")

    one = Wary(initial_items(ITEMS, K, 0.1, np.random.default_rng(0)))
    one.open_round(1)
    both = one.check_each([scatter_update(1, 1), scatter_update(1, 2)])
    assert [error and error.reason for error in both] == ["bad-tensors"] * 2


@pytest.mark.parametrize("name", KINDS)
def test_a_task_s_first_round_is_held_and_the_next_adds_up(name: str) -> None:
    kind = KINDS[name]
    one = kind.build()
    for number in (1, 2):
        one.open_round(number)
        assert one.adds_up == (number == 2 and "median" not in name and "trimmed" not in name)
        for device in range(5):
            one.absorb(kind.update(number, device))
        if not one.adds_up:
            with pytest.raises(TypeError, match="does not add up"):
                one.share()
            with pytest.raises(TypeError, match="does not add up"):
                one.merge({})
        one.close_round()
    assert not one.adds_up, "between rounds nothing does"


@pytest.mark.parametrize(
    "kind", [KINDS["scatter, guarded"], KINDS["bpr, guarded"], KINDS["averaging, outliers"]]
)
def test_a_fleet_of_many_is_judged_by_the_same_voices_on_every_shard(kind: Kind) -> None:
    """More devices than have a voice, in one round and in the next."""
    chosen = [[kind.update(1, device) for device in range(400)]]
    chosen.append([kind.update(2, device, 1 + 9 * (device % 50 == 0)) for device in range(300)])
    chosen.append([kind.update(3, device) for device in range(5)])
    assert closed(kind, chosen) == closed(kind, chosen, 8, 1)


floats = hnp.arrays(
    np.float32, st.integers(1, 200), elements=st.floats(-1e6, 1e6, width=32, allow_nan=False)
)


@settings(max_examples=200, deadline=None)
@given(floats, st.integers(1, 1 << 20))
def test_the_error_of_a_sum_is_as_stated(values: np.ndarray, weight: int) -> None:
    exact = sum(int(math.ldexp(float(v), 200)) for v in values) * weight
    bound = float(np.abs(values).max()) * weight
    total = FixedPointSum((1,), bound)
    for value in values:
        total.add(value[None], weight)
    found = int(total.array[0]) << (200 - total._exponent)
    unit = 2 ** (200 - total._exponent)
    assert abs(found - exact) * 2**15 <= len(values) * unit * (2**14 + 1)
    assert abs(found - exact) <= len(values) * int(math.ldexp(max(bound, 2.0**-60), 200)) // 2**36
    assert total.value[0] == pytest.approx(exact / 2.0**200, abs=len(values) * unit / 2.0**200)


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0**-60, 1e24), st.floats(-1, 1))
def test_so_many_values_of_the_bound_cannot_overflow(bound: float, share: float) -> None:
    """The largest that is ever added is the bound, wrong by a few thousandths."""
    total = FixedPointSum((1,), bound)
    value = np.asarray([1.01 * share], np.float32)
    units = int(total.units(value, bound)[0])
    assert units == round(float(value[0]) * bound * 2.0**total._exponent)
    assert abs(units) * MOST_UPDATES <= 2**62


@settings(max_examples=100, deadline=None)
@given(st.lists(floats, min_size=1, max_size=8), st.integers(1, 1 << 20), st.randoms())
def test_a_sum_of_unlike_values_keeps_the_small_ones(
    several: list[np.ndarray], weight: int, random: Any
) -> None:
    scales = np.resize(np.float32([1e9, 1.0, 1e-6]), min(map(len, several)))
    rows = [each[: len(scales)] * scales for each in several]
    bound = float(max(np.abs(row).max() for row in rows)) * weight
    total, again = (UnlikeSum(scales.shape, bound) for _ in range(2))
    for row in rows:
        total.add(row, weight)
    for row in random.sample(rows, len(rows)):
        again.add(row, weight)
    np.testing.assert_array_equal(total.value, again.value)
    exact = np.sum([row.astype(np.longdouble) * weight for row in rows], axis=0)
    own = np.sum([np.abs(row.astype(float)) * weight for row in rows], axis=0)
    room = len(rows) * max(bound, 2.0**-60) * 2.0**-72 + own * 2.0**-50
    assert (np.abs(total.value - exact) <= room).all()


def test_units_are_rounded_to_the_nearest() -> None:
    total = FixedPointSum((1,), 1.0)
    assert total._exponent == 36
    halves = np.asarray([0.5, 1.5, -0.5, -1.5, 2.25, -2.75], np.float32) * np.float32(2.0**-36)
    assert total.units(halves).tolist() == [0, 2, 0, -2, 2, -3]


@functools.cache
def opened(name: str) -> Any:
    one = KINDS[name].build()
    one.open_round(1)
    for device in range(5):
        one.absorb(KINDS[name].update(1, device))
    one.close_round()
    one.open_round(2)
    return unpack_state(pack_state(one.state()))


def second_round(name: str, devices: range = range(0)) -> Any:
    one = KINDS[name].build()
    one.restore(opened(name))
    for device in devices:
        one.absorb(KINDS[name].update(2, device))
    return one


@pytest.mark.parametrize("name", ["scatter, guarded", "bpr, guarded", "averaging, outliers"])
def test_a_share_that_does_not_fit_is_refused_and_changes_nothing(name: str) -> None:
    one, share = second_round(name, range(3)), second_round(name, range(3, 6)).share()
    before = bits(one)
    for key, array in share.items():
        with pytest.raises(RestoreError):
            one.merge({n: a for n, a in share.items() if n != key})
        bad = array[None], array.astype(np.complex64)
        for each in bad:
            with pytest.raises(RestoreError):
                one.merge({**share, key: each})
    with pytest.raises(RestoreError):
        one.merge({**share, "more": np.zeros(1)})
    for key in ("bounding.fleet.round", "bounding.outliers.voices.round"):
        with pytest.raises(RefusedShare, match="round"):
            one.merge({**share, key: np.asarray(7, dtype=np.int64)})
    scales = [key for key in share if key.endswith(".exponent")]
    assert len(scales) == {"bpr, guarded": 1, "averaging, outliers": 3}.get(name, 2)
    for scale in scales:
        with pytest.raises(RefusedShare, match="summed at"):
            one.merge({**share, scale: share[scale] + 1})
    assert bits(one) == before
    one.merge(share)
    assert bits(one) != before


@pytest.mark.parametrize("name", ["scatter", "bpr", "averaging"])
def test_a_round_that_could_overflow_takes_no_more(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aggregator.methods.method.MOST_UPDATES", 4)
    one, other = second_round(name, range(2)), second_round(name, range(2, 5))
    before = bits(one)
    with pytest.raises(RefusedShare, match="overflow"):
        one.merge(other.share())
    assert bits(one) == before
    for device in (5, 6):
        one.check(KINDS[name].update(2, device))
        one.absorb(KINDS[name].update(2, device))
    with pytest.raises(Refused, match="round-full"):
        one.check(KINDS[name].update(2, 7))


@pytest.mark.parametrize("name", ["scatter, no limits", "bpr, no limits", "averaging, no limits"])
def test_without_limits_what_is_absurd_next_to_the_fleet_is_refused(name: str) -> None:
    one, kind = second_round(name), KINDS[name]
    # Never in the first round, when nothing is known.
    kind_one = kind.build()
    kind_one.open_round(1)
    kind_one.check(kind.update(1, 2, 1e9))
    one.check(kind.update(2, 2, 10.0))
    with pytest.raises(Refused, match="bad-values"):
        one.check(kind.update(2, 2, 1e6))


@pytest.mark.parametrize("name", ["scatter", "bpr", "averaging"])
def test_with_limits_whatever_is_sent_stays_within_the_sum(name: str) -> None:
    one, kind = second_round(name), KINDS[name]
    for device in range(20):
        update = kind.update(2, device, 1e9 if device % 2 else 1e-30)
        one.check(update)
        one.absorb(update)
    for key, array in one.share().items():
        if key.endswith("sum"):
            assert np.abs(array).max() <= 20 * 2**38


def name_of(device: int) -> str:
    return f"{device:032x}"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 600), max_size=500), st.integers(1, 8), st.integers(0, 99))
def test_the_voices_are_the_same_in_any_order_and_on_any_shards(
    devices: list[int], shards: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)

    def heard(notes: list[tuple[int, float]]) -> Voices:
        one = Voices(1)
        one.begin(5)
        for device, value in notes:
            one.note(name_of(device), (value,))
        return one

    notes = [(device, float(rng.integers(100))) for device in devices]
    whole = heard(notes)
    mixed = [notes[place] for place in rng.permutation(len(notes))]
    parts = [heard(mixed[place::shards]) for place in range(shards)]
    first, *others = parts
    for each in others:
        first.merge(each.share())
    assert pack_state(first.state()) == pack_state(whole.state())
    assert len(whole.together) == min(256, len(set(devices)))


def test_the_voices_of_a_large_fleet_are_others_in_each_round() -> None:
    chosen = []
    for number in (1, 2):
        one = Voices(1)
        one.begin(number)
        for device in range(2000):
            one.note(name_of(device), (1.0,))
        chosen.append(set(one.together))
    assert [len(each) for each in chosen] == [256, 256]
    assert 10 < len(chosen[0] & chosen[1]) < 60, "an eighth of each by chance"


def test_a_sum_s_file_is_as_small_as_it_is_said_to_be() -> None:
    for name, cells in (("bpr", ITEMS * K), ("scatter", ITEMS * (K + 1) + K * K)):
        share = second_round(name, range(3)).share()
        assert sum(array.nbytes for array in share.values()) < cells * 8 + 12_000
    assert sums.MOST_UPDATES == 1 << 24
