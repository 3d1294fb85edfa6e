"""Virtual devices: a task's learners over their data, as :mod:`device_sdk.train` trains them.

Each device draws from a generator of its own in each round, so a round is the same whatever the
groups, the processes and the rounds that went wrong before.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from aggregator.errors import AggregatorError
from aggregator.evaluation import DeviceReport
from aggregator.rounds.model_parts import option_name
from aggregator.simulate.data import (
    DataError,
    Entries,
    Rows,
    TableEntries,
    arrays_of,
    entries_of,
    interactions_of,
    require_known,
    require_samples,
)
from aggregator.simulate.fleet import StreamPurpose, VirtualFleet, stream
from aggregator.simulate.traffic import PublishedRound
from aggregator.task.file import Task, read_catalogue_file
from device_sdk.artifact import Manifest, read_manifest
from device_sdk.errors import DeviceError
from device_sdk.evaluation.report import EvaluationTerms
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.learner import Declined, Learner, LearnerError, LearnerParts, Where
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.methods.scatter.least_squares import items_of
from device_sdk.methods.state import State
from device_sdk.tables.text import Reading
from device_sdk.train.arrays import apart, evaluate_received, train_control
from device_sdk.train.evaluate import HeldOutItem, RankEvaluation, RoundEvaluation
from device_sdk.train.job import learner_class, reason_of
from device_sdk.train.scatter import ScatterTrainer, factor_step
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update, encode_update
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.manifest import evaluates_in, is_control
from device_sdk.wire.publish.report import ItemCount, Reason
from device_sdk.wire.publish.task_messages import BROADCAST_CODECS, TaskTerms, read_attachment

_Kind = tuple[tuple[str, np.dtype[Any], np.dtype[Any], int], ...]
_PLACE, _LENGTH = struct.Struct("<H"), struct.Struct("<I")


class StateStore:
    """Learners' states by device, each as one byte string: integers in as few bytes as they need.

    What is got is what was put, bit for bit.
    """

    def __init__(self) -> None:
        self._packed: dict[int, bytes] = {}
        # Names, dtypes and numbers of axes: of few kinds in one fleet.
        self._kinds: list[_Kind] = []
        self._places: dict[_Kind, int] = {}

    @property
    def nbytes(self) -> int:
        """Of all states together."""
        return sum(map(len, self._packed.values()))

    def put(self, device: int, state: State) -> None:
        """Keep a copy of the state; an empty one takes no room."""
        if not state:
            self._packed.pop(device, None)
            return
        arrays = {name: (array, _narrowest(array)) for name, array in state.items()}
        kind = tuple(
            (name, array.dtype, dtype, array.ndim) for name, (array, dtype) in arrays.items()
        )
        if kind not in self._places:
            self._places[kind] = len(self._kinds)
            self._kinds.append(kind)
        parts = [_PLACE.pack(self._places[kind])]
        parts += [_LENGTH.pack(n) for array, _ in arrays.values() for n in array.shape]
        parts += [array.astype(dtype).tobytes() for array, dtype in arrays.values()]
        self._packed[device] = b"".join(parts)

    def get(self, device: int) -> State | None:
        """The state that was put last; None for none."""
        packed = self._packed.get(device)
        if packed is None:
            return None
        (place,) = _PLACE.unpack_from(packed)
        kind = self._kinds[place]
        offset = _PLACE.size
        shapes = []
        for _, _, _, axes in kind:
            shapes.append(struct.unpack_from(f"<{axes}I", packed, offset))
            offset += _LENGTH.size * axes
        found: dict[str, NDArray[Any]] = {}
        for (name, dtype, stored, _), shape in zip(kind, shapes, strict=True):
            count = int(np.prod(shape, dtype=np.int64))
            array = np.frombuffer(packed, stored, count, offset).reshape(shape)
            found[name] = array.astype(dtype)
            offset += count * stored.itemsize
        return found


def _narrowest(array: NDArray[Any]) -> np.dtype[Any]:
    if array.dtype.kind != "i" or array.size == 0:
        return array.dtype
    found = np.result_type(np.min_scalar_type(array.min()), np.min_scalar_type(array.max()))
    return found if found.kind in "iu" else array.dtype  # no integer holds -1 and 2^63


_FAILURES = (LearnerError, Declined, DeviceError, WireError, ValueError, MemoryError)
_KEPT_BYTES = 256 << 20
"""Of scatter learners that stay as they are from round to round, their triples prepared."""
_RECEIPTS = 8
GROUP_BYTES = 256 << 20
"""Of what the devices that train in one call may send: a round is never in memory whole."""
_MOST_IN_A_GROUP = 1024
T = TypeVar("T")


class FixedInteractions:
    """Interactions that never change; see ``LocalPositives`` of the scatter learner."""

    def __init__(self, positives: Sequence[Rows]) -> None:
        self._positives = tuple(positives)

    def positives(self) -> Sequence[Rows]:
        """Per local user the item rows, as given."""
        return self._positives


def most_in_a_group(broadcast: Broadcast) -> int:
    """How many devices may train in one call, each update being no larger than the broadcast."""
    size = sum(array.size * 4 for array in broadcast.tensors.values())
    return max(1, min(_MOST_IN_A_GROUP, GROUP_BYTES // max(1, size)))


def groups(devices: Iterable[T], most: int) -> Iterator[list[T]]:
    """The devices in their order, at most so many together."""
    left = iter(devices)
    while group := list(islice(left, most)):
        yield group


def train_many(
    learners: Sequence[Learner], broadcast: Broadcast
) -> Sequence[Update | LearnerError]:
    """The learners' updates in their order; those of one class train in one call."""
    found: dict[int, Update | LearnerError] = {}
    kinds: dict[type[Learner], list[int]] = {}
    for place, learner in enumerate(learners):
        kinds.setdefault(type(learner), []).append(place)
    for kind, places in kinds.items():
        trained = kind.train_many([learners[place] for place in places], broadcast)
        found.update(zip(places, trained, strict=True))
    return [found[place] for place in range(len(learners))]


