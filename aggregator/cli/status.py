"""``tessera-aggregator status``: how the fleet is doing, from the database."""

from __future__ import annotations

import argparse
import json
import time

from tabulate import tabulate

from aggregator.cli.arguments import add_home, home_of
from aggregator.store import Store
from aggregator.store.rounds import RoundRow
from aggregator.store.tasks import TaskRow
from aggregator.task.selector import served_selector
from device_sdk.system.command_line import positive_int
from device_sdk.system.printable import ago, printable, span

DESCRIPTION = """\
Shows the model's version, the last rounds, what was refused and why, and anything that waits for
the operator. Reads the database; works whether serve runs or not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    parser.add_argument(
        "--rounds", type=positive_int, default=10, metavar="N", help="how many (default: 10)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    store = home_of(arguments).open_store()
    now = time.time()
    tasks = [_Seen(store, row, arguments.rounds) for row in store.tasks.all()]
    if arguments.json:
        print(json.dumps(_as_json(store, tasks, now), indent=2))
    else:
        _print(store, tasks, now)
    store.database.close()
    return 0


class _Seen:
    """One task, as the database has it."""

    def __init__(self, fleet: Store, row: TaskRow, most_rounds: int) -> None:
        self.row = row
        self.store = fleet.task(row.number)
        self.rounds = self.store.rounds.latest(most_rounds)
        checkpoint = self.store.checkpoints.get("version")
        self.version = 0 if checkpoint is None else checkpoint.version
        selector = served_selector(row.served)
        active = (each for each in fleet.devices.all() if each.revoked_unix_seconds is None)
        self.eligible = sum(1 for each in active if selector.admits(each.labels))
        self.only = str(selector)


def _print(store: Store, tasks: list[_Seen], now: float) -> None:
    devices = list(store.devices.all())
    revoked = sum(1 for row in devices if row.revoked_unix_seconds is not None)
    several = len(tasks) > 1
    if not several:
        _print_head(tasks[0])
    print(f"devices      {len(devices) - revoked} active, {revoked} revoked")
    print(f"codes        {store.tokens.unused(int(now))} unused")
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
        if task.row.request is not None:
            print("waiting      it is replaced when serve runs and its open round has ended")
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


def _print_head(task: _Seen) -> None:
    label = task.store.facts.label or f"{task.row.name or ''} not served yet".strip()
    print(f"task         {printable(label)}")
    print(f"version      {task.version}")


def _print_rounds(task: _Seen, now: float) -> None:
    if task.rounds:
        print()
        print(tabulate([_line(row, now) for row in task.rounds], headers="keys", tablefmt="plain"))


def _print_waiting(task: _Seen) -> None:
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


def _line(row: RoundRow, now: float) -> dict[str, str]:
    if row.threshold == 0:
        state = "rests"
    elif row.closed_unix_seconds is None:
        left = row.deadline_unix_seconds - now
        state = "held" if row.held else f"open, {span(left)} left" if left > 0 else "open"
    else:
        state = "no quorum" if row.next_version is None else f"made version {row.next_version}"
    return {
        "round": str(row.round),
        "opened": ago(row.opened_unix_seconds, now),
        "selected": str(row.expected),
        "counted": "-" if row.participants is None else str(row.participants),
        "state": state,
        "metrics": ", ".join(
            f"{printable(name)} {value:.4g}" for name, value in (row.metrics or {}).items()
        ),
    }


def _as_json(store: Store, tasks: list[_Seen], now: float) -> dict[str, object]:
    first = _task_as_json(tasks[0])
    return {
        "task": first["task"],
        "generation": first["generation"],
        "version": first["version"],
        "devices": sum(1 for row in store.devices.all() if row.revoked_unix_seconds is None),
        "unused_codes": store.tokens.unused(int(now)),
        "refusals": store.refusals.all(),
        "unpublished": first["unpublished"],
        "rounds": first["rounds"],
        "tasks": [_task_as_json(task) for task in tasks],
    }


def _task_as_json(seen: _Seen) -> dict[str, object]:
    return {
        "name": seen.row.name,
        "task": seen.store.facts.label,
        "state": seen.row.state,
        "generation": seen.store.facts.generation,
        "version": seen.version,
        "only": seen.only or None,
        "eligible_devices": seen.eligible,
        "problem": seen.row.problem,
        "unpublished": seen.store.facts.unpublished,
        "rounds": [
            {
                "round": row.round,
                "version": row.version,
                "opened_unix_seconds": row.opened_unix_seconds,
                "deadline_unix_seconds": row.deadline_unix_seconds,
                "closed_unix_seconds": row.closed_unix_seconds,
                "selected": row.expected,
                "participants": row.participants,
                "next_version": row.next_version,
                "metrics": row.metrics,
                "held": row.held,
            }
            for row in seen.rounds
        ],
    }
