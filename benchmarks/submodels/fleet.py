"""The devices of a run, the aggregator's half of the ladder, and what their models are worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.fedavg import FedAvgBinding, FedAvgMethod, FedAvgSettings
from aggregator.methods.server_optimizer import OptimizerSettings
from benchmarks.channels import HalfChannel, MutualChannel
from benchmarks.harness import Artifacts
from benchmarks.simulation import Simulation, device_name
from benchmarks.submodels.experiment import SHARES, Experiment, Outcome
from benchmarks.submodels.levers import Slowed, Teacher, untaught
from benchmarks.submodels.ordered_dropout import OrderedDropout
from benchmarks.submodels.own_networks import own_networks
from benchmarks.submodels.tasks import HELD, TASKS, Dealt, Held, Samples, joined, rows_of
from device_sdk import LocalData, Trainer
from device_sdk.artifact import load_artifact
from device_sdk.artifact.load import rung_folders
from device_sdk.errors import NonFiniteStep
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update

_EVALUATED = 10
"""Rounds between two looks at the validation samples."""
_LOOKS = 4
"""At what is trained by itself."""


class _Counted(HalfChannel):
    """Bytes by device, too; what many devices fetch is encoded once."""

    def __init__(self, devices: int) -> None:
        super().__init__(devices)
        self.up_by: dict[int, list[int]] = {}
        self.down_by: dict[int, list[int]] = {}
        self._device = 0
        self._fetched: list[tuple[Attachment, Attachment, int]] = []

    def down(self, broadcast: Broadcast) -> Broadcast:
        self._fetched.clear()
        return super().down(broadcast)

    def fetch(self, device: int, attachment: Attachment) -> Attachment:
        self._device = device
        known = next((each for each in self._fetched if each[0] is attachment), None)
        if known is None:
            before = self.down_bytes
            known = attachment, super().fetch(device, attachment), self.down_bytes - before
            self._fetched.append(known)
        _, found, size = known
        self.down_by.setdefault(device, []).append(size)
        return found

    def up(self, update: Update) -> Update:
        before = self.up_bytes
        found = super().up(update)
        self.up_by.setdefault(self._device, []).append(self.up_bytes - before)
        return found


def execute(
    run: Experiment, root: Path, artifacts: Artifacts, progress: Callable[[str], None]
) -> Outcome:
    """Carry out a run."""
    task = TASKS[run.data]
    dealt = task.deal(root, run)
    if run.fleet == "popular":
        none = (0.0,) * len(SHARES)
        validation, test = ((dealt.popular[part],) * len(SHARES) for part in HELD)
        return Outcome(0, validation, test, none, none, none)
    rng = np.random.default_rng([run.seed, 7])
    classes = rng.permutation(np.arange(run.devices) % len(SHARES))
    served = {"full": [3] * 4, "smallest": [0] * 4}.get(run.fleet, [*range(4)])
    trained = np.array(served)[classes]
    able = np.flatnonzero([rows_of(each) >= task.least for each in dealt.devices])
    if run.fleet in ("prototypes", "mutual"):
        return _exchanging(run, dealt, artifacts, classes, able, rng, progress)
    more = _more(run)
    ladder = artifacts.path(
        {"submodels": run.data, "kind": run.kind, "seed": run.seed, "shares": SHARES, **more},
        lambda folder: task.write(run.kind, run.seed, folder, dealt.others, **more),
    )
    folders = rung_folders(ladder)
    rungs = [Trainer(folder, providers="cpu", seed=run.seed) for folder in folders]
    taking_part = able if run.fleet != "strong" else able[classes[able] == len(SHARES) - 1]
    if run.fleet == "alone":
        return _alone(run, dealt, rungs, trained, able, progress)
    if run.fleet == "pooled":
        return _pooled(run, dealt, rungs[-1], able, progress)
    training = FedAvgTraining(
        epochs=1000,
        batch_size=run.batch_size,
        most_steps=run.steps,
        learning_rate=run.learning_rate,
    )
    name: Literal["adam", "plain"] = "adam" if run.server else "plain"
    optimizer = OptimizerSettings(name, run.server or 1.0, beta1=0.9 if run.server else 0.0)
    settings = FedAvgSettings(optimizer, slices=run.slices, training=training)
    binding = FedAvgBinding("fedavg", settings)
    method = binding.build(0, rng, [load_artifact(folder) for folder in folders])
    assert isinstance(method, FedAvgMethod)
    trainers: Sequence[Trainer] = rungs
    if run.fleet == "fjord":
        draws = np.random.default_rng([run.seed, 9])
        trainers = [OrderedDropout(each, rungs[:k], draws) for k, each in enumerate(folders)]
    if run.small_rate != 1:
        trainers = [*(Slowed(each, run.small_rate) for each in folders[:-1]), rungs[-1]]
    told: Sequence[Callable[[Samples], Samples]] = [dict] * len(rungs)
    if run.taught:
        teacher = Teacher(method, folders[-1], run.temperature)
        told = [teacher.teaches] * (len(rungs) - 1) + [untaught]
        dealt = replace(dealt, timed=untaught(dealt.timed))
    learners = [
        FedAvgLearner(
            _source(dealt.devices[d], told[trained[d]]),
            trainers[trained[d]],
            device_name(d),
            np.random.default_rng([run.seed, d]),
        )
        for d in range(run.devices)
    ]
    channel = _Counted(run.devices)
    simulation = Simulation(method, learners, rng, channel)

    def judged(part: Held) -> tuple[float, ...]:
        return _judged(method, rungs, served, dealt, part)

    best = _best_round(run, simulation, taking_part, rng, judged, progress)

    def by_class(counted: Mapping[int, Sequence[int]]) -> tuple[float, ...]:
        means = []
        for place in range(len(SHARES)):
            sizes = [n for d, each in counted.items() if classes[d] == place for n in each]
            means.append(float(np.mean(sizes)) if sizes else 0.0)
        return tuple(means)

    return replace(
        best,
        failed=sum(simulation.failures.values()),
        up_bytes=by_class(channel.up_by),
        down_bytes=by_class(channel.down_by),
        milliseconds=tuple(_step_milliseconds(rungs[place], dealt) for place in served),
    )


def _best_round(
    run: Experiment,
    simulation: Simulation,
    taking_part: NDArray[np.int64],
    rng: np.random.Generator,
    judged: Callable[[Held], tuple[float, ...]],
    progress: Callable[[str], None],
) -> Outcome:
    """The run's rounds, and quality by class at the one that validation picks; without costs."""
    best: Outcome | None = None
    rounds = 0 if run.fleet == "frozen" else run.rounds
    for number in range(min(1, rounds), rounds + 1):
        if number:
            cohort = rng.choice(taking_part, min(run.cohort, len(taking_part)), replace=False)
            simulation.round(sorted(cohort.tolist()))
        if number % _EVALUATED and number != run.rounds:
            continue
        validation = judged("validation")
        progress(f"round {number}: validation {fmean(validation):.4f}")
        if best is None or fmean(validation) > best.chosen_by:
            best = Outcome(number, validation, judged("test"), (), (), ())
    assert best is not None
    return best