def with_wanted(
    broadcast: Broadcast,
    opened: Broadcast,
    name: str,
    learner: Learner,
    fetch: Callable[[Attachment], Attachment],
    *,
    begins: bool = False,
) -> Broadcast:
    """The broadcast with those attachments of ``opened`` that the device may read and wants; of the
    control arm where it ``begins`` too.

    Raises LearnerError as ``learner.wants`` does.
    """
    readable: Mapping[str, Attachment] = {
        key: attachment
        for key, attachment in opened.attachments.items()
        if not attachment.cohort or name in opened.cohorts[attachment.cohort]
    }
    sizes = {
        key: sum(array.nbytes for array in attachment.tensors.values())
        for key, attachment in readable.items()
    }
    offer = replace(broadcast, offered=sizes)
    wanted = [*learner.wants(offer), *(learner.wants_alone(offer) if begins else ())]
    return replace(offer, attachments={key: fetch(readable[key]) for key in wanted})


class Chosen(NamedTuple):
    """A device of a round. ``trains`` False: it only evaluates the model that it receives."""

    device: int
    trains: bool = True


class DeviceAnswer(NamedTuple):
    """What a device made of a round.

    Attributes:
        device: who.
        option: what it trained: ``k=8``, or an artifact's name as reports have it.
        seconds: that its training took, in virtual time.
        body: of its update; empty where there is none.
        reason: why there is none, as reports have it.
        detail: likewise, in words.
        evaluation: what it found out about the model, as reports have it; empty for nothing.
        fetched_bytes: of the attachments that it wanted.
        items: how many it has, and how many of them the catalogue does not know; None without one.
    """

    device: int
    option: str = ""
    seconds: float = 0.0
    body: bytes = b""
    reason: str = ""
    detail: str = ""
    evaluation: bytes = b""
    fetched_bytes: int = 0
    items: ItemCount | None = None


class VirtualDevices(ABC):
    """The devices of a run, or a part of them. One round after another.

    ``understood``: what the table that their data is of was taken for, in lines for people.
    """

    understood: tuple[str, ...] = ()

    @abstractmethod
    def round(self, published: PublishedRound, chosen: Sequence[Chosen]) -> Iterator[DeviceAnswer]:
        """What each of these devices makes of the round, in their order; none of them twice.

        What a device is to keep of its training is kept when its answer is given.
        """

    def popularity(self) -> list[DeviceReport]:
        """What each device would say of a model that recommends what most devices train on. Here:
        nothing, since the task recommends nothing."""
        return []

    def settle(self, number: int, counted: Mapping[int, bool]) -> None:  # noqa: B027
        """The verdicts on the updates of a round, by device. Here: no matter."""

    def reports(self) -> tuple[str, ...]:
        """Why what runs their artifacts does, in lines for people. Here: nothing to say."""
        return ()

    def close(self) -> None:  # noqa: B027
        """Give back what is held outside of this process. Here: nothing."""


