"""The device's half of mutual learning: local steps, and steps towards what the others think.

Method: MAFML (papers/mafml; Zhou et al. 2023, Model agnostic federated mutual learning), and FedMD
(Li and Wang 2019, Heterogenous federated learning via model distillation) in the same messages.
Devices may have models of any architecture, as long as they take the same samples and tell the same
classes apart.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.errors import BatchError, DeviceError
from device_sdk.local_data import DataSource, LocalData
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.local_steps import (
    ModelLearner,
    SampleStream,
    least_rows,
    predict_all,
    sayable,
    unchanged_on_error,
)
from device_sdk.methods.mutual.contract import (
    MutualTraining,
    SampleEntry,
    attachment_name,
    decode_samples,
    decode_soft_labels,
    encode_samples,
    encode_soft_labels,
    owner_of,
    sample_entries,
    samples_mark,
)
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast, Scalar, Update
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.report import Reason

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


Arrays = dict[str, NDArray[Any]]


@dataclass(slots=True)
class _Tally:
    """Sums over a round's steps."""

    local: list[float] = field(default_factory=list)
    public: list[float] = field(default_factory=list)
    conflicts: list[float] = field(default_factory=list)

    def metadata(self) -> dict[str, Scalar]:
        """Means; what had no step is left out."""
        sides = (
            ("local_loss", self.local),
            ("public_loss", self.public),
            ("conflict_share", self.conflicts),
        )
        return {name: sayable(float(np.mean(values))) for name, values in sides if values}


