"""The aggregator's half of mutual learning: relays public samples and soft labels about them.

MAFML (papers/mafml; Zhou et al. 2023), and with ``combine="mean"`` FedMD (Li and Wang 2019).
It keeps a device's public samples and its last soft labels, so its memory grows with the devices
that share: that is what the method is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.method import LOSSES, Binding, Method, Refused, RoundSummary, Said
from device_sdk.artifact import Artifact
from device_sdk.evaluation.report import Stage
from device_sdk.fields import Within, require_declared
from device_sdk.methods.mutual.contract import (
    MutualTraining,
    SampleEntry,
    attachment_name,
    decode_samples,
    decode_soft_labels,
    encode_soft_labels,
    sample_entries,
)
from device_sdk.methods.state import (
    COUNT,
    Entry,
    RestoreError,
    Schema,
    State,
    Stateful,
    counters,
    part,
    unpack,
)
from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update
from device_sdk.wire.arrays.tensors import LARGEST_TO_HAND_ON
from device_sdk.wire.codec.errors import WireError

# What devices shared: public samples, soft labels, and means of these.

_OWNER_DIGITS = 32
_MARK_DIGITS = 16


Tag = TypeVar("Tag")


class _Book(Stateful, Generic[Tag]):
    """Coded arrays by owner, with what is noted of each owner's."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Tag, dict[str, NDArray[Any]]]] = {}

    def put(self, owner: str, tag: Tag, coded: State) -> None:
        """Replace what the owner shares; arrays are copied."""
        self._held[owner] = (tag, {name: array.copy() for name, array in coded.items()})

    def drop(self, owner: str) -> None:
        self._held.pop(owner, None)


class PublicBook(_Book[str]):
    """Public samples in their coded form, by owner, with the mark that tells versions apart."""

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(sorted(self._held))

    def mark(self, owner: str) -> str:
        """Raises KeyError for an owner that shares nothing."""
        return self._held[owner][0]

    def coded(self, owner: str) -> State:
        """Raises KeyError for an owner that shares nothing."""
        return self._held[owner][1]

    def state(self) -> dict[str, NDArray[Any]]:
        """Arrays ``<owner>.<mark>.<name>``; copies."""
        return {
            f"{owner}.{mark}.{name}": array.copy()
            for owner, (mark, coded) in self._held.items()
            for name, array in coded.items()
        }

    def restored(self, state: State) -> PublicBook:
        book = PublicBook()
        for owner, marked in _by_owner(state).items():
            mark = min(marked).partition(".")[0]
            coded = part(f"{mark}.", marked)
            if len(mark) != _MARK_DIGITS or len(coded) != len(marked):
                raise RestoreError(f"the state's public samples of {owner} have no usable mark")
            book.put(owner, mark, coded)
        return book


class LabelBook(_Book[int]):
    """Coded soft labels by owner, with the count of closed rounds when they came."""

    def since(self, closed: int) -> dict[str, State]:
        """Soft labels that came in that closed round or later, by owner."""
        return {
            owner: coded for owner, (came, coded) in sorted(self._held.items()) if came >= closed
        }

    def state(self) -> dict[str, NDArray[Any]]:
        """Arrays ``<owner>.<name>``, and ``<owner>.came`` int64 scalar; copies."""
        found: dict[str, NDArray[Any]] = {}
        for owner, (came, coded) in self._held.items():
            found[f"{owner}.came"] = np.asarray(came, dtype=np.int64)
            found.update({f"{owner}.{name}": array.copy() for name, array in coded.items()})
        return found

    def restored(self, state: State) -> LabelBook:
        book = LabelBook()
        for owner, coded in _by_owner(state).items():
            came = unpack({"came": COUNT}, {n: coded.pop(n) for n in ("came",) if n in coded})
            if not coded:
                raise RestoreError(f"the state lacks the soft labels of {owner}")
            book.put(owner, int(came["came"]), coded)
        return book


