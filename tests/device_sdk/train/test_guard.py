"""Which artifacts run on a device, and when: what was tried, what did harm, what died with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from device_sdk.errors import CallEnded
from device_sdk.home.home import Home
from device_sdk.home.task_store import TriedArtifact
from device_sdk.methods.learner import Declined
from device_sdk.system.watch import Watch
from device_sdk.train.guard import ArtifactGuard, ArtifactHeld
from device_sdk.train.job import LocalArtifact, TrainingJob
from device_sdk.trainer import Trainer
from device_sdk.trial import PASSED, TrialLimits, TrialResult, example_batch
from device_sdk.wire.publish.report import Reason
from device_sdk.world import DeviceWorld
from tests.device_sdk.train.test_array_trainer import job as array_job
from tests.fakes.step_clock import StepClock
from tests.fakes.worlds import world_of

HOUR = 3600
KILLED = TrialResult(Reason.KILLED, "its first run was ended from outside", certain=False)
BAD = TrialResult(Reason.CRASHED, "a step ended the process by SIGSEGV")


class Trials:
    """Gives results by the folder's name, and remembers what was tried."""

    def __init__(self, **results: TrialResult | None) -> None:
        self.results = results
        self.tried: list[str] = []

    def __call__(
        self, folder: Path, limits: TrialLimits, stopped: Callable[[], bool]
    ) -> TrialResult | None:
        self.tried.append(folder.name)
        return None if stopped() else self.results.get(folder.name, PASSED)


class Device:
    """A device's guard, made anew at each start, at a time that the test holds."""

    def __init__(self, home: Home, artifacts: tuple[LocalArtifact, ...], trials: Trials) -> None:
        world = world_of(home, bytes(16), np.random.default_rng(0), StepClock(0.0), None)
        self.world: DeviceWorld = replace(world, try_artifact=trials)
        self.trials, self.now = trials, 1_000_000
        self.job: TrainingJob = array_job(artifacts)
        self.start()

    def start(self) -> None:
        self.world = replace(self.world, watch=Watch())
        self.guard = ArtifactGuard(self.world, lambda: self.now)

    def train(self) -> list[str]:
        """Names of the artifacts that ran."""
        with self.guard.using(self.job) as job:
            return [each.name for each in job.artifacts]

    def die_training(self) -> None:
        """The process ends in the middle of it."""
        self.guard._begun(self.job)
        self.start()

    def known(self, place: int = 0) -> TriedArtifact | None:
        return self.world.home.trials.find(self.job.artifacts[place].artifact_id)


