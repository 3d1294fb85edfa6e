"""``tessera-aggregator status``: how the fleet is doing, from the database."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

from tabulate import tabulate

from aggregator.cli.arguments import add_home, add_task, home_of, tasks_of
from aggregator.errors import AggregatorError
from aggregator.evaluation import as_json, in_a_line, what_it_brings, what_serves
from aggregator.home import is_served
from aggregator.keys.registry import Registry
from aggregator.operate.health import Rollback, move_lines
from aggregator.operate.names import called, called_all, parts_of, ranking_of, shows_clash
from aggregator.rounds.attendance import Attendance, KnownHabits
from aggregator.rounds.model_parts import ModelParts
from aggregator.serve.reach import Reach, read_reach
from aggregator.store import Store, TaskStore
from aggregator.store.reports import KEPT_ROUNDS
from aggregator.store.rows import DeviceRow, RoundRow, TaskRow
from aggregator.store.versions import Ranking
from aggregator.task.evaluation import metric_of
from aggregator.task.file import RoundSettings, Selector, served_round, served_selector
from device_sdk.system.command_line import positive_int
from device_sdk.system.printable import ago, printable, span

# What makes the open round last: whom it waits for, and when it closes.


@dataclass(frozen=True)
class WaitingRound:
    """An open round at one moment, by the rule that ``serve`` closes it by.

    Attributes:
        awaited: devices that it waits for.
        passed_over: devices that it selected, that were not heard of, and that it waits for no
            longer, or never did.
        updates: that a version would be made of now.
        quorum: that one needs.
        closes_seconds: from now, when it closes if nothing more comes.
        left_seconds: from now, when it closes at the latest.
    """

    row: RoundRow
    awaited: list[DeviceRow]
    passed_over: list[DeviceRow]
    updates: int
    quorum: int
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
            _known(registry, awaited),
            _known(registry, passed_over),
            updates,
            settings.quorum,
            max(0.0, closes - elapsed),
            max(0.0, row.length_seconds - elapsed),
        )

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
                f"{self.quorum} updates have come that make a version"
            )
        else:
            yield (
                f"closes       when they have come, in {span(self.closes_seconds)} without them, "
                f"in {span(self.left_seconds)} at the latest"
            )

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "round": self.row.round,
            "waits_for": _listed(self.awaited),
            "passes_over": _listed(self.passed_over),
            "updates": self.updates,
            "quorum": self.quorum,
            "closes_in_seconds": self.closes_seconds,
            "deadline_in_seconds": self.left_seconds,
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


DESCRIPTION = """\
Shows each task's version and last rounds, how these ended on the devices, why and on which ones,
whom the open round waits for, what was refused and why, and anything that waits for the operator.
Reads the database; works whether serve runs or not, and says whether serve is connected to its
broker, and since when. devices has each device's newest round."""

