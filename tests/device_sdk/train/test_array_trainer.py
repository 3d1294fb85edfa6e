"""A round on arrays without a broker: what is kept, what is measured, what is thrown away."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aggregator.methods.attention import AttentionMethod, AttentionSettings
from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from device_sdk.artifact import load_artifact
from device_sdk.artifact.flat_layout import FlatLadder
from device_sdk.evaluation.report import EvaluationTerms
from device_sdk.home.home import Home
from device_sdk.home.model_store import CapabilityRow
from device_sdk.local_data import DataSource, LocalData
from device_sdk.methods.attention.contract import AttentionTraining
from device_sdk.methods.attention.learner import AttentionLearner
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.learner import Declined, LearnerError, LearnerParts, State
from device_sdk.rounds.current_round import commit_round
from device_sdk.train.arrays import ArrayTrainer
from device_sdk.train.job import LocalArtifact, TrainedRound, TrainingJob
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast, Update, decode_update
from tests.fakes.array_device import local_data
from tests.fakes.jobs import job_of
from tests.fakes.step_clock import StepClock
from tests.fakes.worlds import world_of

TRAINING = FedAvgTraining(epochs=1, batch_size=4, learning_rate=0.1, optimizer_state="kept")


def opened(artifact: LocalArtifact, number: int = 1) -> Broadcast:
    trainer = Trainer(artifact.folder)
    settings = FedAvgSettings(training=TRAINING)
    return FedAvgMethod(trainer.parameters, trainer.buffers, settings).open_round(number)


def job(
    artifacts: tuple[LocalArtifact, ...], number: int = 1, train_seconds: float = 60.0
) -> TrainingJob:
    return job_of(opened(artifacts[0], number), artifacts, train_seconds=train_seconds)


def trainer(
    home: Home,
    source: DataSource | None = lambda: local_data(3),
    clock: StepClock | None = None,
    **options: object,
) -> ArrayTrainer:
    rng = np.random.default_rng(1)
    world = world_of(home, b"\xab" * 16, rng, clock or StepClock(), source, **options)
    return ArrayTrainer(world, FedAvgLearner)


def commit(home: Home, work: TrainingJob, result: TrainedRound) -> None:
    commit_round(home, b"d" * 16, work, result)


def test_a_round_gives_an_update_a_state_and_a_model(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    result = trainer(home).train(job(artifacts[:1]))
    update = decode_update(result.body, 1)
    assert set(update.tensors) == {"w.linear.weight", "w.linear.bias", "b.mean"}
    assert update.metadata["samples"] == 13
    assert result.artifact == artifacts[0] and result.capability is None and result.k == 1
    state = load_artifact(artifacts[0].folder).manifest.state
    kept = {tensor.name for tensor in state if tensor.kind in ("parameter", "buffer")}
    assert result.model is not None and set(result.model) == kept
    commit(home, job(artifacts[:1]), result)
    assert home.models.learner_artifact("t") == artifacts[0].artifact_id


def test_what_serves_the_fleet_best_is_what_a_device_predicts_with(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    work, kept = job(artifacts[:1]), {}
    for predicts in ("", "personal", "global"):
        told = replace(work, terms=replace(work.terms, predicts=predicts))
        result = trainer(home).train(told)
        assert result.model is not None
        model = Trainer(artifacts[0].folder)
        model.set_state(result.model)
        kept[predicts] = model.parameters["linear.weight"], result.body
    commit(home, work, result)
    received = work.broadcast.tensors["w.linear.weight"]
    assert (kept["global"][0] == received).all() and (kept[""][0] != received).any()
    assert (kept["personal"][0] != received).any()
    rests = replace(work.manifest, threshold=0)
    for predicts, adopts in (("", True), ("personal", False), ("global", True)):
        told = replace(work, manifest=rests, terms=replace(work.terms, predicts=predicts))
        assert (trainer(home).adopt(told) is not None) is adopts


def test_a_model_of_its_own_is_given_up_only_where_the_shared_one_is_known_to_be_better(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    training = replace(TRAINING, optimizer_state="fresh", personalise="ditto")
    work = job(artifacts[:1])
    work = replace(work, broadcast=replace(work.broadcast, settings=training.as_scalars()))
    commit(home, work, trainer(home).train(work))
    received = work.broadcast.tensors["w.linear.weight"]
    for predicts, gives_up in (("", False), ("personal", False), ("global", True)):
        told = replace(work, terms=replace(work.terms, predicts=predicts))
        rests = replace(told, manifest=replace(work.manifest, threshold=0))
        model = Trainer(artifacts[0].folder)
        model.set_state(trainer(home).train(told).model or {})
        assert (model.parameters["linear.weight"] == received).all() == gives_up
        assert (trainer(home).adopt(rests) is not None) is gives_up


def test_the_shared_model_is_the_one_that_was_evaluated_as_global(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    """With attention a device goes on with its own model, but is shown the global one."""
    ladder = FlatLadder.of([Trainer(artifacts[0].folder).artifact])
    start = ladder.full.flatten(Trainer(artifacts[0].folder).parameters)
    told = AttentionTraining(batch_size=4, base_steps=2, aggregator_mixes=True)
    opened = AttentionMethod(start, ladder, AttentionSettings(training=told)).open_round(1)
    work = job_of(opened, artifacts[:1], "attention")
    world = world_of(
        home, b"\xab" * 16, np.random.default_rng(1), StepClock(), lambda: local_data(3)
    )
    rests = replace(work.manifest, threshold=0)
    commit(home, work, ArrayTrainer(world, AttentionLearner).train(work))
    for predicts, shared in (("global", True), ("personal", False), ("", False)):
        work = replace(work, terms=replace(work.terms, predicts=predicts))
        result = ArrayTrainer(world, AttentionLearner).train(work)
        assert result.model is not None
        kept = Trainer(artifacts[0].folder)
        kept.set_state(result.model)
        assert (ladder.full.flatten(kept.parameters) == start).all() == shared
        adopted = ArrayTrainer(world, AttentionLearner).adopt(replace(work, manifest=rests))
        assert (adopted is not None) is shared


class Variates(FedAvgLearner):
    """A method whose own state is called as SCAFFOLD calls its control variates."""

    rounds = 0

    def train(self, broadcast: Broadcast) -> Update:
        self.rounds += 1
        return super().train(broadcast)

    def state(self) -> State:
        return {**super().state(), "control.variate": np.array([self.rounds])}

    def restore(self, state: State) -> None:
        self.rounds = int(state["control.variate"][0])
        super().restore({n: each for n, each in state.items() if n != "control.variate"})


@pytest.mark.parametrize("control", [0.0, 1.0])
def test_a_learner_s_own_state_is_none_of_the_control_arm_s(
    home: Home, artifacts: tuple[LocalArtifact, ...], control: float
) -> None:
    asked = EvaluationTerms(("mae",), control=control)
    world = world_of(
        home, b"\xab" * 16, np.random.default_rng(1), StepClock(), lambda: local_data(3)
    )
    for number in (1, 2, 3):
        work = job_of(opened(artifacts[0], number), artifacts[:1], evaluation=asked)
        result = ArrayTrainer(world, Variates).train(work)
        commit(home, work, result)
        assert result.learner_state["control.variate"] == [number]
    learner, _ = ArrayTrainer(world, Variates).learner(work, artifacts[0], local_data(3))
    own = len(learner.state())
    assert len(result.learner_state) == own * round(1 + control)


def test_an_arm_that_begins_later_says_how_long_it_trained_alone(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    world = world_of(
        home, b"\xab" * 16, np.random.default_rng(1), StepClock(), lambda: local_data(3)
    )
    told = []
    for number, control in enumerate((0, 0, 1, 1, 0, 1), 1):
        asked = EvaluationTerms(("mae",), control=control)
        work = job_of(opened(artifacts[0], number), artifacts[:1], evaluation=asked)
        result = ArrayTrainer(world, FedAvgLearner).train(work)
        commit(home, work, result)
        assert result.evaluation is not None
        told.append(result.evaluation.rounds)
    assert told == [0, 0, 1, 2, 0, 1]


class Diverges(FedAvgLearner):
    """A method whose second model is no number after its steps."""

    def train_alone(self, broadcast: Broadcast, *, begins: bool) -> None:
        super().train_alone(broadcast, begins=begins)
        nothing = {
            name: np.full_like(each, np.nan) for name, each in self._trainer.parameters.items()
        }
        self._trainer.set_parameters(nothing)


def test_a_second_model_that_is_not_finite_costs_the_device_nothing(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    world = world_of(
        home, b"\xab" * 16, np.random.default_rng(1), StepClock(), lambda: local_data(3)
    )
    asked = EvaluationTerms(("mae",), control=1.0)
    work = job_of(opened(artifacts[0]), artifacts[:1], evaluation=asked)
    result = ArrayTrainer(world, Diverges).train(work)
    commit(home, work, result)
    assert "what it led to is not finite" in result.evaluation_detail
    assert not [name for name in result.learner_state if name.startswith("second model.")]


class Unmakeable(FedAvgLearner):
    """A method whose second learner, which has a generator of its own, cannot be made."""

    first: np.random.Generator | None = None

    @classmethod
    def make(cls, parts: LearnerParts) -> Unmakeable:
        cls.first = cls.first or parts.rng
        if parts.rng is not cls.first:
            raise LearnerError("there is no second one")
        return super().make(parts)


def test_a_second_learner_that_cannot_be_made_costs_the_device_nothing(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    world = world_of(
        home, b"\xab" * 16, np.random.default_rng(1), StepClock(), lambda: local_data(3)
    )
    asked = EvaluationTerms(("mae",), control=1.0)
    work = job_of(opened(artifacts[0]), artifacts[:1], evaluation=asked)
    result = ArrayTrainer(world, Unmakeable).train(work)
    commit(home, work, result)
    assert result.body and "there is no second one" in result.evaluation_detail


def test_the_state_goes_on_from_the_last_commit_and_from_nothing_else(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    one = trainer(home)
    first = one.train(job(artifacts[:1]))
    dropped = one.train(job(artifacts[:1]))  # never committed: as if it had not been
    assert first.learner_state["trainer.step"] == dropped.learner_state["trainer.step"] == 4
    commit(home, job(artifacts[:1]), first)
    second = one.train(job(artifacts[:1], 2))
    assert second.learner_state["trainer.step"] == 8
    restarted = trainer(home).train(job(artifacts[:1], 2))
    assert restarted.learner_state["trainer.step"] == 8


def test_another_artifact_starts_anew(home: Home, artifacts: tuple[LocalArtifact, ...]) -> None:
    commit(home, job(artifacts[:1]), trainer(home).train(job(artifacts[:1])))
    other = trainer(home).train(job(artifacts[1:], 2))
    assert other.learner_state["trainer.step"] == 4
    assert other.artifact == artifacts[1]


def test_the_largest_that_fits_is_trained_and_the_choice_is_kept(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    one = trainer(home, capability_seconds=0.2)
    result = one.train(job(artifacts))
    assert (result.k, result.artifact) == (2, artifacts[1])
    assert result.capability is not None and "large takes" in result.capability.reason
    # Measuring left no trace: the round began from the artifact's own parameters.
    assert result.learner_state["trainer.step"] == 4
    commit(home, job(artifacts), result)
    known = home.models.capability("t")
    assert known == result.capability
    again = one.train(job(artifacts, 2))
    assert again.capability == known and again.learner_state["trainer.step"] == 8


def test_on_its_battery_a_machine_is_measured_anew(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    on_mains = True
    one = trainer(home, capability_seconds=0.2)
    one._on_mains = lambda: on_mains
    row = one.train(job(artifacts)).capability
    assert row is not None
    home.models.save_capability(replace(row, option=artifacts[0].artifact_id.hex()))
    assert one.train(job(artifacts)).k == 1  # as it was measured, or so it seems
    on_mains = False
    found = one.train(job(artifacts))
    assert found.k == 2 and found.capability is not None
    assert found.capability.conditions != row.conditions


@pytest.mark.parametrize("change", ["misses", "size", "conditions"])
def test_the_choice_is_measured_anew_when_it_no_longer_holds(
    home: Home, artifacts: tuple[LocalArtifact, ...], change: str
) -> None:
    one = trainer(home, capability_seconds=0.2)
    row = one.train(job(artifacts)).capability
    assert row is not None and row.option == artifacts[1].artifact_id.hex()
    small = artifacts[0].artifact_id.hex()
    stale: dict[str, CapabilityRow] = {
        "misses": replace(row, option=small, misses=2),
        "size": replace(row, option=small, size=4),
        "conditions": replace(row, option=small, conditions="other"),
    }
    home.models.save_capability(replace(row, option=small))
    assert one.train(job(artifacts)).k == 1  # as it was measured, or so it seems
    home.models.save_capability(stale[change])
    assert one.train(job(artifacts)).k == 2


def test_a_slow_device_trains_the_smallest_or_declines(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    slow = StepClock(tick=1.0)
    result = trainer(home, clock=slow).train(job(artifacts, train_seconds=2.0))
    assert result.k == 1 and result.capability is not None
    assert "Even the smallest misses" in result.capability.reason
    assert result.capability.misses == 1
    with pytest.raises(Declined, match="Even the smallest misses"):
        trainer(home, clock=slow, when_none_fits="decline").train(
            job(artifacts[:1], train_seconds=2.0)
        )


def test_a_device_without_data_declines(home: Home, artifacts: tuple[LocalArtifact, ...]) -> None:
    with pytest.raises(Declined, match="given no data"):
        trainer(home, source=None).train(job(artifacts))
    empty = LocalData({name: each[:0] for name, each in local_data(1).train.items()})
    with pytest.raises(LearnerError, match="no local samples"):
        trainer(home, source=lambda: empty).train(job(artifacts[:1]))


def test_the_last_version_replaces_the_devices_own(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    one = trainer(home)
    assert one.adopt(job(artifacts)) is None  # nothing was trained here
    commit(home, job(artifacts[:1]), one.train(job(artifacts[:1])))
    adopted = one.adopt(job(artifacts, 2))
    assert adopted is not None
    fresh = Trainer(artifacts[0].folder)
    fresh.set_state(adopted)
    wanted = opened(artifacts[0]).tensors["w.linear.weight"]
    np.testing.assert_allclose(fresh.parameters["linear.weight"], wanted)


def test_what_was_chosen_before_fetching_is_trained_though_the_data_grew_meanwhile(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    data = [local_data(3)]
    one = trainer(home, lambda: data[-1], capability_seconds=0.2)
    row = one.train(job(artifacts)).capability
    assert row is not None
    home.models.save_capability(replace(row, option=artifacts[0].artifact_id.hex()))
    one.wants(job(artifacts))  # the part of the smallest is fetched, and no other
    data.append(local_data(60))
    assert one.train(job(artifacts)).k == 1
    assert one.train(job(artifacts)).k == 2  # measured anew
