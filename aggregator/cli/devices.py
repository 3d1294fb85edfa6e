"""``tessera-aggregator devices``: who takes part, and how it went on each."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

from tabulate import tabulate

from aggregator.cli.arguments import (
    add_home,
    add_labels,
    add_task,
    device_name,
    device_of,
    label,
    labels_of,
    opened,
    tasks_of,
)
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.operate.names import parts_of, short_id, shows_clash
from aggregator.store import Store
from aggregator.store.rows import DeviceRow, LastParticipation, TaskRow
from aggregator.task.file import served_selector
from device_sdk.system.printable import ago, printable
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import decode
from device_sdk.wire.publish.report import Report

DESCRIPTION = """\
Lists the devices: id, name, labels, when each was seen last, its version of Tessera (sdk) and, by
task, what it told of its newest round there (outcome and reason, the columns or artifact that it
picked as option) and when an update of it was counted last. With several tasks there is a line for
each device and each task that it is meant for. Other commands know a device by its name, or by the
first digits of its id; --json has the whole id. Below: codes that a second device tried to use.

devices label ID NAME=VALUE... changes labels, also while serve runs; NAME= takes one away, and
--name renames the device. Labels that a device gives itself show too; the operator's win."""

EXAMPLES = """\
examples:
  tessera-aggregator devices --home fleet         all of them, in all tasks
  tessera-aggregator devices --home fleet --task air --label site=north
                                                  how those labelled so do in one task
  tessera-aggregator devices --home fleet --json  whole ids, seconds, bytes and platform, too
  tessera-aggregator devices --home fleet label 3f2a site=south line=
                                                  set one label, take another away
  tessera-aggregator devices --home fleet label 3f2a --name hall-3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    add_task(parser, "show this one's rounds only (default: those of all)")
    add_labels(parser, "that the devices shown must have")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--name", type=device_name, metavar="NAME", help="with label: the device's new name"
    )
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
    with opened(arguments) as (home, store):
        chosen = {row.name for row in tasks_of(store, arguments)}
        tasks = [_Task(home, store, row) for row in store.tasks.all()]
        seen_unix, clashes = store.devices.seen(), store.devices.clashes()
        devices = [
            _SeenDevice(
                row, tasks, chosen, seen_unix.get(row.device_id), clashes.get(row.device_id)
            )
            for row in store.devices.all()
        ]
        tried = store.tokens.tried_by_strangers()
    wanted = dict(arguments.label).items()
    seen = [each for each in devices if wanted <= each.labels.items()]
    if arguments.task is not None:
        seen = [each for each in seen if each.parts]
    if arguments.json:
        print(json.dumps([each.as_json() for each in seen], indent=2))
        return 0
    if seen:
        now = time.time()
        lines = [line for each in seen for line in each.lines(now, len(tasks) > 1)]
        print(tabulate(lines, headers="keys", tablefmt="plain", disable_numparse=True))
    elif not devices:
        print("no device has joined yet: tessera-aggregator invite prints codes")
    elif wanted:
        print("no device has these labels: tessera-aggregator devices lists all")
    else:
        print(f"task {arguments.task} is for none of the devices: see [task] only in its file")
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
    if arguments.task is not None or arguments.label or arguments.json:
        raise AggregatorError(
            "--task, --label and --json are for the list; labels to set follow label ID"
        )
    try:
        pairs = [label(each) for each in rest[1:]]
    except argparse.ArgumentTypeError as error:
        raise AggregatorError(str(error)) from None
    if not pairs and arguments.name is None:
        raise AggregatorError("say what to change: NAME=VALUE, NAME= to take it away, or --name")
    with opened(arguments) as (_, store), store.database.transaction():
        row = device_of(store, rest[0])
        labels = labels_of(pairs, row.labels)
        store.devices.set_labels(row.device_id, labels)
        if arguments.name is not None:
            store.devices.set_name(row.device_id, arguments.name)
    name = row.name if arguments.name is None else arguments.name
    called = f" is named {printable(name)} and" if name else ""
    print(f"{row.device_id.hex()}{called} has {_told(labels) or 'no labels'}")
    return 0


class _Task:
    """A task, and what each device did last in it."""

    def __init__(self, home: AggregatorHome, store: Store, row: TaskRow) -> None:
        self.name = row.name
        self.parts = parts_of(home, store, row)
        self.selector = served_selector(row.served)
        self.participations = store.task(row.number).participations.all()


class _Part:
    """What a device did last in one task. ``report`` None: it told nothing that can be read."""

    def __init__(self, task: _Task | None, row: LastParticipation) -> None:
        self.task = None if task is None else task.name
        self.row = row
        self.trained = "" if task is None else task.parts.trained(row.width or 0)
        self.report: Report | None = None
        if row.report is not None:
            with suppress(WireError):  # of a version that this one cannot read
                self.report = decode(Report, row.report)
        self.details = None if self.report is None else self.report.details

    @property
    def option(self) -> str:
        """What it trained last."""
        if self.details is not None and self.details.option:
            return self.details.option
        return self.trained

    @property
    def outcome(self) -> str:
        """With the reason; empty where it never said."""
        if self.report is None:
            return ""
        said = ": ".join(each for each in (self.report.outcome.value, self.report.reason) if each)
        items = None if self.details is None else self.details.items
        return said if items is None or not items.unknown else f"{said}, {items}"

    def as_json(self) -> dict[str, object]:
        row, report, details = self.row, self.report, self.details
        items = None if details is None else details.items
        return {
            "task": self.task,
            "round": row.round,
            "outcome": None if report is None else report.outcome.value,
            "reason": None if report is None else report.reason,
            "told_unix_seconds": row.told_unix_seconds,
            "option": self.option or None,
            "train_seconds": None if details is None else details.seconds,
            "received_bytes": None if details is None else details.received_bytes,
            "items": None if items is None else items.recorded,
            "unknown_items": None if items is None else items.unknown,
            "counted_unix_seconds": row.counted_unix_seconds,
        }


class _SeenDevice:
    """A device, and what it did in each of the tasks that it is meant for, or took part in:
    ``parts``, of those ``chosen``; all else is over all tasks."""

    def __init__(
        self,
        row: DeviceRow,
        tasks: Sequence[_Task],
        chosen: Collection[str | None],
        seen_unix_seconds: int | None,
        clash_unix_seconds: int | None,
    ) -> None:
        self.row = row
        self.clash_unix_seconds = clash_unix_seconds
        active = row.revoked_unix_seconds is None
        parts = [
            _Part(task, task.participations.get(row.device_id, LastParticipation()))
            for task in tasks
            if (active and task.selector.admits(row.labels)) or row.device_id in task.participations
        ]
        told = [each for each in parts if each.details is not None]
        newest = max(told, key=lambda each: each.row.told_unix_seconds or 0, default=None)
        self.details = None if newest is None else newest.details
        self.labels = {**(self.details.labels if self.details else {}), **row.labels}
        self.seen_unix_seconds = seen_unix_seconds
        self.parts = [each for each in parts if each.task in chosen]

    def _state(self, now: float) -> str:
        if self.row.revoked_unix_seconds is not None:
            return "revoked"
        return "on two machines" if shows_clash(self.clash_unix_seconds, now) else "active"

    def lines(self, now: float, several: bool) -> Iterator[dict[str, str]]:
        """One for each task, named where there are several."""
        row, details = self.row, self.details
        for part in self.parts or [_Part(None, LastParticipation())]:
            yield {
                "device": short_id(row),
                "name": printable(row.name or "-"),
                "labels": printable(_told(self.labels) or "-"),
                "state": self._state(now),
                "joined": ago(row.enrolled_unix_seconds, now),
                "seen": ago(self.seen_unix_seconds, now),
                "sdk": "-" if details is None else printable(details.sdk),
                **({"task": part.task or "-"} if several else {}),
                "round": "-" if part.row.round is None else str(part.row.round),
                "outcome": printable(part.outcome or "-"),
                "option": printable(part.option or "-"),
                "counted": ago(part.row.counted_unix_seconds, now),
            }

    def as_json(self) -> dict[str, object]:
        row, details = self.row, self.details
        return {
            "device_id": row.device_id.hex(),
            "name": row.name,
            "labels": self.labels,
            "enrolled_unix_seconds": row.enrolled_unix_seconds,
            "first_round": row.first_round,
            "revoked_unix_seconds": row.revoked_unix_seconds,
            "last_seen_unix_seconds": self.seen_unix_seconds,
            "on_two_machines_unix_seconds": self.clash_unix_seconds,
            "sdk": None if details is None else details.sdk,
            "runtime": None if details is None else details.runtime,
            "platform": None if details is None else details.platform,
            "tasks": [each.as_json() for each in self.parts],
        }


def _told(labels: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(labels.items()))
