"""Many devices of a run in one process: the product's agents, each with its home and its link."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from device_sdk.agent import Agent
from device_sdk.home.home import Home
from device_sdk.home.round_store import RoundStore
from device_sdk.link import LinkSettings
from device_sdk.local_data import LocalData
from device_sdk.rounds.sender import Sender
from device_sdk.train.job import RoundTrainer, TrainedRound, TrainingJob
from device_sdk.world import DeviceWorld, Pace
from tests.faults.counters import Counters
from tests.faults.crash_points import arm
from tests.faults.hooks import after
from tests.faults.known import WIDTH, known_body
from tests.faults.known_ladder import ladder_body

_PACE = Pace(answer_seconds=0.5, fetch_seconds=0.5, reopen_seconds=0.2, most_seconds=2.0)
_LINK = LinkSettings(
    keepalive_seconds=1,
    stall_seconds=1.0,
    connect_timeout_seconds=1.0,
    version_probe_seconds=0.3,
    backoff_first_seconds=0.05,
    backoff_most_seconds=0.5,
)


@dataclass
class KnownTrainer(RoundTrainer):
    """Trains by looking up what device ``place`` has to contribute; takes a moment for it."""

    place: int
    rng: np.random.Generator
    may_go_on: threading.Event
    body: Callable[[int, int, int], bytes] = known_body
    users: np.ndarray = field(default_factory=lambda: np.zeros((1, WIDTH), np.float32))  # type: ignore[type-arg]

    def train(self, job: TrainingJob) -> TrainedRound:
        """See :class:`~device_sdk.train.job.RoundTrainer`."""
        seconds = float(self.rng.exponential(0.03))
        time.sleep(seconds)
        self.may_go_on.wait()
        body = self.body(self.place, job.manifest.generation, job.manifest.round)
        return TrainedRound(3, body, {"users": self.users}, None, seconds)


def live(
    folders: list[str],
    places: list[int],
    counters: str,
    log: str,
    brisk: bool,
    point: str,
    calls: int,
    *,
    ladder: bool = False,
) -> None:
    """Run the devices of these homes until killed; at ``point``, if any, all die at once.

    ``brisk``: with waits of a second instead of the product's own.
    """
    logging.raiseExceptions = False  # the log's disk is full now and then, too
    logging.basicConfig(filename=log, level=logging.WARNING, force=True)
    shared = Counters(Path(counters))
    if point:
        arm(point, calls)
    after(RoundStore, "post", lambda *values, **named: shared.add("commits"))
    after(Sender, "_send", lambda *values, **named: shared.add("sends"))
    agents = [
        make_agent(Path(folder), place, brisk, ladder_body if ladder else known_body)
        for folder, place in zip(folders, places, strict=True)
    ]
    for agent in agents:
        agent.start()
    threading.Event().wait()


def make_agent(
    folder: Path,
    place: int,
    brisk: bool = True,
    body: Callable[[int, int, int], bytes] = known_body,
) -> Agent:
    """The agent of device ``place``, which brings known updates; not started yet. It has the home
    for itself until the process ends."""
    return agent_of(Home(folder), place, brisk, body=body)


def agent_of(
    home: Home,
    place: int,
    brisk: bool,
    may_go_on: threading.Event | None = None,
    body: Callable[[int, int, int], bytes] = known_body,
) -> Agent:
    """The same for a home that the caller will close. While ``may_go_on`` is not set, the device
    comes to the end of no training."""
    if may_go_on is None:
        may_go_on = threading.Event()
        may_go_on.set()
    membership = home.membership.load()
    assert membership is not None
    rng = np.random.default_rng()
    # A crystal that is wrong by up to a hundredth, the other way after the next start perhaps.
    rate = float(rng.uniform(0.99, 1.01)) if brisk else 1.0
    return Agent(
        DeviceWorld(
            home,
            membership,
            pace=_PACE if brisk else Pace(),
            link_settings=_LINK if brisk else LinkSettings(),
            clock=lambda: rate * time.monotonic(),
            rng=rng,
            installed={bytes(32): home.folder},
            source=lambda: LocalData({"x": np.zeros((1, 1), np.float32)}),
        ),
        KnownTrainer(place, rng.spawn(1)[0], may_go_on, body),
    )
