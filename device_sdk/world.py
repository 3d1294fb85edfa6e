"""What the parts of a device share: its owner's choices, its waits, and the world around it."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np

from device_sdk.artifact import MANIFEST_FILE
from device_sdk.conditions import on_mains_power
from device_sdk.fields import As, Declared, Length, OneOf, Within
from device_sdk.home.home import Home
from device_sdk.home.membership import Membership
from device_sdk.link import LinkSettings
from device_sdk.local_data import DataSource
from device_sdk.methods.scatter.triples import PoolSettings
from device_sdk.system.clock import Clock, MonotonicClock, awake_clock
from device_sdk.system.watch import Watch
from device_sdk.trial import TrialLimits, TrialResult, try_artifact
from device_sdk.wire.publish.report import OwnLabels
from device_sdk.wire.publish.topics import Topics

PROVIDER_NAMES: Final = ("auto", "cpu", "cuda", "openvino", "webgpu")
"""What may run artifacts, as options say it (`device_sdk.runtime.providers` knows more)."""


_Positive = Annotated[int, Within(1)]
_Seconds = Annotated[float, Within(0, above=True)]


@dataclass(frozen=True, slots=True)
class TrainingOptions(Declared):
    """How this device trains.

    Attributes:
        k: the number of columns to train; None measures what the device can afford.
        slowdown: emulates a device so many times slower, by sleeping; the status says so.
        capability_seconds: the longest that a measurement of k may take.
        when_none_fits: ``one`` trains one column, or the smallest artifact, even where that takes
            too long; ``decline`` sits such rounds out.
        artifact: of a task that offers several, train this one: its name, or the first digits (8
            or more) of its id in hexadecimal. None measures what the device can afford.
        most_artifact_bytes: of a task that offers several, take no more than this for all of them
            together, smallest first.
        placement: with attention, where neighbours' parameters are mixed: ``device``, or
            ``aggregator`` for a device too weak to fetch them and to train the meta-network.
            ``auto`` measures: the device, where a round with its own mixture ends in time.
        most_attachment_bytes: with ``placement="auto"``, the most that neighbours' parameters may
            be; the aggregator mixes where they are more.
        only_when: asked before a training starts; while it says False the round waits, as long as
            it can still be trained in time. Called on the device's thread: it must not wait. One
            that raises counts as False. :mod:`device_sdk.conditions` has ready ones.
        pool: pseudo-items that are mixed in for privacy.
        most_outbox_updates, most_outbox_bytes: with so much waiting for receipts no further round
            is trained until some have come.
        report: what the aggregator's operator is told of each round that this device was selected
            for. ``full``: how it ended, versions, platform, what was trained, seconds, bytes,
            labels, and sums over held-out data where the task asks for them. ``outcome``: how it
            ended and, as one of a few words, why, and nothing else.
        labels: what this device calls itself in reports, such as ``{"site": "north"}``: names of a
            to z, 0 to 9, ``. _ -``, and 56 bytes of all. They are shown to the operator, whose
            own win; tasks choose by the operator's alone.
        most_step_seconds: the longest that one step of an artifact, or the opening of one of its
            graphs, may take; None: what its task gives a whole training, 30 s at least, and 10 to
            60 s at its first run. One that takes longer is ended, and not run again for some time.
        most_memory_bytes: the most that an artifact's first run may take, in a process of its own;
            None: what the machine has at that moment.
        seconds_a_day, bytes_a_day: the most that taking part may take on one day (UTC), over all
            tasks: seconds of training, bytes sent and received. A round that would take more than
            is left, going by the task's last trainings here, is not taken. None: no bound.
        providers: what runs artifacts: ``cpu``, ``cuda``, ``webgpu``, ``openvino``, or ``auto``,
            the fastest of these that is here and trains as the CPU does.

    Raises ValueError, naming the option.
    """

    k: _Positive | None = None
    slowdown: Annotated[float, Within(1)] = 1.0
    capability_seconds: _Seconds = 5.0
    when_none_fits: Literal["one", "decline"] = "one"
    pool: PoolSettings = field(default_factory=PoolSettings)
    artifact: Annotated[str, Length(1, sys.maxsize)] | None = None
    most_artifact_bytes: _Positive = 64 << 20
    placement: Literal["auto", "device", "aggregator"] = "auto"
    most_attachment_bytes: _Positive = 64 << 20
    most_outbox_updates: _Positive = 8
    most_outbox_bytes: _Positive = 64 << 20
    report: Literal["full", "outcome"] = "full"
    labels: OwnLabels = field(default_factory=dict)
    most_step_seconds: _Seconds | None = None
    most_memory_bytes: _Positive | None = None
    seconds_a_day: _Seconds | None = None
    bytes_a_day: _Positive | None = None
    providers: Annotated[str, OneOf(PROVIDER_NAMES)] = "auto"
    only_when: Annotated[Callable[[], bool] | None, As(Any)] = None

    def check(self) -> None:
        if self.only_when is not None and not callable(self.only_when):
            raise ValueError(
                f"only_when is {self.only_when!r}; expected a function without arguments"
            )


@dataclass(frozen=True, slots=True)
class Pace(Declared):
    """Waits in seconds; each repeated one grows (full jitter) up to ``most_seconds``.

    Attributes:
        answer_seconds: an open or an update without an answer for so long is sent again.
        repeat_seconds: an update that fits one message is sent again for the first time after this
            and up to half as much more: a broker that is flooded drops messages that it
            acknowledged. At most once, so that a slow way costs one message more; never for an
            update in parts, which may still be on its way out.
        fetch_seconds: chunks that did not come for so long are asked for again; so is, by each
            connection, a round that may have been missed, after this and up to as much more.
        reopen_seconds: a new session because of a new presence, an unknown key epoch or silence is
            opened after a random wait of up to this, so that a fleet does not come at once.
        renew_seconds: a session that the aggregator says it does not hold is replaced after a
            random wait of up to this.
        cell_seconds: a device that was told to be in a cell, and finds no session there for so
            long and up to twice as long, looks for one at the broker that it enrolled at.
        most_seconds: the longest wait of the others.
        ask_seconds: what ``only_when`` of the options refuses is asked again after this.
        unanswered_sends: after so many sends without a receipt the session is opened anew.

    Raises ValueError, naming the field.
    """

    answer_seconds: _Seconds = 10.0
    repeat_seconds: _Seconds = 2.0
    fetch_seconds: _Seconds = 15.0
    reopen_seconds: _Seconds = 10.0
    renew_seconds: _Seconds = 1.0
    cell_seconds: _Seconds = 300.0
    most_seconds: _Seconds = 600.0
    unanswered_sends: _Positive = 3
    ask_seconds: _Seconds = 10.0

    def check(self) -> None:
        first = (self.answer_seconds, self.fetch_seconds, self.reopen_seconds, self.renew_seconds)
        if self.most_seconds < max(first):
            raise ValueError(f"most_seconds is {self.most_seconds}, below one of the first waits")


@dataclass(frozen=True)
class DeviceWorld:
    """Made once for a device, and handed down as it is to every part that takes part in rounds.

    Attributes:
        home: the open home folder.
        membership: what enrolment left there.
        options, pace, link_settings: the owner's choices.
        clock: monotonic seconds that count the machine's sleep.
        work_clock: times the training.
        rng: source of every draw. Each start of the device spawns generators of its own from it.
        installed: folders of artifacts that came with the installation, by their id.
        source: gives the app's data source, for methods that train on arrays; None for none.
        data: gives the app's data sources by the names of tasks, "" for the one without a name;
            :meth:`of_task` picks the task's ``source`` from them.
        tasks: those to take part in, as the app chose; empty: it did not choose.
        watch: ends what artifacts do past their time.
        on_mains: whether the machine runs on mains power; on a battery it may be another one.
        try_artifact: runs one for the first time; see :func:`device_sdk.trial.try_artifact`.
    """

    home: Home
    membership: Membership
    options: TrainingOptions = field(default_factory=TrainingOptions)
    pace: Pace = field(default_factory=Pace)
    link_settings: LinkSettings = field(default_factory=LinkSettings)
    clock: Callable[[], float] = awake_clock
    work_clock: Clock = field(default_factory=MonotonicClock)
    rng: np.random.Generator = field(default_factory=np.random.default_rng)
    installed: Mapping[bytes, Path] = field(default_factory=dict)
    source: Callable[[], DataSource | None] = lambda: None
    data: Callable[[], Mapping[str, DataSource]] | None = None
    tasks: tuple[str, ...] = ()
    watch: Watch = field(default_factory=Watch)
    on_mains: Callable[[], bool] = field(default_factory=on_mains_power)
    try_artifact: Callable[[Path, TrialLimits, Callable[[], bool]], TrialResult | None] = (
        try_artifact
    )

    @cached_property
    def topics(self) -> Topics:
        """Of the fleet."""
        return Topics(self.membership.prefix)

    def of_task(self, task: str, cohort: str) -> DeviceWorld:
        """As the parts see it that know one task: the membership's names are the task's."""
        own = replace(self.membership, task=task, cohort=cohort)
        if self.data is None:
            return replace(self, membership=own)
        return replace(self, membership=own, source=partial(self.source_of, task))

    def source_of(self, task: str) -> DataSource | None:
        """The app's data for a task. What it gave without a name is for the home's own task, or
        for the only one that could use it."""
        if self.data is None:
            return self.source()
        given = self.data()
        if task in given or "" not in given:
            return given.get(task)
        rows = [row for row in self.home.tasks.all() if row.served and row.name not in given]
        names = [row.name for row in rows if row.takes != "records"]
        if self.membership.task in names or not names:
            names = [self.membership.task]
        return given[""] if names == [task] else None

    def wishes(self) -> Collection[str] | None:
        """The tasks to take part in, where they are served; None for all that are."""
        if self.tasks:
            return self.tasks
        if not self.membership.is_wish:
            return None
        named = {} if self.data is None else self.data()
        return {self.membership.task, *named} - {""}

    def lacks(self, task: str, generation: int | None = None) -> str:
        """Why there is nothing to train a task on, as far as that is known; empty where there is.

        ``generation``: a round's; what is known of another one's method does not count.
        """
        row = self.home.tasks.find(task)
        if row is None or (generation is not None and row.generation != generation):
            return ""
        if row.takes == "arrays" and self.source_of(task) is None:
            return "the app has given no data to train on: Device.open(data=...) or device.provide"
        if row.takes == "records":
            names = self.home.record_names(task)
            if "" not in names and not self.home.interactions.tasks() & set(names):
                return f"the app has recorded nothing for it: device.record(item, task={task!r})"
        return ""

    def has_artifact(self, artifact_id: bytes) -> bool:
        """Whether an artifact is here, whole."""
        return artifact_id in self.installed or self.home.has_artifact(artifact_id)

    def artifact_folder(self, artifact_id: bytes) -> Path:
        """Where an artifact lies, or would."""
        return self.installed.get(artifact_id) or self.home.artifact_folder(artifact_id)


def installed_artifacts(*folders: str | os.PathLike[str]) -> Mapping[bytes, Path]:
    """Folder by artifact id, 32 bytes: SHA-256 of ``manifest.json``."""
    return {
        hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).digest(): folder
        for folder in map(Path, folders)
    }
