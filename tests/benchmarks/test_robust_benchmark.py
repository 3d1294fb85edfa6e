from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest

from aggregator.simulate.devices import FixedInteractions
from benchmarks.recommendation.split import hold_out_validation
from benchmarks.robust.scatter import (
    METHOD,
    OPTIONS,
    HostileScatterLearner,
    base_experiment,
    execute,
    exposure,
)
from benchmarks.robust.suite import (
    ATTACKS,
    SHARES,
    Case,
    Outcome,
    Trial,
    hostile_devices,
    single_table,
    unpopular_item,
)
from device_sdk.methods.scatter.contract import BprTraining
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.wire.arrays.exchange import Broadcast
from tests.fakes.reference_step import ReferenceStep

ITEMS, K = 30, 8
CLEAN = Trial(base_experiment("validation", 0, 1), None, 0.0)


def learner(seed: int = 0) -> ScatterLearner:
    liked = FixedInteractions([np.asarray([1, 4, 7, 9], dtype=np.int64)])
    return ScatterLearner(liked, ReferenceStep(), 5, np.random.default_rng(seed))


def broadcast() -> Broadcast:
    items = np.random.default_rng(1).standard_normal((ITEMS, K)).astype(np.float32)
    return Broadcast(1, 0, {"items": items}, BprTraining(user_spread=0.5).as_scalars())


def test_hostile_updates_are_what_their_attack_says() -> None:
    sent = learner().train(broadcast()).tensors
    hostile = {
        attack: HostileScatterLearner(learner(), attack, 20, np.random.default_rng(2))
        .train(broadcast())
        .tensors
        for attack in ATTACKS
    }
    np.testing.assert_allclose(hostile["flip"]["values"], -10 * sent["values"], rtol=1e-6)
    noise = hostile["noise"]["values"]
    assert np.linalg.norm(noise) == pytest.approx(10 * np.linalg.norm(sent["values"]), rel=1e-5)
    for attack, strength in (("promotion", 10), ("patient", 1)):
        promoted = hostile[attack]  # type: ignore[index]
        place = promoted["rows"].tolist().index(20)
        sizes = np.linalg.norm(promoted["values"], axis=1)
        assert sizes[place] == pytest.approx(strength * np.delete(sizes, place).max(), rel=1e-4)
    honest = [row for row in sent["rows"].tolist() if row != 20]
    for row in honest:
        np.testing.assert_array_equal(
            promoted["values"][promoted["rows"] == row], sent["values"][sent["rows"] == row]
        )
    assert promoted["rows"].tolist() == sorted({*sent["rows"].tolist(), 20})


def test_a_larger_share_holds_the_devices_of_a_smaller_one() -> None:
    order = np.random.default_rng(0).permutation(100)
    few, many = (set(hostile_devices(order, share).tolist()) for share in SHARES)
    assert (len(few), len(many)) == (5, 20)
    assert few < many


def small_split() -> object:
    rng = np.random.default_rng(3)
    train = [np.sort(rng.choice(20, size=8, replace=False)) for _ in range(40)]
    train[0] = np.append(train[0], 25)
    return hold_out_validation(train, ITEMS, rng, latest=False, negatives=15)


def test_exposure_counts_who_is_recommended_the_item() -> None:
    split = small_split()
    users, items = np.ones((40, 1), np.float32), np.zeros((ITEMS, 1), np.float32)
    items[25] = 1
    found = exposure(users, items, split, 25)  # type: ignore[arg-type]
    knows = np.asarray([25 in rows for rows in split.train])  # type: ignore[attr-defined]
    assert np.array_equal(np.isnan(found), knows)
    assert (found[~knows] == 1).all()
    items[25] = -1
    assert (exposure(users, items, split, 25)[~knows] == 0).all()  # type: ignore[arg-type]


def test_an_unpopular_item_is_known_to_few() -> None:
    known = np.asarray([0, 5, 6, 1, 900])
    found = {unpopular_item(known, np.random.default_rng(seed)) for seed in range(20)}
    assert found == {1, 3}


def test_a_trial_is_repeatable_and_measures_honest_users() -> None:
    split = small_split()
    base = replace(CLEAN.experiment, width=K, classes=(4, 8), epochs=2, cohort=20)
    notes: list[str] = []
    clean = execute(Trial(base, None, 0.0), split, ReferenceStep(), notes.append)  # type: ignore[arg-type]
    assert set(clean.measures["hit_ratio"]) == {"0.0", str(1 / 40), *map(str, SHARES)}
    assert len(notes) == 3
    guarded = replace(base, settings=OPTIONS[-1].change(base.settings))
    for attack in ATTACKS:
        trial = Trial(guarded, attack, 0.2)
        one, two = (execute(trial, split, ReferenceStep(), notes.append) for _ in range(2))  # type: ignore[arg-type]
        assert one == two
        assert set(one.measures["hit_ratio"]) == {"0.2"}


def measured(hit_ratio: dict[str, float], exposure: dict[str, float] | None = None) -> Outcome:
    return Outcome({"hit_ratio": hit_ratio, "exposure": exposure or {}})


def test_tables_compare_with_the_clean_run_on_the_same_users() -> None:
    found = {
        Case("none"): {0: measured({"0.0": 0.60, "0.05": 0.50}, {"0.0": 0.0})},
        Case("none", "promotion", 0.05): {0: measured({"0.05": 0.45}, {"0.05": 0.7})},
        Case("none", "patient", 0.05): {0: measured({"0.05": 0.45}, {"0.05": 0.3})},
    }
    accuracy, shown = METHOD.tables(found, Namespace(one_device=False, options=["none"]))
    assert "0.4500 (-10.0 %)" in accuracy
    assert [cell in shown for cell in ("70.0 %", "30.0 %", "patient, 5%")] == [True] * 3


def test_one_device_is_compared_with_no_attack_on_all_others() -> None:
    share = 1 / 40
    clean, attacked = measured({"0.0": 0.5, str(share): 0.6}), measured({str(share): 0.3})
    found = {Case("none"): {0: clean}, Case("default", "row", 1.0): {0: attacked}}
    table = single_table(found, share, "hit_ratio", "HR@10")
    assert "| none, no attack " in table and "| 1       | 0.6000 (+0.0 %)" in table
    assert "| default, row" in table and "0.3000 (-50.0 %)" in table
