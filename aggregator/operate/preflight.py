"""What ``serve`` would meet: looked at without starting it, and without changing anything."""

from __future__ import annotations

import os
import shutil
import socket
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aggregator.clock import moment_of
from aggregator.errors import AggregatorError, StoreOutdated
from aggregator.home import AggregatorHome
from aggregator.keys.fence import Fence, next_start
from aggregator.keys.folder import current_descriptor, delegation_problem, read_serving_keys
from aggregator.operate.broker_check import BrokerCheck, ends_of, validity
from aggregator.operate.checking import Checked, Looking, check_alone, check_files
from aggregator.operate.health import LEAST_FREE_BYTES
from aggregator.operate.soundness import Aspect, CheckedPart, Soundness
from aggregator.serve.alone import require_no_shares
from aggregator.serve.reach import read_reach
from aggregator.serve.successor import find_move, where_serve_is
from aggregator.store import STORE_FAILURES, Store
from aggregator.task.cluster import Cluster
from aggregator.task.file import (
    FLEET_TABLES,
    ConsoleSettings,
    MetricsSettings,
    SharedSettings,
    read_task,
)
from device_sdk.link.broker_url import BrokerWay
from device_sdk.system.printable import size
from device_sdk.wire.publish.topics import Topics
from device_sdk.wire.seal.announcement import new_presence
from device_sdk.wire.seal.keys import RandomBytes

_FILE, _HOME, _STORE, _SERVE = (
    Aspect("file"),
    Aspect("home"),
    Aspect("store"),
    Aspect("serve"),
)
_KEYS, _CLOCK, _DISK, _METRICS = (
    Aspect("keys"),
    Aspect("clock"),
    Aspect("disk"),
    Aspect("metrics"),
)
_CONSOLE, _TASK, _SIZES = Aspect("console"), Aspect("task"), Aspect("sizes")
_APART_SECONDS = 5.0
_READ_ERRORS = (AggregatorError, *STORE_FAILURES)


