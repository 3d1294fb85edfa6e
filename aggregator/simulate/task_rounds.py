"""A task's rounds over virtual devices: sampling, deadlines and quorum in virtual time, evaluation.

What ``serve`` does around a method, without messages, store and keys: the same arithmetic, by the
same functions.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
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
from aggregator.simulate.traffic import PublishedRound, publish, update_bytes
from aggregator.task.artifacts import read_artifacts, terms_of
from aggregator.task.file import read_catalogue_file
from device_sdk.evaluation.report import read_evaluations
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.manifest import EVERYONE, evaluates_in, selected

_LATE = "late"
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
        busy: devices that train on as the round ends, for it or for an earlier one: what they send
            may count in a later one (``round.late``).
        stale: updates of earlier rounds that were counted in this one, beside ``counted``.
        failed, refused: devices by why there was no update, and updates by why they do not count.
        down_bytes, up_bytes: of all messages of the round.
        metrics: of the method.
        figures: of ``version``, where it ends with this round and devices evaluated it.
        earlier: of versions of before of which no more is to be heard, likewise, by the number of
            the round that each ended with (``round.late``).
        processor_seconds: that the round took here.
        failure: in words, what the first device that failed said.
        selected_by, counted_by: by the kind of device (:meth:`VirtualFleet.by_kind`) how many were
            selected, and how many updates counted, of whatever round.
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
    busy: int = 0
    stale: int = 0
    earlier: Mapping[int, tuple[Figure, ...]] = field(default_factory=dict)
    selected_by: Mapping[str, int] = field(default_factory=dict)
    counted_by: Mapping[str, int] = field(default_factory=dict)


class _UnderWay(NamedTuple):
    """An update whose round ended before it came. Its device does nothing else until then.

    Attributes:
        at_seconds: when it comes, since the run's beginning.
        took_seconds: likewise, since its round's.
        number, version: of its round.
        answer: with its body.
    """

    at_seconds: float
    took_seconds: float
    number: int
    version: int
    answer: DeviceAnswer


class _Came(NamedTuple):
    """What came of a device, in virtual seconds after the opening. ``reason``: why it does not
    count, whenever it comes; ``body``: where it lies in the round's file, and its length; ``late``:
    as what it was under way, if it is of an earlier round."""

    seconds: float
    answer: DeviceAnswer
    reason: str = ""
    body: tuple[int, int] = (0, 0)
    late: _UnderWay | None = None


class _Coming:
    """What comes in a round, the earliest first, and of what comes together the lowest device's."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, _Came]] = []
        self._added = 0

    def add(self, came: _Came) -> None:
        self._added += 1
        heappush(self._heap, (came.seconds, came.answer.device, self._added, came))

    def until(self, seconds: float) -> _Came | None:
        """The next one, where it comes by then."""
        return heappop(self._heap)[3] if self._heap and self._heap[0][0] <= seconds else None

    def rest(self) -> list[_Came]:
        """What comes after that."""
        return [came for _, _, _, came in sorted(self._heap)]


class _AskedOf(NamedTuple):
    """Whom a round asked for an evaluation, but for those that were heard in it or a later one."""

    number: int
    began_seconds: float
    missing: set[bytes]


@dataclass(slots=True)
class _SaidOf:
    """What devices said of a version that has no figures yet, by device, and its rounds."""

    rounds: list[_AskedOf] = field(default_factory=list)
    by_device: dict[int, tuple[str, bytes]] = field(default_factory=dict)


