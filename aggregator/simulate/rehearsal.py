"""A task rehearsed before its first round: both halves of its method, its codecs and its artifacts,
with what devices will bring.

Runs in a process of its own (:func:`device_sdk.trial.supervised`): a device's training, which runs
whatever an artifact holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from aggregator.errors import AggregatorError
from aggregator.methods.method import Method, NoVersion
from aggregator.simulate.data import Entries, arrays_of, entries_of
from aggregator.simulate.devices import (
    ArrayDevices,
    Chosen,
    DeviceSettings,
    ScatterDevices,
    VirtualDevices,
    device_id,
)
from aggregator.simulate.fleet import CapabilityClass, Speeds, VirtualFleet
from aggregator.simulate.recipe import in_one_pass, recipe_of, training_of
from aggregator.simulate.traffic import publish
from aggregator.task.artifacts import ArtifactContent, read_artifacts, terms_of
from aggregator.task.file import Task, parse_task, read_catalogue_file
from device_sdk.methods.learner import Learner
from device_sdk.rehearsal import (
    MORE_TIMES,
    Case,
    CaseSet,
    Finding,
    LossProgress,
    Make,
    Outcome,
    Trains,
    cases,
    finish,
    ids_out_of_range,
    made_up,
    rows_of_example,
)
from device_sdk.train.job import learner_class
from device_sdk.train.noting import NotingTrainer
from device_sdk.train.scatter import ScatterTrainer
from device_sdk.trainer import Trainer
from device_sdk.trial import begin, say
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.manifest import EVERYONE

_ROUNDS = 3
_MOST_CASES = 1024
_MOST_ITEMS = 5000
"""Of a catalogue: rounds of a longer one tell no more."""
_PARTNER = 0
"""Of the cases: the device that the others exchange with."""
_DECLINED = (
    *("too-few-samples", "no-data", "not-now", "no-artifact-fits", "too-slow", "unknown-items"),
)


@dataclass(frozen=True)
class _Settings(DeviceSettings):
    """Of virtual devices, one a case; ``brought``: what each has."""

    brought: Entries = ()

    def entries(self) -> Entries:
        return self.brought


class Notes(Protocol):
    """What training comes to, of one case after another."""

    def begin(self, method: Method) -> None:
        """A case begins; ``method``: the aggregator's half, as it is then."""

    def of_own(self, yes: bool) -> None:
        """Whether the device that trains next is the case's."""

    def moved(self, method: Method) -> bool:
        """Whether anything that is trained has changed."""

    def finding(self, case: Case, method: Method, rounds: int) -> Finding:
        """Of a case in which nothing failed by itself."""


class _OfSteps:
    """By the steps of the artifact's trainer."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._trainer: NotingTrainer | None = None
        self._progress: LossProgress | None = None

    def opens(self, watched: Path, folder: Path) -> Trainer:
        """A trainer of an artifact; of the one that is ``watched`` the steps are noted."""
        trainer = NotingTrainer(folder, threads=1)
        if folder == watched:
            self._trainer = trainer
        trainer.noting = folder == watched
        return trainer

    def begin(self, method: Method) -> None:
        self._progress = None
        if self._trainer is not None:
            self._trainer.begin_notes()

    def of_own(self, yes: bool) -> None:
        if self._trainer is not None:
            if not yes and self._trainer.noting:
                self._progress = LossProgress(*self._trainer.notes())
            self._trainer.noting = yes

    def moved(self, method: Method) -> bool:
        return self._progress is None or self._progress.moved

    def finding(self, case: Case, method: Method, rounds: int) -> Finding:
        found = self._progress
        return Finding(case, "trains") if found is None else found.finding(case)


class _OfItems:
    """By the vectors of a catalogue's items."""

    def begin(self, method: Method) -> None:
        self._before = method.model_arrays or {}

    def of_own(self, yes: bool) -> None:
        pass

    def moved(self, method: Method) -> bool:
        after = method.model_arrays or {}
        return any(not np.array_equal(self._before[name], after[name]) for name in self._before)

    def finding(self, case: Case, method: Method, rounds: int) -> Finding:
        if self.moved(method):
            return Finding(case, "trains")
        if not case.usual:
            return Finding(case, "trains", "and changes nothing")
        detail = f"no item's vector moves in {rounds} rounds: is a learning rate 0?"
        return Finding(case, "fails", "", detail)


