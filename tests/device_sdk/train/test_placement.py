"""Where neighbours are mixed: on a device that has the time and the room, else for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import export
from aggregator.methods.attention import AttentionMethod, AttentionSettings
from device_sdk import Trainer
from device_sdk.artifact.flat_layout import FlatLadder
from device_sdk.home.home import Home
from device_sdk.home.model_store import CapabilityRow
from device_sdk.local_data import LocalData
from device_sdk.methods.attention.contract import AttentionTraining
from device_sdk.methods.attention.learner import AttentionLearner
from device_sdk.methods.learner import MovableWork
from device_sdk.rounds.current_round import commit_round
from device_sdk.train.arrays import ArrayTrainer, MeasuredPlacement
from device_sdk.train.job import LocalArtifact, TrainedRound, TrainingJob
from device_sdk.wire.arrays.exchange import Broadcast, Update, decode_update
from export.build import Recipe
from export.models.attention_meta import MetaDesign, attention_recipe
from export.models.gru_classifier import DYNAMIC, classification, predicted_classes
from tests.fakes.jobs import artifact_in, job_of
from tests.fakes.step_clock import StepClock
from tests.fakes.worlds import world_of

OWN = "00" * 16
OTHERS = tuple(f"{index:032x}" for index in (1, 2))
# A round looks at the clock at each step: 4 times, and 8 where a meta-step goes before each.
TOLD = AttentionTraining(
    aggregator_mixes=False,
    warm_up_rounds=2,
    base_steps=4,
    meta_every=1,
    batch_size=8,
    learning_rate=0.1,
    sketch_rows=16,
)
TIGHT = 10.0
"""``train_seconds`` that 4 steps of a second fit, with the headroom, and 8 do not."""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> LocalArtifact:
    folder = tmp_path_factory.mktemp("placement")
    example = {"x": torch.randn(4, 2), "y": torch.randint(2, (4,))}
    base = Recipe(
        nn.Linear(2, 2), classification, example, DYNAMIC, export.Sgd(lr=0.1), predicted_classes
    )
    base.export(folder / "base", verify=False)
    attention_recipe(base, MetaDesign(16, 4)).export(folder / "meta", verify=False)
    return artifact_in(folder / "base", companion=folder / "meta")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    opened = Home(tmp_path / "home", create=True)
    yield opened
    opened.close()


class Fleet:
    """The aggregator's method, this device through its ArrayTrainer, and what two others send."""

    def __init__(self, home: Home, artifact: LocalArtifact) -> None:
        model = Trainer(artifact.folder)
        ladder = FlatLadder.of([model.artifact])
        self.start = ladder.full.flatten(model.parameters)
        self.method = AttentionMethod(self.start, ladder, AttentionSettings(training=TOLD))
        self.home = home
        self.artifact = artifact
        self.rng = np.random.default_rng(1)
        x = self.rng.standard_normal((40, 2)).astype(np.float32)
        self.data = LocalData({"x": x, "y": (x[:, 0] > 0).astype(np.int64)})

    def job(self, number: int, train_seconds: float) -> TrainingJob:
        opened = self.method.open_round(number)
        sizes = {
            name: sum(each.nbytes for each in one.tensors.values())
            for name, one in opened.attachments.items()
            if not one.cohort or OWN in opened.cohorts[one.cohort]
        }
        offering: Broadcast = replace(opened, offered=sizes)
        return job_of(offering, [self.artifact], "attention", train_seconds)

    def device(self, tick: float, **options: object) -> ArrayTrainer:
        clock, own = StepClock(tick), bytes.fromhex(OWN)
        world = world_of(self.home, own, self.rng, clock, lambda: self.data, **options)
        return ArrayTrainer(world, AttentionLearner)

    def round(
        self, device: ArrayTrainer, number: int, train_seconds: float = 60.0
    ) -> tuple[tuple[str, ...], TrainedRound, Update]:
        """What the device wanted, what it did, and the update that the method took."""
        job = self.job(number, train_seconds)
        wanted = tuple(device.wants(job))
        kept = {name: job.broadcast.attachments[name] for name in wanted}
        job = replace(job, broadcast=replace(job.broadcast, attachments=kept))
        result = device.train(job)
        commit_round(self.home, b"d" * 16, job, result)
        update = replace(decode_update(result.body, number), sender=OWN)
        self.method.check(update)
        self.method.absorb(update)
        for sender in OTHERS:
            moved = self.start + self.rng.normal(0, 0.1, self.start.shape).astype(np.float32)
            told = {"samples": 40, "mixture": False, "loss": 1.0}
            self.method.absorb(Update(number, {"vector": moved}, told, sender))
        self.method.close_round()
        return wanted, result, update


def reason(result: TrainedRound) -> str:
    return result.capability.reason


def test_a_quick_device_mixes_and_keeps_the_choice(home: Home, artifact: LocalArtifact) -> None:
    fleet = Fleet(home, artifact)
    device = fleet.device(1e-4, capability_seconds=0.1)
    _, first, _ = fleet.round(device, 1)
    assert first.capability is None  # nobody to mix with is known yet
    wanted, second, _ = fleet.round(device, 2)
    assert wanted == () and "mixes 2 neighbours itself: base takes" in reason(second)
    wanted, third, update = fleet.round(device, 3)
    assert wanted == tuple(f"vector.{name}" for name in OTHERS)
    assert third.capability == second.capability
    assert update.metadata["mixture"] is False
    assert "scores.first" in third.learner_state


