"""What the other simulators are given, and how what they answer is judged; none is installed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.__main__ import (
    ROWS,
    TOLERANCE,
    Comparison,
    Costs,
    Measured,
    Round,
    extrapolated,
    started,
    table,
)
from benchmarks.peers.record import positives_of, record
from benchmarks.peers.tessera_rounds import AloneRounds
from benchmarks.peers.workload import Floats, Workload, device_step

ITEMS, DEVICES, K, ROUNDS = 40, 9, 4, 3


def likes() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.choice(ITEMS, size=5 + device, replace=False) for device in range(DEVICES)]


@pytest.fixture(scope="module")
def workload() -> Workload:
    return record(likes(), ITEMS, K, ROUNDS, seed=7)


def replayed(work: Workload) -> tuple[Floats, Floats]:
    """What a framework does: the sum of all devices' gradients, round after round."""
    items, users = work.items, work.users.copy()
    for number in range(work.rounds):
        total = np.zeros_like(items)
        for device in range(work.devices):
            part = work.part(device)
            users[device], rows, gradient = device_step(
                items,
                users[device],
                (work.positive[part], work.negative[number][part], work.weight[part]),
                work.user_rates[device],
                work.user_l2,
                work.item_l2,
            )
            total[rows] += gradient
        items = work.server_step(items, total)
    return items, users


def test_the_triples_are_the_devices_own(workload: Workload) -> None:
    assert workload.devices == DEVICES and workload.rounds == ROUNDS
    for rows, given in zip(positives_of(workload), likes(), strict=True):
        np.testing.assert_array_equal(rows, given)
    for device, rows in enumerate(likes()):
        assert not np.isin(workload.negative[:, workload.part(device)], rows).any()
    assert set(workload.weight.tolist()) == {1.0, float(np.float32(0.1))}
    assert not np.array_equal(workload.negative[0], workload.negative[1])


def test_a_replay_of_the_triples_comes_to_tesseras_result(workload: Workload) -> None:
    errors = workload.errors(*replayed(workload))
    assert set(errors) == {"items", "users"}
    assert max(errors.values()) < TOLERANCE / 10


def test_a_former_round_or_another_step_is_seen(workload: Workload) -> None:
    negative = workload.negative.copy()
    negative[1] = negative[0]
    changes = (
        {"negative": negative},
        {"item_l2": 2 * workload.item_l2},
        {"user_l2": 2 * workload.user_l2},
        {"server_rate": 1.001 * workload.server_rate},
        {"user_rates": np.float32(1.001) * workload.user_rates},
    )
    for change in changes:
        items, _ = replayed(replace(workload, **change))  # type: ignore[arg-type]
        assert workload.errors(items, None)["items"] > TOLERANCE, change.keys()


def test_what_is_no_result_is_infinitely_far(workload: Workload) -> None:
    items = workload.final_items
    assert workload.errors(np.full_like(items, np.nan), None)["items"] == np.inf
    assert workload.errors(items[:-1], None)["items"] == np.inf
    assert workload.errors(items, workload.final_users) == {"items": 0.0, "users": 0.0}


def test_a_device_without_interactions_is_refused() -> None:
    with pytest.raises(ValueError, match="device 9 has nothing"):
        record([*likes(), np.empty(0, np.int64)], ITEMS, K, 1, seed=7)


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize(("step", "most"), [("numpy", 0.0), ("graph", TOLERANCE)])
def test_tessera_draws_the_same_triples_again(
    workload: Workload, step: str, most: float, together: int
) -> None:
    rounds = AloneRounds(workload, step, together)
    for number in range(ROUNDS):
        rounds.prepare(number)
        rounds.round(number)
    assert max(workload.errors(rounds.items, rounds.users).values()) <= most


def test_a_process_runs_rounds_when_it_is_told_to(workload: Workload, tmp_path: Path) -> None:
    workload.save(tmp_path / "workload.npz")
    with started(ROWS[0], tmp_path / "workload.npz", tmp_path) as peer:
        taken = [peer.round() for _ in range(ROUNDS)]
        costs = peer.end()
    assert costs.rounds == tuple(taken) and costs.agrees
    assert min(one.processor_seconds for one in taken) > 0
    assert costs.peak_bytes > 2**20 and {"numpy", "python"} <= costs.versions.keys()


def test_rounds_that_are_missing_are_no_result(workload: Workload, tmp_path: Path) -> None:
    workload.save(tmp_path / "workload.npz")
    with started(ROWS[0], tmp_path / "workload.npz", tmp_path) as peer:
        peer.round()
        assert not peer.end().agrees


def test_every_package_of_an_environment_is_pinned() -> None:
    pins = Path(__file__).parents[2] / "benchmarks" / "peers" / "requirements"
    named = {row.environment for row in ROWS if row.environment}
    assert {path.stem for path in pins.iterdir()} == named
    found: dict[str, str] = {}
    for name in named:
        for line in (pins / f"{name}.txt").read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                assert re.fullmatch(r"[\w.-]+==[\w.]+", line), line
                found.update([line.split("==")])
    assert (found["pfl"], found["fedjax"]) == ("0.6.0", "0.0.17")
    assert tuple(map(int, found["flwr"].split("."))) >= (1, 42)


def costs(*seconds: float, error: float = 1e-6) -> Costs:
    rounds = tuple(Round(2 * one, one) for one in seconds)
    return Costs({"python": "3.11"}, rounds, {"items": error}, 5_000_000)


def compared(devices: int, **found: Costs) -> tuple[Comparison, Measured]:
    return Comparison(tuple(found), devices, 32, 3, 0), Measured("2 cores", found)


def test_another_result_has_no_times() -> None:
    lines = table([compared(6040, JAX=costs(9.0, 3.0, error=0.5))], 6040)
    assert "another result: items by 0.5" in lines and "3.00" not in lines


def test_a_whole_fleet_is_read_off_a_line_and_said_to_be() -> None:
    assert extrapolated({200: 3.0, 600: 7.0, 400: 99.0}, 6040) == pytest.approx(61.4)
    with pytest.raises(ValueError, match="two sizes"):
        extrapolated({200: 3.0}, 6040)
    few, many = (compared(n, Flower=costs(9.0, n / 100)) for n in (200, 600))
    last = table([few, many], 6040).splitlines()[-1]
    assert "by a line through the rows above" in last and "about 60" in last
    assert "about" not in table([few, compared(600, Flower=costs(9.0, 6.0, error=1.0))], 6040)
    assert "about" not in table([few, many, compared(6040, Flower=costs(9.0, 70.0))], 6040)