@dataclass
class Rehearsal:
    """A task, each case in a fleet of two, beside the ``usual`` one.

    ``devices`` makes them; ``notes``: what their training comes to; ``sizes`` gets those of the
    largest ``broadcast`` and ``update``, in bytes; ``items``: of the catalogue, 0 without one.
    Raises AggregatorError, and ValueError where the artifacts do not suit the method.
    """

    task: Task
    artifacts: tuple[ArtifactContent, ...]
    usual: Case
    devices: Callable[[_Settings], VirtualDevices]
    speeds: Speeds
    notes: Notes
    sizes: dict[str, int]
    items: int = 0

    def __post_init__(self) -> None:
        self._brought = [self.usual.data] * _MOST_CASES
        self._cases = self._number = 0
        fleet = VirtualFleet(_MOST_CASES, 0, self.speeds)
        self._devices = self.devices(_Settings(self.task, "", fleet, brought=self._brought))
        self._terms = terms_of(self.task, self.artifacts)
        self._rounds = _ROUNDS + int(getattr(training_of(self.task), "warm_up_rounds", 0))

    def train(self, case: Case) -> Finding:
        """Some rounds of one case; the usual one comes first."""
        method, place = self._method(), self._cases
        self._brought[place] = case.data
        self._cases += 1
        self.notes.begin(method)
        most = MORE_TIMES * self._rounds if case.usual else self._rounds
        for played in range(1, most + 1):
            found = self._round(method, case, place)
            if found is not None:
                return found
            if played >= self._rounds and self.notes.moved(method):
                break
        return self.notes.finding(case, method, played)

    def _method(self) -> Method:
        rng = np.random.default_rng(0)
        artifacts = [each.artifact for each in self.artifacts]
        method = self.task.binding.build(self.items, rng, artifacts)
        begun = self.task.warm_start
        if begun is not None and begun.file is not None and not self.items:
            begun.begin(method, None, self.task.ranking, ())
        return method

    def _round(self, method: Method, case: Case, place: int) -> Finding | None:
        """What went wrong; None where nothing did."""
        self._number += 1
        opened = method.open_round(self._number)
        rng = np.random.default_rng(self._number)
        try:
            published = publish(self.task, self._terms, opened, EVERYONE, rng)
        except ValueError as error:
            return Finding(case, "fails", "not-finite", f"the model cannot be sent: {error}")
        self._note_size("broadcast", published.plaintext)
        verdicts = {}
        # The case's own first: what it is like must not go by what its partner made of the trainer.
        for each in sorted({_PARTNER, place}, reverse=True):
            self.notes.of_own(each == place)
            (answer,) = self._devices.round(published, [Chosen(each)])
            self.notes.of_own(False)
            if not answer.body:
                if each != place:
                    continue
                outcome: Outcome = "declines" if answer.reason in _DECLINED else "fails"
                return Finding(case, outcome, answer.reason, answer.detail)
            self._note_size("update", answer.body)
            name = device_id(each).hex()
            try:
                update = self.task.binding.decode(answer.body, self._number, self.items, name)
                method.check(update)
            except WireError as error:
                if each != place:
                    continue
                return Finding(case, "refused", error.reason, str(error))
            method.absorb(update)
            verdicts[each] = True
        try:
            method.close_round()
        except NoVersion as error:
            return Finding(case, "fails", "not-finite", str(error))
        self._devices.settle(self._number, verdicts)
        return None

    def _note_size(self, what: str, content: bytes) -> None:
        self.sizes[what] = max(self.sizes.get(what, 0), len(content))


def main() -> None:
    """Rehearse a task with one of its artifacts, or with its catalogue. Arguments: where to write;
    a file with the task's text, and the path that it is of; the artifact's place; what gives data,
    or nothing."""
    limits, (out, file, path, said_place, data) = begin()
    say("reading the task", limits.seconds)
    task = parse_task(Path(file).read_text(encoding="utf-8"), Path(path))
    artifacts = read_artifacts(task)
    name = task.binding.method_name
    kind = learner_class(name)
    sizes = {"artifact": max((len(each.content) for each in artifacts), default=0)}
    try:
        if issubclass(kind, Learner):
            title, ways = _with_samples(task, artifacts, int(said_place), kind, data, sizes)
        elif kind is ScatterTrainer:
            title, ways = _with_items(task, artifacts, sizes)
        else:
            title, ways = f"not rehearsed: {name} trains with a device's own home", iter(())
        finish(out, ways, limits.seconds, title, sizes=sizes)
    except (AggregatorError, ValueError) as error:
        finish(out, (), limits.seconds, "not rehearsed", str(error))


