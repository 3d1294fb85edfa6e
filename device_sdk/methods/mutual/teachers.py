"""What a device learns from: the others' public samples, with what their owners think of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.errors import DeviceError
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.local_steps import SampleStream, predict_all
from device_sdk.methods.mutual.contract import (
    MutualTraining,
    SampleEntry,
    decode_samples,
    decode_soft_labels,
    owner_of,
)
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast
from device_sdk.wire.codec.errors import WireError

_TEACHER = "teacher"
_REACH = 100.0
_HELD = 3.0
_log = logging.getLogger("tessera.device")


@dataclass(frozen=True, slots=True)
class PublicSet:
    """One owner's public samples.

    Attributes:
        owner: the sender.
        samples: arrays by the names of the batch entries.
        teacher: soft labels, float32 [samples, classes]; zeros where none are known.
        confidence: their weight, 0 to 1; 0 where none are known.
    """

    owner: str
    samples: Mapping[str, NDArray[Any]]
    teacher: NDArray[np.float32]
    confidence: float


def pool_names(broadcast: Broadcast) -> dict[str, str]:
    """Owner to attachment, of all public samples on offer, by owner."""
    names = {owner_of(name): name for name in (*broadcast.offered, *broadcast.attachments)}
    return {owner: names[owner] for owner in sorted(o for o in names if o is not None)}


def public_sets(
    broadcast: Broadcast,
    entries: Mapping[str, SampleEntry],
    training: MutualTraining,
    own: Mapping[str, PublicSet],
) -> list[PublicSet]:
    """The public sets that came with a broadcast, by owner, and those in ``own`` that it offers.

    The confidence is how many of its soft labels name the right class, recomputed here: an owner
    that predicts at random cannot claim another (but it can send wrong classes). Raises
    LearnerError where an array does not fit.
    """
    found = []
    for owner, name in pool_names(broadcast).items():
        if owner in own:
            samples = own[owner].samples
        elif name in broadcast.attachments:
            try:
                samples = decode_samples(broadcast.attachments[name].tensors, entries)
            except WireError as error:
                raise LearnerError(f"the public samples of {owner}: {error}") from error
        else:
            continue
        count = len(samples[training.target])
        teacher, confidence = _teacher(broadcast, owner, samples[training.target], training)
        if count:
            found.append(PublicSet(owner, samples, teacher, confidence))
    return found


def learnable(
    sets: list[PublicSet],
    own: Mapping[str, NDArray[Any]],
    trainer: Trainer,
    training: MutualTraining,
) -> list[PublicSet]:
    """The sets whose samples the trainer's model can take, their floats within 100 times the
    largest of ``own`` (and 100): no owner is to decide whether another device's round succeeds.

    Floats are held within 3 times the largest of ``own``, as of which this model's steps are: a
    gradient grows with its samples, and one owner's would outweigh all others'.
    """
    floats = {name: np.abs(array) for name, array in own.items() if array.dtype.kind == "f"}
    reach = {name: _REACH * float(sizes.max(initial=1.0)) for name, sizes in floats.items()}
    most = {name: _HELD * float(sizes.max(initial=0.0)) for name, sizes in floats.items()}
    public = [f"{name}_pub" for name in own]
    found = []
    for one in sets:
        if not _within_reach(one.samples, reach):
            why = "their values are far beyond this device's own"
        elif len(one.teacher) < trainer.artifact.rows(public, to_train=True)[0]:
            why = "they are fewer than a step of the model takes"
        elif not _is_readable(one.samples, trainer, training):
            why = "the model cannot take them"
        else:
            found.append(replace(one, samples=_held(one.samples, most)))
            continue
        _log.warning("the public samples of %s are left out: %s", one.owner, why)
    return found


def _held(
    theirs: Mapping[str, NDArray[Any]], most: Mapping[str, float]
) -> Mapping[str, NDArray[Any]]:
    """The samples with floats beyond ``most`` brought to it; of a device without own, as is."""
    return {
        name: np.clip(array, -most[name], most[name]) if most.get(name) else array
        for name, array in theirs.items()
    }


def _within_reach(theirs: Mapping[str, NDArray[Any]], reach: Mapping[str, float]) -> bool:
    return not any(
        float(np.abs(array).max(initial=0.0)) > reach[name]
        for name, array in theirs.items()
        if array.dtype.kind == "f"
    )


def _is_readable(
    samples: Mapping[str, NDArray[Any]], trainer: Trainer, training: MutualTraining
) -> bool:
    if [name for name, array in samples.items() if array.dtype.kind in "iu"] == [training.target]:
        return True  # floats within reach need no trial
    try:
        predict_all(trainer, samples, training.output)
    except DeviceError:  # such as an id beyond the rows of an embedding
        return False
    return True


def _teacher(
    broadcast: Broadcast, owner: str, target: NDArray[Any], training: MutualTraining
) -> tuple[NDArray[np.float32], float]:
    coded = {
        kind: broadcast.tensors[f"{kind}.{owner}"]
        for kind in ("labels", "classes")
        if f"{kind}.{owner}" in broadcast.tensors
    }
    if not coded:
        return np.zeros((len(target), training.classes), dtype=np.float32), 0.0
    try:
        teacher = decode_soft_labels(
            coded, training.classes, training.label_form, training.top_classes
        )
    except WireError as error:
        raise LearnerError(f"the soft labels of {owner}: {error}") from error
    if len(teacher) != len(target):
        raise LearnerError(
            f"{len(teacher)} soft labels came for {len(target)} public samples of {owner}"
        )
    right = float(np.mean(teacher.argmax(axis=1) == target)) if len(target) else 0.0
    if right < training.least_confidence:
        return teacher, 0.0
    return teacher, right if training.use_confidence else 1.0


class PublicStream:
    """Batches of public samples, the same number from each owner.

    Args:
        sets: at least one, none of them empty.
        size: samples an owner; fewer where one of them has fewer.
    """

    def __init__(self, sets: list[PublicSet], size: int, rng: np.random.Generator) -> None:
        self._size = min(size, *(len(one.teacher) for one in sets))
        self._sets = sets
        self._streams = [
            SampleStream({**one.samples, _TEACHER: one.teacher}, self._size, rng) for one in sets
        ]

    @property
    def owners(self) -> int:
        """The number of owners."""
        return len(self._sets)

    @property
    def taught(self) -> bool:
        """Whether anybody's soft labels are known."""
        return any(one.confidence > 0 for one in self._sets)

    def draw(self) -> dict[str, NDArray[Any]]:
        """``<entry>_pub``, ``teacher`` and ``confidence``, [owners * size, ...]."""
        return _joined([self._draw(place) for place in range(self.owners)])

    def draw_from(self, place: int) -> dict[str, NDArray[Any]]:
        """The same of one owner's samples, [size, ...]."""
        return self._draw(place)

    def _draw(self, place: int) -> dict[str, NDArray[Any]]:
        rows = self._streams[place].draw()
        teacher = rows.pop(_TEACHER)
        confidence = np.full(self._size, self._sets[place].confidence, dtype=np.float32)
        public = {f"{name}_pub": array for name, array in rows.items()}
        return {**public, _TEACHER: teacher, "confidence": confidence}


def _joined(parts: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
