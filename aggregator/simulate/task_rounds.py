"""A task's rounds over virtual devices: sampling, deadlines and quorum in virtual time, evaluation.

What ``serve`` does around a method, without messages, store and keys: the same arithmetic, by the
same functions.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, NamedTuple

import numpy as np

from aggregator.errors import AggregatorError
from aggregator.evaluation import (
    DeviceReport,
    Evaluated,
    Figure,
    figure_name,
    stalled_since,
    summarise,
)
from aggregator.methods.method import RoundSummary
from aggregator.rounds.attendance import Attendance, KnownHabits, asked_share
from aggregator.simulate.devices import (
    GROUP_BYTES,
    Chosen,
    DeviceAnswer,
    DeviceSettings,
    VirtualDevices,
    device_id,
)
from aggregator.simulate.fleet import Fate, StreamPurpose, stream
from aggregator.simulate.traffic import PublishedRound, publish, terms_of, update_bytes
from aggregator.task.artifacts import read_artifacts
from aggregator.task.file import read_catalogue_file
from device_sdk.evaluation.report import read_evaluations
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.manifest import EVERYONE, evaluates_in, selected

_EVALUATED_BY = 2**31
"""Rounds of evaluation alone are numbered from here: their draws are apart from the others'."""


@dataclass(frozen=True, slots=True)
class PlayedRound:
    """What happened in one round.

    Attributes:
        number: from 1.
        version, next_version: that it began with, and that it made; None: without quorum.
        began_seconds, seconds: in virtual time, since the run's beginning and the round's.
        selected: devices; of these the other numbers are parts.
        counted: updates.
        late, silent, crashed: devices whose update came too late, or not at all.
        failed, refused: devices by why there was no update, and updates by why they do not count.
        down_bytes, up_bytes: of all messages of the round.
        metrics: of the method.
        figures: of ``version``, where it ends with this round and devices evaluated it.
        processor_seconds: that the round took here.
        failure: in words, what the first device that failed said.
    """

    number: int
    version: int
    next_version: int | None
    began_seconds: float
    seconds: float
    selected: int
    counted: int
    late: int
    silent: int
    crashed: int
    failed: Mapping[str, int]
    refused: Mapping[str, int]
    down_bytes: int
    up_bytes: int
    metrics: Mapping[str, float]
    figures: tuple[Figure, ...]
    processor_seconds: float
    failure: str = ""


class _Came(NamedTuple):
    """What came of a device, in virtual seconds after the opening. ``reason``: why it does not
    count, whenever it comes; ``body``: where it lies in the round's file, and its length."""

    seconds: float
    answer: DeviceAnswer
    reason: str = ""
    body: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class _RoundTally:
    """What comes in a round; ``bodies``: of updates, in no one's memory when they are many."""

    bodies: IO[bytes]
    came: list[_Came] = field(default_factory=list)
    up_bytes: int = 0
    fetched_bytes: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    verdicts: dict[int, bool] = field(default_factory=dict)
    failure: str = ""


