"""The aggregator's half of mutual learning: relays public samples and soft labels about them.

MAFML (papers/mafml; Zhou et al. 2023), and with ``combine="mean"`` FedMD (Li and Wang 2019).
It keeps a device's public samples and its last soft labels, so its memory grows with the devices
that share: that is what the method is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.method import LOSSES, Arrays, Method, PersonalBinding, Refused, Said
from aggregator.methods.robust import LastUpdates
from device_sdk.artifact import Artifact
from device_sdk.fields import Declared, Within
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
    unpack,
)
from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update
from device_sdk.wire.arrays.tensors import LARGEST_TO_HAND_ON


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


_OWNER_DIGITS = 32


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


@dataclass(frozen=True, slots=True)
class MutualSettings(Declared):
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


class MutualMethod(Method):
    """Relays what devices share; there is no global model.

    Args:
        entries: what a sample consists of (``sample_entries`` of any of the task's artifacts).
        settings: of the task.

    Raises ValueError where the settings' target is no integer entry.
    """

    PARTS = ("public", "labels", "new_public", "new_labels", "new_means")
    ADDED = ("metric_sums", "metric_counts")
    _metric_sums: NDArray[np.float64]
    _metric_counts: NDArray[np.int64]
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
        # By their owners: samples with the mark that tells versions apart, and soft labels about
        # them, of which the round is the count of closed ones when they came.
        self._public, self._labels = LastUpdates(), LastUpdates()
        self._closed = 0
        self.begin(0)

    @property
    def owners(self) -> tuple[str, ...]:
        """Who shares public samples."""
        return tuple(sorted(update.sender for update in self._public))

    def begin(self, round_id: int) -> None:
        self._new_public, self._new_labels = LastUpdates(), LastUpdates()
        self._new_means = LabelMeans()
        super().begin(round_id)

    def tell(self) -> Broadcast:
        """Attachments ``public.<owner>.<mark>``; tensors ``labels.<owner>`` (and
        ``classes.<owner>``) as the owners sent them, or the mean of all."""
        oldest = self._closed - self._settings.stale_rounds
        shared = (self._public[owner] for owner in self.owners)
        return Broadcast(
            round_id=self._round_id,
            version=self._version,
            tensors={
                f"{kind}.{one.sender}": array
                for one in self._labels_since(oldest)
                for kind, array in one.tensors.items()
            },
            settings=self._settings.training.as_scalars(),
            attachments={
                attachment_name(one.sender, str(one.metadata["mark"])): Attachment(one.tensors)
                for one in shared
            },
        )

    def require(self, update: Update) -> None:
        """Refuses with reason ``bad-sender``, ``bad-tensors``, ``bad-metadata``, ``bad-public``,
        ``bad-labels`` or ``too-many``."""
        if not update.sender:
            raise Refused("bad-sender", "mutual learning needs to know whose labels these are")
        public, labels = taken_apart(update)
        check_metadata(update, shares=bool(public))
        self._check_labels(self._check_public(update, public), labels)

    def add(self, update: Update) -> None:
        """Keeps what was shared until the round closes."""
        public, labels = taken_apart(update)
        for place, name in enumerate(METRICS):
            if name in update.metadata:
                self._metric_sums[place] += float(update.metadata[name])
                self._metric_counts[place] += 1
        shared = bool(public) and self._has_room(update.sender)
        if shared:
            said = {"mark": update.metadata["mark"]}
            self._new_public.put(Update(update.round_id, public, said, update.sender))
        if self._training.combine == "mean":
            for name, coded in labels.items():
                probabilities = self._decoded({"labels": coded})
                self._new_means.add(name.removeprefix("labels."), probabilities)
        elif shared or (labels and not public and update.sender not in self._new_public):
            # Else the samples were one device's too many, or new ones were carried over from a
            # round without quorum, and these labels are about those that they replace.
            self._new_labels.put(Update(self._closed + 1, labels, {}, update.sender))

    def step(self) -> Mapping[str, float]:
        """Figures: mean ``local_loss``, ``public_loss`` and ``conflict_share`` of the devices,
        ``owners`` who share, ``confidence``: the mean share of an owner's samples that its new soft
        labels get right."""
        self._closed += 1
        for one in self._new_public:
            self._labels.drop(one.sender)  # about the samples that these replace
            self._public.put(one)
        for one in self._new_labels:
            self._labels.put(one)
        for owner, mean in self._new_means.means().items():
            if owner not in self._new_public:
                coded = encode_soft_labels(mean, self._training.label_form)
                self._labels.put(Update(self._closed, coded, {}, owner))
        sums, counts = self._metric_sums.tolist(), self._metric_counts.tolist()
        said = zip(METRICS, sums, counts, strict=True)
        return {
            **{name: total / count for name, total, count in said if count},
            "owners": float(len(self._public)),
            **self._confidence(),
        }

    def _labels_since(self, closed: int) -> list[Update]:
        """Soft labels that came in that closed round or later."""
        found = [one for one in self._labels if one.round_id >= closed]
        return sorted(found, key=lambda one: one.sender)

    def forget(self, sender: str) -> None:
        self._public.drop(sender)
        self._labels.drop(sender)

    def schema(self) -> Schema:
        each = (len(METRICS),)
        return {
            "closed": COUNT,
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
        if not public:
            return len(self._target(update.sender)) if update.sender in self._public else None
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
        owners = {one.sender for one in (*self._public, *self._new_public)}
        return sender in owners or len(owners) < self._settings.most_owners

    def _check_labels(self, samples: int | None, labels: Arrays) -> None:
        if self._training.combine == "mean":
            for name, coded in labels.items():
                kind, _, owner = name.partition(".")
                if kind != "labels" or owner not in self._public:
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
        coded = {name: self._public[owner].tensors[name]}
        return decode_samples(coded, {name: self._entries[name]})[name]

    def _confidence(self) -> dict[str, float]:
        right = [
            float(np.mean(self._decoded(one.tensors).argmax(axis=1) == self._target(one.sender)))
            for one in self._labels_since(self._closed)
        ]
        return {"confidence": float(np.mean(right))} if right else {}


class MutualBinding(PersonalBinding[MutualSettings]):
    """Models of any kind, as long as they take the same samples."""

    __slots__ = ()
    settings_class = MutualSettings

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> MutualMethod:
        """Nothing of the artifacts but what their samples are."""
        entries = [sample_entries(artifact.manifest) for artifact in artifacts]
        if any(each != entries[0] for each in entries[1:]):
            raise ValueError("the artifacts take different samples, which devices could not share")
        return MutualMethod(entries[0], self.settings)
