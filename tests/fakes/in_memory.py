"""Both ends in one thread, with a broker that is a dictionary and a clock that a test moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
from paho.mqtt.client import topic_matches_sub

from device_sdk.factorisation import packaged_artifact
from device_sdk.home.home import Home
from device_sdk.home.membership import Membership
from device_sdk.home.round_store import RoundOutcome
from device_sdk.link.broker_url import BrokerWay
from device_sdk.link.events import Message
from device_sdk.local_data import DataSource, LocalData
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.rounds.actions import MoveTo, Publish, Subscribe, Unsubscribe
from device_sdk.rounds.current_round import CurrentRound
from device_sdk.rounds.participant import Participant
from device_sdk.train.job import TrainedRound, TrainingJob
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.publish.report import Reason
from device_sdk.wire.publish.topics import EnrolAnswerTopic, EnrolRequestTopic
from device_sdk.wire.seal.enrolment import EnrolmentAttempt
from device_sdk.wire.seal.enrolment_message import parse_code
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.handshake import sign_no_session
from device_sdk.world import DeviceWorld, Pace, TrainingOptions, installed_artifacts
from tests.fakes.scatter_updates import one_user
from tests.fakes.small_aggregator import WIDTH, SmallAggregator


class TableBroker:
    """Retained messages and what is on its way; stands in for the aggregator's link too."""

    def __init__(self) -> None:
        self.retained: dict[str, bytes] = {}
        self.to_device: deque[tuple[str, bytes, bool]] = deque()
        self.filters: set[str] = set()

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        if retain:
            self.retained[topic] = payload
        if any(topic_matches_sub(each, topic) for each in self.filters):
            self.to_device.append((topic, payload, False))

    def subscribe(self, topic_filter: str) -> None:
        self.filters.add(topic_filter)
        for topic, payload in self.retained.items():
            if topic_matches_sub(topic_filter, topic):
                self.to_device.append((topic, payload, True))