@dataclass(slots=True)
class _RoundTally:
    """What comes in a round; ``bodies``: of updates, in no one's memory when they are many.

    Attributes:
        in_time: what was heard before the round ended, in that order.
        late, busy: see :class:`PlayedRound`.
        started: devices that began to train.
    """

    bodies: IO[bytes]
    coming: _Coming = field(default_factory=_Coming)
    in_time: list[_Came] = field(default_factory=list)
    late: int = 0
    busy: int = 0
    started: int = 0
    up_bytes: int = 0
    fetched_bytes: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    verdicts: dict[int, bool] = field(default_factory=dict)
    failure: str = ""

    def body(self, came: _Came) -> bytes:
        """Of an update of this round or, as it was kept, of an earlier one."""
        if came.late is not None:
            return came.late.answer.body
        place, length = came.body
        self.bodies.seek(place)
        return self.bodies.read(length)


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
        self._said: dict[int, _SaidOf] = {}
        """By version, the oldest first."""
        self._history: list[Evaluated] = []
        self._under_way: list[_UnderWay] = []

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
        self._ask(published, devices)
        silent = sum(1 for each in devices if fates[each] == Fate.SILENT)
        crashed = sum(1 for each in devices if fates[each] == Fate.CRASHES)

        def train(free: Sequence[int], at_seconds: float) -> None:
            """These devices take part, from so long after the opening on."""
            tally.started += len(free)
            for answer in self._devices.round(published, [Chosen(each) for each in free]):
                fate = Fate(int(fates[answer.device]))
                self._take(published, answer, fate, tally, at_seconds)

        training = [each for each in devices if fates[each] not in (Fate.SILENT, Fate.CRASHES)]
        seconds = self._collect(version, devices, training, train, tally)
        counted = [each for each in tally.in_time if not each.reason]
        own = [each for each in counted if each.late is None]
        held = self._absorb(version, counted, tally)
        tally.verdicts |= {each.answer.device: True for each in own}
        self._devices.settle(self._number, tally.verdicts)

        participants = len(counted) + len(self._carried)
        summary = RoundSummary(self._number, version, participants)
        made: int | None = None
        if participants >= self._task.round.quorum:
            summary = self.method.close_round()
            made, self._carried = summary.version, []
        else:
            self._carried += held
        found = self._settle(made or version, self._clock_seconds + seconds)
        figures = found.pop(self._number, ())
        played = PlayedRound(
            number=self._number,
            version=version,
            next_version=made,
            began_seconds=self._clock_seconds,
            seconds=seconds,
            selected=len(devices),
            counted=len(own),
            late=tally.late,
            silent=silent,
            crashed=crashed,
            failed=dict(tally.failed),
            refused=dict(Counter(e.reason for e in tally.in_time if e.reason and _is_update(e))),
            down_bytes=published.down_bytes * (tally.started + crashed) + tally.fetched_bytes,
            up_bytes=tally.up_bytes,
            metrics=dict(summary.metrics),
            figures=figures,
            processor_seconds=time.process_time() - began,
            failure=tally.failure,
            busy=tally.busy,
            stale=len(counted) - len(own),
            earlier=found,
            selected_by=self._fleet.by_kind(devices),
            counted_by=self._fleet.by_kind([each.answer.device for each in counted]),
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
        said = _SaidOf()
        for answer in self._devices.round(published, chosen):
            if answer.evaluation:
                said.by_device[answer.device] = (answer.option, answer.evaluation)
        return self._figures(said)

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
        self,
        published: PublishedRound,
        answer: DeviceAnswer,
        fate: Fate,
        tally: _RoundTally,
        at_seconds: float,
    ) -> None:
        """Note what comes of a device, and why it cannot count, if that does not hang on time."""
        tally.fetched_bytes += answer.fetched_bytes
        seconds = at_seconds + answer.seconds
        if not answer.body:
            tally.failed[answer.reason] += 1
            tally.failure = tally.failure or f"device {answer.device}: {answer.detail}"
            tally.coming.add(_Came(seconds, answer, answer.reason))
            return
        device = device_id(answer.device)
        tally.up_bytes += update_bytes(
            device, published.manifest, answer.option, answer.evaluation, answer.body
        )
        tally.verdicts[answer.device] = False
        reason = ""
        try:
            update = self._decode(answer.device, answer.body, self._number)
            self.method.check(_spoilt(update) if fate is Fate.SPOILT else update)
        except WireError as error:
            reason = error.reason
        tally.bodies.seek(0, os.SEEK_END)
        place = tally.bodies.tell()
        tally.bodies.write(answer.body)
        body = place, len(answer.body)
        seconds = np.inf if fate is Fate.LATE else seconds
        tally.coming.add(_Came(seconds, answer._replace(body=b""), reason, body))

    def _collect(
        self,
        version: int,
        devices: Sequence[int],
        training: Sequence[int],
        train: Callable[[Sequence[int], float], None],
        tally: _RoundTally,
    ) -> float:
        """Let devices train and the round end, and say when, in seconds after its opening: what
        comes is heard one after the other, as :class:`~aggregator.rounds.machine.RoundMachine`
        hears it.

        A device that is busy with an earlier round begins once it is through, if this one is still
        open then.
        """
        settings, attendance = self._task.round, self._attendance
        attendance.begin(self._number, settings.deadline_seconds, set(map(device_id, devices)))
        busy = {each.answer.device for each in self._under_way}
        for late in self._under_way:
            seconds = max(0.0, late.at_seconds - self._clock_seconds)
            tally.coming.add(_Came(seconds, late.answer, late=late))
        train([each for each in training if each not in busy], 0.0)
        waiting = busy & set(training)
        ends, gathered = settings.deadline_seconds, len(self._carried)
        while (came := tally.coming.until(ends)) is not None:
            device = device_id(came.answer.device)
            self._heard(device, self._number if came.late is None else came.late.number)
            if came.late is None:
                attendance.heard_of(device, None if came.reason else came.seconds)
            else:
                came = self._judged(came, version)
                took = came.late.took_seconds if came.late is not None else np.inf
                useful = not came.reason and took <= settings.deadline_seconds
                attendance.came_late(device, took if useful else None, came.seconds)
            if came.reason == _LATE:
                tally.late += 1
            else:
                tally.in_time.append(came)
            gathered += not came.reason
            has_quorum = partial(bool, gathered >= settings.quorum)
            ends = max(came.seconds, attendance.closes_seconds(np.inf, has_quorum))
            enough = 0 < settings.wanted <= gathered
            if enough or (attendance.counted and not attendance.missing):
                ends = came.seconds
                break
            if came.late is not None and came.answer.device in waiting:
                train([came.answer.device], came.seconds)
        blamed = attendance.in_vain(ends) if attendance.counted else ()
        attendance.habits.save(blamed, lambda device: True)
        attendance.end()
        self._leave(version, ends, tally)
        heard = sum(1 for each in tally.in_time if each.late is None)
        if settings.most_age >= 0:
            tally.busy = len(training) - heard
        return ends

    def _leave(self, version: int, ends: float, tally: _RoundTally) -> None:
        """The round ended without what is still to come: that is too late, or counts later."""
        settings, rest = self._task.round, tally.coming.rest()
        self._under_way = [each.late for each in rest if each.late is not None]
        for each in rest:
            device = device_id(each.answer.device)
            if each.late is not None:
                continue
            if settings.most_age >= 0 and each.body[1]:
                del tally.verdicts[each.answer.device]
                seconds = max(ends, each.seconds) if np.isfinite(each.seconds) else ends
                answer = each.answer._replace(body=tally.body(each))
                at_seconds = self._clock_seconds + seconds
                late = _UnderWay(at_seconds, seconds, self._number, version, answer)
                self._under_way.append(late)
                continue
            tally.late += 1
            useful = not each.reason and each.seconds <= settings.deadline_seconds
            self._attendance.came_late(device, each.seconds if useful else None, ends)

    def _judged(self, came: _Came, version: int) -> _Came:
        """An earlier round's update as it is judged in this one."""
        assert came.late is not None
        if version - came.late.version > self._task.round.most_age:
            return came._replace(reason=_LATE)
        try:
            self.method.check(self._read(came, version, came.late.answer.body))
        except WireError as error:
            return came._replace(reason=error.reason)
        return came

    def _absorb(self, version: int, came: Iterable[_Came], tally: _RoundTally) -> list[Update]:
        """Absorb updates in the order of the devices; those that the next round may begin with."""
        held: list[Update] = []
        absorbed = len(self._carried)
        for each in sorted(came, key=lambda each: (each.answer.device, each.late is None)):
            update = self._read(each, version, tally.body(each))
            self.method.absorb(update)
            self._note(version if each.late is None else each.late.version, each)
            held.append(update)
            absorbed += 1
            if absorbed >= self._task.round.quorum:
                held.clear()  # it makes a version: nothing is carried over
        return held

    def _read(self, came: _Came, version: int, body: bytes) -> Update:
        if came.late is None:
            return self._decode(came.answer.device, body, self._number)
        update = self._decode(came.answer.device, body, came.late.number)
        return replace(update, age=version - came.late.version)

    def _decode(self, device: int, body: bytes, number: int) -> Update:
        name = device_id(device).hex()
        return self._task.binding.decode(body, number, self._items, name)

    # -- what devices find out: as rounds/evaluator.py has it, without a store ---------------------

    def _ask(self, published: PublishedRound, devices: Iterable[int]) -> None:
        asked, manifest = self._terms.evaluation, published.manifest
        missing: set[bytes] = set()
        if asked is not None and self._task.round.most_age >= 0:
            seed, task, number = manifest.sampling_seed, manifest.task, manifest.round
            missing.update(
                each
                for each in map(device_id, devices)
                if evaluates_in(asked, seed, task, number, each)
            )
        said = self._said.setdefault(manifest.version, _SaidOf())
        said.rounds.append(_AskedOf(manifest.round, self._clock_seconds, missing))

    def _heard(self, device: bytes, number: int) -> None:
        for said in self._said.values():
            for asked in said.rounds:
                if asked.number <= number:
                    asked.missing.discard(device)

    def _note(self, version: int, came: _Came) -> None:
        answer = came.answer
        if answer.evaluation and version in self._said:
            self._said[version].by_device[answer.device] = (answer.option, answer.evaluation)

    def _settle(self, newest: int, now_seconds: float) -> dict[int, tuple[Figure, ...]]:
        """Figures of versions before the ``newest`` of which no more is to be heard, by the last
        round of each."""
        settings, found = self._task.round, {}
        for version in [each for each in self._said if each < newest]:
            said = self._said[version]
            waits = any(
                self._attendance.awaits_any(
                    each.missing,
                    each.number,
                    settings.deadline_seconds,
                    now_seconds - each.began_seconds,
                )
                for each in said.rounds
            )
            if self.stopped or (waits and newest - version <= settings.most_age):
                break
            del self._said[version]
            number = said.rounds[-1].number
            if figures := self._figures(said):
                found[number] = figures
                self._history += self._compared(version, number, figures)
        return found

    def _figures(self, said: _SaidOf) -> tuple[Figure, ...]:
        """Of a version that no further device evaluates."""
        asked = self._task.evaluation
        if asked is None or not said.by_device:
            return ()
        told = (said.by_device[each] for each in sorted(said.by_device))
        reports = (DeviceReport(part, read_evaluations(data)) for part, data in told)
        return tuple(summarise(reports, asked.rules))

    def _compared(
        self, version: int, number: int, figures: Iterable[Figure]
    ) -> Iterator[Evaluated]:
        """What early stopping compares the version by."""
        name = "" if self._task.ranking is None else self._task.ranking.metric
        for each in figures:
            if each.part == "" and figure_name(each.stage, each.metric) == name:
                yield Evaluated(version, number, each.comparable)


def _is_update(came: _Came) -> bool:
    return bool(came.body[1]) or came.late is not None


def _spoilt(update: Update) -> Update:
    spoilt = {
        name: np.full_like(array, np.nan) if array.dtype.kind == "f" else array
        for name, array in update.tensors.items()
    }
    return Update(update.round_id, spoilt, update.metadata, update.sender)
