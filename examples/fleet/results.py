"""What is known about a fleet's run, at its end or when it was stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median, median_low

from examples.fleet.evaluate import FleetQuality, QualityTable
from examples.fleet.journal import Finished, Measured, RoundQuality, Trouble, UserShown
from examples.fleet.journal import Record as JournalRecord


@dataclass(frozen=True, slots=True)
class Run:
    """What was decided before the start.

    ``train_seconds``: what a round's training is given. ``round_p90_seconds``: by k, a round's
    training on this machine, before throttling. ``baselines``: what recommenders reach that see
    everybody's data in one place, by their name.
    """

    data_name: str
    data_origin: str
    synthetic: bool
    negatives: str
    users: int
    items: int
    interactions: int
    devices: int
    processes: int
    rounds: int
    columns: int
    train_seconds: float
    round_p90_seconds: Mapping[int, float]
    baselines: Mapping[str, FleetQuality]


@dataclass
class FleetResults:
    """Filled from the journals while the fleet runs."""

    run: Run
    broker: str = ""
    quality: QualityTable = field(default_factory=QualityTable)
    enrolled: set[str] = field(default_factory=set)
    measured: dict[str, Measured] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)
    shown: dict[str, UserShown] = field(default_factory=dict)
    troubles: list[Trouble] = field(default_factory=list)
    closed_rounds: int = 0
    updates_counted: int = 0
    round_seconds: list[float] = field(default_factory=list)
    refused_by_aggregator: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    stopped_early: str = ""

    def take(self, record: JournalRecord) -> None:
        """Add one line of a journal."""
        match record:
            case RoundQuality():
                self.quality.add(record)
            case Measured():
                self.measured[record.device] = record
            case Finished():
                self.finished[record.device] = record
            case UserShown():
                self.shown[record.user] = record
            case Trouble(device, text, over=True):
                self.troubles.remove(Trouble(device, text))
            case Trouble():
                self.troubles.append(record)
            case _:
                self.enrolled.add(record.device)

    @property
    def dense_bytes(self) -> int:
        """A float32 update of the whole item matrix."""
        return self.run.items * self.run.columns * 4

    @property
    def refusals(self) -> str:
        """What the aggregator refused, by reason: messages, which devices may have sent again."""
        return ", ".join(f"{n} {why}" for why, n in self.refused_by_aggregator.items()) or "none"

    @property
    def points(self) -> float:
        """The standard error of a share among all users, in points: that of drawing users alone."""
        return 100.0 * (0.25 / self.run.users) ** 0.5

    def curve_rounds(self) -> list[int]:
        """Rounds that nearly every device evaluated: a mean over fewer would jump about.

        A round's figures are those of the version that it began with, together with the users'
        vectors that it trained. One above the last round stands for the final version.
        """
        return self.quality.rounds(least_devices=max(1, round(0.9 * self.run.devices)))

    def last_round(self) -> int | None:
        """The round whose quality is reported; None before the first."""
        rounds = self.curve_rounds() or self.quality.rounds()
        return rounds[-1] if rounds else None

    def round_name(self, round_id: int) -> str:
        """``round 7``; the final version is what came of the last round, published once more."""
        return "the last round" if round_id > self.run.rounds else f"round {round_id}"

    def ks(self, capacity: str) -> tuple[int, ...]:
        """k of every measured device of a class."""
        return tuple(each.k for each in self.measured.values() if each.capacity == capacity)

    def class_k(self, capacity: str) -> int | None:
        """What a class trains: the median of what its timed devices picked."""
        found = self.ks(capacity)
        return median_low(found) if found else None

    def slowdown(self, capacity: str) -> float | None:
        """Median over a class of what was emulated."""
        factors = [each.slowdown for each in self.measured.values() if each.capacity == capacity]
        return median(factors) if factors else None

    def p90_seconds(self, capacity: str) -> float | None:
        """Median over a class of the time that a round takes at the chosen k, at its p90."""
        times = [
            each.p90_seconds
            for each in self.measured.values()
            if each.capacity == capacity and each.p90_seconds is not None
        ]
        return median(times) if times else None

    def train_seconds(self, capacity: str) -> float | None:
        """Mean over a class of the time that training took in the rounds, among all the others."""
        times = [
            each.train_seconds
            for each in self.finished.values()
            if each.capacity == capacity and each.train_seconds is not None
        ]
        return fmean(times) if times else None

    def bytes_per_update(self, capacity: str | None = None) -> float | None:
        """Mean of the sealed updates' sizes, of one class or of all; None where none was sent."""
        chosen = [
            each
            for each in self.finished.values()
            if capacity in (None, each.capacity) and each.updates
        ]
        updates = sum(each.updates for each in chosen)
        return sum(each.sent_bytes for each in chosen) / updates if updates else None