def _more(run: Experiment) -> dict[str, Any]:
    """What is its ladder's own."""
    asked: dict[str, Any] = {"whole": run.whole} if run.whole else {}
    return asked | ({"taught": run.taught, "temperature": run.temperature} if run.taught else {})


def _source(samples: Samples, told: Callable[[Samples], Samples]) -> Callable[[], LocalData]:
    return lambda: LocalData(dict(told(samples)))


def _judged(
    method: FedAvgMethod, rungs: Sequence[Trainer], served: Sequence[int], dealt: Dealt, part: Held
) -> tuple[float, ...]:
    """Of each class, what the rung that it is served is worth."""
    told: Broadcast = method.tell()
    found = {}
    for place in set(served):
        rng = np.random.default_rng(0)
        learner = FedAvgLearner(lambda: LocalData({}), rungs[place], device_name(0), rng)
        learner.adopt(told)
        found[place] = dealt.judge(rungs[place], part, None)
    return tuple(found[place] for place in served)


def _exchanging(
    run: Experiment,
    dealt: Dealt,
    artifacts: Artifacts,
    classes: NDArray[np.int64],
    able: NDArray[np.int64],
    rng: np.random.Generator,
    progress: Callable[[str], None],
) -> Outcome:
    """Each class has a network of its own, each device its values: judged on its own samples."""
    method, learners, trainers = own_networks(run, dealt, artifacts, classes)
    channel = MutualChannel("float16", rng)
    simulation = Simulation(method, learners, rng, channel)

    def judged(part: Held) -> tuple[float, ...]:
        found = np.array([dealt.judge(trainers[d], part, [d]) for d in able])
        return tuple(float(found[classes[able] == k].mean()) for k in range(len(SHARES)))

    best = _best_round(run, simulation, able, rng, judged, progress)
    updates = run.rounds * min(run.cohort, len(able))
    return replace(
        best,
        failed=sum(simulation.failures.values()),
        up_bytes=(channel.up_bytes / updates,) * len(SHARES),
        down_bytes=(channel.down_bytes / updates,) * len(SHARES),
        milliseconds=(0.0,) * len(SHARES),
    )