def _with_samples(
    task: Task,
    artifacts: tuple[ArtifactContent, ...],
    place: int,
    kind: type[Learner],
    data: str,
    sizes: dict[str, int],
) -> tuple[str, Iterator[CaseSet]]:
    """The title, and the ways to rehearse it; ``sizes`` gets those of messages."""
    manifest = artifacts[place].artifact.manifest
    batch_size = int(getattr(training_of(task), "batch_size", 0)) or rows_of_example(manifest)
    rng = np.random.default_rng(0)
    title = (
        f"rehearsed {task.binding.method_name} with {manifest.name!r} in steps of {batch_size} "
        f"samples{recipe_of(task, manifest)}, {task.broadcast_codec} down, {task.update_codec} up, "
        f"and {f'samples of {data}' if data else 'made-up data'}:"
    )
    speeds = Speeds((CapabilityClass("rehearsed", artifact=manifest.name),))

    def way(draw: Make) -> CaseSet:
        usual, *others = cases(manifest, batch_size, rng, draw)
        notes = _OfSteps()
        opens = partial(notes.opens, task.artifacts[place])
        devices = partial(ArrayDevices, kind=kind, opens=opens)
        short = in_one_pass(task)
        rehearsal = Rehearsal(short, artifacts, usual, devices, speeds, notes, sizes)
        more = partial(ids_out_of_range, manifest, batch_size, draw)
        return CaseSet((usual, *others), rehearsal.train, more)

    return title, map(way, (_from(data),) if data else made_up(manifest, rng))


def _with_items(
    task: Task, artifacts: tuple[ArtifactContent, ...], sizes: dict[str, int]
) -> tuple[str, Iterator[CaseSet]]:
    """As above, of a catalogue."""
    assert task.catalogue is not None
    catalogue = read_catalogue_file(task.catalogue)
    every = catalogue.items
    sizes["catalogue"] = len(encode(catalogue))
    ids, settings = every[:_MOST_ITEMS], task.binding.settings
    title = (
        f"rehearsed {task.binding.method_name} ({getattr(settings, 'loss', '')}) with "
        f"{len(ids):,}{f' of {len(every):,}' * (len(ids) < len(every))} items, "
        f"{task.broadcast_codec} down, {task.update_codec} up, and made-up choices of them:"
    )
    found = _choices(ids)

    def whole(_: Trains) -> tuple[Finding, ...]:
        sizes["broadcast"] = sizes["broadcast"] * len(every) // len(ids)
        return ()

    def way() -> Iterator[CaseSet]:
        parts = (ScatterDevices, Speeds(), _OfItems(), sizes, len(ids))
        rehearsal = Rehearsal(task, artifacts, found[0], *parts)
        yield CaseSet(found, rehearsal.train, whole)

    return title, way()


def _choices(ids: Sequence[str]) -> tuple[Case, ...]:
    """Devices with some of these items, the most usual first."""
    few = list(ids[: max(1, min(20, len(ids) // 2))])
    half_known = f"{len(few)} items that the catalogue knows, and as many that it does not"
    unknown = [f"{each}?" for each in few if f"{each}?" not in ids]
    found = [
        Case(f"{len(few)} item{'s' * (len(few) != 1)}", few, usual=True),
        Case("1 item", few[:1]),
        Case(half_known, few + unknown),
        Case("no item that the catalogue knows", unknown),
        Case(f"all of these {len(ids):,} items", list(ids)),
    ]
    return tuple(found)


def _from(said: str) -> Make:
    """Samples of the first device of a function, from the first again where there are too few."""
    own = arrays_of(entries_of(said, 1, np.random.default_rng(0)), 0).train
    return lambda rows: {name: array[np.arange(rows) % len(array)] for name, array in own.items()}


if __name__ == "__main__":
    main()
