"""Rounds in virtual time that do not wait for the slow (``round.late = "staleness"``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aggregator.simulate.devices import Chosen, DeviceAnswer, DeviceSettings, VirtualDevices
from aggregator.simulate.fleet import Failures, Speeds, VirtualFleet
from aggregator.simulate.record import Asked, Recorder
from aggregator.simulate.task_rounds import PlayedRound, TaskSimulation
from aggregator.simulate.traffic import PublishedRound
from aggregator.task.file import read_task
from device_sdk import LocalData
from device_sdk.evaluation.report import STAGES
from device_sdk.system.clock import MonotonicClock
from tests.fakes.array_device import local_data
from tests.fakes.handmade import linear_artifact

DEVICES, WANTED = 20, 5
STALE = f'wanted = {WANTED}\nquorum = {WANTED}\nover_select = 100.0\nlate = "staleness"'
CLASSES = """
[[class]]
name = "quick"
share = 3
[[class]]
name = "slow"
speed = 0.2
"""


def samples(devices: int, rng: np.random.Generator) -> list[LocalData]:
    return [local_data(place % 3) for place in range(devices)]


def held_back(devices: int, rng: np.random.Generator) -> list[LocalData]:
    return [LocalData(each.train, holdout=0.5) for each in samples(devices, rng)]


class Watched(VirtualDevices):
    """Devices of which is noted who was asked to train in which round."""

    def __init__(self, devices: VirtualDevices) -> None:
        self._devices = devices
        self.asked: Counter[tuple[int, int]] = Counter()

    def round(self, published: PublishedRound, chosen: Sequence[Chosen]) -> Iterator[DeviceAnswer]:
        self.asked.update((published.manifest.round, each.device) for each in chosen if each.trains)
        yield from self._devices.round(published, chosen)


def played(
    folder: Path, rounds: int, lines: str = STALE, seed: int = 5, **fleet: object
) -> tuple[list[PlayedRound], TaskSimulation, Watched]:
    linear_artifact(folder / "linear")
    path = folder / "task.toml"
    path.write_text(
        f'[task]\nname = "t"\nmethod = "fedavg"\nartifact = "linear"\n[round]\n{lines}\n'
        "[fedavg.training]\nlearning_rate = 0.01\n"
    )
    # A training takes a device of speed 1 ten seconds or a little more.
    virtual = VirtualFleet(DEVICES, seed, pace_seconds=1000.0, **fleet)  # type: ignore[arg-type]
    settings = DeviceSettings(read_task(path), f"{__name__}:samples", virtual)
    devices = Watched(settings.make())
    simulation = TaskSimulation(settings, devices)
    return (
        [replace(e, processor_seconds=0.0) for e in simulation.rounds(rounds)],
        simulation,
        devices,
    )


@pytest.mark.parametrize("control", [0.0, 1.0])
def test_a_version_that_three_of_four_evaluate_late_has_the_figure_of_all_four(
    tmp_path: Path, control: float
) -> None:
    """The slow take five times as long as the quick one, whose updates alone end rounds."""
    linear_artifact(tmp_path / "linear", "mae")
    path = tmp_path / "task.toml"
    path.write_text(
        '[task]\nname = "t"\nmethod = "fedavg"\nartifact = "linear"\n[round]\nwanted = 1\n'
        f'quorum = 1\nover_select = 100.0\nlate = "staleness"\n'
        f"[evaluation]\nleast_devices = 1\ncontrol = {control}\n"
        "[fedavg.training]\nlearning_rate = 0.01\n"
    )
    kinds = CLASSES.replace("share = 3", "share = 0.33").replace("speed = 0.2", "speed = 0.19")
    virtual = VirtualFleet(4, 5, speeds=speeds(tmp_path, kinds), pace_seconds=1000.0)
    settings = DeviceSettings(read_task(path), f"{__name__}:held_back", virtual)
    rounds = list(TaskSimulation(settings, settings.make()).rounds(40))
    made = {of: figures for each in rounds for of, figures in each.earlier.items()}
    assert [*made] == [*range(1, len(made) + 1)] and len(made) > 20
    assert not any(each.figures for each in rounds)  # in none all came before it ended
    heard = {}
    for number, figures in made.items():
        whole = [each for each in figures if each.part == ""]
        (heard[number],) = {each.devices for each in whole}
        assert {each.stage for each in whole} == {*STAGES} - ({"alone"} if not control else set())
    # All four begin the first round together, and later ones as each is through with its last.
    assert heard[1] == 4 and max(heard.values()) <= 4
    came = sum(each.counted + each.stale for each in rounds)
    assert len(made) < sum(heard.values()) <= came
    recorder = Recorder(
        "late",
        settings.task,
        Asked("", 4, 40, (5,), "", Failures(), 1.0),
        tmp_path,
        MonotonicClock(),
        lambda: 1.8e9,
    )
    recorder.begin(5)
    for each in rounds:
        recorder.add(5, each)
    told = recorder.made().rounds(0)
    assert [len(each["figures"]) > 0 for each in told] == [each["number"] in made for each in told]


def speeds(folder: Path, text: str = CLASSES) -> Speeds:
    (folder / "classes.toml").write_text(text)
    return Speeds.read(str(folder / "classes.toml"))


def test_a_seed_repeats_a_run_bit_for_bit(tmp_path: Path) -> None:
    failing = Failures(0.1, 0.1, 0.1, 0.1)
    found = []
    for seed in (5, 5, 6):
        rounds, simulation, _ = played(
            tmp_path, 12, seed=seed, speeds=Speeds(spread=0.9), failures=failing
        )
        found.append((simulation.model_sha256, str(rounds)))
    assert found[0] == found[1] and found[0][0] != found[2][0]


def test_what_the_slow_began_counts_later_and_nobody_trains_twice_at_once(tmp_path: Path) -> None:
    lines = f"{STALE}\nmost_stale = 100"
    rounds, simulation, devices = played(tmp_path, 40, lines, speeds=speeds(tmp_path))
    assert all(each.counted + each.stale == WANTED for each in rounds)
    assert sum(each.stale for each in rounds) > 0 and max(devices.asked.values()) == 1
    for each in rounds:
        assert each.selected == each.counted + each.busy and each.late == 0
        assert each.next_version == each.version + 1
    # A round takes as long as the quickest five, and no slow one is waited for.
    assert max(each.seconds for each in rounds) < 13
    # Whoever began has counted once, but for who trains on.
    counted = sum(each.counted + each.stale for each in rounds)
    assert devices.asked.total() == counted + len(simulation._under_way)
    by_class: Counter[str] = Counter()
    for each in rounds:
        assert each.selected_by == {"quick": 15, "slow": 5}
        assert sum(each.counted_by.values()) == WANTED
        by_class.update(each.counted_by)
    assert 0 < by_class["slow"] < by_class["quick"] / 3


def test_beyond_most_stale_it_is_too_late(tmp_path: Path) -> None:
    lines = f"{STALE}\nmost_stale = 5"
    rounds, simulation, devices = played(tmp_path, 30, lines, speeds=speeds(tmp_path))
    late = sum(each.late for each in rounds)
    counted = sum(each.counted + each.stale for each in rounds)
    assert late > 0
    assert devices.asked.total() == counted + late + len(simulation._under_way)
    assert all(each.counted_by["slow"] == 0 for each in rounds)


def test_every_device_that_is_selected_is_accounted_for(tmp_path: Path) -> None:
    failing = Failures(dropout=0.2, crash=0.1, late=0.2, nan=0.1)
    rounds, _, _ = played(tmp_path, 20, failures=failing, speeds=Speeds(spread=0.9))
    for each in rounds:
        away = each.silent + each.crashed
        assert each.counted + away <= each.selected <= each.counted + away + each.busy + 20
        assert each.busy >= 0 and not each.failed
        assert each.selected_by.keys() == each.counted_by.keys() and len(each.selected_by) == 4
        assert list(each.selected_by.values()) == [5, 5, 5, 5]
    assert {name for each in rounds for name in each.refused} == {"bad-values"}
    assert sum(each.silent for each in rounds) and sum(each.crashed for each in rounds)


def test_without_quorum_what_was_late_is_carried_with_its_age(tmp_path: Path) -> None:
    """A round that only the slow could fill has its quorum missed, and loses nothing."""
    lines = f'quorum = {WANTED}\ndeadline_seconds = 11\nlate = "staleness"\ntrain_seconds = 1e6'
    text = CLASSES.replace("share = 3", "share = 0.2").replace("speed = 0.2", "speed = 0.05")
    rounds, simulation, _ = played(tmp_path, 40, lines, speeds=speeds(tmp_path, text))
    made = [each for each in rounds if each.next_version is not None]
    assert 0 < len(made) < len(rounds) and sum(each.stale for each in rounds) > 0
    assert np.isfinite(simulation.method.model_arrays["linear.bias"]).all()  # type: ignore[index]


@pytest.mark.parametrize("late", ["refuse", "staleness"])
def test_a_fleet_that_is_all_alike_has_no_kinds(tmp_path: Path, late: str) -> None:
    rounds, _, _ = played(tmp_path, 2, f'late = "{late}"')
    assert all(each.selected_by == each.counted_by == {} for each in rounds)
    assert all((each.counted, each.stale) == (DEVICES, 0) for each in rounds)
