"""Thousands of restarts with kills in the middle of publications, every sealing noted.

The tests make a few; `python -m tests.attacks.restarts --restarts 3000` makes many.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aggregator.keys.enrolment import make_codes
from aggregator.methods.method import Method
from aggregator.methods.scatter import ScatterSettings
from device_sdk.artifact import Artifact
from device_sdk.wire.arrays.exchange import Attachment, Broadcast
from device_sdk.wire.publish.topics import EnrolRequestTopic
from device_sdk.wire.seal.enrolment import EnrolmentAttempt
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.world import Pace
from tests.attacks.nonce_ledger import NonceLedger
from tests.attacks.stage import Stage
from tests.faults.known import WIDTH, KnownBinding, KnownSums
from tests.faults.oracle import judge

_PACE = Pace(answer_seconds=2.0, fetch_seconds=2.0, reopen_seconds=0.5, most_seconds=20.0)
_ROUND = "quorum = 1\nwait_for_devices = 2\ndeadline_seconds = 6\npause_seconds = 0.5"


class _Killed(BaseException):
    pass


@dataclass(frozen=True)
class RestartFigures:
    """``in_publications``: deaths of the aggregator between two of the messages it sent."""

    restarts: int
    in_publications: int
    sealed: int
    encapsulated: int
    reused: int


class _Attaching(KnownSums):
    """Attaches its sums, for everybody and for a cohort."""

    def __init__(self, items: int, settings: ScatterSettings, members: list[str]) -> None:
        super().__init__(np.zeros((items, WIDTH), np.float32), settings)
        self._members = members

    def tell(self) -> Broadcast:
        """See :class:`~aggregator.methods.method.Method`."""
        broadcast = super().tell()
        sums = broadcast.tensors["items"].reshape(-1)
        # In float16 more than one chunk of 64 KiB, and less.
        long, short = {"sums": np.resize(sums, 40_000)}, {"sums": sums}
        return replace(
            broadcast,
            attachments={"for.all": Attachment(long), "for.near": Attachment(short, "near")},
            cohorts={"near": tuple(self._members)},
        )


def make_restart_stage(folder: Path) -> Stage:
    """Two devices in short rounds, both of a cohort with an attachment of its own."""
    members: list[str] = []

    class Binding(KnownBinding):
        """See :class:`_Attaching`."""

        def build(
            self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
        ) -> Method:
            """See :class:`~aggregator.methods.method.Binding`."""
            return _Attaching(items, self.settings, members)

    stage = Stage(folder, 2, _ROUND, pace=_PACE, binding=Binding())
    members += [device.grant.device_id.hex() for device in stage.devices]
    return stage


def _late_enrolment(stage: Stage) -> Callable[[int], bytes]:
    """A request under a code that has expired, by its counter: each is answered, and sealed."""
    [code] = make_codes(stage.store, 1, int(stage.unix()), os.urandom)
    with stage.store.database.transaction():
        stage.store.tokens.add(code, int(stage.unix()) - 2, int(stage.unix()) - 1, None)
    descriptor = stage.parts.keys.current().descriptor
    identity = Ed25519PrivateKey.generate()

    def request(counter: int) -> bytes:
        freshness = Freshness(stage.incarnation(), counter)
        return EnrolmentAttempt(code, descriptor, identity, freshness).message

    return request


def restart_often(stage: Stage, ledger: NonceLedger, restarts: int, seed: int) -> RestartFigures:
    """Kill and start the aggregator, or one of the devices, ``restarts`` times."""
    rng = np.random.default_rng(seed)
    original = stage.broker.publish
    left = killed = 0

    def publish(topic: str, payload: bytes, *, retain: bool = False) -> None:
        nonlocal left
        original(topic, payload, retain=retain)
        if retain or "/down/" in topic:
            left -= 1
            if left == 0:
                raise _Killed

    request, enrol = _late_enrolment(stage), stage.topics.write(EnrolRequestTopic())
    stage.broker.publish = publish  # type: ignore[method-assign]
    for count in range(1, restarts + 1):
        stage.broker.publish(enrol, request(count))
        left = int(rng.integers(1, 60))
        try:
            stage.run(float(rng.uniform(1.0, 7.0)))
        except _Killed:
            killed += 1
        left = 0
        stage.broker.seen.clear()
        if rng.random() < 0.8:
            stage.restart_aggregator()
        else:
            device = stage.devices[int(rng.integers(2))]
            device.restart()
        if rng.random() < 0.02:
            with stage.store.database.transaction():
                stage.store.facts.rotation_due = True
    stage.broker.publish = original  # type: ignore[method-assign]
    return RestartFigures(restarts, killed, ledger.sealed, ledger.encapsulated, len(ledger.reused))


def main() -> int:
    """0, or 1 when a key met a nonce twice."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.restarts", description=__doc__)
    parser.add_argument("--restarts", type=int, default=3000, help="how many (3000)")
    parser.add_argument("--seed", type=int, default=17)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    memory = Path("/dev/shm")
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
    ):
        ledger = NonceLedger(patch)
        stage = make_restart_stage(Path(folder))
        figures = restart_often(stage, ledger, arguments.restarts, arguments.seed)
        stage.close()
        judge(stage.fleet)
    print(
        f"{figures.restarts:,} restarts, {figures.in_publications:,} of them in the middle of a "
        f"publication; {figures.sealed:,} sealings and {figures.encapsulated:,} encapsulations, "
        f"{figures.reused} with a key and nonce used before"
    )
    return 1 if figures.reused else 0


if __name__ == "__main__":
    sys.exit(main())
