"""Rounds in virtual time: who counts, what they cost, and that a seed repeats them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from aggregator.errors import AggregatorError
from aggregator.simulate.devices import DeviceSettings
from aggregator.simulate.fleet import Failures, Fate, Speeds, StreamPurpose, VirtualFleet, stream
from aggregator.simulate.task_rounds import PlayedRound, TaskSimulation
from aggregator.simulate.traffic import publish
from aggregator.task.artifacts import terms_of
from aggregator.task.file import read_task
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.manifest import seal_chunks
from device_sdk.wire.seal.broadcast import Publication, new_group_key

ITEMS, DEVICES = 40, 30


def tastes(devices: int, rng: np.random.Generator) -> list[np.ndarray]:
    return [rng.choice(ITEMS, size=6, replace=False) for _ in range(devices)]


def settings(
    folder: Path, round_lines: str = "", more: str = "", devices: int = DEVICES, **fleet: object
) -> DeviceSettings:
    (folder / "items.txt").write_text("".join(f"i{row}\n" for row in range(ITEMS)))
    path = folder / "task.toml"
    path.write_text(
        f'[task]\nname = "t"\ncatalogue = "items.txt"\n[round]\n{round_lines}\n'
        f"[scatter]\ncolumns = 8\n{more}"
    )
    virtual = VirtualFleet(devices, 5, **fleet)  # type: ignore[arg-type]
    return DeviceSettings(read_task(path), f"{__name__}:tastes", virtual)


def simulation(given_settings: DeviceSettings) -> TaskSimulation:
    return TaskSimulation(given_settings, given_settings.make())


def test_a_seed_repeats_a_run_bit_for_bit_and_another_does_not(tmp_path: Path) -> None:
    failing = Failures(0.1, 0.1, 0.1, 0.1)
    own = settings(tmp_path, "share = 0.7", "[evaluation]\n", failures=failing)
    found = []
    for seed in (5, 5, 6):
        run = simulation(replace(own, fleet=replace(own.fleet, seed=seed)))
        rounds = [replace(each, processor_seconds=0.0) for each in run.rounds(3)]
        found.append((run.model_sha256, str(rounds), str(run.evaluate())))
    assert found[0] == found[1] and found[0][0] != found[2][0]


def test_every_device_that_is_selected_is_accounted_for(tmp_path: Path) -> None:
    failing = Failures(dropout=0.2, crash=0.1, late=0.2, nan=0.1)
    run = simulation(settings(tmp_path, "share = 0.8\ndeadline_seconds = 60", failures=failing))
    rounds = list(run.rounds(4))
    for each in rounds:
        parts = each.counted + each.late + each.silent + each.crashed + sum(each.refused.values())
        assert parts == each.selected and not each.failed
        assert set(each.refused) <= {"bad-values"}
        assert 5 <= each.seconds <= 60
    # It waits for all whom it does not know, and not for long for those that it does.
    assert rounds[0].seconds == 60 > min(each.seconds for each in rounds)
    assert {name for each in rounds for name in each.refused} == {"bad-values"}
    assert min(sum(getattr(e, n) for e in rounds) for n in ("late", "silent", "crashed")) > 0
    assert rounds[-1].began_seconds == sum(each.seconds for each in rounds[:3])
    assert len({each.selected for each in rounds}) > 1


def test_the_slow_are_late_and_a_round_of_the_quick_ends_when_they_are_through(
    tmp_path: Path,
) -> None:
    slow = tmp_path / "classes.toml"
    slow.write_text(
        '[[class]]\nname = "quick"\nshare = 2\n[[class]]\nname = "slow"\nspeed = 1e-9\nk = 8\n'
    )
    own = settings(tmp_path, "deadline_seconds = 9", speeds=Speeds.read(str(slow)))
    (mixed,) = simulation(own).rounds(1)
    assert (mixed.counted, mixed.late, mixed.seconds) == (20, 10, 9)
    (quick,) = simulation(settings(tmp_path, "deadline_seconds = 9")).rounds(1)
    assert (quick.counted, quick.late) == (30, 0) and 0 < quick.seconds < 1


def test_a_round_ends_no_sooner_than_the_last_update_that_it_counts(tmp_path: Path) -> None:
    slow = tmp_path / "classes.toml"
    slow.write_text(
        '[[class]]\nname = "quick"\nshare = 4\nspeed = 30\n[[class]]\nname = "slow"\nspeed = 1\n'
    )
    own = settings(
        tmp_path,
        "share = 1.0",
        speeds=Speeds.read(str(slow)),
        failures=Failures(dropout=0.1),
        pace_seconds=5000.0,
    )
    for each in simulation(own).rounds(12):
        assert each.seconds >= 30.0 * 0.9 and each.late == 0


def test_a_device_trains_as_much_as_fits_as_a_real_one_would(tmp_path: Path) -> None:
    fleet = VirtualFleet(3, 0)
    # 1,000 samples take a second: of a limit of 0.8 of the time.
    assert fleet.columns(0, 1000, 64, train_seconds=0.5) == int(0.8 * 0.5 * 64)
    assert fleet.columns(0, 1000, 64, train_seconds=100) == 64
    assert fleet.columns(0, 1000, 64, train_seconds=1e-6) == 1
    assert fleet.option(0, 1000, ["a", "b", "c"], [0.1, 0.3, 1.0], train_seconds=0.5) == 1


def test_without_quorum_what_was_counted_is_carried_into_the_next_round(tmp_path: Path) -> None:
    failing = Failures(dropout=0.5)
    run = simulation(settings(tmp_path, "quorum = 16", failures=failing))
    rounds = list(run.rounds(6))
    carried = 0
    for each in rounds:
        carried += each.counted
        assert (each.next_version is not None) == (carried >= 16)
        carried = 0 if each.next_version is not None else carried
    assert {each.next_version is None for each in rounds} == {True, False}


def test_a_task_that_no_fleet_of_this_size_could_begin_is_refused(tmp_path: Path) -> None:
    for line, key in (("wait_for_devices = 31", "wait_for_devices"), ("quorum = 31", "quorum")):
        own = settings(tmp_path, line)
        with pytest.raises(AggregatorError, match=rf"30 devices: round\.{key} is 31"):
            simulation(own)


def test_what_a_broadcast_costs_is_what_its_seals_would(tmp_path: Path) -> None:
    own = settings(tmp_path, more="[evaluation]\n")
    run, rng = simulation(own), np.random.default_rng(0)
    task = own.task
    for columns in (8, 1024):
        wide = replace(
            task.binding, settings=replace(task.binding.settings, columns=columns)
        ).build(ITEMS, rng)
        published = publish(task, terms_of(task, ()), wide.open_round(1), 2**63, rng)
        publication = Publication(new_group_key(1, rng.bytes), "t", "all", rng.bytes)
        chunks, _ = seal_chunks(publication, published.plaintext)
        signing = Ed25519PrivateKey.from_private_bytes(rng.bytes(32))
        manifest = publication.seal_manifest(encode(published.manifest), signing)
        assert published.down_bytes == sum(map(len, chunks)) + len(manifest)
    (first,) = run.rounds(1)
    assert isinstance(first, PlayedRound) and first.up_bytes > 0


@given(
    st.lists(st.floats(0, 0.25), min_size=4, max_size=4),
    st.integers(0, 2**32),
    st.integers(1, 200),
)
def test_fates_come_as_often_as_was_asked(chances: list[float], seed: int, devices: int) -> None:
    fleet = VirtualFleet(devices, seed, failures=Failures(*chances))
    again = VirtualFleet(devices, seed, failures=Failures(*chances))
    fates = fleet.fates(1)
    assert (fates == again.fates(1)).all()
    drawn = stream(seed, StreamPurpose.FATES, 1).random(devices)
    assert ((fates == Fate.ANSWERS) == (drawn >= sum(chances))).mean() > 0.99
