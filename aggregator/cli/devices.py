"""``tessera-aggregator devices``: who takes part."""

from __future__ import annotations

import argparse
import json
import time

from tabulate import tabulate

from aggregator.cli.arguments import add_home, home_of
from aggregator.store.devices import DeviceRow
from device_sdk.system.printable import ago

DESCRIPTION = """\
Lists the devices: id, when it joined, when an update of it was counted last, the k it trained, and
whether it was revoked. Below: codes that a second device tried to use."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    store = home_of(arguments).open_store()
    rows, tried = list(store.devices.all()), store.tokens.tried_by_strangers()
    store.database.close()
    if arguments.json:
        print(json.dumps([_as_json(row) for row in rows], indent=2))
        return 0
    now = time.time()
    if rows:
        print(tabulate([_as_line(row, now) for row in rows], headers="keys", tablefmt="plain"))
    else:
        print("no device has joined yet: tessera-aggregator invite prints codes")
    for token in tried:
        owner = "nobody" if token.device_id is None else token.device_id.hex()
        stranger = (token.last_stranger or b"").hex()[:16]
        print(
            f"warning: the code of {owner} was tried {token.strangers} times by another key, last "
            f"by {stranger}...: it leaked or went to two devices"
        )
    return 0


def _as_line(row: DeviceRow, now: float) -> dict[str, str]:
    return {
        "device": row.device_id.hex(),
        "joined": ago(row.enrolled_unix_seconds, now),
        "counted": ago(row.last_counted_unix_seconds, now),
        "k": "-" if row.last_width is None else str(row.last_width),
        "state": "active" if row.revoked_unix_seconds is None else "revoked",
    }


def _as_json(row: DeviceRow) -> dict[str, object]:
    return {
        "device_id": row.device_id.hex(),
        "enrolled_unix_seconds": row.enrolled_unix_seconds,
        "first_round": row.first_round,
        "last_counted_unix_seconds": row.last_counted_unix_seconds,
        "last_k": row.last_width,
        "revoked_unix_seconds": row.revoked_unix_seconds,
    }
