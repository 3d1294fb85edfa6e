"""The simulator hands an attachment only to those who may read it and want it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aggregator.methods.method import Method
from benchmarks.simulation import Simulation, device_name
from device_sdk.methods.learner import Learner
from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update


class Relay(Method):
    """Attaches one array for everybody and one for device 1 alone; notes who answered."""

    def __init__(self) -> None:
        self.heard: dict[str, set[str]] = {}

    def tell(self) -> Broadcast:
        one = np.ones(3, dtype=np.float32)
        return Broadcast(
            self._round_id,
            0,
            {},
            attachments={
                "open": Attachment({"x": one}),
                "closed": Attachment({"x": one}, cohort="first"),
            },
            cohorts={"first": (device_name(1),)},
        )

    def require(self, update: Update) -> None: ...

    def add(self, update: Update) -> None:
        self.heard[update.sender] = set(str(update.metadata["got"]).split())

    def step(self) -> dict[str, float]:
        return {}


class Reader(Learner):
    def wants(self, broadcast: Broadcast) -> Sequence[str]:
        assert not broadcast.attachments
        assert not broadcast.cohorts
        assert all(size == 12 for size in broadcast.offered.values())
        return tuple(broadcast.offered)

    def train(self, broadcast: Broadcast) -> Update:
        return Update(broadcast.round_id, {}, {"got": " ".join(sorted(broadcast.attachments))})

    def state(self) -> Mapping[str, NDArray[Any]]:
        return {}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        pass


def test_only_members_read_a_cohorts_attachment() -> None:
    method = Relay()
    Simulation(method, [Reader(), Reader()], np.random.default_rng(0)).round()
    assert method.heard == {device_name(0): {"open"}, device_name(1): {"closed", "open"}}


def test_an_attachment_for_an_unknown_cohort_is_refused() -> None:
    attachments = {"x": Attachment({}, cohort="nobody")}
    with pytest.raises(ValueError, match="no cohort"):
        Broadcast(1, 0, {}, attachments=attachments, cohorts={"somebody": ()})


@pytest.mark.parametrize("sender", ["x", "A" * 32, "0" * 31])
def test_a_sender_is_32_hexadecimal_digits(sender: str) -> None:
    with pytest.raises(ValueError, match="sender"):
        Update(1, {}, sender=sender)
