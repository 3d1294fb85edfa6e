"""A task rehearsed before its first round: both halves of its method, its codecs and its artifacts,
with what devices will bring.

Runs in a process of its own (:func:`device_sdk.trial.supervised`): a device's training, which runs
whatever an artifact holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aggregator.errors import AggregatorError
from aggregator.methods.method import Method, NoVersion
from aggregator.simulate.data import Entries, arrays_of, entries_of
from aggregator.simulate.devices import ArrayDevices, Chosen, DeviceSettings, device_id
from aggregator.simulate.fleet import CapabilityClass, Speeds, VirtualFleet
from aggregator.simulate.traffic import publish, terms_of
from aggregator.task.artifacts import ArtifactContent, read_artifacts
from aggregator.task.file import Task, parse_task
from device_sdk.methods.learner import Learner
from device_sdk.rehearsal import (
    Case,
    Finding,
    Make,
    Outcome,
    Trains,
    cases,
    finish,
    made_up,
    rows_of_example,
)
from device_sdk.train.job import learner_class
from device_sdk.trial import begin, say
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.manifest import EVERYONE

_ROUNDS = 3
_LOSSES = ("loss", "local_loss")
_RISES = 100.0
"""A loss that rises by so much in a few rounds does not come back."""
_PARTNER = 0
"""Of the cases: the device that the others exchange with."""
_DECLINED = ("too-few-samples", "no-data", "not-now", "no-artifact-fits", "too-slow")


@dataclass(frozen=True)
class _Settings(DeviceSettings):
    """Of virtual devices, one a case."""

    cases: tuple[Case, ...] = ()

    def entries(self) -> Entries:
        return [case.data for case in self.cases]


class Rehearsal:
    """A task with one of its artifacts: each case in a fleet of two, beside the most usual one.

    Raises AggregatorError, and ValueError where the artifacts do not suit the method.
    """

    def __init__(
        self,
        task: Task,
        artifacts: tuple[ArtifactContent, ...],
        place: int,
        found: tuple[Case, ...],
        kind: type[Learner],
    ) -> None:
        name = artifacts[place].artifact.manifest.name
        chosen = Speeds((CapabilityClass("rehearsed", artifact=name),))
        self._task, self._artifacts, self._cases = task, artifacts, found
        fleet = VirtualFleet(len(found), 0, chosen)
        self._devices = ArrayDevices(_Settings(task, "", fleet, cases=found), kind)
        self._terms = terms_of(task, artifacts)
        self._rounds = _ROUNDS + int(getattr(training_of(task), "warm_up_rounds", 0))
        self._number = 0

    def train(self, case: Case) -> Finding:
        """Some rounds of one case."""
        method = self._method()
        if self._task.warm_start is not None and self._task.warm_start.file is not None:
            self._task.warm_start.begin(method, None, self._task.ranking, ())
        place = next(place for place, each in enumerate(self._cases) if each is case)
        losses: list[float] = []
        for _ in range(self._rounds):
            found = self._round(method, case, place, losses)
            if found is not None:
                return found
        if losses and losses[-1] > _RISES * max(losses[0], 1.0):
            detail = (
                f"the loss rose from {losses[0]:.3g} to {losses[-1]:.3g} in {len(losses)} rounds"
            )
            return Finding(case, "fails", "not-finite", f"{detail}, and will go on")
        return Finding(case, "trains")

    def _method(self) -> Method:
        rng = np.random.default_rng(0)
        return self._task.binding.build(0, rng, [each.artifact for each in self._artifacts])

    def _round(self, method: Method, case: Case, place: int, losses: list[float]) -> Finding | None:
        """What went wrong; None where nothing did. ``losses`` gets what the case's device says."""
        self._number += 1
        opened = method.open_round(self._number)
        rng = np.random.default_rng(self._number)
        try:
            published = publish(self._task, self._terms, opened, EVERYONE, 60.0, rng)
        except ValueError as error:
            return Finding(case, "fails", "not-finite", f"the model cannot be sent: {error}")
        verdicts = {}
        for each in sorted({_PARTNER, place}):
            (answer,) = self._devices.round(published, [Chosen(each)])
            if not answer.body:
                if each != place:
                    continue
                outcome: Outcome = "declines" if answer.reason in _DECLINED else "fails"
                return Finding(case, outcome, answer.reason, answer.detail)
            name = device_id(each).hex()
            try:
                update = self._task.binding.decode(answer.body, self._number, 0, name)
                method.check(update)
            except WireError as error:
                if each != place:
                    continue
                return Finding(case, "refused", error.reason, str(error))
            method.absorb(update)
            if each == place:
                losses += [float(v) for name, v in update.metadata.items() if name in _LOSSES]
            verdicts[each] = True
        try:
            method.close_round()
        except NoVersion as error:
            return Finding(case, "fails", "not-finite", str(error))
        self._devices.settle(self._number, verdicts)
        return None


def main() -> None:
    """Rehearse a task with one of its artifacts. Arguments: where to write; a file with the task's
    text, and the path that it is of; the artifact's place; what gives data, or nothing."""
    limits, (out, file, path, said_place, data) = begin()
    say("reading the task", limits.seconds)
    task = parse_task(Path(file).read_text(encoding="utf-8"), Path(path))
    artifacts, place = read_artifacts(task.artifacts, task.companions), int(said_place)
    manifest = artifacts[place].artifact.manifest
    kind = learner_class(task.binding.method_name)
    if not issubclass(kind, Learner):
        method = task.binding.method_name
        finish(out, (), limits.seconds, f"not rehearsed: {method} trains with a device's own home")
    batch_size = int(getattr(training_of(task), "batch_size", 0)) or rows_of_example(manifest)
    rng = np.random.default_rng(0)
    title = (
        f"rehearsed {task.binding.method_name} with {manifest.name!r} in steps of {batch_size} "
        f"samples, {task.broadcast_codec} down, {task.update_codec} up, and "
        f"{f'samples of {data}' if data else 'made-up data'}:"
    )

    def way(draw: Make) -> tuple[tuple[Case, ...], Trains]:
        found = cases(manifest, batch_size, rng, draw)
        return found, Rehearsal(task, artifacts, place, found, kind).train

    try:
        draws = (_from(data),) if data else made_up(manifest, rng)
        finish(out, map(way, draws), limits.seconds, title)
    except (AggregatorError, ValueError) as error:
        finish(out, (), limits.seconds, "not rehearsed", str(error))


def training_of(task: Task) -> object:
    """What the task's broadcasts tell devices of their training, where its method has such."""
    return getattr(task.binding.settings, "training", None)


def _from(said: str) -> Make:
    """Samples of the first device of a function, from the first again where there are too few."""
    own = arrays_of(entries_of(said, 1, np.random.default_rng(0)), 0).train
    return lambda rows: {name: array[np.arange(rows) % len(array)] for name, array in own.items()}


if __name__ == "__main__":
    main()
