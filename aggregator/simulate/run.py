"""A simulation from its command line: what was asked for, made sure of, and played."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from aggregator.errors import AggregatorError
from aggregator.evaluation import DeviceReport, Figure, what_it_brings, what_serves
from aggregator.operate.runs import FINISHED, STOPPED_EARLY
from aggregator.simulate.devices import Chosen, DeviceAnswer, DeviceSettings, VirtualDevices
from aggregator.simulate.fleet import Failures, Speeds, VirtualFleet
from aggregator.simulate.recipe import recipe_of, training_of
from aggregator.simulate.record import (
    Asked,
    Recorder,
    changed_task,
    read_change,
)
from aggregator.simulate.task_rounds import PlayedRound, TaskSimulation
from aggregator.simulate.traffic import PublishedRound
from aggregator.task.evaluation import metric_of
from aggregator.task.file import Task
from device_sdk.artifact import read_manifest
from device_sdk.errors import DeviceError
from device_sdk.runtime.providers import candidates
from device_sdk.system.clock import Clock
from device_sdk.tables.options import reading_of
from device_sdk.trainer import Trainer
from device_sdk.wire.publish.report import ItemCount

Show = Callable[[str], None]
_SHOWN_EVERY_SECONDS = 0.5
_LONGEST_NAME = 200
MakeDevices = Callable[[DeviceSettings], VirtualDevices]


class Began(NamedTuple):
    """A seed's devices are there. ``popularity``: see :meth:`TaskSimulation.popularity`."""

    popularity: tuple[Figure, ...]
    understood: tuple[str, ...]


class Ended(NamedTuple):
    """A seed's run is over, with all its rounds or early."""

    state: str
    figures: tuple[Figure, ...]
    version: int
    model_sha256: str
    items: Mapping[int, ItemCount]
    reports: tuple[str, ...]


Event = Began | PlayedRound | Ended
"""What becomes of a seed's run, one after the other; whoever plays it, the recorder takes it."""


@dataclass(eq=False)
class Simulated:
    """A simulation that can be played.

    Attributes:
        task: of the file.
        settings: of the first run.
        asked: all that was asked for.
        recorder: takes what was played.
        make: makes the devices of a run, here or in other processes.
        clock: says when to show where a round is.
    """

    task: Task
    settings: DeviceSettings
    asked: Asked
    recorder: Recorder
    make: MakeDevices
    clock: Clock
    _failure: str = ""
    _played: int = 0
    _counted: int = 0
    _selected_by: Counter[str] = field(default_factory=Counter)
    _counted_by: Counter[str] = field(default_factory=Counter)
    _figures: dict[int, Sequence[Figure]] = field(default_factory=dict)
    """By seed, of the last round that was evaluated."""
    _understood: tuple[str, ...] = ()
    _reports: tuple[str, ...] = ()
    _items: Mapping[int, ItemCount] = field(default_factory=dict)

    def play(self, seed: int, show: Show) -> Iterator[Event]:
        """As :func:`play_seed` does. Nothing is kept of it but by :meth:`take`."""
        return play_seed(self.settings, self.asked.rounds, seed, self.make, self.clock, show)

    def take(self, seed: int, event: Event) -> None:
        """Record what became of the run of a seed."""
        if isinstance(event, Began):
            self._understood = event.understood
            self.recorder.begin(seed, event.popularity)
        elif isinstance(event, Ended):
            self._items, self._reports = event.items, event.reports
            self.recorder.end(seed, event.state, event.figures, event.version, event.model_sha256)
        else:
            self.recorder.add(seed, event)
            self._failure = self._failure or event.failure
            self._played += 1
            self._counted += event.counted + event.stale
            self._selected_by.update(event.selected_by)
            self._counted_by.update(event.counted_by)
            if found := _newest(event):
                self._figures[seed] = found

    def _recipes(self) -> Iterator[str]:
        """How devices trained, of each artifact."""
        size = getattr(training_of(self.task), "batch_size", None)
        for folder in self.task.artifacts if size is not None else ():
            manifest = read_manifest(folder)
            if recipe := recipe_of(self.task, manifest):
                steps = f"steps of {size} samples" if size else "steps of all samples"
                yield f"{manifest.name} trains in {steps}{recipe}"

    def remarks(self) -> Iterator[str]:
        """What whoever reads the table should know."""
        yield from self._understood
        yield from self._reports
        unknown = [each for each in self._items.values() if each.unknown]
        if unknown:
            yield (
                f"{sum(each.unknown for each in unknown):,} of "
                f"{sum(each.recorded for each in self._items.values()):,} items are unknown to the "
                f"catalogue, on {len(unknown):,} of {len(self._items):,} devices that took part"
            )
        yield from self._recipes()
        yield from self._compared(what_serves)
        brings = [*self._compared(partial(what_it_brings, asked=self.task.has_control))]
        if self._figures and not brings and self.task.may_have_control:
            brings = [
                "control = 0.2 under [evaluation], say, has a fifth of the devices train a second "
                "model alone, to say what federation brings"
            ]
        yield from brings
        if self._counted and self._selected_by:
            shares = (
                f"{kind} {self._counted_by[kind] / max(1, asked):.0%}"
                for kind, asked in self._selected_by.items()
            )
            yield f"of the updates that were asked for, these counted: {', '.join(shares)}"
        if self._failure:
            yield f"the first device without an update, {self._failure}"
        if self.task.evaluation is None:
            yield (
                "no figures: a table [evaluation] in the task file has devices find out how good "
                "each version is"
            )
        if self.task.selector:
            yield "task.only was left aside: virtual devices have no labels"
        if self._played and not self._counted:
            yield f"no update was counted: the quorum is {self.task.round.quorum}"

    def _compared(self, say: Callable[[Sequence[Figure], str], str]) -> Iterator[str]:
        """What figures say of each seed, where they say it."""
        if self.task.ranking is None:
            return
        metric = metric_of(self.task.ranking)
        for seed, figures in self._figures.items():
            if sentence := say(figures, metric):
                yield f"seed {seed}: {sentence}" if len(self._figures) > 1 else sentence