def test_an_artifact_is_tried_once_and_what_came_with_the_installation_never(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    device = Device(home, artifacts[:1], Trials())
    assert device.train() == device.train() == ["small"]
    device.start()
    assert device.train() == ["small"] and device.trials.tried == ["small"]
    assert not device.guard._file.exists(), "nothing is in use between trainings"
    ours = {artifacts[1].artifact_id: artifacts[1].folder}
    device.world = replace(device.world, installed=ours)
    device.job = array_job(artifacts[1:])
    device.start()
    assert device.train() == ["large"] and device.trials.tried == ["small"]


def test_one_that_does_harm_is_declined_by_name_for_longer_each_time_and_others_run(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    device = Device(home, artifacts[:1], Trials(small=BAD))
    for hours in (1, 2, 4):
        with pytest.raises(ArtifactHeld, match=r"SIGSEGV\. It is tried again in") as held:
            device.train()
        assert held.value.reason is Reason.CRASHED
        tried = len(device.trials.tried)
        for start in (False, True):
            if start:
                device.start()
            device.now += (hours * HOUR) // 4
            with pytest.raises(ArtifactHeld):
                device.train()
        assert len(device.trials.tried) == tried, "not run meanwhile, whatever is started anew"
        device.now += hours * HOUR
    device.trials.results["small"] = PASSED
    assert device.train() == ["small"]
    known = device.known()
    assert known is not None and known.passed and known.strikes == 0
    both = Device(home, artifacts, Trials(large=BAD))
    assert both.train() == both.train() == ["small"] and both.trials.tried == ["large"]


def test_a_clock_that_was_set_back_keeps_nothing_out_for_ever(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    device = Device(home, artifacts[:1], Trials(small=BAD))
    with pytest.raises(ArtifactHeld):
        device.train()
    device.now -= 90 * 24 * HOUR
    device.trials.results["small"] = PASSED
    assert device.train() == ["small"]


def test_a_death_is_looked_into_and_the_second_in_a_row_keeps_it_out(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    device = Device(home, artifacts[:1], Trials())
    device.train()
    device.die_training()
    assert device.train() == ["small"], "whoever was killed by somebody goes on"
    assert device.trials.tried == ["small", "small"], "once the artifact was tried again"
    device.die_training()
    assert device.train() == ["small"], "a training that ended in between takes it back"
    device.die_training()
    device.die_training()
    with pytest.raises(ArtifactHeld, match="again and again") as held:
        device.train()
    assert held.value.reason is Reason.CRASHED
    for pause in (60, 120, 240):
        device.now += pause - 1
        with pytest.raises(ArtifactHeld):
            device.train()
        device.now += 1
        device.die_training()
        with pytest.raises(ArtifactHeld):
            device.train()
    device.now += 480
    assert device.train() == ["small"]


def test_a_call_that_is_ended_keeps_the_artifact_out_and_one_that_was_stopped_does_not(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    device = Device(home, artifacts, Trials())
    for why, strikes in (("stopped", 0), ("too-long", 1)):
        device.start()
        with pytest.raises(CallEnded), device.guard.using(device.job):
            trainer = Trainer(artifacts[0].folder, watch=device.world.watch)
            device.world.watch.end(why)  # type: ignore[arg-type]
            trainer.step(example_batch(trainer.artifact, "train"))
        known = device.known()
        assert known is not None and known.strikes == strikes
    assert device.train() == ["large"], "whose call it was not"
    device.job = array_job(artifacts[:1])
    with pytest.raises(ArtifactHeld, match="did not end within 60 s") as held:
        device.train()
    assert held.value.reason is Reason.STEP_TOO_LONG


def test_a_device_that_stops_in_a_trial_has_neither_run_nor_judged_it(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    device = Device(home, artifacts[:1], Trials())
    device.world.watch.end("stopped")
    with pytest.raises(CallEnded):
        device.train()
    assert device.known() is None


def test_what_was_changed_in_the_home_is_neither_tried_nor_run(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    small, large = artifacts
    folder = home.artifact_folder(small.artifact_id)
    shutil.copytree(small.folder, folder)
    device = Device(home, (replace(small, folder=folder),), Trials())
    assert device.train() == ["small"]
    shutil.rmtree(folder)
    shutil.copytree(large.folder, folder)  # right in itself, and not what was tried
    with pytest.raises(ArtifactHeld, match="changed in this device's home") as held:
        device.train()
    assert held.value.reason is Reason.DISK
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(small.folder, folder)
    assert device.train() == ["small"] and len(device.trials.tried) == 1


def test_a_home_that_cannot_be_written_is_named_and_no_artifact_blamed(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    device = Device(home, artifacts[:1], Trials())
    device.guard._file.mkdir()
    with pytest.raises(Declined, match="home cannot be written") as declined:
        device.train()
    assert declined.value.reason is Reason.DISK
    device.guard._file.rmdir()
    assert device.train() == ["small"]
    known = device.known()
    assert known is not None and known.strikes == 0 and device.trials.tried == ["small"]


def test_whoever_kills_a_trial_keeps_the_artifact_out_for_a_round_and_then_for_a_minute(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    device = Device(home, artifacts[:1], Trials(small=KILLED))
    with pytest.raises(ArtifactHeld, match="It is tried again in the next round") as held:
        device.train()
    assert held.value.reason is Reason.KILLED
    device.trials.results["small"] = PASSED
    assert device.train() == ["small"]
    device.trials.results["small"] = KILLED
    device.die_training()
    with pytest.raises(ArtifactHeld, match="in 1 min"):
        device.train()
    device.now += 60
    device.trials.results["small"] = PASSED
    assert device.train() == ["small"]
    known = device.known()
    assert known is not None and known.strikes == 0


def test_a_training_without_memory_is_looked_into_and_the_second_in_a_row_keeps_it_out(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    device = Device(home, artifacts[:1], Trials())
    for trials in (1, 2):
        with pytest.raises(MemoryError), device.guard.using(device.job):
            raise MemoryError
        assert len(device.trials.tried) == trials
    device.start()
    with pytest.raises(ArtifactHeld, match="more memory than there is here") as held:
        device.train()
    assert held.value.reason is Reason.OUT_OF_MEMORY
    device.now += 60
    assert device.train() == ["small"]


@pytest.mark.parametrize("killed", [False, True])
def test_of_several_the_one_that_ran_last_is_kept_out_and_the_others_go_on(
    home: Home, artifacts: tuple[LocalArtifact, ...], killed: bool
) -> None:
    """Whether it had no memory, or the machine ended the process for what it took."""
    device = Device(home, artifacts, Trials())

    def run_all() -> None:
        for each in artifacts:
            trainer = Trainer(each.folder, watch=device.world.watch)
            trainer.step(example_batch(trainer.artifact, "train"))

    for _ in range(2):
        if killed:
            device.guard._begun(device.job)
            run_all()
            device.start()
            continue
        with pytest.raises(MemoryError), device.guard.using(device.job):
            run_all()
            raise MemoryError
    assert device.train() == ["small"]


def test_where_no_process_can_be_had_it_runs_and_is_watched(
    home: Home, artifacts: tuple[LocalArtifact, ...]
) -> None:
    device = Device(home, artifacts[:1], Trials(small=None))
    assert device.train() == device.train() == ["small"] and device.known() is None
    assert device.trials.tried == ["small"], "a process that starts after a minute, each round?"
    device.die_training()
    device.die_training()
    with pytest.raises(ArtifactHeld, match="again and again"):
        device.train()


def test_what_is_in_use_is_said_in_one_step(
    home: Home, artifacts: tuple[LocalArtifact, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(home, artifacts, Trials())
    device.guard._begun(device.job)
    before = (home.folder / "in-use").read_text()
    real = Path.write_text

    def dies_half_way(path: Path, text: str, **more: str) -> int:
        real(path, text[:10], **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", dies_half_way)
    with pytest.raises(KeyboardInterrupt):
        device.guard._say_in_use([artifacts[0].artifact_id])
    assert (home.folder / "in-use").read_text() == before