class LabelMeans(Stateful):
    """Means of what many devices think of each owner's samples, streamed."""

    def __init__(self) -> None:
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._counts: dict[str, int] = {}

    def add(self, owner: str, probabilities: NDArray[np.float32]) -> None:
        """One device's soft labels, [samples, classes]."""
        if owner not in self._sums:
            self._sums[owner] = np.zeros(probabilities.shape, dtype=np.float64)
            self._counts[owner] = 0
        self._sums[owner] += probabilities
        self._counts[owner] += 1

    def means(self) -> dict[str, NDArray[np.float32]]:
        """float32 [samples, classes] by owner."""
        return {
            owner: (total / self._counts[owner]).astype(np.float32)
            for owner, total in sorted(self._sums.items())
        }

    def state(self) -> dict[str, NDArray[Any]]:
        """``<owner>.sum`` float64 [samples, classes] and ``<owner>.count`` int64; copies."""
        found: dict[str, NDArray[Any]] = {}
        for owner, total in self._sums.items():
            found[f"{owner}.sum"] = total.copy()
            found[f"{owner}.count"] = np.asarray(self._counts[owner], dtype=np.int64)
        return found

    def restored(self, state: State) -> LabelMeans:
        schema = {
            "sum": Entry(np.float64, ("samples", "classes")),
            "count": Entry(np.int64, least=1),
        }
        found = LabelMeans()
        for owner, own in _by_owner(state).items():
            arrays = unpack(schema, own)
            found._sums[owner], found._counts[owner] = arrays["sum"], int(arrays["count"])
        return found


def _by_owner(state: State) -> dict[str, dict[str, NDArray[Any]]]:
    found: dict[str, dict[str, NDArray[Any]]] = {}
    for key, array in state.items():
        owner, _, name = key.partition(".")
        if len(owner) != _OWNER_DIGITS or not name:
            raise RestoreError(f"the state's {key!r} names no owner")
        found.setdefault(owner, {})[name] = array
    return found


# The parts of a mutual-learning update.

METRICS = ("local_loss", "public_loss", "conflict_share")
"""What a device may say about its steps."""

_PUBLIC = "public."
_MARK = re.compile(r"[0-9a-f]{16}")


def taken_apart(update: Update) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """The public samples of an update by their own names, and its other tensors."""
    public: dict[str, NDArray[Any]] = {}
    others: dict[str, NDArray[Any]] = {}
    for name, array in update.tensors.items():
        if name.startswith(_PUBLIC):
            public[name.removeprefix(_PUBLIC)] = array
        else:
            others[name] = array
    return public, others


