"""Learning in the background: an agent is made at each start, for an agent runs once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from device_sdk.agent import Agent
from device_sdk.home.home import Home
from device_sdk.home.membership import Membership
from device_sdk.link.settings import LinkSettings
from device_sdk.local_data import DataSource
from device_sdk.rounds.outbox_limit import OutboxLimit
from device_sdk.rounds.pace import Pace
from device_sdk.status import Live
from device_sdk.train.artifact_wishes import ArtifactWishes
from device_sdk.train.lazy import LazyTrainer
from device_sdk.train.options import TrainingOptions

if TYPE_CHECKING:
    from device_sdk.system.clock import Clock

__all__ = ["Background"]


class Background:
    """Starts and stops taking part in rounds, from any thread.

    Args:
        options: of the training, and what bounds artifacts and outbox.
        installed: folders of artifacts that are installed with the device, by their id.
        source: gives the app's data source, for methods that train on arrays; None for none.
        clock: monotonic seconds that count the machine's sleep.
        work_clock: times the training; the machine's own when None.
        rng: each start draws generators of its own from it.
    """

    def __init__(
        self,
        home: Home,
        membership: Membership,
        options: TrainingOptions,
        *,
        installed: Mapping[bytes, Path],
        source: Callable[[], DataSource | None],
        pace: Pace,
        link_settings: LinkSettings,
        clock: Callable[[], float],
        work_clock: Clock | None,
        rng: np.random.Generator,
    ) -> None:
        self._home = home
        self._membership = membership
        self._options = options
        self._installed = installed
        self._source = source
        self._pace = pace
        self._link_settings = link_settings
        self._clock = clock
        self._work_clock = work_clock
        self._rng = rng
        self._agent: Agent | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start a thread. Does nothing if one runs."""
        with self._lock:
            if self._agent is not None and self._agent.running:
                return
            self._agent = self._made()
            self._agent.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Stop after the work in hand; whether the thread ended within ``timeout_seconds``."""
        with self._lock:
            if self._agent is None:
                return True
            return self._agent.stop(timeout_seconds)

    def live(self) -> Live:
        """What the running thread knows; all empty where none runs."""
        agent = self._agent
        if agent is None or not agent.running:
            return Live()
        participant = agent.participant
        manifest = participant.working_on
        return Live(
            running=True,
            connected=agent.connected,
            session=participant.sessions.is_open,
            working_on=None if manifest is None else manifest.round,
            time_unix_seconds=participant.sessions.time.largest_unix_seconds,
            sent_bytes=participant.sender.sent_bytes,
            refused=participant.refusals.counts(),
            problem=agent.problem or participant.problem,
        )

    def _made(self) -> Agent:
        options = self._options
        training_rng, agent_rng = self._rng.spawn(2)
        trainer = LazyTrainer(
            self._home,
            options,
            source=self._source,
            sender=self._membership.grant.device_id.hex(),
            clock=self._work_clock,
            rng=training_rng,
        )
        return Agent(
            self._home,
            self._membership,
            trainer,
            artifacts=self._installed,
            wishes=ArtifactWishes(options.artifact, options.most_artifact_bytes),
            outbox_limit=OutboxLimit(options.most_outbox_updates, options.most_outbox_bytes),
            pace=self._pace,
            link_settings=self._link_settings,
            clock=self._clock,
            rng=agent_rng,
        )