EXAMPLES = """\
examples:
  tessera-aggregator status --home fleet
  tessera-aggregator status --home fleet --task air --rounds 50
  tessera-aggregator status --home fleet --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    add_task(parser, "this one only (default: all)")
    parser.add_argument(
        "--rounds", type=positive_int, default=10, metavar="N", help="how many (default: 10)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    home = home_of(arguments)
    now, reach = time.time(), read_reach(home.live_file)
    try:
        store = home.open_store()
    except AggregatorError:
        if reach is not None and not arguments.json:
            print(f"serve        {printable(reach.words(now))}", flush=True)
        raise
    try:
        serves = reach is not None or is_served(home) or store.lease.is_held()
        registry = Registry(store.devices)
        tasks = [
            _SeenTask(
                store.task(row.number),
                row,
                parts_of(home, store, row),
                ranking_of(home, store, row),
                registry,
                arguments.rounds,
                now,
            )
            for row in tasks_of(store, arguments)
        ]
        if arguments.json:
            print(json.dumps(_as_json(store, tasks, now, serves, reach), indent=2))
        else:
            _print(store, tasks, now, serves, reach)
    finally:
        store.database.close()
    return 0


_SHUT_OUT_ROUNDS = 5
"""Of which nobody was counted, though devices were selected: any that lives has come by then."""
_SILENT_SECONDS = 10.0
"""A worker says each second that it lives."""


class _SeenTask:
    """One task, as the database has it."""

    def __init__(
        self,
        store: TaskStore,
        row: TaskRow,
        parts: ModelParts,
        ranking: Ranking | None,
        registry: Registry,
        most_rounds: int,
        now: float,
    ) -> None:
        self.row = row
        self.store = store
        self.rounds = store.rounds.latest(most_rounds)
        checkpoint = store.checkpoints.get("version")
        self.version = 0 if checkpoint is None else checkpoint.version
        selector = served_selector(row.served)
        self.eligible = registry.eligible(selector.admits)
        self.only = str(selector)
        self.evaluated = store.evaluations.latest()
        self.metric = metric_of(ranking)
        self.rollback = Rollback.of(store)
        self.outcomes = store.reports.outcomes()
        self.trained = parts.counts(store.participations.widths())
        self.counted_by_part = self._counted_by_part(parts)
        self.unknown_items = store.reports.unknown_items()
        self.not_trained = {
            (each.outcome, each.reason): _known(registry, each.device_ids)
            for each in store.reports.not_trained()
        }
        last = store.rounds.latest(_SHUT_OUT_ROUNDS + 1)
        closed = [each for each in last if each.closed_unix_seconds is not None and each.expected]
        self.shut_out = len(closed) >= _SHUT_OUT_ROUNDS and not any(
            each.participants for each in closed[:_SHUT_OUT_ROUNDS]
        )
        settings = None if row.served is None else served_round(row.served)
        self.wait_for_devices = None if settings is None else settings.wait_for_devices
        found = self.open_round
        self.open: WaitingRound | None = None
        if settings is not None and found is not None and found.threshold:
            self.open = WaitingRound.look(store, found, registry, selector, settings, now)

    def _counted_by_part(self, parts: ModelParts) -> dict[str, float]:
        """Of the updates that each device of a part was asked for in the last closed rounds, the
        share that counted: rounds draw devices whatever they train. Closing early favours the
        quick."""
        closed = [each for each in self.rounds if not each.unfinished and each.threshold]
        asked = [each for each in closed if each.generation == closed[0].generation]
        rounds = sum(each.expected for each in asked) / max(1, self.eligible)
        if not rounds:
            return {}
        of = asked[0].generation, asked[-1].round, asked[0].round
        counted = parts.counts(self.store.log.counted_by_width(*of))
        return {
            part: min(1.0, counted.get(part, 0) / (devices * rounds))
            for part, devices in self.trained.items()
        }

    @property
    def open_round(self) -> RoundRow | None:
        """The one that is open."""
        row = self.rounds[0] if self.rounds else None
        return row if row is not None and row.unfinished else None

    def counted(self, row: RoundRow) -> int:
        """Updates of a round, so far where it is open."""
        if row.participants is not None:
            return row.participants
        return self.store.log.counted(row.generation, row.round)

    @property
    def lacks_devices(self) -> bool:
        """Whether no round opens because there are too few."""
        waits = self.open_round is None and self.row.state == "active"
        return waits and self.eligible < (self.wait_for_devices or 0)

    def told(self) -> list[dict[str, str]]:
        """How the last rounds ended on devices, as they told, and on which without an update."""
        newest: Counter[tuple[str, str]] = Counter()
        last: Counter[tuple[str, str]] = Counter()
        number = self.outcomes[0].round
        for each in self.outcomes:
            if each.round > number - KEPT_ROUNDS:
                last[each.outcome, each.reason] += each.devices
            if each.round == number:
                newest[each.outcome, each.reason] += each.devices
        return [
            {
                "told": printable(": ".join(filter(None, why))),
                f"round {number}": str(newest[why]),
                f"last {KEPT_ROUNDS} rounds": str(count),
                "by": called_all(self.not_trained.get(why, [])),
            }
            for why, count in last.most_common()
        ]


def _known(registry: Registry, device_ids: Iterable[bytes]) -> list[DeviceRow]:
    """The rows of these devices, but for those that were revoked."""
    found = (registry.by_id(each) for each in device_ids)
    return [each for each in found if each is not None]


def _print(
    store: Store, tasks: list[_SeenTask], now: float, serves: bool, reach: Reach | None
) -> None:
    devices = list(store.devices.all())
    revoked = sum(1 for row in devices if row.revoked_unix_seconds is not None)
    several = len(tasks) > 1
    if not several:
        _print_head(tasks[0])
    if reach is not None:
        print(f"serve        {printable(reach.words(now))}")
    elif serves:
        print("serve        runs on another machine: status there says what it is connected to")
    else:
        print("serve        does not run: no round opens or closes")
    for line in move_lines(store, None, now):
        print(line)
    _print_cluster(store)
    if serves and (problem := store.facts.clock_problem):
        print(f"problem      {printable(problem)}")
    if problem := store.facts.keys_problem:
        print(f"problem      {printable(problem)}")
    if problem := store.facts.mirror_problem:
        print(
            f"problem      cluster.chunk_store cannot be written to ({printable(problem)}); "
            "devices ask the broker, and serve tries again"
        )
    print(f"devices      {len(devices) - revoked} active, {revoked} revoked")
    print(f"codes        {store.tokens.unused(int(now))} unused")
    for row, seen in _clashes(store, devices, now):
        print(
            f"problem      two machines have the identity of {called(row)} (seen "
            f"{ago(seen, now)}): its home was copied. Enrol one of them again, with a code from "
            "invite"
        )
    for task in tasks:
        if several:
            print()
            _print_head(task)
            print(f"state        {task.row.state}")
        if task.only or several:
            print(f"for          {task.eligible} devices{task.only and f', only {task.only}'}")
        if task.only and not task.eligible:
            print(
                f"problem      no device has the labels {task.only}: no round opens. See "
                "[task] only in its file, and the labels in tessera-aggregator devices"
            )
        if task.row.problem is not None:
            print(f"problem      {printable(task.row.problem)}")
        if problem := task.store.facts.no_room:
            print(f"problem      no round opens: {printable(problem)}")
        if task.row.request is not None:
            print("waiting      it is replaced when serve runs and its open round has ended")
        if task.shut_out:
            print(
                f"problem      no device was counted in the last {_SHUT_OUT_ROUNDS} rounds: where "
                "they are not all away, each says why in tessera-device status. Was this home put "
                "back from a backup? Then run tessera-aggregator restored, with serve stopped and, "
                "where since the backup keys were rotated or the fleet was moved, rotate keys or "
                "broker move"
            )
        if task.rollback.said:
            print(f"rollback     {task.rollback.said}")
        if task.evaluated:
            found = task.evaluated[0]
            print(f"evaluation   version {found.version}: {in_a_line(found.figures)}")
            if brings := what_it_brings(found.figures, task.metric):
                print(f"control arm  {brings}")
            if predictions := what_serves(found.figures, task.metric):
                print(f"predictions  {predictions}")
        if task.trained:
            told = ", ".join(f"{printable(each)}: {count}" for each, count in task.trained.items())
            print(f"train        {told}")
        if len(task.counted_by_part) > 1:
            shares = task.counted_by_part.items()
            told = ", ".join(f"{printable(part)}: {share:.0%}" for part, share in shares)
            print(f"counted      of what was asked for in the last rounds: {told}")
        if task.store.facts.stopped_at is not None:
            print(
                f"stopped      nothing has improved version {task.store.facts.stopped_at} for "
                "evaluation.early_stopping rounds: no round opens"
            )
        _print_rounds(task, now)
    refusals = store.refusals.all()
    if refusals:
        print()
        print(
            "refused      "
            + ", ".join(f"{printable(why)} {count}" for why, count in refusals.items())
        )
    for task in tasks:
        _print_waiting(task)


def _clashes(
    store: Store, devices: Iterable[DeviceRow], now: float
) -> Iterator[tuple[DeviceRow, int]]:
    """The devices that were on two machines of late, and when that showed."""
    seen = store.devices.clashes()
    for row in devices if seen else ():
        last = seen.get(row.device_id)
        if row.revoked_unix_seconds is None and last is not None and shows_clash(last, now):
            yield row, last


def _print_cluster(store: Store) -> None:
    lease, now = store.lease.find(), store.database.now()
    if lease is None:
        return
    coordinated = store.lease.is_held()
    workers = [(each, now - each.heartbeat_unix_seconds) for each in store.workers.all()]
    if coordinated:
        print(f"coordinator  {printable(lease.holder)}, term {lease.term}")
    elif any(silent < _SILENT_SECONDS for _, silent in workers):
        print("coordinator  none: workers go on, and end after ten minutes")
    else:
        return
    for each, silent in workers:
        cell = f"{printable(each.cell)}, " if each.cell else ""
        if silent >= _SILENT_SECONDS:
            state = f"silent for {span(silent)}"
        else:
            state = "connected" if each.connected else "no connection to its broker"
        print(f"worker {each.slot:<5} {cell}{each.shards} shards, start {each.epoch}, {state}")


def _print_head(task: _SeenTask) -> None:
    label = task.store.facts.label or f"{task.row.name or ''} not served yet".strip()
    print(f"task         {printable(label)}")
    print(f"version      {task.version}")


def _print_rounds(task: _SeenTask, now: float) -> None:
    if task.rounds:
        print()
        lines = [_line(task, row, now) for row in task.rounds]
        print(tabulate(lines, headers="keys", tablefmt="plain"))
    if task.outcomes:
        print()
        print(
            tabulate(
                task.told(),
                headers="keys",
                tablefmt="plain",
                disable_numparse=True,  # ids may look like numbers
                colalign=("left", "right", "right", "left"),
            )
        )
    if task.unknown_items.unknown:
        told = task.unknown_items
        print(
            f"\nitems        {told.unknown} of {told.recorded} items unknown to the catalogue, on "
            f"{told.devices} of {told.told} devices"
        )
    if task.open is not None:
        print()
        for line in task.open.lines(task.store.fleet.devices.seen(), now):
            print(line)
    if task.lacks_devices:
        print(
            f"\nwaits        no round opens before {task.wait_for_devices} devices are enrolled "
            f"(round.wait_for_devices); there are {task.eligible}"
        )


def _print_waiting(task: _SeenTask) -> None:
    for row in task.rounds:
        if row.held is not None:
            _print_held(row.round, row.held)
    if task.store.facts.unpublished is not None:
        number = task.rounds[0].round + 1 if task.rounds else 1
        _print_held(number, task.store.facts.unpublished)
    for number, device_id, why in task.store.log.quarantined():
        print(f"quarantine   an update of {device_id.hex()} for round {number}: {printable(why)}")


def _print_held(number: int, why: str) -> None:
    print(f"\nround {number} is held: {printable(why)}\n  see tessera-aggregator release")


def _line(task: _SeenTask, row: RoundRow, now: float) -> dict[str, str]:
    if row.threshold == 0:
        state = "rests"
    elif row.unfinished and row.closed_unix_seconds is not None:
        state = "held" if row.held else "is closed"
    elif row.closed_unix_seconds is None:
        left = row.deadline_unix_seconds - now
        state = "held" if row.held else f"open, {span(left)} left" if left > 0 else "open"
    else:
        state = "no quorum" if row.next_version is None else f"made version {row.next_version}"
    return {
        "round": str(row.round),
        "opened": ago(row.opened_unix_seconds, now),
        "selected": str(row.expected),
        "took": _took(row),
        "counted": "-" if row.threshold == 0 else str(task.counted(row)),
        "state": state,
        "metrics": ", ".join(
            f"{printable(name)} {value:.4g}" for name, value in (row.metrics or {}).items()
        ),
    }


def _took(row: RoundRow) -> str:
    return "-" if row.took_seconds is None or row.threshold == 0 else span(row.took_seconds)


def _as_json(
    store: Store, tasks: list[_SeenTask], now: float, serves: bool, reach: Reach | None
) -> dict[str, object]:
    first = _task_as_json(tasks[0])
    return {
        "task": first["task"],
        "generation": first["generation"],
        "version": first["version"],
        "devices": sum(1 for row in store.devices.all() if row.revoked_unix_seconds is None),
        "unused_codes": store.tokens.unused(int(now)),
        "refusals": store.refusals.all(),
        "unpublished": first["unpublished"],
        "serves": serves,
        "serve": None if reach is None else asdict(reach),
        "clock_problem": store.facts.clock_problem,
        "keys_problem": store.facts.keys_problem,
        "on_two_machines": [
            row.device_id.hex() for row, _ in _clashes(store, list(store.devices.all()), now)
        ],
        "chunk_store_problem": store.facts.mirror_problem,
        "coordinator": _lease_as_json(store),
        "workers": [asdict(each) for each in store.workers.all()],
        "rounds": first["rounds"],
        "tasks": [_task_as_json(task) for task in tasks],
    }


def _lease_as_json(store: Store) -> dict[str, object] | None:
    row = store.lease.find()
    return asdict(row) if row is not None and store.lease.is_held() else None


def _evaluation_as_json(seen: _SeenTask) -> dict[str, object] | None:
    if not seen.evaluated:
        return None
    found = seen.evaluated[0]
    return {
        "version": found.version,
        "round": found.round,
        "figures": [as_json(each) for each in found.figures],
        "brings": what_it_brings(found.figures, seen.metric) or None,
        "stopped_at_version": seen.store.facts.stopped_at,
    }


def _listed(devices: Iterable[DeviceRow]) -> list[dict[str, object]]:
    return [{"device_id": each.device_id.hex(), "name": each.name} for each in devices]


def _task_as_json(seen: _SeenTask) -> dict[str, object]:
    return {
        "name": seen.row.name,
        "task": seen.store.facts.label,
        "state": seen.row.state,
        "generation": seen.store.facts.generation,
        "version": seen.version,
        "only": seen.only or None,
        "eligible_devices": seen.eligible,
        "wait_for_devices": seen.wait_for_devices,
        "problem": seen.row.problem or seen.store.facts.no_room,
        "shut_out": seen.shut_out,
        "rollback": asdict(seen.rollback),
        "evaluation": _evaluation_as_json(seen),
        "unpublished": seen.store.facts.unpublished,
        "outcomes": [each._asdict() for each in seen.outcomes],
        "devices_by_part": seen.trained,
        "counted_by_part": seen.counted_by_part,
        "unknown_items": seen.unknown_items._asdict(),
        "not_trained": [
            {"outcome": outcome, "reason": reason, "devices": _listed(devices)}
            for (outcome, reason), devices in seen.not_trained.items()
        ],
        "open_round": None if seen.open is None else seen.open.as_json(),
        "rounds": [
            {
                "round": row.round,
                "version": row.version,
                "opened_unix_seconds": row.opened_unix_seconds,
                "deadline_unix_seconds": row.deadline_unix_seconds,
                "closed_unix_seconds": row.closed_unix_seconds,
                "took_seconds": row.took_seconds,
                "selected": row.expected,
                "participants": row.participants,
                "counted": seen.counted(row),
                "next_version": row.next_version,
                "metrics": row.metrics,
                "held": row.held,
            }
            for row in seen.rounds
        ],
    }
