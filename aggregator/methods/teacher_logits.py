"""The aggregator's half of teacher-logit aggregation: means of soft outputs by label.

Methods: AFD (papers/afd: table 3, equation 6) and federated distillation (Jeong et al. 2018). A
device leaves itself out of the sums, so that one broadcast serves all of them and nobody needs to
remember who sent what: the rounds that the updates were sent for are enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.fleet import FleetScale
from aggregator.methods.method import Binding, Method, RateDecay, Refused, rate_at
from device_sdk.artifact import Artifact
from device_sdk.evaluation.report import Stage
from device_sdk.methods.state import Entry, Schema, counters
from device_sdk.methods.teacher_logits.contract import (
    TeacherLogitsTraining,
    decode_knowledge,
    share_of,
)
from device_sdk.wire.arrays.exchange import Broadcast, Update


class TeacherLogitsMethod(Method):
    """Sums the devices' knowledge; see :class:`~aggregator.methods.method.Method` for the calls.

    Args:
        training: the task's settings, which the broadcast carries.
        rate_decay: ``learning_rate`` falls by this factor a round. Adaptive steps are fast at a
            high rate, and need a lower one to settle.

    Raises ValueError for a ``rate_decay`` out of range, or without a ``learning_rate``.

    Memory is that of two [classes, classes] tables, however many updates are absorbed.
    """

    # Distributions by their form. A device takes its own share out of the sums that it is told, so
    # what its claims count for is told with the round that it is asked in.
    bounds = None
    PARTS = ("claims",)
    ADDED = ("sums", "weights", "devices", "bounded")
    _sums: NDArray[np.float64]
    _weights: NDArray[np.int64]
    _devices: NDArray[np.int64]
    _bounded: int
    _first_round: int

    def __init__(self, training: TeacherLogitsTraining, rate_decay: float = 1.0) -> None:
        if not 0 < rate_decay <= 1:
            raise ValueError(f"rate_decay is {rate_decay}; expected a number above 0 and at most 1")
        if rate_decay < 1 and training.learning_rate == 0:
            raise ValueError("rate_decay needs a learning_rate: the artifact's own cannot fall")
        self._training = training
        self._rate_decay = rate_decay
        classes = training.classes
        self._known_sums = np.zeros((classes, classes), dtype=np.float32)
        self._known_weights = np.zeros(classes, dtype=np.int64)
        self._known_devices = np.zeros(classes, dtype=np.int64)
        self._known_participants = 0
        self._known_first_round = 0
        self._known_round = 0
        self._claims = FleetScale(1)
        self.begin(0)

    @property
    def knowledge(self) -> NDArray[np.float32]:
        """Mean soft output by label over all devices of the last round, float32 [classes, classes].

        Rows of labels that nobody had are zero.
        """
        divisors = np.maximum(self._known_weights, 1).astype(np.float32)
        means: NDArray[np.float32] = self._known_sums / divisors[:, None]
        return means

    def tell(self) -> Broadcast:
        """The broadcast holds the means of the last version, and the rounds of its updates.

        ``means`` float32 [classes, classes], which no codec is too narrow for however many devices
        there are, and what makes sums of them again: ``weights`` and ``devices`` int64 [classes],
        ``participants`` (updates), ``first_round`` and ``round`` int64 [] (both 0: nothing summed
        yet). They differ where rounds missed their quorum: what counted in them was carried over.
        """
        told = self._counted
        if self._rate_decay < 1:
            rate = rate_at(told.learning_rate, self._rate_decay, self._round_id)
            told = replace(told, learning_rate=rate)
        return Broadcast(
            round_id=self._round_id,
            version=self._version,
            tensors={
                "means": self.knowledge,
                "weights": self._known_weights.copy(),
                "devices": self._known_devices.copy(),
                "participants": np.asarray(self._known_participants, dtype=np.int64),
                "first_round": np.asarray(self._known_first_round, dtype=np.int64),
                "round": np.asarray(self._known_round, dtype=np.int64),
            },
            settings=told.as_scalars(),
        )

    def require(self, update: Update) -> None:
        """Refuses with reason ``bad-tensors`` or ``bad-metadata``."""
        if update.metadata:
            raise Refused("bad-metadata", "expected no metadata")
        try:
            decode_knowledge(update.tensors, self._training)
        except ValueError as error:
            raise Refused("bad-tensors", str(error)) from error

    def add(self, update: Update) -> None:
        """The device's share."""
        knowledge = decode_knowledge(update.tensors, self._training)
        if len(knowledge.counts):
            self._claims.note(update.sender, (float(knowledge.counts.max()),))
        share = share_of(knowledge, self._counted)
        self._sums += share.sums
        self._weights += share.weights
        self._devices += share.devices
        self._first_round = min(self._first_round, update.round_id)
        self._bounded += share.bounded

    def begin(self, round_id: int) -> None:
        super().begin(round_id)
        self._first_round = round_id

    def step(self) -> Mapping[str, float]:
        """Figures: ``labels`` known, ``confidence`` (mean probability of the label itself),
        ``bounded`` means that lay outside the task's bounds."""
        self._known_sums = self._sums.astype(np.float32)
        self._known_weights, self._known_devices = self._weights, self._devices
        self._known_participants = self._participants
        self._known_first_round, self._known_round = self._first_round, self._round_id
        known = self._known_weights > 0
        figures = {"bounded": float(self._bounded), "labels": float(known.sum())}
        if known.any():
            figures["confidence"] = float(np.diagonal(self.knowledge)[known].mean())
        return figures

    @property
    def _counted(self) -> TeacherLogitsTraining:
        """The settings, with what a claim of samples counts for in the open round: at most so many
        times what the median device claims of its most frequent label; before that is known, each
        device counts alike."""
        if self._training.weights == "devices":
            return self._training
        usual = self._claims.median(0) if self._claims.known else 0.0
        most = max(1, min(self._training.most_samples, int(_MOST_CLAIMS * usual)))
        return replace(self._training, most_samples=most)

    def schema(self) -> Schema:
        table, each = (self._training.classes,) * 2, (self._training.classes,)
        known = ("known_participants", "known_first_round", "known_round")
        return {
            "known_sums": Entry(np.float32, table, least=0),
            "known_weights": Entry(np.int64, each, least=0),
            "known_devices": Entry(np.int64, each, least=0),
            # float64: sums of a hundred thousand float32 shares keep their small ones.
            "sums": Entry(np.float64, table, least=0),
            "weights": Entry(np.int64, each, least=0),
            "devices": Entry(np.int64, each, least=0),
            "numbers": counters(*known, "first_round"),
        }


