"""``tessera-aggregator status``: how the fleet is doing, from the database."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import asdict

from tabulate import tabulate

from aggregator.cli.arguments import add_home, add_task, home_of, opened
from aggregator.errors import AggregatorError
from aggregator.evaluation import as_json, in_a_line, what_serves
from aggregator.operate.health import FleetHealth, TaskHealth, reach_problems
from aggregator.operate.moving import move_lines
from aggregator.operate.problems import FleetProblem, Severity
from aggregator.operate.waiting import listed
from aggregator.serve.reach import read_reach
from aggregator.store.rows import RoundRow
from device_sdk.system.command_line import positive_int
from device_sdk.system.printable import ago, printable, span

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
    try:
        fleet = opened(arguments)
    except AggregatorError:
        reach = read_reach(home_of(arguments).live_file)
        if reach is not None and not arguments.json:
            now = time.time()
            print(f"serve        {printable(reach.words(now))}", flush=True)
            _print_problems(FleetProblem(*each) for each in reach_problems(reach, now))
        raise
    with fleet:
        health = fleet.health(arguments.task, arguments.rounds)
        if arguments.json:
            print(json.dumps(_as_json(health), indent=2))
        else:
            _print(health)
    return 0


def _print(health: FleetHealth) -> None:
    store, tasks, now = health.store, health.tasks, health.now
    several = len(tasks) > 1
    if not several:
        _print_head(tasks[0])
    if health.reach is not None:
        print(f"serve        {printable(health.reach.words(now))}")
        if health.reach.receipts:
            print(f"receipts     {health.reach.receipts}")
    elif health.serves:
        print("serve        runs on another machine: status there says what it is connected to")
    for line in move_lines(store, None, now):
        print(line)
    _print_cluster(health)
    print(f"devices      {health.active} active, {len(health.devices) - health.active} revoked")
    print(f"codes        {store.tokens.unused(int(now))} unused")
    _print_problems(health.own_problems)
    for task in tasks:
        if several:
            print()
            _print_head(task)
        _print_task(task, several)
        _print_problems(task.problems)
        _print_rounds(task, now)
    refusals = store.refusals.all()
    if refusals:
        told = ", ".join(f"{printable(why)} {count}" for why, count in refusals.items())
        print(f"\nrefused      {told}")
    for task in tasks:
        for number, device_id, why in task.store.log.quarantined():
            print(
                f"quarantine   an update of {device_id.hex()} for round {number}: {printable(why)}"
            )


def _print_problems(problems: Iterable[FleetProblem]) -> None:
    for each in problems:
        word = "problem" if each.severity is Severity.ERROR else "warning"
        print(f"{word:<12} {each.sentence}")


def _print_cluster(health: FleetHealth) -> None:
    lease = health.store.lease.find()
    if lease is None:
        return
    if health.store.lease.is_held():
        print(f"coordinator  {printable(lease.holder)}, term {lease.term}")
    elif health.works_alone:
        print("coordinator  none: workers go on, and end after ten minutes")
    else:
        return
    for worker in health.workers:
        row, state = worker.row, worker.problem or "connected"
        cell = f"{printable(row.cell)}, " if row.cell else ""
        print(f"worker {row.slot:<5} {cell}{row.shards} shards, start {row.epoch}, {state}")


def _print_head(task: TaskHealth) -> None:
    label = task.store.facts.label or f"{task.name} not served yet".strip()
    print(f"task         {printable(label)}")
    print(f"version      {task.version}")
    print(f"state        {task.standing}")


def _print_task(task: TaskHealth, several: bool) -> None:
    if (only := str(task.selector)) or several:
        print(f"for          {task.eligible} devices{only and f', only {only}'}")
    if task.row.request is not None:
        print("waiting      it is replaced when serve runs and its open round has ended")
    if task.rollback.version is not None:
        print(f"rollback     {task.rollback.said}")
    if (found := task.evaluated) is not None:
        print(f"evaluation   version {found.version}: {in_a_line(found.figures)}")
        if brings := task.brings:
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
    if (arrivals := task.arrivals) is not None:
        print(
            f"arrivals     half of the devices' updates within {span(arrivals.half)} of a round's "
            f"opening, nine tenths within {span(arrivals.nine_tenths)}, all within "
            f"{span(arrivals.longest)}"
        )
    if (stopped_at := task.store.facts.stopped_at) is not None:
        print(
            f"stopped      nothing has improved version {stopped_at} for "
            "evaluation.early_stopping rounds: no round opens"
        )


def _print_rounds(task: TaskHealth, now: float) -> None:
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
    if task.waiting is not None:
        print()
        for line in task.waiting.lines(task.store.fleet.devices.seen(), now):
            print(line)


def _line(task: TaskHealth, row: RoundRow, now: float) -> dict[str, str]:
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


def _as_json(health: FleetHealth) -> dict[str, object]:
    store, first = health.store, _task_as_json(health.tasks[0])
    lease = store.lease.find()
    return {
        "task": first["task"],
        "generation": first["generation"],
        "version": first["version"],
        "problems": [each.as_json() for each in health.problems],
        "devices": health.active,
        "unused_codes": store.tokens.unused(int(health.now)),
        "refusals": store.refusals.all(),
        "unpublished": first["unpublished"],
        "serves": health.serves,
        "serve": None if health.reach is None else asdict(health.reach),
        "coordinator": asdict(lease) if lease is not None and store.lease.is_held() else None,
        "workers": [asdict(each.row) for each in health.workers],
        "rounds": first["rounds"],
        "tasks": [_task_as_json(task) for task in health.tasks],
    }


def _evaluation_as_json(task: TaskHealth) -> dict[str, object] | None:
    found = task.evaluated
    if found is None:
        return None
    return {
        "version": found.version,
        "round": found.round,
        "figures": [as_json(each) for each in found.figures],
        "brings": task.brings or None,
        "stopped_at_version": task.store.facts.stopped_at,
    }


def _task_as_json(task: TaskHealth) -> dict[str, object]:
    return {
        "name": task.row.name,
        "task": task.store.facts.label,
        "state": task.row.state,
        "standing": task.standing,
        "generation": task.store.facts.generation,
        "version": task.version,
        "only": str(task.selector) or None,
        "eligible_devices": task.eligible,
        "wait_for_devices": task.wait_for_devices,
        "rollback": asdict(task.rollback),
        "evaluation": _evaluation_as_json(task),
        "unpublished": task.store.facts.unpublished,
        "arrivals": None if task.arrivals is None else asdict(task.arrivals),
        "outcomes": [each._asdict() for each in task.outcomes],
        "devices_by_part": task.trained,
        "counted_by_part": task.counted_by_part,
        "unknown_items": task.unknown_items._asdict(),
        "not_trained": [
            {"outcome": outcome, "reason": reason, "devices": listed(devices)}
            for (outcome, reason), devices in task.not_trained.items()
        ],
        "open_round": None if task.waiting is None else task.waiting.as_json(),
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
                "counted": task.counted(row),
                "next_version": row.next_version,
                "metrics": row.metrics,
                "held": row.held,
            }
            for row in task.rounds
        ],
    }
