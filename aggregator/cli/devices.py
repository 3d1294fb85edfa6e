"""``tessera-aggregator devices``: who takes part, and how it went on each."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import suppress

from tabulate import tabulate

from aggregator.cli.arguments import (
    add_home,
    add_labels,
    device_name,
    device_of,
    home_of,
    label,
    labels_of,
)
from aggregator.errors import AggregatorError
from aggregator.store.devices import DeviceRow
from device_sdk.system.printable import ago, printable
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.report import Report, read_report

DESCRIPTION = """\
Lists the devices: id, name, labels, when it was seen last, its version of Tessera, how its newest
round ended (as the device told) and what it trained there, and whether it was revoked. Below: codes
that a second device tried to use.

devices label ID NAME=VALUE... changes labels, also while serve runs; NAME= takes one away, and
--name renames the device. Labels that a device gives itself show too; the operator's win."""

EXAMPLES = """\
examples:
  tessera-aggregator devices --home fleet
  tessera-aggregator devices --home fleet --label site=north --json
  tessera-aggregator devices --home fleet label 3f2a site=south line=
  tessera-aggregator devices --home fleet label 3f2a --name hall-3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    add_labels(parser, "that the devices shown must have")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--name", type=device_name, help="with label: the device's new name")
    parser.add_argument(
        "change",
        nargs="*",
        metavar="label ID NAME=VALUE",
        help="change a device's labels: the word label, its id or name, and labels",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.change:
        return _change(arguments)
    if arguments.name is not None:
        raise AggregatorError("--name goes with label ID")
    store = home_of(arguments).open_store()
    rows, tried = list(store.devices.all()), store.tokens.tried_by_strangers()
    store.database.close()
    wanted = dict(arguments.label)
    seen = [each for each in map(Seen, rows) if wanted.items() <= each.labels.items()]
    if arguments.json:
        print(json.dumps([each.as_json() for each in seen], indent=2))
        return 0
    now = time.time()
    if seen:
        print(tabulate([each.line(now) for each in seen], headers="keys", tablefmt="plain"))
    elif rows:
        print("no device has these labels: tessera-aggregator devices lists all")
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


def _change(arguments: argparse.Namespace) -> int:
    verb, *rest = arguments.change
    if verb != "label" or not rest:
        raise AggregatorError(f"{verb!r} is nothing to do with devices: label ID NAME=VALUE is")
    try:
        pairs = [label(each) for each in rest[1:]]
    except argparse.ArgumentTypeError as error:
        raise AggregatorError(str(error)) from None
    if not pairs and arguments.name is None:
        raise AggregatorError("say what to change: NAME=VALUE, NAME= to take it away, or --name")
    store = home_of(arguments).open_store()
    try:
        with store.database.transaction():
            row = device_of(store, rest[0])
            labels = labels_of(pairs, row.labels)
            store.devices.set_labels(row.device_id, labels)
            if arguments.name is not None:
                store.devices.set_name(row.device_id, arguments.name)
    finally:
        store.database.close()
    print(f"{row.device_id.hex()} has {_told(labels) or 'no labels'}")
    return 0


class Seen:
    """A device with what it told of its newest round, if that can be read."""

    def __init__(self, row: DeviceRow) -> None:
        self.row = row
        self.report: Report | None = None
        if row.last_report is not None:
            with suppress(WireError):  # of a version that this one cannot read
                self.report = read_report(row.last_report)
        own = self.report.details.labels if self.report and self.report.details else {}
        self.labels = {**own, **row.labels}

    @property
    def seen_unix_seconds(self) -> int | None:
        """When something of it was taken last."""
        times = (self.row.last_counted_unix_seconds, self.row.last_report_unix_seconds)
        return max((each for each in times if each is not None), default=None)

    @property
    def outcome(self) -> str:
        """How its newest round ended, with the reason; empty where it never said."""
        if self.report is None:
            return ""
        return ": ".join(each for each in (self.report.outcome.value, self.report.reason) if each)

    @property
    def option(self) -> str:
        """What it trained last."""
        details = None if self.report is None else self.report.details
        if details is not None and details.option:
            return details.option
        return "" if self.row.last_width is None else f"k={self.row.last_width}"

    def line(self, now: float) -> dict[str, str]:
        row, details = self.row, None if self.report is None else self.report.details
        return {
            "device": row.device_id.hex(),
            "name": printable(row.name or "-"),
            "labels": printable(_told(self.labels) or "-"),
            "joined": ago(row.enrolled_unix_seconds, now),
            "seen": ago(self.seen_unix_seconds, now),
            "counted": ago(row.last_counted_unix_seconds, now),
            "version": "-" if details is None else printable(details.sdk),
            "last round": printable(self.outcome or "-"),
            "trained": printable(self.option or "-"),
            "state": "active" if row.revoked_unix_seconds is None else "revoked",
        }

    def as_json(self) -> dict[str, object]:
        row, report = self.row, self.report
        details = None if report is None else report.details
        return {
            "device_id": row.device_id.hex(),
            "name": row.name,
            "labels": self.labels,
            "enrolled_unix_seconds": row.enrolled_unix_seconds,
            "first_round": row.first_round,
            "last_seen_unix_seconds": self.seen_unix_seconds,
            "last_counted_unix_seconds": row.last_counted_unix_seconds,
            "last_k": row.last_width,
            "last_outcome": None if report is None else report.outcome.value,
            "last_reason": None if report is None else report.reason,
            "sdk": None if details is None else details.sdk,
            "runtime": None if details is None else details.runtime,
            "platform": None if details is None else details.platform,
            "option": self.option or None,
            "train_seconds": None if details is None else details.seconds,
            "received_bytes": None if details is None else details.received_bytes,
            "revoked_unix_seconds": row.revoked_unix_seconds,
        }


def _told(labels: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(labels.items()))
