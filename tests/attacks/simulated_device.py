"""A device on a simulated broker: the product's participant and home, and no thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from device_sdk.home.home import Home
from device_sdk.home.round_store import Participation
from device_sdk.local_data import LocalData
from device_sdk.rounds.actions import Publish, Subscribe, Unsubscribe
from device_sdk.rounds.current_round import CurrentRound
from device_sdk.rounds.participant import Participant
from device_sdk.train.job import TrainedRound, TrainingJob
from device_sdk.world import DeviceWorld, Pace, TrainingOptions
from tests.attacks.simulated_broker import Parcel, SimulatedBroker
from tests.faults.known import WIDTH, known_body


class _WorkClock:
    """Times trainings by the world's clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = clock

    def sleep(self, seconds: float) -> None:
        raise NotImplementedError


def _no_samples() -> LocalData:
    return LocalData({})


class SimulatedDevice:
    """Device ``place``; what it sends in a round is ``body(place, generation, round)``. Its clock
    runs ``rate`` times as fast as the world's; another rate, and other ``options``, hold from its
    next start on.

    ``train_seconds``: that a training takes. As on a real device, nothing that comes meanwhile is
    looked at before its end.
    """

    def __init__(
        self,
        folder: Path,
        place: int,
        broker: SimulatedBroker,
        clock: Callable[[], float],
        pace: Pace,
        body: Callable[[int, int, int], bytes] = known_body,
    ) -> None:
        self.folder = folder
        self.place = place
        self.name = f"device-{place}"
        self.body = body
        self.jobs = 0
        """Rounds trained, those whose result was never committed included."""
        self._broker = broker
        self._clock = clock
        self.rate = 1.0
        self.options = TrainingOptions()
        self._pace = pace
        self._lives = 0
        self.train_seconds = 0.0
        self.connected = False
        self.start()

    def start(self) -> None:
        """The process starts, and connects."""
        self.home = Home(self.folder)
        membership = self.home.membership.load()
        self.grant = membership.grant
        self._lives += 1
        self._rate = rate = self.rate
        self.participant = Participant(
            DeviceWorld(
                self.home,
                membership,
                options=self.options,
                pace=self._pace,
                clock=lambda: rate * self._clock(),
                work_clock=_WorkClock(self._clock),
                rng=np.random.default_rng([self.place, self._lives]),
                installed={bytes(32): self.folder},
                # Never read, since nothing trains here; without it, the round would be declined.
                source=lambda: _no_samples,
            )
        )
        self._filters: set[str] = set()
        self._training: tuple[CurrentRound, TrainingJob, float] | None = None
        self._came: list[Parcel] = []
        self.alive = True
        self.participant.start()
        self.set_connected(True)

    def kill(self) -> None:
        """The process dies; what it had committed is all that stays."""
        self.home.close()
        self._broker.forget(self.name)
        self.alive = self.connected = False

    def restart(self) -> None:
        """The process dies, and starts again."""
        self.kill()
        self.start()

    def set_connected(self, value: bool) -> None:
        """The broker's connection comes or goes."""
        self.connected = value
        self._broker.forget(self.name)
        if value:
            for each in self._filters:
                self._broker.subscribe(self.name, each)
        self.participant.connected(value)

    def deliver(self, parcel: Parcel) -> None:
        """A publication comes."""
        if self.alive and self.connected:
            if self._training is not None:
                self._came.append(parcel)
            else:
                self.participant.message(parcel.topic, parcel.payload, retained=parcel.retained)

    def turn(self) -> bool:
        """Do what is due; whether there was anything."""
        if not self.alive or not self._has_trained():
            return False
        self.participant.tick()
        busy = False
        actions = self.participant.actions
        while actions:
            busy = True
            match actions.popleft():
                case Publish(topic, payload):
                    if self.connected:
                        self._broker.publish(topic, payload)
                case Subscribe(topic_filter):
                    self._filters.add(topic_filter)
                    if self.connected:
                        self._broker.subscribe(self.name, topic_filter)
                case Unsubscribe(topic_filter):
                    self._filters.discard(topic_filter)
                    self._broker.unsubscribe(self.name, topic_filter)
        round_ = self.participant.turn()
        if round_ is None:
            return busy
        if round_.question is not None:
            round_.wanted(())
        elif round_.job is not None:
            self.jobs += 1
            self._training = round_, round_.job, self._clock() + self.train_seconds
        return True

    def _has_trained(self) -> bool:
        """Whether the device is free; ends a training whose time is over."""
        if self._training is not None:
            round_, job, until = self._training
            if self._clock() < until:
                return False
            self._training = None
            round_.trained(job, self._train(job))
            came, self._came = self._came, []
            for parcel in came:
                self.deliver(parcel)
        return True

    def next_seconds(self) -> float:
        """When :meth:`turn` has something to do, by the world's clock."""
        if not self.alive:
            return float("inf")
        if self._training is not None:
            return self._training[2]
        return self.participant.next_seconds() / self._rate

    def part(self, number: int) -> Participation | None:
        """How a round of the newest generation ended here."""
        found = [
            part
            for part in self.home.rounds._participations("ORDER BY number DESC")
            if part.round == number
        ]
        return found[0] if found else None

    def _train(self, job: TrainingJob) -> TrainedRound:
        body = self.body(self.place, job.manifest.generation, job.manifest.round)
        return TrainedRound(3, body, {"users": np.zeros((1, WIDTH), np.float32)}, None, 0.01)
