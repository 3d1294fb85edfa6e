"""``tessera-aggregator status``: how the fleet is doing, from the database."""

from __future__ import annotations

import argparse
import json
import time

from tabulate import tabulate

from aggregator.cli.arguments import add_home, home_of
from aggregator.store import Store
from aggregator.store.rounds import RoundRow
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
    rounds = store.rounds.latest(arguments.rounds)
    if arguments.json:
        print(json.dumps(_as_json(store, rounds, now), indent=2))
    else:
        _print(store, rounds, now)
    store.database.close()
    return 0


def _print(store: Store, rounds: list[RoundRow], now: float) -> None:
    devices = list(store.devices.all())
    revoked = sum(1 for row in devices if row.revoked_unix_seconds is not None)
    print(f"task         {printable(store.facts.task or 'not served yet')}")
    print(f"version      {_version(store)}")
    print(f"devices      {len(devices) - revoked} active, {revoked} revoked")
    print(f"codes        {store.tokens.unused(int(now))} unused")
    if rounds:
        print()
        print(tabulate([_line(row, now) for row in rounds], headers="keys", tablefmt="plain"))
    refusals = store.refusals.all()
    if refusals:
        print()
        print(
            "refused      "
            + ", ".join(f"{printable(why)} {count}" for why, count in refusals.items())
        )
    for row in rounds:
        if row.held is not None:
            _print_held(row.round, row.held)
    if store.facts.unpublished is not None:
        _print_held(rounds[0].round + 1 if rounds else 1, store.facts.unpublished)
    for number, device_id, why in store.log.quarantined():
        print(f"quarantine   an update of {device_id.hex()} for round {number}: {printable(why)}")


def _print_held(number: int, why: str) -> None:
    print(f"\nround {number} is held: {printable(why)}\n  see tessera-aggregator release")


def _version(store: Store) -> int:
    checkpoint = store.checkpoints.get("version")
    return 0 if checkpoint is None else checkpoint.version


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


def _as_json(store: Store, rounds: list[RoundRow], now: float) -> dict[str, object]:
    return {
        "task": store.facts.task,
        "generation": store.facts.generation,
        "version": _version(store),
        "devices": sum(1 for row in store.devices.all() if row.revoked_unix_seconds is None),
        "unused_codes": store.tokens.unused(int(now)),
        "refusals": store.refusals.all(),
        "unpublished": store.facts.unpublished,
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
            for row in rounds
        ],
    }