def check_metadata(update: Update, *, shares: bool) -> None:
    """Raises Refused with reason ``bad-metadata``; ``shares``: it holds public samples."""
    said = Said(update.metadata)
    mark = said.take("mark", None)
    if shares != (mark is not None):
        raise said.error("mark", "comes with public samples, and only with them")
    if mark is not None and not (isinstance(mark, str) and _MARK.fullmatch(mark)):
        raise said.error("mark", "is not 16 hexadecimal digits")
    for name in METRICS:
        said.number(name, LOSSES, 0.0)
    said.end()


Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class MutualSettings:
    """Settings of a mutual-learning task.

    Attributes:
        training: what the broadcast tells the devices.
        stale_rounds: soft labels of a device that missed rounds are still relayed for so many.
        most_public: public samples a device may share at most.
        most_owners: devices that may share at most; further ones learn without sharing.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    training: MutualTraining
    stale_rounds: Annotated[int, Within(0)] = 0
    most_public: Annotated[int, Within(1)] = 2000
    most_owners: Annotated[int, Within(1)] = 100

    def __post_init__(self) -> None:
        require_declared(self)


class MutualMethod(Stateful, Method):
    """Relays what devices share; there is no global model.

    Args:
        entries: what a sample consists of (``sample_entries`` of any of the task's artifacts).
        settings: of the task.

    Raises ValueError where the settings' target is no integer entry.
    """

    PARTS = ("public", "labels", "new.public", "new.labels", "new.means")
    # Soft labels are distributions, samples are held to a reader's own where they are learnt from,
    # and each owner's count alike: one of n is a share of 1 / n of what is handed on.
    bounds = None

    def __init__(self, entries: Mapping[str, SampleEntry], settings: MutualSettings) -> None:
        target = entries.get(settings.training.target)
        if target is None or target.shape != () or not target.dtype.startswith("int"):
            raise ValueError(
                f"the target {settings.training.target!r} must be one integer a sample; samples "
                f"hold {', '.join(sorted(entries))}"
            )
        self._entries = dict(entries)
        self._settings = settings
        self._public = PublicBook()
        self._labels = LabelBook()
        self._closed = 0
        self._clear()

    @property
    def owners(self) -> tuple[str, ...]:
        return self._public.owners

    def open_round(self, round_id: int) -> Broadcast:
        """Attachments ``public.<owner>.<mark>``; tensors ``labels.<owner>`` (and
        ``classes.<owner>``) as the owners sent them, or the mean of all."""
        self._begin(round_id)
        self._clear()
        oldest = self._closed - self._settings.stale_rounds
        return Broadcast(
            round_id=round_id,
            version=self._version,
            tensors={
                f"{kind}.{owner}": array
                for owner, coded in self._labels.since(oldest).items()
                for kind, array in coded.items()
            },
            settings=self._settings.training.as_scalars(),
            attachments={
                attachment_name(owner, self._public.mark(owner)): Attachment(
                    self._public.coded(owner)
                )
                for owner in self._public.owners
            },
        )

    def check(self, update: Update) -> None:
        """Refuses with reason ``bad-round``, ``bad-sender``, ``bad-tensors``, ``bad-metadata``,
        ``bad-public``, ``bad-labels`` or ``too-many``."""
        self._require_round(update)
        if not update.sender:
            raise Refused("bad-sender", "mutual learning needs to know whose labels these are")
        public, labels = taken_apart(update)
        check_metadata(update, shares=bool(public))
        try:
            samples = self._check_public(update, public)
            self._check_labels(samples, labels)
        except Refused:
            raise
        except WireError as error:
            raise Refused(error.reason, str(error)) from error

    def absorb(self, update: Update) -> None:
        """Keeps what was shared until the round closes; ``update`` must have passed ``check``."""
        public, labels = taken_apart(update)
        self._participants += 1
        for place, name in enumerate(METRICS):
            if name in update.metadata:
                self._metric_sums[place] += float(update.metadata[name])
                self._metric_counts[place] += 1
        shared = bool(public) and self._has_room(update.sender)
        if shared:
            self._new_public.put(update.sender, str(update.metadata["mark"]), public)
        if self._training.combine == "mean":
            for name, coded in labels.items():
                probabilities = self._decoded({"labels": coded})
                self._new_means.add(name.removeprefix("labels."), probabilities)
        elif shared or (labels and not public and update.sender not in self._new_public.owners):
            # Else the samples were one device's too many, or new ones were carried over from a
            # round without quorum, and these labels are about those that they replace.
            self._new_labels.put(update.sender, self._closed + 1, labels)

    def close_round(self) -> RoundSummary:
        """Metrics: mean ``local_loss``, ``public_loss`` and ``conflict_share`` of the devices,
        ``owners`` who share, ``confidence``: the mean share of an owner's samples that its new soft
        labels get right."""
        metrics: dict[str, float] = {
            name: self._metric_sums[place] / self._metric_counts[place]
            for place, name in enumerate(METRICS)
            if self._metric_counts[place]
        }
        participants = self._participants
        if participants:
            self._closed += 1
            self._version += 1
            for owner in self._new_public.owners:
                self._labels.drop(owner)  # about the samples of before
                self._public.put(owner, self._new_public.mark(owner), self._new_public.coded(owner))
            for owner, coded in self._new_labels.since(0).items():
                self._labels.put(owner, self._closed, coded)
            for owner, mean in self._new_means.means().items():
                if owner not in self._new_public.owners:
                    coded = encode_soft_labels(mean, self._training.label_form)
                    self._labels.put(owner, self._closed, coded)
            metrics["owners"] = float(len(self._public.owners))
            metrics.update(self._confidence())
        self._clear()
        return RoundSummary(self._round_id, self._version, participants, metrics)

    def forget(self, sender: str) -> None:
        self._public.drop(sender)
        self._labels.drop(sender)

    def _schema(self) -> Schema:
        each = (len(METRICS),)
        return {
            "counters": counters("version", "round_id", "closed", "participants"),
            "metric_sums": Entry(np.float64, each),
            "metric_counts": Entry(np.int64, each, least=0),
        }

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _training(self) -> MutualTraining:
        return self._settings.training

    def _decoded(self, coded: Arrays) -> NDArray[np.float32]:
        training = self._training
        return decode_soft_labels(
            coded, training.classes, training.label_form, training.top_classes
        )

    def _check_public(self, update: Update, public: Arrays) -> int | None:
        """The number of the sender's public samples; None where it shares none."""
        known = self._public
        if not public:
            return len(self._target(update.sender)) if update.sender in known.owners else None
        most = self._settings.most_public
        target = decode_samples(public, self._entries, most=most)[self._training.target]
        if not 1 <= len(target) <= most:
            raise Refused("too-many", f"{len(target)} public samples; expected 1 to {most}")
        if int(target.min()) < 0 or int(target.max()) >= self._training.classes:
            raise Refused("bad-public", "a public sample is of a class that the task has not")
        if any(
            array.dtype.kind == "f"
            and array.size
            and float(np.abs(array).max()) > LARGEST_TO_HAND_ON
            for array in public.values()
        ):
            raise Refused("bad-public", "a value exceeds 9e11, which not every codec could hand on")
        if not self._has_room(update.sender):
            raise Refused("too-many", "the task takes no further devices' public samples")
        return len(target)

    def _has_room(self, sender: str) -> bool:
        owners = {*self._public.owners, *self._new_public.owners}
        return sender in owners or len(owners) < self._settings.most_owners

    def _check_labels(self, samples: int | None, labels: Arrays) -> None:
        if self._training.combine == "mean":
            for name, coded in labels.items():
                kind, _, owner = name.partition(".")
                if kind != "labels" or owner not in self._public.owners:
                    raise Refused("bad-tensors", f"nobody shares what {name!r} is about")
                if len(self._decoded({"labels": coded})) != len(self._target(owner)):
                    raise Refused("bad-labels", "not one soft label for each public sample")
            return
        if samples is None:
            if labels:
                raise Refused("bad-tensors", "soft labels about samples that were not shared")
            return
        if len(self._decoded(labels)) != samples:
            raise Refused("bad-labels", "not one soft label for each public sample")

    def _target(self, owner: str) -> NDArray[Any]:
        name = self._training.target
        coded = {name: self._public.coded(owner)[name]}
        return decode_samples(coded, {name: self._entries[name]})[name]

    def _confidence(self) -> dict[str, float]:
        fresh = self._labels.since(self._closed)
        right = [
            float(np.mean(self._decoded(coded).argmax(axis=1) == self._target(owner)))
            for owner, coded in fresh.items()
        ]
        return {"confidence": float(np.mean(right))} if right else {}

    def _clear(self) -> None:
        self._new_public = PublicBook()
        self._new_labels = LabelBook()
        self._new_means = LabelMeans()
        self._participants = 0
        self._metric_sums = np.zeros(len(METRICS), dtype=np.float64)
        self._metric_counts = np.zeros(len(METRICS), dtype=np.int64)


class MutualBinding(Binding[MutualSettings]):
    """Models of any kind, as long as they take the same samples."""

    __slots__ = ()
    settings_class = MutualSettings

    @property
    def stages(self) -> tuple[Stage, ...]:
        """No model is sent to anybody: each device has its own."""
        return ("personal",)

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> MutualMethod:
        """Nothing of the artifacts but what their samples are."""
        entries = [sample_entries(artifact.manifest) for artifact in artifacts]
        if any(each != entries[0] for each in entries[1:]):
            raise ValueError("the artifacts take different samples, which devices could not share")
        return MutualMethod(entries[0], self.settings)