def test_a_slow_device_leaves_it_to_the_aggregator(home: Home, artifact: LocalArtifact) -> None:
    fleet = Fleet(home, artifact)
    device = fleet.device(1.0)
    fleet.round(device, 1, TIGHT)
    _, second, update = fleet.round(device, 2, TIGHT)
    assert "The aggregator mixes for this device: with a mixture of its own" in reason(second)
    assert "the limit is 8 s" in reason(second)
    assert update.metadata["mixture"] is True
    # The warm-up's steps, which fit, were not late; measuring left nothing behind.
    assert second.capability is not None and second.capability.misses == 0
    assert second.learner_state["meta.step"] == 0
    restarted = fleet.device(1.0)
    wanted, third, _ = fleet.round(restarted, 3, TIGHT)
    assert wanted == (f"mixture.{OWN}",)
    assert third.capability == second.capability and "scores.first" not in third.learner_state


def test_the_aggregator_is_given_up_when_there_is_time_again(
    home: Home, artifact: LocalArtifact
) -> None:
    fleet = Fleet(home, artifact)
    fleet.round(fleet.device(1.0), 1, TIGHT)
    _, second, _ = fleet.round(fleet.device(1.0), 2, TIGHT)
    quick = fleet.device(1e-4, capability_seconds=0.1)
    assert second.capability is not None
    home.models.save_capability(replace(second.capability, misses=2))
    _, third, update = fleet.round(quick, 3, TIGHT)
    assert "itself" in reason(third) and update.metadata["mixture"] is False
    wanted, _, _ = fleet.round(quick, 4, TIGHT)
    assert wanted == tuple(f"vector.{name}" for name in OTHERS)


def test_a_device_that_is_late_twice_measures_anew(home: Home, artifact: LocalArtifact) -> None:
    fleet = Fleet(home, artifact)
    quick = fleet.device(1e-4, capability_seconds=0.1)
    fleet.round(quick, 1, TIGHT)
    _, result, _ = fleet.round(quick, 2, TIGHT)
    slow = fleet.device(2.0)  # a step takes 2 seconds now
    for number in (3, 4):
        _, result, _ = fleet.round(slow, number, TIGHT)
        assert result.capability is not None and result.capability.misses == number - 2
    _, result, _ = fleet.round(slow, 5, TIGHT)
    assert "The aggregator mixes" in reason(result)


def test_other_bounds_on_bytes_are_measured_anew(home: Home, artifact: LocalArtifact) -> None:
    fleet = Fleet(home, artifact)
    small = fleet.device(1e-4, most_attachment_bytes=20)  # one vector is 6 float16
    for number in (1, 2):
        _, result, _ = fleet.round(small, number)
    assert "vectors are 24 bytes, above most_attachment_bytes (20)" in reason(result)
    wanted, _, _ = fleet.round(small, 3)
    assert wanted == (f"mixture.{OWN}",)
    _, result, _ = fleet.round(fleet.device(1e-4, most_attachment_bytes=100), 4)
    assert "mixes 2 neighbours itself" in reason(result)


def test_without_a_meta_network_the_aggregator_mixes(home: Home, artifact: LocalArtifact) -> None:
    fleet = Fleet(home, replace(artifact, companion=None))
    device = fleet.device(1e-4)
    _, _, update = fleet.round(device, 1)
    assert update.metadata["mixture"] is True
    _, second, _ = fleet.round(device, 2)
    assert "the task offers no meta-network" in reason(second)


@pytest.mark.parametrize(("placement", "asks"), [("device", False), ("aggregator", True)])
def test_a_placement_that_is_given_is_not_measured(
    home: Home, artifact: LocalArtifact, placement: str, asks: bool
) -> None:
    fleet = Fleet(home, artifact)
    device = fleet.device(1.0, placement=placement)
    for number in (1, 2, 3):
        wanted, result, update = fleet.round(device, number, TIGHT)
        assert result.capability is None and update.metadata["mixture"] is asks
    given = (f"mixture.{OWN}",) if asks else tuple(f"vector.{name}" for name in OTHERS)
    assert wanted == given


def test_a_choice_holds_while_the_cluster_stays_about_as_large() -> None:
    placed = MeasuredPlacement.of("device", MovableWork(9, 90))
    row = CapabilityRow("t", "c", "ab", 1, "device", 16, 0, "", None)
    assert MeasuredPlacement.read(row) == placed
    assert MeasuredPlacement.read(replace(row, placement=None, placed_size=None)) is None
    held = [n for n in range(30) if placed.holds(MovableWork(n, 10 * (n < 17)), 100)]
    assert held == list(range(5, 17))
    assert placed.holds(None, 100)
    assert not placed.holds(MovableWork(9, 101), 100)
    assert replace(placed, where="aggregator").holds(MovableWork(9, 101), 100)
