"""What a device has sent of its labels, and the fleet's knowledge without that share."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.learner import LearnerError
from device_sdk.methods.state import Entry, State, unpack
from device_sdk.methods.teacher_logits.contract import Share, TeacherLogitsTraining
from device_sdk.wire.arrays.exchange import Broadcast

# What a device sent in its last rounds, so that it can take itself out of the sums.

# Verdicts that never come do not make the state grow for ever.
_MOST_SHARES = 8


_SENT = {
    "sent_rounds": Entry(np.int64, ("sent",)),
    "sent_counted": Entry(np.bool_, ("sent",)),
    "sent_weights": Entry(np.int64, ("sent", "classes")),
    "sent_devices": Entry(np.int64, ("sent", "classes"), least=0),
    "sent_sums": Entry(np.float32, ("sent", "classes", "classes")),
}


@dataclass(frozen=True, slots=True, eq=False)
class SentShare:
    """What went out in a round, and whether the aggregator says that it counted.

    What went out in several rounds for one version is one, under the newest round's number.
    """

    round_id: int
    share: Share
    counted: bool


@dataclass(frozen=True, slots=True)
class SentShares:
    """The shares of the last rounds, oldest first. Immutable: each change gives a new one."""

    shares: tuple[SentShare, ...] = ()

    def sent(self, round_id: int, share: Share) -> SentShares:
        """With one more, which does not count until a receipt says so."""
        others = tuple(one for one in self.shares if one.round_id != round_id)
        return SentShares((*others, SentShare(round_id, share, False))[-_MOST_SHARES:])

    def receipted(self, round_id: int, counted: bool) -> SentShares:
        """With the verdict on the share of ``round_id``, if that one is still known."""
        return SentShares(
            tuple(
                replace(one, counted=counted) if one.round_id == round_id else one
                for one in self.shares
            )
        )

    def in_sums_of(self, rounds: range) -> Share | None:
        """All of ours within the sums of ``rounds``; None where there is nothing of ours."""
        return _total([one for one in self.shares if one.counted and one.round_id in rounds])

    def at(self, summed: range) -> SentShares:
        """What is worth keeping once the sums of the rounds ``summed`` were broadcast.

        Sums of earlier rounds come no more. What counted since then, in however many rounds without
        quorum, waits for one and the same version: it is added up.
        """
        kept = [one for one in self.shares if one.round_id >= summed.start]
        waiting = [one for one in kept if one.counted and one.round_id >= summed.stop]
        total = _total(waiting)
        if total is not None:
            kept = [one for one in kept if one not in waiting]
            kept.append(SentShare(waiting[-1].round_id, total, True))
        return SentShares(tuple(sorted(kept, key=lambda one: one.round_id)))

    def state(self) -> dict[str, NDArray[Any]]:
        """The shares side by side, as ``_SENT`` says; copies."""
        shares = self.shares
        classes = len(shares[0].share.weights) if shares else 0
        weights = np.zeros((len(shares), classes), dtype=np.int64)
        devices = np.zeros_like(weights)
        sums = np.zeros((len(shares), classes, classes), dtype=np.float32)
        for place, one in enumerate(shares):
            weights[place], devices[place] = one.share.weights, one.share.devices
            sums[place] = one.share.sums
        return {
            "sent_rounds": np.asarray([one.round_id for one in shares], dtype=np.int64),
            "sent_counted": np.asarray([one.counted for one in shares], dtype=np.bool_),
            "sent_weights": weights,
            "sent_devices": devices,
            "sent_sums": sums,
        }

    @staticmethod
    def from_state(state: State) -> SentShares:
        """Take ``state()`` back; raises LearnerError where dtypes, shapes or values do not fit."""
        found = unpack(_SENT, state, error=LearnerError)
        rounds, counted, weights, devices, sums = (found[name] for name in _SENT)
        if not ((weights >= devices).all() and (np.diff(rounds) > 0).all()):
            raise LearnerError("the state's sent shares do not fit together")
        columns = (rounds, sums, weights, devices, counted)
        return SentShares(
            tuple(
                SentShare(int(number), Share(total, weight, device, 0), bool(counts))
                for number, total, weight, device, counts in zip(*columns, strict=True)
            )
        )


def _total(sent: Sequence[SentShare]) -> Share | None:
    return functools.reduce(operator.add, [one.share for one in sent]) if sent else None


# A device's teachers by label: the mean knowledge of the other devices.


@dataclass(frozen=True, slots=True, eq=False)
class LabelTeachers:
    """What to learn from, besides the labels.

    Attributes:
        table: float32 [classes, classes], row t = T of label t; uniform where there is none.
        taught: float32 [classes], 1 where label t has a teacher, else 0: its samples train as in
            round 1.
    """

    table: NDArray[np.float32]
    taught: NDArray[np.float32]


def summed_rounds(broadcast: Broadcast) -> range:
    """The rounds whose updates are in the broadcast's sums; empty for none.

    More than one where rounds missed their quorum, and what counted in them was carried over.
    Raises LearnerError where the broadcast does not say so.
    """
    first, last = (int(_tensor(broadcast, name, np.int64, ())) for name in ("first_round", "round"))
    if not (0 < first <= last < broadcast.round_id or first == last == 0):
        raise LearnerError(
            f"the broadcast of round {broadcast.round_id} holds sums of rounds {first} to {last}"
        )
    return range(first, last + 1) if last else range(0)


def leave_one_out(
    broadcast: Broadcast, own: Share | None, training: TeacherLogitsTraining
) -> LabelTeachers:
    """Teachers out of the sums over all devices, less this device's own share.

    AFD (papers/afd), table 3 and equation 6. ``own`` is all that the device added to these very
    sums, None where it added nothing. A label that no other device has is without a teacher. The
    mean is over what came of other devices that have the label (or over their samples, as
    ``weights`` says); with ``normalise`` off the sum is divided by the number of all updates.

    Raises LearnerError where the broadcast's arrays are missing or do not fit.
    """
    classes = training.classes
    means = _tensor(broadcast, "means", np.float32, (classes, classes)).astype(np.float64)
    weights = _tensor(broadcast, "weights", np.int64, (classes,)).copy()
    devices = _tensor(broadcast, "devices", np.int64, (classes,)).copy()
    participants = int(_tensor(broadcast, "participants", np.int64, ()))
    if not np.isfinite(means).all() or min(int(weights.min()), int(devices.min())) < 0:
        raise LearnerError("the broadcast's means are not finite or its counts are negative")
    sums = means * weights[:, None]
    if own is not None:
        if own.sums.shape != sums.shape:
            raise LearnerError(
                f"this device knows {len(own.weights)} classes, the task has {classes}"
            )
        sums -= own.sums
        weights -= own.weights
        devices -= own.devices
    taught = (devices > 0) & (weights > 0)
    table = np.full((classes, classes), 1 / classes)
    divisors = weights[taught] if training.normalise else np.full(int(taught.sum()), participants)
    # Sums of rounded means less a share may end a little below zero: the clip takes that too.
    table[taught] = np.maximum(
        sums[taught] / np.maximum(divisors, 1)[:, None], training.least_teacher
    )
    if training.normalise:
        table /= table.sum(axis=1, keepdims=True)
    return LabelTeachers(table.astype(np.float32), taught.astype(np.float32))


def _tensor(broadcast: Broadcast, name: str, dtype: type, shape: tuple[int, ...]) -> NDArray[Any]:
    array = broadcast.tensors.get(name)
    if array is None or array.dtype != dtype or array.shape != shape:
        found = "missing" if array is None else f"{array.dtype} {array.shape}"
        raise LearnerError(
            f"the broadcast's {name!r} is {found}; expected {np.dtype(dtype)} {shape}"
        )
    return array