def play_seed(
    settings: DeviceSettings, rounds: int, seed: int, make: MakeDevices, clock: Clock, show: Show
) -> Iterator[Event]:
    """Play the run of a seed; ``show`` is told where it is, in a line. Raises AggregatorError."""
    settings = replace(settings, fleet=replace(settings.fleet, seed=seed))
    show("the devices' data")
    devices = WatchedDevices(make(settings), show, clock)
    try:
        yield from _play(TaskSimulation(settings, devices), rounds, devices)
    finally:
        devices.close()


def _play(simulation: TaskSimulation, most: int, devices: WatchedDevices) -> Iterator[Event]:
    show = devices.say
    show("what the most popular items reach")
    yield Began(simulation.popularity(), devices.understood)
    rounds, version = simulation.most_rounds(most), 0
    show(f"round 1 of {rounds}")
    for played in simulation.rounds(rounds):
        yield played
        version = played.version if played.next_version is None else played.next_version
        if played.number < rounds:
            show(f"round {played.number + 1} of {rounds}{_told(played)}")
    state = STOPPED_EARLY if simulation.stopped else FINISHED
    model = simulation.model_sha256
    show("the newest version is evaluated")
    figures = simulation.evaluate()
    yield Ended(state, figures, version, model, devices.items, devices.reports())


class WatchedDevices(VirtualDevices):
    """Devices of which is told, now and then, how many have answered in a round."""

    def __init__(self, devices: VirtualDevices, show: Show, clock: Clock) -> None:
        self._devices, self._show, self._clock = devices, show, clock
        self._heading = ""
        self.understood = devices.understood
        self.items: dict[int, ItemCount] = {}
        """Of the devices that answered, where their task has a catalogue."""
        self._show_at = 0.0

    def say(self, heading: str) -> None:
        """Show this, and go on from it."""
        self._heading = heading
        self._show_at = self._clock.now() + _SHOWN_EVERY_SECONDS
        self._show(heading)

    def round(self, published: PublishedRound, chosen: Sequence[Chosen]) -> Iterator[DeviceAnswer]:
        for number, answer in enumerate(self._devices.round(published, chosen), 1):
            now = self._clock.now()
            if now >= self._show_at:
                self._show_at = now + _SHOWN_EVERY_SECONDS
                self._show(f"{self._heading}, device {number:,} of {len(chosen):,}")
            if answer.items is not None:
                self.items[answer.device] = answer.items
            yield answer

    def settle(self, number: int, counted: Mapping[int, bool]) -> None:
        self._devices.settle(number, counted)

    def popularity(self) -> list[DeviceReport]:
        return self._devices.popularity()

    def reports(self) -> tuple[str, ...]:
        return self._devices.reports()

    def close(self) -> None:
        self._devices.close()