@dataclass(frozen=True)
class Preflight:
    """Looks at a home, and at a task file in the place of the one that the home has.

    It makes and writes no file, takes no lock that ``serve`` waits for, and leaves nothing at the
    broker (see ``BrokerCheck``): the fleet may be served meanwhile. ``clock``: monotonic seconds.
    """

    home: AggregatorHome
    file: Path | None
    looking: Looking
    clock: Callable[[], float]
    unix_clock: Callable[[], float]
    rng: np.random.Generator
    random_bytes: RandomBytes

    def look(self) -> Iterator[CheckedPart]:
        """Each part as it is found, the slow ones last; none that is wrong ends it."""
        settings = None
        try:
            first = read_task(self._first_file())
            settings = first.fleet
            yield _FILE.ok(f"{first.path} can be read")
        except AggregatorError as error:
            yield _FILE.wrong(str(error))
        if not self.home.is_made:
            yield _HOME.warning(
                f"{self.home.folder} holds no fleet (--home)",
                f"tessera-aggregator init --home {self.home.folder}",
            )
            yield from self._around(settings, None)
            return
        try:
            store = self.home.open_store(read_only=True)
        except _READ_ERRORS as error:
            say = _STORE.warning if isinstance(error, StoreOutdated) else _STORE.wrong
            yield say(str(error))
            yield from self._around(settings, None)
            return
        with closing(store.database):
            yield from self._store(store)
            yield from self._alone(store, settings)
            yield from self._keys(store)
            yield self._calendar(store)
            yield from self._around(settings, store)

    def _first_file(self) -> Path:
        """Which has the fleet's tables."""
        if self.file is None or (self.home.task_file.exists() and not _has_fleet(self.file)):
            return self.home.task_file
        return self.file

    # -- what lies here ----------------------------------------------------------------------------

    def _store(self, store: Store) -> Iterator[CheckedPart]:
        database = store.database
        if self.home.store_url is not None:
            if database.row("SELECT pg_is_in_recovery()::int") == (1,):
                yield _STORE.wrong(f"{database.where} is a standby", "name its primary in the URL")
                return
        else:
            places = (self.home.folder, self.home.database)
            locked = [str(each) for each in places if not os.access(each, os.W_OK)]
            if locked:
                yield _STORE.wrong(
                    f"{' and '.join(locked)} cannot be written to",
                    "serve needs a disk that can be, and a user who may",
                )
                return
        devices = len(list(store.devices.all()))
        yield _STORE.ok(f"{database.where} can be used, and has {devices} devices")

    def _alone(self, store: Store, settings: SharedSettings | None) -> Iterator[CheckedPart]:
        """What a cluster has left for one process."""
        lease = store.lease.find()
        if lease is not None and store.lease.is_held():
            yield _SERVE.ok(f"a cluster serves this fleet ({lease.holder})")
            return
        try:
            require_no_shares(store)
        except AggregatorError as error:
            has_workers = settings is not None and settings.cluster != Cluster()
            yield _SERVE.warning(str(error)) if has_workers else _SERVE.wrong(str(error))

    def _keys(self, store: Store) -> Iterator[CheckedPart]:
        try:
            descriptor = current_descriptor(store)
            read_serving_keys(self.home, store, self.unix_clock)
        except _READ_ERRORS as error:
            yield _KEYS.wrong(str(error), f"put a copy of {self.home.keys} back")
            return
        now, ends = self.unix_clock(), descriptor.delegation.expires_unix_seconds
        if problem := delegation_problem(descriptor, now):
            yield _KEYS.wrong(problem) if ends <= now else _KEYS.warning(problem)
        else:
            yield _KEYS.ok(f"the root key's delegation holds until {moment_of(ends)}")

    def _fence(self, store: Store) -> Fence | None:
        """As the next life here would begin with."""
        now, last = int(self.unix_clock()), store.facts.started_unix_seconds
        try:
            keys = read_serving_keys(self.home, store, self.unix_clock)
        except _READ_ERRORS:
            return None  # which was said
        return Fence(
            new_presence(next_start(last, now), self.random_bytes),
            store.facts.announced_unix_seconds,
            self.home.folder,
            lambda: [each.descriptor for each in keys],
            self.clock,
            self.unix_clock,
        )

    def _calendar(self, store: Store) -> CheckedPart:
        now, seen = self.unix_clock(), float(store.facts.started_unix_seconds or 0)
        for row in store.tasks.all():
            for each in store.task(row.number).rounds.latest(1):
                seen = max(seen, each.opened_unix_seconds)
        if now < seen - _APART_SECONDS:
            return _CLOCK.warning(
                f"this machine's clock says {moment_of(now)}, and this fleet was served at "
                f"{moment_of(seen)} already",
                "set it right; if it is, it was ahead then, and rounds go on",
            )
        return _CLOCK.ok(f"{moment_of(now)}, which is not before anything that the store has")

    def _disk(self) -> CheckedPart:
        folder = self.home.folder.absolute()
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        said = f"{size(free)} are free at {folder}"
        return _DISK.ok(said) if free >= LEAST_FREE_BYTES else _DISK.wrong(said, "make room there")

    # -- what is around it -------------------------------------------------------------------------

    def _around(
        self, settings: SharedSettings | None, store: Store | None
    ) -> Iterator[CheckedPart]:
        yield self._disk()
        reach = read_reach(self.home.live_file)
        if reach is not None:
            yield _SERVE.ok(reach.words(self.unix_clock()))
        if settings is not None:
            if settings.metrics.port:
                yield _metrics(settings.metrics, is_served=reach is not None)
            if settings.console.address is not None:
                yield self._console(settings.console, is_served=reach is not None)
            for way in self._ways(settings, store):
                yield from BrokerCheck(
                    way,
                    settings.broker.proxy,
                    Topics(settings.broker.prefix),
                    None if store is None else self._fence(store),
                    self.clock,
                    self.unix_clock,
                    self.rng,
                    self.random_bytes,
                ).look()
        for found in self._checked(store):
            yield from _of_task(found)

    def _ways(self, settings: SharedSettings, store: Store | None) -> Sequence[BrokerWay]:
        """To each broker that serve would connect to."""
        named = settings.broker.way
        cells = settings.cluster.cells
        if own := [named.at(each.broker) for each in cells if each.broker is not None]:
            return own
        move = None if store is None else find_move(store)
        return where_serve_is(move, named, self.unix_clock())

    def _console(self, console: ConsoleSettings, *, is_served: bool) -> CheckedPart:
        try:
            had = _port(_CONSOLE, *console.place, is_served=is_served)
            if had.soundness is Soundness.OK and not self.home.console_file.exists():
                return _CONSOLE.warning(
                    "nobody may log in yet", "tessera-aggregator console user add NAME"
                )
            if console.certificate is None or had.soundness is not Soundness.OK:
                return had
            ends, now = min(ends_of(Path(console.certificate))), self.unix_clock()
            holds = validity(_CONSOLE, f"console.certificate {console.certificate}", ends, now)
            return had if holds.soundness is Soundness.OK else holds
        except (OSError, ValueError) as error:
            return _CONSOLE.wrong(f"console.certificate {console.certificate}: {error}")

    def _checked(self, store: Store | None) -> list[Checked]:
        try:
            if store is not None:
                return check_files(self.home, store, self.file, None, None, self.looking)
            file = self.file or self.home.task_file
            return [check_alone(file, self.looking)] if file.exists() else []
        except _READ_ERRORS as error:
            return [{"problem": str(error)}]


def _has_fleet(file: Path) -> bool:
    """Whether it is a first task's file; one that cannot be read is, for its reader to say why."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return True
    return any(each in values for each in FLEET_TABLES)


def _metrics(metrics: MetricsSettings, *, is_served: bool) -> CheckedPart:
    try:
        metrics.token()
    except AggregatorError as error:
        return _METRICS.wrong(str(error))
    return _port(_METRICS, metrics.address, metrics.port, is_served=is_served)


def _port(part: Aspect, address: str, port: int, *, is_served: bool) -> CheckedPart:
    """Whether it can be had, unless a serve has it."""
    where = f"{address}, port {port}"
    if is_served:
        return part.ok(f"{where}: served now")
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((address, port))
    except OSError as error:
        return part.wrong(f"{where}: {error}", f"see [{part.name}] in the task file")
    return part.ok(f"{where} can be had")


def _of_task(found: Checked) -> Iterator[CheckedPart]:
    if found["problem"] is not None:
        yield _TASK.wrong(found["problem"])
    else:
        said = f"{found['task']}, {found['method']}: devices would train what {found['file']} says"
        if found.get("refused"):
            yield _TASK.wrong(f"{found['file']}: {found['refused']}")
        else:
            yield _TASK.ok(said)
        if found["note"] is not None:
            yield _TASK.warning(f"{found['task']}: {found['note']}")
        if found.get("waits"):
            yield _TASK.warning(f"{found['task']}: {found['waits']}")
    for line in found.get("sizes", ()):
        yield _SIZES.warning(line) if line.startswith("not checked") else _SIZES.ok(line)
