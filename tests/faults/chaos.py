"""One run: a fleet, a broker, and a seeded list of everything that can happen to them."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import signal
import sqlite3
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from aggregator.cli import main
from tests.fakes.waiting import PATIENCE_SECONDS
from tests.faults.aggregator_process import serve
from tests.faults.broker_setups import Broker, make_broker
from tests.faults.counters import Counters
from tests.faults.crash_points import AGGREGATOR_POINTS, DEVICE_POINTS, ONCE_A_START
from tests.faults.device_process import live
from tests.faults.fault_proxy import FaultProxy
from tests.faults.fleet_home import FleetHome, make_fleet
from tests.faults.holding import KillCost
from tests.faults.oracle import (
    Judgement,
    Mismatch,
    count_counted,
    counted_since,
    judge,
    outbox_rows,
)
from tests.faults.processes import Victim
from tests.faults.wire_faults import FaultRates

# Event, weight. What the wire does to packets comes on top.
_EVENTS = {
    "aggregator killed": 3.0,
    "aggregator paused": 2.0,
    "aggregator's disk full": 1.0,
    "aggregator's clock jumped": 3.0,
    "aggregator's clock strobed": 1.0,
    "aggregator's clock put right": 1.0,
    "aggregator moved to another machine": 1.0,
    "broker killed": 2.0,
    "broker replaced": 1.0,
    "broker paused": 2.0,
    "devices killed": 3.0,
    "devices paused": 2.0,
    "devices' disk full": 1.0,
}
LIVING_ROUNDS = 8
"""After the last fault each device is counted within so many rounds. A device that starts needs a
session first, and on a busy machine misses a deadline of seconds now and then: one round in five or
so, never eight in a row. A device that is shut out is counted in none."""
_MOST_JUMP_SECONDS = 100 * 86_400.0
_STROBES = 10


@dataclass(frozen=True)
class RunSettings:
    """``seconds`` of faults; setting up and coming to rest takes some more, at most a minute.

    ``hosts``: processes that share the devices; ``pause_seconds``: mean time between two events.
    ``least_faults``: it goes on until there were so many and an update was counted, however slow
    the machine is. ``breath_events``: after so many events the next one waits until another update
    was counted, for ``breath_seconds`` at most: what has no time to get up again cannot be struck.
    """

    seed: int
    broker: str
    seconds: float
    devices: int = 16
    hosts: int = 2
    pause_seconds: float = 0.7
    deadline_seconds: float = 2.0
    rates: FaultRates = field(default_factory=FaultRates)
    least_faults: int = 0
    breath_events: int | None = None
    breath_seconds: float = 30.0
    ladder: bool = False
    """Devices train parts of one model."""
    late: bool = False
    """Updates of closed rounds count in the open one."""


@dataclass(frozen=True)
class RunResult:
    """``faults`` by kind, ``struck``: the rounds that were open when one of the kind came. The
    counts are of the whole run. ``costs``: what kills of workers cost; ``between``: what they would
    have cost at other moments."""

    faults: Counter[str]
    struck: dict[str, set[int]]
    judgement: Judgement
    sends: int
    arrivals: int
    suppressed: int
    seconds: float
    costs: Sequence[KillCost] = ()
    between: Sequence[KillCost] = ()
    living_rounds: int = 0
    """After the last fault each device was counted in one of so many."""


def run(settings: RunSettings, folder: Path) -> RunResult:
    """Make the fleet in ``folder``, torment it, let it come to rest, and judge it.

    Raises :class:`Mismatch` when the promise was broken, the fleet does not come to rest, or a
    device was not counted in its last rounds, though nothing happened to anybody any more.
    """
    return _play(settings, folder, lambda scene: scene.torment())


def sweep(settings: RunSettings, folder: Path) -> RunResult:
    """Kill the aggregator, then a process of devices, at each named point, and nothing else.

    Raises :class:`Mismatch`, also when a point is never passed.
    """
    return _play(settings, folder, lambda scene: scene.sweep())


def _play(settings: RunSettings, folder: Path, act: Callable[[Scene], None]) -> RunResult:
    began = time.monotonic()
    broker = make_broker(settings.broker, folder)
    broker.start()
    proxy = FaultProxy(broker.port, settings.seed, settings.rates)
    scene = Scene(settings, folder, [broker], [proxy])
    return play(scene, act, began)


def play(scene: Scene, act: Callable[[Scene], None], began: float) -> RunResult:
    """Act, let it come to rest, and judge it. Raises :class:`Mismatch`."""
    try:
        act(scene)
        scene.rest()
        scene.end_processes()
        judgement = judge(scene.fleet)
    finally:
        scene.end()
    moments = list(scene.moments)
    for proxy in scene.proxies:
        moments += [(fault.value, when) for fault, when in proxy.moments]
    struck: dict[str, set[int]] = {kind: set() for kind, _ in moments}
    opened = sorted((when, number) for number, when in judgement.opened_unix_seconds.items())
    for kind, when in moments:
        before = bisect(opened, (when, math.inf))
        struck[kind].update(number for _, number in opened[max(0, before - 1) : before])
    return RunResult(
        Counter(kind for kind, _ in moments),
        struck,
        judgement,
        scene.count("sends"),
        scene.count("arrivals"),
        scene.count("repeats") + scene.count("replays"),
        time.monotonic() - began,
        tuple(scene.costs),
        tuple(scene.between),
        scene.living_rounds,
    )


class Scene:
    """A fleet, its broker and its aggregator, in processes of their own."""

    events: Mapping[str, float] = _EVENTS
    """What may happen, by weight."""
    patience_seconds = PATIENCE_SECONDS

    def __init__(
        self,
        settings: RunSettings,
        folder: Path,
        brokers: Sequence[Broker],
        proxies: Sequence[FaultProxy],
    ) -> None:
        self._settings = settings
        self._brokers = list(brokers)
        self.proxies = list(proxies)
        self._rng = np.random.default_rng([settings.seed, 1])
        self.moments: list[tuple[str, float]] = []
        """Each fault's kind, and when it came in Unix seconds; without the wire's."""
        self.costs: list[KillCost] = []
        self.between: list[KillCost] = []
        self.living_rounds = 0
        self._ahead_seconds = 0.0
        self.counters = Counters(folder / "counters")
        rounds = (
            f"quorum = {max(1, settings.devices // 2)}\nwait_for_devices = {settings.devices}\n"
            f"deadline_seconds = {settings.deadline_seconds}\nresume_grace_seconds = 0.5"
        )
        self.fleet = self._make_fleet(folder, rounds)
        self._servers = self._make_servers(folder)
        places = np.array_split(np.arange(settings.devices), settings.hosts)
        self._hosts = [
            Victim(
                partial(live, ladder=settings.ladder),
                (
                    [str(self.fleet.devices[place]) for place in group],
                    [int(place) for place in group],
                    str(folder / "counters"),
                    str(folder / f"devices-{number}.log"),
                    True,
                ),
                "devices",
                DEVICE_POINTS,
            )
            for number, group in enumerate(places)
        ]
        self._resume_at: list[tuple[float, Callable[[], None]]] = []

    def _make_fleet(self, folder: Path, rounds: str) -> FleetHome:
        settings = self._settings
        made = make_fleet(folder, self.proxies[0].url, settings.devices, rounds, settings.seed)
        return replace(made, ladder=settings.ladder)

    def _make_servers(self, folder: Path) -> list[Victim]:
        """What serves, in the order in which it is started."""
        log, home = str(folder / "aggregator.log"), str(self.fleet.aggregator.folder)
        arguments = (home, str(folder / "counters"), log, True)
        serving = partial(serve, ladder=self._settings.ladder, late=self._settings.late)
        return [Victim(serving, arguments, "aggregator", AGGREGATOR_POINTS)]

    @property
    def _aggregator(self) -> Victim:
        return self._servers[0]

    @property
    def _victims(self) -> list[Victim]:
        return [*self._servers, *self._hosts]

    def count(self, name: str) -> int:
        """One of the counters, over all processes."""
        return self.counters.read(name)

    def torment(self) -> None:
        """Faults, for as long as the settings say."""
        for victim in self._victims:
            victim.start()
        self._settle()
        until = time.monotonic() + self._settings.seconds
        for proxy in self.proxies:
            proxy.rage()
        names, weights = list(self.events), np.array(list(self.events.values()))
        next_event, events = time.monotonic() + 1.5, 0
        while (now := time.monotonic()) < until or self._too_few(until):
            self._look_after(now)
            if now >= next_event:
                name = names[int(self._rng.choice(len(names), p=weights / weights.sum()))]
                self._cause(name, now)
                events += 1
                if events == self._settings.breath_events:
                    events = 0
                    self._draw_breath()
                next_event = time.monotonic() + float(
                    self._rng.exponential(self._settings.pause_seconds)
                )
            time.sleep(0.02)

    def _draw_breath(self) -> None:
        """No event, though the wire's faults go on and what is gone is started again."""
        before = self._told_counted()
        until = time.monotonic() + self._settings.breath_seconds
        while time.monotonic() < until and self._told_counted() == before:
            self._look_after(time.monotonic())
            time.sleep(0.2)

    def _told_counted(self) -> int | None:
        """Updates, as devices were told; None while a process that was stopped has locked one's
        file."""
        with contextlib.suppress(sqlite3.OperationalError):
            return count_counted(self.fleet)
        return None

    def _settle(self) -> None:
        """Before the faults begin."""

    def _too_few(self, until: float) -> bool:
        least = self._settings.least_faults
        if not least or time.monotonic() > until + PATIENCE_SECONDS:
            return False
        faults = len(self.moments) + sum(len(each.moments) for each in self.proxies)
        return faults < least or not self._told_counted()

    def sweep(self) -> None:
        """One death at each point."""
        for host in self._hosts:
            host.start()
        for point in AGGREGATOR_POINTS:
            self._die_at(self._aggregator, point)
        self._aggregator.start()
        for point in DEVICE_POINTS:
            self._hosts[0].kill()
            self._die_at(self._hosts[0], point)
        self._hosts[0].start()

    def rest(self) -> None:
        """No more faults and no more rounds: everything in the outboxes must come to its end."""
        self._look_after(float("inf"))
        for victim in self._victims:
            # Limits of the disk and armed points go with the process.
            victim.kill()
        for proxy in self.proxies:
            proxy.calm()
        for broker in self._brokers:
            if not broker.alive():
                broker.start()
        if self._rng.random() < 0.5:
            self._set_clock(0.0)
        since = self._let_rounds_end()
        for victim in self._victims:
            victim.start()
        until = time.monotonic() + self.patience_seconds
        while not self._is_at_rest():
            if time.monotonic() > until:
                self._require_life(since)
                raise Mismatch(f"no rest within {self.patience_seconds} s: {self._outboxes()}")
            self._see_to_servers()
            time.sleep(0.2)
        self._require_life(since)

    def _require_life(self, since: int) -> None:
        """Every device was counted in the last ``LIVING_ROUNDS``, those after round ``since``."""
        store = self.fleet.open_store()
        counted = counted_since(store.database, since)
        latest = store.first.rounds.latest()
        store.database.close()
        missing = [place for place, each in enumerate(self.fleet.device_ids) if each not in counted]
        if not missing:
            self.living_rounds = max(counted.values()) - since
            return
        with redirect_stdout(io.StringIO()) as said:
            main(["status", "--home", str(self.fleet.aggregator.folder)])
        number = latest[0].round if latest else 0
        raise Mismatch(
            f"devices {missing} live and were not counted in rounds {since + 1} to {number}; "
            f"status:\n{said.getvalue()}"
        )

    def _see_to_servers(self) -> None:
        """While nothing happens to them any more."""
        for victim in self._servers:
            if (code := victim.ended()) is not None:
                raise Mismatch(f"the {victim.who} ended by itself with {code}")

    def end_processes(self) -> None:
        """End those whose files are judged."""
        self._look_after(float("inf"), restart=False)
        for victim in self._victims:
            with contextlib.suppress(AssertionError):
                victim.kill()

    def end(self) -> None:
        """End every process."""
        self.end_processes()
        for broker in self._brokers:
            broker.kill()
        for proxy in self.proxies:
            proxy.stop()

    def _cause(self, name: str, now: float) -> None:
        rng = self._rng
        self._note(name)
        broker = self._brokers[int(rng.integers(len(self._brokers)))]
        host = self._hosts[int(rng.integers(len(self._hosts)))]
        pause = now + float(rng.uniform(0.1, 2.5))
        match name:
            case "aggregator killed":
                self._aggregator.kill()
            case "aggregator paused":
                self._pause(self._aggregator, pause)
            case "aggregator's disk full":
                self._fill_disk(self._aggregator, pause)
            case "aggregator's clock jumped" | "the cluster's clock jumped":
                self._set_clock(self._jump_seconds())
            case "aggregator's clock strobed" | "the cluster's clock strobed":
                self._strobe()
            case "aggregator's clock put right" | "the cluster's clock put right":
                self._set_clock(0.0)
            case "aggregator moved to another machine":
                self._aggregator.kill()
                self._set_clock(self._jump_seconds())
            case "broker killed":
                broker.kill()
                broker.start()
            case "broker replaced":
                broker.replace()
            case "broker paused":
                pid = broker.pid
                os.kill(pid, signal.SIGSTOP)
                self._resume_at.append((pause, lambda: _go_on(pid)))
            case "devices killed":
                host.kill()
            case "devices paused":
                self._pause(host, pause)
            case "devices' disk full":
                self._fill_disk(host, pause)

    def _note(self, kind: str) -> None:
        """A fault comes now."""
        self.moments.append((kind, time.time()))

    def _set_clock(self, ahead_seconds: float) -> None:
        """The calendar of whatever serves, from now on."""
        self._ahead_seconds = ahead_seconds
        self.counters.put("clock_offset_millis", int(1000 * ahead_seconds))

    def _jump_seconds(self) -> float:
        """From a hundredth of a second to months, ahead or behind."""
        seconds = math.exp(self._rng.uniform(math.log(0.01), math.log(_MOST_JUMP_SECONDS)))
        return seconds if self._rng.random() < 0.5 else -seconds

    def _strobe(self) -> None:
        """There and back, for a second."""
        before, there = self._ahead_seconds, self._jump_seconds()
        for turn in range(_STROBES):
            self._set_clock(there if turn % 2 == 0 else before)
            time.sleep(0.1)
        self._set_clock(before)

    def _die_at(self, victim: Victim, point: str) -> None:
        victim.start(point, 1 + int(self._rng.integers(3)))
        until = time.monotonic() + PATIENCE_SECONDS
        while victim.ended() is None:
            if time.monotonic() > until:
                raise Mismatch(f"no process passed the point {point!r}")
            time.sleep(0.01)
        if victim.ended() != -signal.SIGKILL:
            raise Mismatch(f"ended with {victim.ended()} on the way to {point!r}: see its log")
        self._note(f"killed {point}")

    def _pause(self, victim: Victim, until: float) -> None:
        victim.pause()
        self._resume_at.append((until, victim.go_on))

    def _fill_disk(self, victim: Victim, until: float) -> None:
        victim.fill_disk()
        self._resume_at.append((until, victim.free_disk))

    def _look_after(self, now: float, *, restart: bool = True) -> None:
        """End pauses that are over, and start again what died."""
        for entry in [entry for entry in self._resume_at if entry[0] <= now]:
            self._resume_at.remove(entry)
            entry[1]()
        if not restart:
            return
        for broker in self._brokers:
            if not broker.alive():
                self._note("broker ended by itself")
                broker.start()
        for victim in self._victims:
            code = victim.ended()
            if code is None:
                continue
            self._require_sound(victim)
            if victim.point and code == -signal.SIGKILL:
                self._note(f"{victim.who} killed {victim.point}")
            self._start(victim)

    @staticmethod
    def _require_sound(victim: Victim) -> None:
        if victim.ended() == 2:
            raise Mismatch(f"the {victim.who} ended by a defect: see its log")

    def _start(self, victim: Victim) -> None:
        """With a crash point more often than not."""
        rng = self._rng
        if not victim.points or rng.random() < 0.25:
            victim.start()
            return
        point = victim.points[int(rng.integers(len(victim.points)))]
        calls = 1 + int(rng.geometric(0.05 if victim in self._hosts else 0.2))
        victim.start(point, 1 if point in ONCE_A_START else calls)

    def _let_rounds_end(self) -> int:
        """After ``LIVING_ROUNDS`` more; the number of the last one of before."""
        store = self.fleet.open_store()
        latest = store.first.rounds.latest()
        store.database.close()
        path = self.fleet.aggregator.task_file
        last = latest[0].round if latest else 0
        most = f"[round]\nmost_rounds = {last + LIVING_ROUNDS}\n"
        path.write_text(re.sub(r"\[round\]\n", most, path.read_text()))
        return last

    def _is_at_rest(self) -> bool:
        store = self.fleet.open_store()
        latest = store.first.rounds.latest()
        store.database.close()
        return bool(latest) and latest[0].threshold == 0 and not any(self._outboxes())

    def _outboxes(self) -> list[int]:
        return [len(outbox_rows(self.fleet, place)) for place in range(self._settings.devices)]


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