_COUNTS = "label_counts"
_MOST_CLAIMS = 3.0


@dataclass(frozen=True, slots=True)
class TeacherLogitsSettings:
    """Settings of a task of teacher-logit aggregation; see :class:`TeacherLogitsMethod`."""

    training: TeacherLogitsTraining
    rate_decay: RateDecay = 1.0


class TeacherLogitsBinding(Binding[TeacherLogitsSettings]):
    """Models of any kind, for none of them is shared; but all must know the same classes."""

    __slots__ = ()
    settings_class = TeacherLogitsSettings

    @property
    def stages(self) -> tuple[Stage, ...]:
        """No model is sent to anybody: each device has its own."""
        return ("personal",)

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> TeacherLogitsMethod:
        """Nothing of the artifacts but what they tell of each label."""
        training = self.settings.training
        for artifact in artifacts:
            name = artifact.manifest.name
            ports = artifact.manifest.graphs["train"].select("output")
            shapes = [port.shape for port in ports if port.of == _COUNTS]
            if not shapes:
                raise ValueError(
                    f"artifact {name!r} gives no {_COUNTS}: export it with export.losses's loss"
                )
            if shapes[0] != (training.classes,):
                raise ValueError(
                    f"artifact {name!r} knows {shapes[0]} classes, the task {training.classes}"
                )
        return TeacherLogitsMethod(training, self.settings.rate_decay)