def _alone(
    run: Experiment,
    dealt: Dealt,
    rungs: Sequence[Trainer],
    classes: NDArray[np.int64],
    able: NDArray[np.int64],
    progress: Callable[[str], None],
) -> Outcome:
    """Each device takes as many steps as it would in the fleet, from the same first values."""
    steps = max(1, run.rounds * run.steps * min(run.cohort, len(able)) // len(able))
    # By class, device, look and part.
    found: dict[int, list[list[tuple[float, ...]]]] = {place: [] for place in range(len(SHARES))}
    failed = 0
    for number, device in enumerate(able.tolist(), 1):
        trainer, samples = rungs[classes[device]], dealt.devices[device]
        own, more = _by_itself(run, trainer, samples, steps, device, dealt, [device])
        found[classes[device]].append(own)
        failed += more
        progress(f"device {number} of {len(able)}")
    # Of a user without both kinds of samples an AUC is not a number.
    means = np.stack([np.nanmean(found[place], axis=0) for place in found])
    return _at_best(run, means, rungs, dealt, failed)


def _pooled(
    run: Experiment,
    dealt: Dealt,
    trainer: Trainer,
    able: NDArray[np.int64],
    progress: Callable[[str], None],
) -> Outcome:
    """One model on the samples of all, by as many steps as those of a fleet in all."""
    steps = run.rounds * run.steps * min(run.cohort, len(able))
    whole = joined([dealt.devices[device] for device in able])
    found, failed = _by_itself(run, trainer, whole, steps, 0, dealt, None)
    progress(f"{steps} steps")
    return _at_best(run, np.array([found] * len(SHARES)), [trainer] * len(SHARES), dealt, failed)


def _by_itself(
    run: Experiment,
    trainer: Trainer,
    samples: Samples,
    steps: int,
    stream: int,
    dealt: Dealt,
    judged: Sequence[int] | None,
) -> tuple[list[tuple[float, ...]], int]:
    """Four looks on the way of a model that is trained by itself: quality by part, on samples of
    the devices ``judged``; and how many steps failed."""
    looks = {max(1, steps * quarter // _LOOKS) for quarter in range(1, _LOOKS + 1)}
    trainer.reset()
    rng = np.random.default_rng([run.seed, stream])
    count, found, failed = rows_of(samples), [], 0
    for step in range(1, steps + 1):
        chosen = rng.choice(count, min(run.batch_size, count), replace=False)
        batch = {name: array[chosen] for name, array in samples.items()}
        try:
            trainer.step(batch, hyper={"lr": run.learning_rate})
        except NonFiniteStep:
            failed += 1
        if step in looks:
            found.append(tuple(dealt.judge(trainer, held, judged) for held in HELD))
    return found, failed


def _at_best(
    run: Experiment, found: NDArray[np.float64], rungs: Sequence[Trainer], dealt: Dealt, failed: int
) -> Outcome:
    """``found``: quality by class, look and part."""
    look = int(found[:, :, 0].mean(axis=0).argmax())
    none = (0.0,) * len(SHARES)
    return Outcome(
        run.rounds * (look + 1) // found.shape[1],
        tuple(found[:, look, 0].tolist()),
        tuple(found[:, look, 1].tolist()),
        none,
        none,
        tuple(_step_milliseconds(each, dealt) for each in rungs),
        failed,
    )


def _step_milliseconds(trainer: Trainer, dealt: Dealt) -> float:
    """Processor time of a step on some samples, median of 30."""
    batch = dealt.timed
    taken = []
    for _ in range(30):
        start = time.process_time()
        trainer.step(batch, hyper={"lr": 1e-6})
        taken.append(1000 * (time.process_time() - start))
    return float(np.median(taken))
