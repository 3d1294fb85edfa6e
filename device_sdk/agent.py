"""The background thread that takes part in rounds. It sleeps until there is something to do."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from device_sdk.home.home import Home
from device_sdk.home.membership import Membership
from device_sdk.home.round_store import RoundOutcome
from device_sdk.link.events import (
    Connected,
    ConnectRefused,
    Disconnected,
    Event,
    Message,
    PublishRefused,
    Stopped,
    Subscribed,
    SubscribeRefused,
)
from device_sdk.link.link import Link
from device_sdk.link.send_queue import LinkError
from device_sdk.link.settings import LinkSettings
from device_sdk.local_data import DataSource
from device_sdk.methods.learner import Declined
from device_sdk.rounds.actions import Publish, Subscribe, Unsubscribe
from device_sdk.rounds.pace import Pace
from device_sdk.rounds.participant import Participant
from device_sdk.rounds.sender import OutboxLimit
from device_sdk.status import Live
from device_sdk.train.affordable import ArtifactWishes
from device_sdk.train.job import RoundTrainer, TrainingJob
from device_sdk.train.lazy import LazyTrainer
from device_sdk.train.options import TrainingOptions

if TYPE_CHECKING:
    from device_sdk.system.clock import Clock


T = TypeVar("T")

_log = logging.getLogger("tessera.device")
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0


class Agent:
    """Runs a :class:`Participant` on a link, and its rounds' training, in one daemon thread.

    The process may end at any moment, by SIGKILL too: what matters is committed before it is sent.
    An agent runs once; make a new one to start again.
    """

    def __init__(
        self,
        home: Home,
        membership: Membership,
        trainer: RoundTrainer,
        *,
        artifacts: Mapping[bytes, Path],
        wishes: ArtifactWishes | None = None,
        outbox_limit: OutboxLimit | None = None,
        pace: Pace,
        link_settings: LinkSettings,
        clock: Callable[[], float],
        rng: np.random.Generator,
    ) -> None:
        jitter, link_rng = rng.spawn(2)
        self._trainer = trainer
        self._clock = clock
        self.participant = Participant(
            home, membership, artifacts=artifacts, wishes=wishes, outbox_limit=outbox_limit,
            pace=pace, clock=clock, rng=jitter,
        )  # fmt: skip
        self._link = Link(
            membership.url,
            rng=link_rng,
            clock=clock,
            tls=membership.tls,
            client_id=membership.grant.handle.hex(),
            settings=link_settings,
        )
        self._stopping = threading.Event()
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._failures: Counter[str] = Counter()
        self._refused: dict[str, str] = {}
        self.problem = ""
        """The last thing that went wrong and has not come right since; empty for none."""
        self._thread = threading.Thread(target=self._run, name="tessera-device", daemon=True)

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted the connection."""
        return self._link.connected

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._link.start()
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Stop after the work in hand; whether the thread ended within ``timeout_seconds``."""
        self._stopping.set()
        # The link's last event wakes the thread; a training in progress is finished first.
        self._link.stop(flush_seconds=min(1.0, timeout_seconds), timeout_seconds=timeout_seconds)
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._guarded(self.participant.start)
        while not self._stopping.is_set():
            self._guarded(self._turn)

    def _guarded(self, work: Callable[[], None]) -> None:
        """No failure of ours (a full disk, say) may end the thread."""
        try:
            work()
        except Exception as error:
            name = type(error).__name__
            if self._failures[name] == 0:
                _log.exception("the device's thread failed and goes on")
            self._failures[name] += 1
            self.problem = f"{name}: {error}"
            self._stopping.wait(self._pause_seconds)
            self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
        else:
            self._pause_seconds = _FIRST_PAUSE_SECONDS

    def _turn(self) -> None:
        self._act()
        question = self.participant.take_question()
        if question is not None:
            self._attempt(question, lambda: self.participant.wanted(self._wants(question)))
            return
        job = self.participant.take_job()
        if job is not None and job.manifest.threshold == 0:
            self._attempt(job, lambda: self.participant.read(job, self._adopted(job)))
            return
        if job is not None:
            result = self._attempt(job, lambda: self._trainer.train(job))
            if result is not None:
                self.participant.trained(job, result)
                self.problem = ""  # network, disk and training all did their part
            self.participant.tick()
            return
        wait_seconds = self.participant.next_seconds() - self._clock()
        timeout_seconds = None if wait_seconds == math.inf else max(0.0, wait_seconds)
        for event in self._link.events(timeout_seconds=timeout_seconds):
            # Each apart: one that fails must not take the others with it.
            self._guarded(partial(self._take, event))
        self.participant.tick()

    def _act(self) -> None:
        for action in self.participant.actions.drain():
            match action:
                case Publish(topic, payload):
                    try:
                        self._link.publish(topic, payload)
                    except LinkError as error:
                        self.problem = str(error)  # sent again like anything without an answer
                case Subscribe(topic_filter):
                    self._link.subscribe(topic_filter)
                case Unsubscribe(topic_filter):
                    self._link.unsubscribe(topic_filter)

    def _take(self, event: Event) -> None:
        match event:
            case Message(topic, payload, retained):
                self.participant.message(topic, payload, retained=retained)
            case Connected():
                self.problem = ""
                self.participant.connected(True)
            case Disconnected(reason, detail):
                self.problem = f"no connection to the broker ({reason}): {detail}"
                self.participant.connected(False)
            case ConnectRefused(_, detail):
                self.problem = f"the broker refused the connection: {detail}"
                self.participant.connected(False)
            case SubscribeRefused(topic_filter, _, detail):
                self.problem = f"the broker refused the subscription to {topic_filter}: {detail}"
                self._refused[topic_filter] = self.problem
            case Subscribed(topic_filter):
                if self._refused.pop(topic_filter, None) == self.problem:
                    self.problem = ""
            case PublishRefused(topic, _, detail):
                self.problem = f"the broker refused a message to {topic}: {detail}"
            case Stopped():
                self._stopping.set()

    def _wants(self, job: TrainingJob) -> Sequence[str]:
        return self._trainer.wants(job)

    def _adopted(self, job: TrainingJob) -> Mapping[str, NDArray[Any]] | None:
        return self._trainer.adopt(job)

    def _attempt(self, job: TrainingJob, work: Callable[[], T]) -> T | None:
        """What ``work`` gives; None where it failed, which ends the round without an update."""
        try:
            return work()
        except Declined as reason:
            self.participant.ended(job, RoundOutcome.DECLINED, str(reason))
        except Exception as error:
            _log.warning("round %d ended without an update: %s", job.manifest.round, error)
            self.problem = f"round {job.manifest.round}: {type(error).__name__}: {error}"
            self.participant.ended(job, RoundOutcome.FAILED, f"{type(error).__name__}: {error}")
        return None


# Learning in the background: an agent is made at each start, for an agent runs once.


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