class TaskSimulation:
    """One run of a task: the same settings and devices give the same bits.

    Updates are absorbed in the order of the devices, whoever computes them. Raises AggregatorError
    where the task could not begin with so many devices.
    """

    def __init__(self, settings: DeviceSettings, devices: VirtualDevices) -> None:
        task, fleet = settings.task, settings.fleet
        self._task, self._fleet, self._devices = task, fleet, devices
        lacking = max(task.round.wait_for_devices, task.round.quorum)
        if fleet.devices < lacking:
            key = "quorum" if task.round.quorum == lacking else "wait_for_devices"
            raise AggregatorError(
                f"{task.path}: no round makes a version with {fleet.devices} devices: round.{key} "
                f"is {lacking}"
            )
        artifacts = read_artifacts(task)
        self._terms = terms_of(task, artifacts)
        catalogue = None if task.catalogue is None else read_catalogue_file(task.catalogue)
        self._items = 0 if catalogue is None else len(catalogue)
        rng = stream(fleet.seed, StreamPurpose.MODEL)
        try:
            self.method = task.binding.build(self._items, rng, [e.artifact for e in artifacts])
        except ValueError as error:
            raise AggregatorError(
                f"the task's artifacts do not suit {task.binding.method_name}: {error}"
            ) from None
        if task.warm_start is not None:
            ids = () if catalogue is None else catalogue.items
            task.warm_start.begin(self.method, None, task.ranking, ids)
        self._number = 0
        self._clock_seconds = 0.0
        self._attendance = Attendance(KnownHabits(None), task.round)
        self._carried: list[Update] = []
        """Updates of rounds without quorum, which the next one begins with."""
        self._said: dict[int, tuple[str, bytes]] = {}
        """What devices said of the present version."""
        self._history: list[Evaluated] = []

    @property
    def stopped(self) -> bool:
        """Whether early stopping (``evaluation.early_stopping``) has ended the rounds."""
        asked = self._task.evaluation
        if asked is None or not asked.early_stopping:
            return False
        stall = stalled_since(
            self._history,
            higher_is_better=asked.ranking.higher_is_better,
            most_rounds=asked.early_stopping,
            least_improvement=asked.least_improvement,
        )
        return stall is not None

    def most_rounds(self, asked: int) -> int:
        """How many rounds more there can be, out of so many (``round.most_rounds``)."""
        limit = self._task.round.most_rounds
        return min(asked, limit - self._number) if limit else asked

    def rounds(self, most: int) -> Iterator[PlayedRound]:
        """So many rounds more, or fewer where the task stops them."""
        for _ in range(self.most_rounds(most)):
            if self.stopped:
                return
            yield self.round()

    def round(self) -> PlayedRound:
        """One round."""
        with tempfile.SpooledTemporaryFile(GROUP_BYTES) as bodies:
            return self._round(_RoundTally(bodies))

    def _round(self, tally: _RoundTally) -> PlayedRound:
        began = time.process_time()
        self._number += 1
        published = self._publish(self._number)
        version = published.manifest.version
        for update in self._carried:
            self.method.absorb(update)
        fates = self._fleet.fates(self._number)
        devices = self._selected(published)
        silent = sum(1 for each in devices if fates[each] == Fate.SILENT)
        crashed = sum(1 for each in devices if fates[each] == Fate.CRASHES)
        training = [
            Chosen(each) for each in devices if fates[each] not in (Fate.SILENT, Fate.CRASHES)
        ]
        for answer in self._devices.round(published, training):
            self._take(published, answer, Fate(int(fates[answer.device])), tally)
        seconds, in_time = self._close(devices, tally.came)
        counted = [each for each in in_time if not each.reason]
        held = self._absorb(counted, tally.bodies)
        tally.verdicts |= {each.answer.device: True for each in counted}
        self._devices.settle(self._number, tally.verdicts)

        participants = len(counted) + len(self._carried)
        summary = RoundSummary(self._number, version, participants)
        made: int | None = None
        if participants >= self._task.round.quorum:
            summary = self.method.close_round()
            made, self._carried = summary.version, []
        else:
            self._carried += held
        figures = self._figures(version) if made not in (None, version) else ()
        played = PlayedRound(
            number=self._number,
            version=version,
            next_version=made,
            began_seconds=self._clock_seconds,
            seconds=seconds,
            selected=len(devices),
            counted=len(counted),
            late=len(tally.came) - len(in_time),
            silent=silent,
            crashed=crashed,
            failed=dict(tally.failed),
            refused=dict(Counter(each.reason for each in in_time if each.body[1] and each.reason)),
            down_bytes=published.down_bytes * (len(devices) - silent) + tally.fetched_bytes,
            up_bytes=tally.up_bytes,
            metrics=dict(summary.metrics),
            figures=figures,
            processor_seconds=time.process_time() - began,
            failure=tally.failure,
        )
        self._clock_seconds += seconds + self._task.round.pause_seconds
        return played

    def evaluate(self) -> tuple[Figure, ...]:
        """Figures of the newest version, by as many devices as evaluate in a round: what they would
        find out in the next one. Empty where the task asks for none.

        The run is over then.
        """
        asked = self._task.evaluation
        if asked is None:
            return ()
        number = _EVALUATED_BY + self._number
        published = self._publish(number)
        terms, manifest = replace(asked.terms, every_rounds=1), published.manifest
        chosen = [
            Chosen(each, trains=False)
            for each in self._selected(published)
            if evaluates_in(terms, manifest.sampling_seed, manifest.task, number, device_id(each))
        ]
        self._said.clear()
        for answer in self._devices.round(published, chosen):
            self._note(answer)
        return self._figures(manifest.version)

    def popularity(self) -> tuple[Figure, ...]:
        """What the most popular items alone would reach, of all devices and users. Empty for a task
        that recommends nothing, or evaluates nothing."""
        asked = self._task.evaluation
        if asked is None:
            return ()
        return tuple(each for each in summarise(self._devices.popularity(), asked.rules))

    @property
    def model_sha256(self) -> str:
        """Of the newest model's arrays, or of all that the method keeps where devices have theirs:
        two runs with one are the same, bit for bit."""
        arrays = self.method.model_arrays
        digest = hashlib.sha256()
        for name, array in sorted((self.method.state() if arrays is None else arrays).items()):
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def _publish(self, number: int) -> PublishedRound:
        opened = self.method.open_round(number)
        settings = self._task.round
        likely = map(self._attendance.habits.is_likely, map(device_id, range(self._fleet.devices)))
        threshold = min(EVERYONE, int(asked_share(settings, sum(likely)) * 2**64))
        rng = stream(self._fleet.seed, StreamPurpose.PUBLISH, number)
        try:
            return publish(self._task, self._terms, opened, threshold, rng)
        except ValueError as error:
            raise AggregatorError(f"round {number}: the model cannot be sent: {error}") from None

    def _selected(self, published: PublishedRound) -> list[int]:
        manifest = published.manifest
        if manifest.threshold == EVERYONE:
            return list(range(self._fleet.devices))
        seed, threshold, task = manifest.sampling_seed, manifest.threshold, manifest.task
        return [
            each
            for each in range(self._fleet.devices)
            if selected(seed, threshold, task, manifest.round, device_id(each))
        ]

    def _take(
        self, published: PublishedRound, answer: DeviceAnswer, fate: Fate, tally: _RoundTally
    ) -> None:
        """Note what comes of a device, and why it cannot count, if that does not hang on time."""
        tally.fetched_bytes += answer.fetched_bytes
        if not answer.body:
            tally.failed[answer.reason] += 1
            tally.failure = tally.failure or f"device {answer.device}: {answer.detail}"
            tally.came.append(_Came(answer.seconds, answer, answer.reason))
            return
        device = device_id(answer.device)
        tally.up_bytes += update_bytes(
            device, published.manifest, answer.option, answer.evaluation, answer.body
        )
        tally.verdicts[answer.device] = False
        reason = ""
        try:
            update = self._decode(answer.device, answer.body)
            self.method.check(_spoilt(update) if fate is Fate.SPOILT else update)
        except WireError as error:
            reason = error.reason
        seconds = np.inf if fate is Fate.LATE else answer.seconds
        place = tally.bodies.tell()
        tally.bodies.write(answer.body)
        came = _Came(seconds, answer._replace(body=b""), reason, (place, len(answer.body)))
        tally.came.append(came)

    def _close(
        self, devices: Sequence[int], came: Sequence[_Came]
    ) -> tuple[float, Sequence[_Came]]:
        """When the round ends, in seconds after its opening, and what came before that: each is
        heard after the other, as :class:`~aggregator.rounds.machine.RoundMachine` hears them."""
        settings, attendance = self._task.round, self._attendance
        attendance.begin(self._number, settings.deadline_seconds, set(map(device_id, devices)))

        def has_quorum() -> bool:
            return attendance.counted + len(self._carried) >= settings.quorum

        order = sorted(came, key=lambda each: (each.seconds, each.answer.device))
        ends, heard = settings.deadline_seconds, 0
        for each in order:
            if each.seconds > ends:
                break
            seconds = None if each.reason else each.seconds
            attendance.heard_of(device_id(each.answer.device), seconds)
            heard += 1
            ends = max(each.seconds, attendance.closes_seconds(np.inf, has_quorum))
            enough = 0 < settings.wanted <= attendance.counted + len(self._carried)
            if enough or (attendance.counted and not attendance.missing):
                ends = each.seconds
                break
        blamed = attendance.in_vain(ends) if attendance.counted else ()
        attendance.habits.save(blamed, lambda device: True)
        attendance.end()
        for each in order[heard:]:
            useful = not each.reason and each.seconds <= settings.deadline_seconds
            device = device_id(each.answer.device)
            attendance.came_late(device, each.seconds if useful else None, ends)
        return ends, order[:heard]

    def _absorb(self, came: Iterable[_Came], bodies: IO[bytes]) -> list[Update]:
        """Absorb updates in the order of the devices; those that the next round may begin with."""
        held: list[Update] = []
        absorbed = len(self._carried)
        for each in sorted(came, key=lambda each: each.answer.device):
            place, length = each.body
            bodies.seek(place)
            update = self._decode(each.answer.device, bodies.read(length))
            self.method.absorb(update)
            self._note(each.answer)
            held.append(update)
            absorbed += 1
            if absorbed >= self._task.round.quorum:
                held.clear()  # it makes a version: nothing is carried over
        return held

    def _decode(self, device: int, body: bytes) -> Update:
        name = device_id(device).hex()
        return self._task.binding.decode(body, self._number, self._items, name)

    def _note(self, answer: DeviceAnswer) -> None:
        if answer.evaluation:
            self._said[answer.device] = (answer.option, answer.evaluation)

    def _figures(self, version: int) -> tuple[Figure, ...]:
        """Of a version that no further device evaluates."""
        asked = self._task.evaluation
        said, self._said = sorted(self._said.items()), {}
        if asked is None or not said:
            return ()
        reports = (DeviceReport(part, read_evaluations(data)) for _, (part, data) in said)
        figures = tuple(summarise(reports, asked.rules))
        for each in figures:
            if each.part == "" and figure_name(each.stage, each.metric) == asked.ranking.metric:
                self._history.append(Evaluated(version, self._number, each.comparable))
        return figures


def _spoilt(update: Update) -> Update:
    spoilt = {
        name: np.full_like(array, np.nan) if array.dtype.kind == "f" else array
        for name, array in update.tensors.items()
    }
    return Update(update.round_id, spoilt, update.metadata, update.sender)
