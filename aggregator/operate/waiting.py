"""The open round: whom it waits for, when it closes, and which setting makes it last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from aggregator.keys.registry import Registry
from aggregator.operate.names import called_all
from aggregator.rounds.attendance import Attendance, KnownHabits
from aggregator.store import TaskStore
from aggregator.store.rows import DeviceRow, RoundRow
from aggregator.task.file import RoundSettings, Selector
from device_sdk.system.printable import ago, span


@dataclass(frozen=True)
class WaitingRound:
    """An open round at one moment, by the rule that ``serve`` closes it by.

    Attributes:
        awaited: devices that it waits for.
        passed_over: devices that it selected, that were not heard of, and that it waits for no
            longer, or never did.
        updates: that a version would be made of now, of so many ``devices``: fewer, where some of
            these were carried over and their devices sent another one.
        closes_seconds: from now, when it closes if nothing more comes.
        left_seconds: from now, when it closes at the latest.
    """

    row: RoundRow
    settings: RoundSettings
    awaited: list[DeviceRow]
    passed_over: list[DeviceRow]
    updates: int
    devices: int
    closes_seconds: float
    left_seconds: float

    @classmethod
    def look(
        cls,
        store: TaskStore,
        row: RoundRow,
        registry: Registry,
        selector: Selector,
        settings: RoundSettings,
        now: float,
    ) -> WaitingRound:
        """``now``: Unix seconds."""
        task = store.fleet.tasks.find(store.number).name or ""
        habits = KnownHabits(store.habits)
        attendance = Attendance(habits, settings, store.fleet.devices.seen_among)
        attendance.resume(store, row, set(registry.selected(task, row, selector.admits)))
        updates = store.log.waiting() + store.shares.summed()
        elapsed = max(0.0, now - row.opened_unix_seconds)
        attendance.look(row, elapsed)
        closes = attendance.closes_seconds(elapsed, lambda: updates >= settings.quorum)
        awaited = attendance.waited_for(elapsed)
        if closes >= row.length_seconds and updates < settings.quorum:
            awaited = awaited or sorted(attendance.missing)  # any of them would do
        passed_over = sorted(attendance.missing - set(awaited))
        return cls(
            row,
            settings,
            known(registry, awaited),
            known(registry, passed_over),
            updates,
            store.log.devices(row.version),
            max(0.0, closes - elapsed),
            max(0.0, row.length_seconds - elapsed),
        )

    @property
    def quorum(self) -> int:
        """Updates that a version needs."""
        return self.settings.quorum

    @property
    def because(self) -> str:
        """Why it lasts as long as it does: the settings that would change it."""
        settings = self.settings
        if self.updates < settings.quorum:
            return (
                f"round.quorum = {settings.quorum}; without it a round lasts until "
                f"round.deadline_seconds = {settings.deadline_seconds:g}"
            )
        if self.awaited and self.closes_seconds >= self.left_seconds:
            return (
                f"round.deadline_seconds = {settings.deadline_seconds:g}: it waits so long for a "
                "device whose updates take about that long, or were never counted; round.wanted "
                "closes it at so many updates"
            )
        if self.awaited:
            return (
                f"round.deadline_margin = {settings.deadline_margin:g} times as long as each "
                "device's updates took of late; round.wanted closes it at so many updates"
            )
        return f"round.least_deadline_seconds = {settings.least_deadline_seconds:g}"

    def lines(self, seen: Mapping[bytes, int], now: float) -> Iterator[str]:
        """In words; ``seen``: when devices were seen last, Unix seconds."""
        if self.awaited:
            of = f"{len(self.awaited)} of {self.row.expected} devices"
            yield f"waits        for {of}: {_called(self.awaited, seen, now)}"
        if self.passed_over:
            yield (
                f"passes over  {len(self.passed_over)} that sent no update of late or have had "
                f"their time, though one would count: {_called(self.passed_over, seen, now)}"
            )
        if self.updates < self.quorum:
            yield (
                f"closes       in {span(self.left_seconds)}: {self.updates} of the "
                f"{self.quorum} updates have come that make a version{self._of_fewer}"
            )
        else:
            yield (
                f"closes       when they have come, in {span(self.closes_seconds)} without them, "
                f"in {span(self.left_seconds)} at the latest{self._of_fewer}"
            )
        yield f"because      {self.because}"

    @property
    def _of_fewer(self) -> str:
        if self.devices >= self.updates:
            return ""
        return f"; {self.updates} updates with those carried over, of {self.devices} devices"

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "round": self.row.round,
            "waits_for": listed(self.awaited),
            "passes_over": listed(self.passed_over),
            "updates": self.updates,
            "devices": self.devices,
            "quorum": self.quorum,
            "closes_in_seconds": self.closes_seconds,
            "deadline_in_seconds": self.left_seconds,
            "because": self.because,
        }


def _called(devices: list[DeviceRow], seen: Mapping[bytes, int], now: float) -> str:
    """Those that were not heard of for the longest time first, and since when."""
    ordered = sorted(devices, key=lambda each: (seen.get(each.device_id, 0), each.device_id))
    longest, shortest = (seen.get(each.device_id) for each in (ordered[0], ordered[-1]))
    since = f"last heard of {ago(longest, now)}"
    if ago(longest, now) != ago(shortest, now):
        since = f"last heard of {ago(longest, now)} to {ago(shortest, now)}"
    if longest is None:
        since = since.replace("last heard of never", "never heard of")
    return f"{called_all(ordered)} ({since})"


def known(registry: Registry, device_ids: Iterable[bytes]) -> list[DeviceRow]:
    """The rows of these devices, but for those that were revoked."""
    found = (registry.by_id(each) for each in device_ids)
    return [each for each in found if each is not None]


def listed(devices: Iterable[DeviceRow]) -> list[dict[str, object]]:
    """Devices, for programs."""
    return [{"device_id": each.device_id.hex(), "name": each.name} for each in devices]