class MutualLearner(ModelLearner):
    """Trains one device's own model.

    Args:
        data: the device's samples, asked for at the start of each round. ``train`` and ``public``
            both train its model; ``public`` is what the others get to see.
        trainer: of an artifact of ``export.models.mutual``. It holds this device's model always.
        sender: this device's name, 32 hexadecimal digits, as the others hear it.
        rng: orders the samples.

    Raises ValueError where the artifact is not of that kind.
    """

    def __init__(
        self, data: DataSource, trainer: Trainer, sender: str, rng: np.random.Generator
    ) -> None:
        super().__init__(data, trainer, sender, rng)
        self._entries: Mapping[str, SampleEntry] = sample_entries(trainer.artifact)
        public = [f"{name}_pub" for name in self._entries]
        self._least = tuple(
            trainer.artifact.rows(names, to_train=True)[0] for names in (self._entries, public)
        )
        self._with_mu = "mu" in {
            port.of for port in trainer.artifact.graphs["train"].select("batch")
        }

    def wants(self, broadcast: Broadcast) -> Sequence[str]:
        """All public samples but its own."""
        return [name for owner, name in pool_names(broadcast).items() if owner != self._sender]

    def train(self, broadcast: Broadcast) -> Update:
        """One round; see :class:`~device_sdk.methods.learner.Learner`.

        The update holds the soft labels on the device's own public samples after the round's steps
        (``labels``, and ``classes`` where only the largest travel), or with ``combine="mean"`` on
        each owner's in the pool (``labels.<owner>``); and until the aggregator offers them the
        public samples themselves (``public.*`` and ``mark``). Metadata: mean ``local_loss`` and,
        once there is somebody to learn from, ``public_loss`` and ``conflict_share``, the share of
        public steps whose gradient opposed the local one.

        Samples that the model cannot take, or whose values are far beyond this device's own, are
        left out: their owner must not decide whether this device's round succeeds.

        Raises LearnerError where the broadcast or the data do not fit the artifact, there are no
        samples, or training fails; the trainer is then unchanged.
        """
        training = MutualTraining.from_scalars(broadcast.settings, LearnerError)
        data = self._data()
        own = self._own(data, training)
        coded = encode_samples(data.public, training.sample_form) if own else {}
        mark = samples_mark(coded)
        offered = pool_names(broadcast).get(self._sender) == attachment_name(self._sender, mark)
        # Its own samples count as a public set only where all are asked about all, as they are.
        counted = own if offered and training.combine == "mean" else {}
        together = _together(data)
        sets = public_sets(broadcast, self._entries, training, counted)
        sets = learnable(sets, together, self._trainer, training)
        with unchanged_on_error(self._trainer):
            tally = self._steps(together, sets, training)
            metadata = tally.metadata()
            tensors = self._labels(own, sets, training)
        if own and not offered:
            tensors.update({f"public.{name}": array for name, array in coded.items()})
            metadata["mark"] = mark
        return Update(broadcast.round_id, tensors, metadata)

    def train_alone(self, broadcast: Broadcast, *, begins: bool) -> None:
        """The local steps, on all that it holds."""
        training = MutualTraining.from_scalars(broadcast.settings, LearnerError)
        data = self._data()
        self._own(data, training)
        with unchanged_on_error(self._trainer):
            self._steps(_together(data), [], training)

    def _own(self, data: LocalData, training: MutualTraining) -> dict[str, PublicSet]:
        """This device's public samples as the others see them; empty where it shares none."""
        if data.samples == 0:
            raise LearnerError("there are no local samples to train on", Reason.NO_DATA)
        odd = sorted(set(data.train) ^ set(self._entries))
        if odd or training.target not in self._entries:
            name = odd[0] if odd else training.target
            raise LearnerError(
                f"{name!r} is not in both, the local samples ({', '.join(data.train)}) and the "
                f"artifact's ({', '.join(self._entries)})",
                Reason.BAD_DATA,
            )
        if data.public_samples == 0:
            return {}
        none = np.zeros((data.public_samples, training.classes), dtype=np.float32)
        return {self._sender: PublicSet(self._sender, data.public, none, 0.0)}

    def _labels(
        self, own: dict[str, PublicSet], sets: list[PublicSet], training: MutualTraining
    ) -> Arrays:
        if training.combine == "mean":
            return {
                f"labels.{one.owner}": self._encoded(one.samples, training)["labels"]
                for one in sets
            }
        tensors: Arrays = {}
        for one in own.values():
            tensors.update(self._encoded(one.samples, training))
        return tensors

    def _encoded(self, samples: Mapping[str, NDArray[Any]], training: MutualTraining) -> Arrays:
        found = predict_all(self._trainer, samples, training.output)
        if found.ndim != 2 or found.shape[1] != training.classes:
            raise LearnerError(
                f"the artifact's {training.output!r} is {found.shape[1:]} a sample; the task has "
                f"{training.classes} classes"
            )
        try:
            return encode_soft_labels(found, training.label_form, training.top_classes)
        except ValueError as error:
            raise LearnerError(f"the artifact's {training.output!r}: {error}") from error

    # -- steps -------------------------------------------------------------------------------------

    def _steps(
        self, samples: Mapping[str, NDArray[Any]], sets: list[PublicSet], training: MutualTraining
    ) -> _Tally:
        count = len(samples[training.target])
        least_rows(self._trainer, self._entries, count, training.batch_size)
        local = SampleStream(samples, training.batch_size, self._rng)
        tally = _Tally()
        if not sets:
            for _ in range(training.local_steps):
                self._local_step(local, training, tally)
            return tally
        public = PublicStream(sets, training.public_batch, self._rng)
        if training.schedule == "joint":
            for _ in range(training.local_steps):
                self._public_step(local, public.draw(), public.taught, training, tally, joint=True)
        elif training.schedule == "alternate":
            for _ in range(training.local_steps):
                self._local_step(local, training, tally)
                self._public_turn(local, public, training, tally)
        else:
            for _ in range(training.public_steps or training.local_steps):
                self._public_turn(local, public, training, tally)
            for _ in range(training.local_steps):
                self._local_step(local, training, tally)
        return tally

    def _public_turn(
        self, local: SampleStream, public: PublicStream, training: MutualTraining, tally: _Tally
    ) -> None:
        if not training.per_teacher:
            self._public_step(local, public.draw(), public.taught, training, tally, joint=False)
            return
        for place in range(public.owners):
            batch = public.draw_from(place)
            self._public_step(local, batch, public.taught, training, tally, joint=False)

    def _local_step(self, local: SampleStream, training: MutualTraining, tally: _Tally) -> None:
        batch = local.draw()
        # The graph wants public samples; with a weight of 0 any will do.
        _, few = self._least
        any_rows = np.arange(few) % len(batch[training.target])
        batch.update({f"{name}_pub": batch[name][any_rows] for name in self._entries})
        batch["teacher"] = np.zeros((few, training.classes), dtype=np.float32)
        batch["confidence"] = np.zeros(few, dtype=np.float32)
        batch.update(self._switches(training, local=1.0, public=0.0, ce=training.weight_ce))
        self._step(batch, training.learning_rate)
        tally.local.append(float(self._trainer.outputs["local_loss"]))

    def _public_step(
        self,
        local: SampleStream,
        public: Arrays,
        taught: bool,
        training: MutualTraining,
        tally: _Tally,
        *,
        joint: bool,
    ) -> None:
        batch = local.draw()
        if not (joint or training.project):
            # Nothing of the local batch is used then.
            batch = {name: array[: self._least[0]] for name, array in batch.items()}
        batch.update(public)
        weight_ce = training.weight_ce if taught else 1.0
        batch.update(self._switches(training, local=float(joint), public=1.0, ce=weight_ce))
        rate = training.learning_rate
        self._step(batch, rate if joint else training.public_rate or rate)
        outputs = self._trainer.outputs
        tally.public.append(float(outputs["public_loss"]))
        if joint:
            tally.local.append(float(outputs["local_loss"]))
        if joint or training.project:
            tally.conflicts.append(float(outputs["conflict"]))

    def _switches(
        self, training: MutualTraining, *, local: float, public: float, ce: float
    ) -> Arrays:
        values = {
            "weight_local": local,
            "weight_public": public,
            "project": float(training.project),
            "weight_kl": training.weight_kl,
            "weight_ce": ce,
        }
        if self._with_mu:
            values["mu"] = 0.0
        return {name: np.asarray(value, dtype=np.float32) for name, value in values.items()}

    def _step(self, batch: Arrays, rate: float) -> None:
        try:
            self._trainer.step(batch, hyper={"lr": rate} if rate else None)
        except BatchError as error:
            raise LearnerError(f"the task does not fit the artifact: {error}") from error


def _together(data: LocalData) -> dict[str, NDArray[Any]]:
    """All local samples: those shown to others are the device's own, too."""
    if data.public_samples == 0:
        return dict(data.train)
    return {name: np.concatenate([data.train[name], data.public[name]]) for name in data.train}