class BenchClock:
    """The bench's time, to time a training by."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def now(self) -> float:
        return self._bench.now_seconds

    def sleep(self, seconds: float) -> None:
        self._bench.now_seconds += seconds


class Bench:
    """A participant and the other end. ``run`` lets time pass; nothing sleeps."""

    def __init__(
        self,
        folder: Path,
        pace: Pace | None = None,
        seed: int = 0,
        options: TrainingOptions | None = None,
    ) -> None:
        self.now_seconds = 1_000_000.0
        self.broker = TableBroker()
        self.aggregator = SmallAggregator("mqtt://unused", clock=lambda: self.now_seconds)
        self.aggregator._link = self.broker  # type: ignore[assignment]
        self.aggregator.rotate_descriptor(publish=False, lifetime_seconds=30 * 86_400)
        self.aggregator.forget_sessions()
        self.aggregator.publish_standing()
        self.folder = folder
        self.pace = pace if pace is not None else Pace()
        self.options = options if options is not None else TrainingOptions()
        self.installed = installed_artifacts(packaged_artifact())
        self.connected = True
        self.rows = 2
        self.wanted: list[str] = []
        self.questions: list[TrainingJob] = []
        self.jobs: list[TrainingJob] = []
        self.refuse_training = False
        self.train_seconds: dict[str, float] = {}
        """By task, how long the thread is busy with a training."""
        self.agenda: list[tuple[float, Callable[[], object]]] = []
        """What happens when, in rising order; during a training, too."""
        self.fetched: list[str] = []
        self.given: dict[str, DataSource] | None = None
        self.chosen: tuple[str, ...] = ()
        self.published: list[tuple[float, int]] = []
        self.moves: list[tuple[float, str]] = []
        self.away: set[str] = set()
        """Cells that cannot be reached; the empty one is where the device enrolled."""
        self._rng = np.random.default_rng(seed)
        self.home = Home(folder, create=True)
        self._enrol()
        self.participant = self._participant()

    def restart(self) -> None:
        """The device's process ends and starts again."""
        self.home.close()
        self.broker.filters.clear()
        self.broker.to_device.clear()
        self.home = Home(self.folder)
        self.participant = self._participant()

    def set_connected(self, value: bool) -> None:
        self.connected = value
        self.participant.connected(value)
        self.broker.to_device.clear()
        if value:
            for each in list(self.broker.filters):
                self.broker.subscribe(each)

    def reach(self, cell: str, value: bool) -> None:
        """The broker of a cell comes or goes."""
        (self.away.discard if value else self.away.add)(cell)
        if self.participant.cell.here == cell and self.connected != value:
            self.set_connected(value)

    def tell_to_wait(self, seconds: float) -> None:
        """The device is told that it has no session, and to come for another then."""
        keys = self.aggregator._sessions._keyring.newest
        in_use = self.participant.sessions._sessions.in_use
        handle = self.participant._world.membership.grant.handle
        life = self.aggregator.presence.incarnation
        assert in_use is not None
        said = sign_no_session(in_use, life, handle, keys.descriptor, keys.sessions, seconds)
        self.aggregator.down(handle, said)

    def run(self, seconds: float) -> None:
        """Everything that happens within ``seconds``."""
        until = self.now_seconds + seconds
        for _ in range(10_000):
            if self._settle():
                continue
            due = self.participant.next_seconds()
            if self.agenda and self.agenda[0][0] <= min(due, until):
                self._pass_to(self.agenda[0][0])
                continue
            if due > until:
                self.now_seconds = until
                return
            self.now_seconds = max(self.now_seconds, due)
            self.participant.tick()
        raise AssertionError("something is due again and again: the thread would never sleep")

    def _pass_to(self, seconds: float) -> None:
        while self.agenda and self.agenda[0][0] <= seconds:
            at_seconds, action = self.agenda.pop(0)
            self.now_seconds = max(self.now_seconds, at_seconds)
            action()
        self.now_seconds = max(self.now_seconds, seconds)

    def sent(self, message_type: int) -> list[float]:
        """When messages of a type were published by the device."""
        return [at for at, kind in self.published if kind == message_type]

    def settle_but_train(self) -> bool:
        """What is on its way is taken; whether there was anything."""
        busy = False
        actions = self.participant.actions
        while actions:
            busy = True
            match actions.popleft():
                case Publish(topic, payload):
                    self.published.append((self.now_seconds, payload[1]))
                    if self.connected:
                        self.aggregator._take(Message(topic, payload, False))
                case Subscribe(topic_filter):
                    self.broker.subscribe(topic_filter)
                case Unsubscribe(topic_filter):
                    self.broker.filters.discard(topic_filter)
                case MoveTo(cell):
                    self.moves.append((self.now_seconds, cell))
                    self.set_connected(cell not in self.away)
        if self.connected and self.broker.to_device:
            busy = True
            topic, payload, retained = self.broker.to_device.popleft()
            self.fetched += [topic] * ("/chunk/" in topic)
            self.participant.message(topic, payload, retained=retained)
        return busy

    def chunks_of(self, task: str) -> int:
        """Chunks and heads that came, of whatever task: all, since they do not tell."""
        return len(self.fetched)

    def _settle(self) -> bool:
        if self.settle_but_train():
            return True
        round_ = self.participant.turn()
        if round_ is None:
            return False
        if round_.question is not None:
            self.questions.append(round_.question)
            round_.wanted(self.wanted)
        elif round_.job is not None:
            self._train(round_, round_.job)
        return True

    def _train(self, round_: CurrentRound, job: TrainingJob) -> None:
        self.jobs.append(job)
        self._pass_to(self.now_seconds + self.train_seconds.get(round_.task, 0.0))
        if self.refuse_training:
            round_.ended(job, RoundOutcome.FAILED, "as the test wants", Reason.ERROR)
            return
        pulls, vector = self._rng.standard_normal(self.rows), self._rng.standard_normal(WIDTH)
        tensors = one_user(WIDTH, range(self.rows), pulls, vector)
        update = Update(job.manifest.round, tensors)
        body = encode_scatter_update(update, WIDTH, job.terms.update_codec, self._rng)
        state = {"users": np.zeros((1, WIDTH), np.float32)}
        seconds = self.train_seconds.get(round_.task, 0.1)
        round_.trained(job, TrainedRound(WIDTH, body, state, None, seconds))

    def _enrol(self) -> None:
        code = self.aggregator.code()
        attempt = EnrolmentAttempt(
            parse_code(code),
            self.aggregator.descriptor,
            self.home.identity(create=True),
            Freshness(self.aggregator.presence.incarnation, self.home.requests.next()),
        )
        topics = self.aggregator.topics
        answer_topic = topics.write(EnrolAnswerTopic(attempt.mailbox))
        self.broker.filters.add(answer_topic)
        self.aggregator._take(Message(topics.write(EnrolRequestTopic()), attempt.message, False))
        enrolled = attempt.accept(self.broker.to_device.popleft()[1])
        self.broker.filters.clear()
        fingerprint = parse_code(code).root_fingerprint
        membership = Membership(
            BrokerWay.parse("mqtt://unused"),
            "tessera",
            "default",
            "all",
            fingerprint,
            enrolled.grant,
        )
        self.home.membership.save(
            membership, self.aggregator.descriptor, enrolled.time_unix_seconds
        )

    def _participant(self) -> Participant:
        membership = self.home.membership.load()
        assert membership is not None
        participant = Participant(
            DeviceWorld(
                self.home,
                membership,
                self.options,
                self.pace,
                clock=lambda: self.now_seconds,
                rng=self._rng,
                installed=self.installed,
                work_clock=BenchClock(self),
                source=lambda: lambda: LocalData({}),
                data=None if self.given is None else lambda: self.given or {},
                tasks=self.chosen,
            )
        )
        participant.start()
        participant.connected(self.connected)
        return participant