def _newest(played: PlayedRound) -> Sequence[Figure]:
    """Those of the last version that has its figures since this round; none where none has."""
    return played.figures or next(reversed([*played.earlier.values()]), ())


def _told(played: PlayedRound) -> str:
    figures = [f"{each.metric} {each.value:.3f}" for each in _newest(played) if not each.part]
    return f", {figures[0]}" if figures else ""


def prepare(arguments: argparse.Namespace, clock: Clock, now: Callable[[], float]) -> Simulated:
    """What the command's arguments ask for. Raises AggregatorError, and TaskError naming the key.

    Nothing is played yet; the data is asked for once, so that what is wrong is told first.
    """
    changes = dict(map(read_change, arguments.set))
    task = changed_task(Path(arguments.task), changes)
    try:
        failures = Failures(arguments.dropout, arguments.crash, arguments.late, arguments.nan)
    except ValueError as error:
        raise AggregatorError(str(error)) from None
    speeds = Speeds.read(arguments.speeds) if arguments.speeds else Speeds()
    first: int = arguments.seed
    asked = Asked(
        data=said_data(arguments),
        devices=arguments.devices,
        rounds=arguments.rounds,
        seeds=tuple(range(first, first + arguments.seeds)),
        speeds=arguments.speeds,
        failures=failures,
        pace_seconds=arguments.pace,
        changes=changes,
        classes=speeds.classes,
        providers=arguments.providers,
    )
    _require_providers(task, arguments.providers)
    fleet = VirtualFleet(arguments.devices, first, speeds, failures, arguments.pace)
    name = "-".join(filter(None, (arguments.name or task.name, arguments.swept)))
    if len(name) > _LONGEST_NAME:
        raise AggregatorError(f"the run's name has {len(name)} characters: give a shorter --name")
    recorder = Recorder(name, task, asked, arguments.out, clock, now)
    if arguments.resume:
        recorder.resume()
    settings = DeviceSettings(
        task, arguments.data, fleet, reading_of(arguments), arguments.providers
    )
    return Simulated(task, settings, asked, recorder, _maker(arguments), clock)


def _require_providers(task: Task, providers: str) -> None:
    """Raises AggregatorError where an artifact of the task does not run there."""
    if providers == "auto":
        return
    try:
        candidates(providers)
        for folder in (*task.artifacts, *task.companions):
            Trainer(folder, providers=providers)
    except DeviceError as error:
        raise AggregatorError(f"--providers {providers}: {error}") from None


def said_data(arguments: argparse.Namespace) -> str:
    """``--data``, and how it is read, as a run's settings have it."""
    columns: Mapping[str, str] = arguments.columns or {}
    options = {
        "columns": ",".join(f"{role}={column}" for role, column in sorted(columns.items())),
        "separator": arguments.separator,
        "encoding": arguments.encoding,
        "time-format": arguments.time_format,
    }
    return " ".join(
        [arguments.data, *(f"--{name} {said}" for name, said in options.items() if said)]
    )


def _maker(arguments: argparse.Namespace) -> MakeDevices:
    cluster: str | None = arguments.cluster
    if cluster is not None and arguments.jobs > 1:
        raise AggregatorError("--jobs is for processes of this machine; leave it out of --cluster")
    if cluster is None:
        if arguments.workers is not None:
            raise AggregatorError("--workers is for --cluster")
        return DeviceSettings.make
    kind, _, address = cluster.partition(":")
    if kind != "ray":
        raise AggregatorError(f"--cluster is {cluster!r}; expected ray, or ray:ADDRESS")
    from aggregator.simulate.cluster import on_ray

    made: MakeDevices = on_ray(address, arguments.workers)
    return made
