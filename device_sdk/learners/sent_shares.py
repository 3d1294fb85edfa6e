"""What a device sent in its last rounds, so that it can take itself out of the sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.learners.learner import LearnerError, State
from device_sdk.wire.label_knowledge import Share

__all__ = ["SentShare", "SentShares"]

# Rounds that miss their quorum leave the sums of an older round in place, but not for ever.
_MOST_ROUNDS = 8


@dataclass(frozen=True, slots=True, eq=False)
class SentShare:
    """A share that went out in a round, and whether the aggregator says that it counted."""

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
        return SentShares((*others, SentShare(round_id, share, False))[-_MOST_ROUNDS:])

    def receipted(self, round_id: int, counted: bool) -> SentShares:
        """With the verdict on the share of ``round_id``, if that one is still known."""
        return SentShares(
            tuple(
                replace(one, counted=counted) if one.round_id == round_id else one
                for one in self.shares
            )
        )

    def in_sums_of(self, round_id: int) -> Share | None:
        """The share that is within the sums of ``round_id``; None where none of ours is."""
        for one in self.shares:
            if one.round_id == round_id and one.counted:
                return one.share
        return None

    def since(self, round_id: int) -> SentShares:
        """Without those of rounds before ``round_id``, whose sums no broadcast carries any more."""
        return SentShares(tuple(one for one in self.shares if one.round_id >= round_id))

    def state(self) -> dict[str, NDArray[Any]]:
        """``sent_rounds`` int64 [n], ``sent_counted`` bool [n], ``sent_weights`` int64 [n, classes]
        and ``sent_sums`` float32 [n, classes, classes]."""
        shares = self.shares
        classes = len(shares[0].share.weights) if shares else 0
        weights = np.zeros((len(shares), classes), dtype=np.int64)
        sums = np.zeros((len(shares), classes, classes), dtype=np.float32)
        for place, one in enumerate(shares):
            weights[place], sums[place] = one.share.weights, one.share.sums
        return {
            "sent_rounds": np.asarray([one.round_id for one in shares], dtype=np.int64),
            "sent_counted": np.asarray([one.counted for one in shares], dtype=np.bool_),
            "sent_weights": weights,
            "sent_sums": sums,
        }

    @staticmethod
    def from_state(state: State) -> SentShares:
        """Take ``state()`` back; raises LearnerError where dtypes, shapes or values do not fit."""
        rounds = _array(state, "sent_rounds", np.int64, 1)
        counted = _array(state, "sent_counted", np.bool_, 1)
        weights = _array(state, "sent_weights", np.int64, 2)
        sums = _array(state, "sent_sums", np.float32, 3)
        count, classes = weights.shape
        if not (
            rounds.shape == counted.shape == (count,)
            and sums.shape == (count, classes, classes)
            and np.isfinite(sums).all()
            and (weights >= 0).all()
            and (np.diff(rounds) > 0).all()
        ):
            raise LearnerError("the state's sent shares do not fit together")
        return SentShares(
            tuple(
                SentShare(int(number), Share(sums[i].copy(), weights[i].copy(), 0), bool(verdict))
                for i, (number, verdict) in enumerate(zip(rounds, counted, strict=True))
            )
        )


def _array(state: Mapping[str, NDArray[Any]], name: str, dtype: type, rank: int) -> NDArray[Any]:
    array = state.get(name)
    if array is None or array.dtype != dtype or array.ndim != rank:
        found = "missing" if array is None else f"{array.dtype} {array.shape}"
        raise LearnerError(
            f"the state's {name!r} is {found}; expected {np.dtype(dtype)} of {rank} dimensions"
        )
    return array