@dataclass(frozen=True)
class DeviceSettings:
    """All that virtual devices are made from, in this process or another.

    ``data``, ``reading``: as :func:`aggregator.simulate.data.entries_of` takes them. ``providers``:
    as :class:`~device_sdk.trainer.Trainer` does.
    """

    task: Task
    data: str
    fleet: VirtualFleet
    reading: Reading = field(default_factory=Reading)
    providers: str = "auto"

    def entries(self) -> Entries:
        """Every device's data. Raises DataError."""
        fleet = self.fleet
        rng = stream(fleet.seed, StreamPurpose.DATA)
        return entries_of(self.data, fleet.devices, rng, self.reading)

    def make(self) -> VirtualDevices:
        """The devices, as installed packages train the task's method. Raises AggregatorError."""
        method = self.task.binding.method_name
        try:
            kind = learner_class(method)
        except (Declined, DeviceError) as error:
            raise AggregatorError(str(error)) from None
        if kind is ScatterTrainer:
            return ScatterDevices(self)
        if not issubclass(kind, Learner):
            raise AggregatorError(
                f"{method} trains with what lies in a device's home ({kind.__name__}), which a "
                "virtual device has none of; a Learner can be simulated"
            )
        return ArrayDevices(self, kind)


class _StandingClock:
    """No time passes within a virtual device's work: it evaluates with all that it holds back."""

    def now(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        pass


class _Streams:
    """A device's generators in a round: as a real one's, that was begun with this seed."""

    def __init__(self, seed: int, number: int, device: int) -> None:
        self._seeds = np.random.SeedSequence([seed, int(StreamPurpose.TRAIN), number, device])
        self.rng = np.random.default_rng(self._seeds)

    def child(self) -> np.random.Generator:
        """As ``Generator.spawn`` of a device's own, so that the training draws what it would."""
        (child,) = self._seeds.spawn(1)
        return np.random.default_rng(child)

    def evaluation(
        self, terms: EvaluationTerms, seconds: float, stages: int = 2
    ) -> RoundEvaluation:
        clock = _StandingClock()
        return RoundEvaluation(terms, terms.time_share * seconds, stages, clock, self.child())


def device_id(device: int) -> bytes:
    """16 bytes; in hexadecimal it is an id as messages name it."""
    return device.to_bytes(16, "big")


def _evaluates(published: PublishedRound, terms: TaskTerms, chosen: Chosen) -> bool:
    asked, manifest = terms.evaluation, published.manifest
    if asked is None or not chosen.trains:
        return asked is not None
    return evaluates_in(
        asked, manifest.sampling_seed, manifest.task, manifest.round, device_id(chosen.device)
    )


def _written(found: RoundEvaluation | None) -> bytes:
    return b"" if found is None else found.written


def _failed(device: int, error: Exception, fetched_bytes: int = 0) -> DeviceAnswer:
    detail = f"{type(error).__name__}: {error}"
    if isinstance(error, (LearnerError, Declined)):
        detail = str(error)
    return DeviceAnswer(
        device, reason=reason_of(error).value, detail=detail, fetched_bytes=fetched_bytes
    )


# Scatter: interactions, and k columns.


class _Known(NamedTuple):
    """What is known of a device from one round to the next."""

    learner: ScatterLearner
    held: list[HeldOutItem]
    triples: int
    items: ItemCount


@dataclass(slots=True)
class _Prepared:
    chosen: Chosen
    known: _Known
    streams: _Streams
    evaluation: RoundEvaluation | None = None
    ranks: RankEvaluation | None = None

    @property
    def trains(self) -> bool:
        """As on a real device, which declines where the catalogue knows none of its items."""
        items = self.known.items
        return self.chosen.trains and not 0 < items.recorded == items.unknown


class ScatterDevices(VirtualDevices):
    """Devices of :class:`~device_sdk.train.scatter.ScatterTrainer`, those of a round in groups."""

    def __init__(self, settings: DeviceSettings, kept_bytes: int = _KEPT_BYTES) -> None:
        task = settings.task
        assert task.catalogue is not None
        self._fleet = settings.fleet
        _refuse_other_classes(self._fleet, "artifact", "trains columns (k), and no artifact")
        self._catalogue = read_catalogue_file(task.catalogue).rows
        self._evaluation = None if task.evaluation is None else task.evaluation.terms
        self._step = factor_step(
            task.artifacts[0] if task.artifacts else packaged_artifact(), settings.providers
        )
        self._entries = settings.entries()
        if isinstance(self._entries, TableEntries):
            self.understood = self._entries.understood
        require_known(self._entries, self._fleet.devices, self._catalogue)
        self._states = StateStore()
        self._kept: OrderedDict[int, _Known] = OrderedDict()
        self._room = kept_bytes

    def round(self, published: PublishedRound, chosen: Sequence[Chosen]) -> Iterator[DeviceAnswer]:
        terms, broadcast = published.read()
        self._fleet.require_width(items_of(broadcast.tensors).shape[1])
        for group in groups(chosen, most_in_a_group(broadcast)):
            prepared = [self._prepared(published, terms, broadcast, each) for each in group]
            training = [each for each in prepared if each.trains]
            trained = train_many([each.known.learner for each in training], broadcast)
            updates = {each.chosen.device: one for each, one in zip(training, trained, strict=True)}
            for each in prepared:
                yield self._answer(terms, broadcast, each, updates.get(each.chosen.device))

    def popularity(self) -> list[DeviceReport]:
        """A model of one column: an item's is how many users are trained on it, and all users like
        it alike. Its ranks are made and ties count as those of any model."""
        asked, items = self._evaluation, len(self._catalogue)
        if asked is None:
            return []
        counts = np.zeros((items, 1), dtype=np.float32)
        for device in range(self._fleet.devices):
            for trained in self._data(device)[0]:
                counts[trained] += 1
        found = []
        for device in range(self._fleet.devices):
            rows, held, _ = self._data(device)
            streams = _Streams(self._fleet.seed, 0, device)
            evaluation = streams.evaluation(asked, math.inf)
            alike = np.ones((len(rows), 1), dtype=np.float32)
            RankEvaluation(evaluation, held).stage("global", alike, counts)
            found.append(DeviceReport("", evaluation.report))
        return found

    def _data(self, device: int) -> tuple[tuple[Rows, ...], list[HeldOutItem], ItemCount]:
        return interactions_of(self._entries, device, self._catalogue, self._evaluation)

    def _answer(
        self,
        terms: TaskTerms,
        broadcast: Broadcast,
        each: _Prepared,
        found: Update | LearnerError | None,
    ) -> DeviceAnswer:
        device, learner, items = each.chosen.device, each.known.learner, items_of(broadcast.tensors)
        count = each.known.items
        self._keep(device, each.known)
        if each.chosen.trains and not each.trains:
            declined = Declined(str(count), Reason.UNKNOWN_ITEMS)
            return _failed(device, declined)._replace(items=count)
        if isinstance(found, LearnerError):
            return _failed(device, found)
        option = f"k={learner.columns}"
        if found is None:
            return DeviceAnswer(device, option, evaluation=_written(each.evaluation), items=count)
        width = items.shape[1]
        body = encode_scatter_update(found, width, terms.update_codec, each.streams.rng)
        if each.ranks is not None and learner.personalises(broadcast):
            each.ranks.stage("personal", learner.vectors(broadcast), items)
        seconds = self._fleet.seconds(device, each.known.triples, learner.columns / width)
        evaluation = _written(each.evaluation)
        return DeviceAnswer(device, option, seconds, body, evaluation=evaluation, items=count)

    def _prepared(
        self, published: PublishedRound, terms: TaskTerms, broadcast: Broadcast, chosen: Chosen
    ) -> _Prepared:
        device, items = chosen.device, items_of(broadcast.tensors)
        known = self._known(device)
        learner = known.learner
        streams = _Streams(self._fleet.seed, published.manifest.round, device)
        learner.rng = streams.rng
        learner.columns = self._fleet.columns(
            device, known.triples, items.shape[1], terms.train_seconds
        )
        each = _Prepared(chosen, known, streams)
        if terms.evaluation is not None and _evaluates(published, terms, chosen):
            each.evaluation = streams.evaluation(terms.evaluation, terms.train_seconds)
            each.ranks = RankEvaluation(each.evaluation, known.held)
            each.ranks.stage("global", learner.vectors(broadcast), items)
        return each

    def _known(self, device: int) -> _Known:
        kept = self._kept.pop(device, None)
        if kept is not None:
            self._room += _kept_bytes(kept.triples)
            return kept
        rows, held, items = self._data(device)
        learner = ScatterLearner(FixedInteractions(rows), self._step, 1, np.random.default_rng(0))
        state = self._states.get(device)
        if state is not None:
            learner.restore(state)
        return _Known(learner, held, max(1, sum(map(len, rows))), items)

    def _keep(self, device: int, known: _Known) -> None:
        """As it is where there is room, and else what it has to remember."""
        if self._room >= _kept_bytes(known.triples):
            self._room -= _kept_bytes(known.triples)
            self._kept[device] = known
        else:
            self._states.put(device, known.learner.state())


def _kept_bytes(triples: int) -> int:
    """About what a prepared learner takes: measured with tracemalloc."""
    return 6000 + 110 * triples


def _refuse_other_classes(fleet: VirtualFleet, name: str, otherwise: str) -> None:
    for each in fleet.speeds.classes:
        if getattr(each, name):
            raise AggregatorError(
                f"--speeds: the class {each.name!r} has {name}; a device of this task {otherwise}"
            )


# Methods on arrays: one device after another, for all of them share a trainer an artifact.


class _ReadRound(NamedTuple):
    """A round, as a device reads it. ``opened``: what it may fetch."""

    published: PublishedRound
    terms: TaskTerms
    broadcast: Broadcast
    opened: Broadcast


class ArrayDevices(VirtualDevices):
    """Devices of :class:`~device_sdk.train.arrays.ArrayTrainer`. ``kind``: what learns on them;
    ``opens``: makes a trainer of an artifact's folder."""

    def __init__(
        self,
        settings: DeviceSettings,
        kind: type[Learner],
        opens: Callable[[Path], Trainer] | None = None,
    ) -> None:
        task = settings.task
        self._fleet, self._kind = settings.fleet, kind
        self._opens = opens or partial(Trainer, providers=settings.providers)
        _refuse_other_classes(self._fleet, "k", "trains an artifact, and no columns")
        self._folders, self._companions = task.artifacts, task.companions
        manifests = [read_manifest(folder) for folder in task.artifacts]
        self._names = [each.name for each in manifests]
        self._fleet.require_artifacts(self._names)
        sizes = np.array([_size(each) for each in manifests], dtype=np.float64)
        self._parts = (sizes / max(1.0, sizes.max(initial=1.0))).tolist()
        self._entries = settings.entries()
        require_samples(self._entries, self._fleet.devices)
        self._states = StateStore()
        self._trained: dict[int, int] = {}
        """By device the artifact that its state is of."""
        self._receipts: dict[int, list[tuple[int, bool]]] = {}
        self._held: dict[tuple[int, str], int] = {}
        """By device and attachment what it fetched last, which it does not fetch again."""
        self._trainers: dict[Path, Trainer] = {}
        self._read: _ReadRound | None = None  # of the last round, in which others may begin later

    def round(self, published: PublishedRound, chosen: Sequence[Chosen]) -> Iterator[DeviceAnswer]:
        if self._read is None or self._read.published is not published:
            self._read = _ReadRound(published, *published.read(), published.offered())
        read = self._read
        for each in chosen:
            fetched = [0]
            try:
                yield self._answer(read, each, fetched)
            except DataError:
                raise
            except _FAILURES as error:
                yield _failed(each.device, error, fetched[0])

    def _answer(self, read: _ReadRound, chosen: Chosen, fetched: list[int]) -> DeviceAnswer:
        (published, terms, broadcast, opened), device = read, chosen.device
        data = arrays_of(self._entries, device)
        samples = data.samples
        streams = _Streams(self._fleet.seed, published.manifest.round, device)
        asked, manifest = terms.evaluation, published.manifest
        control = asked is not None and is_control(asked, manifest.task, device_id(device))
        trainings = 2 if control else 1
        affordable = terms.train_seconds / trainings
        place = self._fleet.option(device, samples, self._names, self._parts, affordable)
        option = option_name(self._names[place])

        kept = apart(self._state(device, place))[1]
        if opened.attachments:
            learner, _ = self._learner(device, place, data, streams.rng)
            fetch = partial(self._fetched, device, opened, published, fetched)
            name = device_id(device).hex()
            begins = control and not kept
            broadcast = with_wanted(broadcast, opened, name, learner, fetch, begins=begins)
        evaluation, found = None, None
        if asked is not None and _evaluates(published, terms, chosen):
            found = streams.evaluation(asked, affordable, 1 + trainings)
            learner, trainer = self._learner(device, place, data, streams.rng)
            evaluation = evaluate_received(learner, trainer, broadcast, data, found)
        if not chosen.trains:
            return DeviceAnswer(device, option, evaluation=_written(found))

        learner, trainer = self._learner(device, place, data, streams.rng)
        update = learner.train(broadcast)
        body = encode_update(update, BROADCAST_CODECS[terms.update_codec], streams.rng)
        if evaluation is not None and learner.personalises(broadcast):
            evaluation.stage("personal", trainer)
        state = learner.state() if learner.carries_over(broadcast) else {}
        if control:
            make = partial(self._new_learner, device, place, data, streams.child())
            state = {**state, **train_control(make, broadcast, kept, evaluation)}
        if state:
            self._states.put(device, state)
            self._trained[device] = place
        seconds = trainings * self._fleet.seconds(device, samples, self._parts[place])
        return DeviceAnswer(
            device, option, seconds, body, evaluation=_written(found), fetched_bytes=fetched[0]
        )

    def settle(self, number: int, counted: Mapping[int, bool]) -> None:
        if self._kind.needs_receipts:
            for device, was in counted.items():
                known = self._receipts.setdefault(device, [])
                known.append((number, was))
                del known[:-_RECEIPTS]

    def reports(self) -> tuple[str, ...]:
        reports = {each.provider_report for each in self._trainers.values()}
        return tuple(sorted(filter(None, reports)))

    def _learner(
        self, device: int, place: int, data: Any, rng: np.random.Generator
    ) -> tuple[Learner, Trainer]:
        """The learner as its last commit left it; a new one for an artifact that it is not of."""
        learner, trainer = self._new_learner(device, place, data, rng)
        own, _ = apart(self._state(device, place))
        if own:
            learner.restore(own)
        for number, counted in self._receipts.get(device, ()):
            learner.receipt(number, counted=counted)
        return learner, trainer

    def _state(self, device: int, place: int) -> State:
        """What was kept last, where it is of this artifact."""
        of_this = self._trained.get(device, place) == place
        return (self._states.get(device) if of_this else None) or {}

    def _new_learner(
        self, device: int, place: int, data: Any, rng: np.random.Generator
    ) -> tuple[Learner, Trainer]:
        seed = int(np.random.SeedSequence([self._fleet.seed, device]).generate_state(1)[0])
        trainer = self._trainer(self._folders[place], seed)
        companion = None
        if self._companions:
            companion = self._trainer(self._companions[place], seed)
        name = device_id(device).hex()
        # What a device with time enough finds: it does itself what it has the companion for.
        where: Where = "aggregator" if companion is None else "device"
        parts = LearnerParts(lambda: data, trainer, companion, name, rng, where)
        return self._kind.make(parts), trainer

    def _trainer(self, folder: Path, seed: int) -> Trainer:
        if folder not in self._trainers:
            self._trainers[folder] = self._opens(folder)
        trainer = self._trainers[folder]
        trainer.seed = seed % 2**31
        trainer.reset()
        return trainer

    def _fetched(
        self,
        device: int,
        opened: Broadcast,
        published: PublishedRound,
        fetched: list[int],
        attachment: Attachment,
    ) -> Attachment:
        name = next(key for key, each in opened.attachments.items() if each is attachment)
        content, cohort = published.attachments[name]
        mark = hash(content)
        if self._held.get((device, name)) != mark:
            self._held[device, name] = mark
            fetched[0] += len(content)
        return read_attachment(content, cohort)  # as its codec left it


def _size(manifest: Manifest) -> int:
    """Parameters of the example's sizes: what a train step's time is taken to grow with."""
    return sum(
        int(np.prod([length if isinstance(length, int) else 1 for length in member.shape]))
        for state, member in manifest.members()
        if state.kind == "parameter"
    )
