"""``tessera-aggregator devices``: who takes part, and how it went on each."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict

from tabulate import tabulate

from aggregator.cli.arguments import (
    add_home,
    add_labels,
    add_task,
    device_name,
    label,
    labels_told,
    opened,
)
from aggregator.errors import AggregatorError
from aggregator.operate.devices import DeviceInTask, FleetDevice
from device_sdk.system.printable import ago, printable

DESCRIPTION = """\
Lists the devices: id, name, labels, state (active, silent when it was not heard of for a day, on
two machines, or revoked), when each was seen last, its version of Tessera (sdk) and, by task, what
it told of its newest round there (outcome and reason, the columns or artifact that it picked as
option) and when an update of it was counted last. With several tasks there is a line for each
device and each task that it is meant for. Other commands know a device by its name, or by the first
digits of its id; --json has the whole id. Below: codes that a second device tried to use.

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
    with opened(arguments) as fleet:
        devices, problems = fleet.devices(arguments.task), fleet.health().own_problems
    seen = [each for each in devices if dict(arguments.label).items() <= each.labels.items()]
    if arguments.task is not None:
        seen = [each for each in seen if each.tasks]
    if arguments.json:
        print(json.dumps([asdict(each) for each in seen], indent=2))
        return 0
    if seen:
        now = time.time()
        told_of = {part.task for each in seen for part in each.tasks}
        several = len(told_of) > 1 or arguments.task is not None
        lines = [line for each in seen for line in _lines(each, now, several)]
        print(tabulate(lines, headers="keys", tablefmt="plain", disable_numparse=True))
    elif not devices:
        print("no device has joined yet: tessera-aggregator invite prints codes")
    elif arguments.label:
        print("no device has these labels: tessera-aggregator devices lists all")
    else:
        print(f"task {arguments.task} is for none of the devices: see [task] only in its file")
    for problem in problems:
        if problem.code == "code-leaked":
            print(f"{problem.severity}: {problem.sentence}")
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
    with opened(arguments) as fleet:
        device = fleet.label(rest[0], dict(pairs), arguments.name)
    called = f" is named {printable(device.name)} and" if device.name else ""
    print(f"{device.device_id}{called} has {labels_told(device.labels) or 'no labels'}")
    return 0


def _lines(device: FleetDevice, now: float, several: bool) -> Iterator[dict[str, str]]:
    """One for each task, named where there are several."""
    for part in device.tasks or [DeviceInTask()]:
        yield {
            "device": device.short_id,
            "name": printable(device.name or "-"),
            "labels": printable(labels_told(device.labels) or "-"),
            "state": str(device.state),
            "joined": ago(device.enrolled_unix_seconds, now),
            "seen": ago(device.last_seen_unix_seconds, now),
            "sdk": printable(device.sdk or "-"),
            **({"task": part.task or "-"} if several else {}),
            "round": "-" if part.round is None else str(part.round),
            "outcome": printable(part.said or "-"),
            "option": printable(part.option or "-"),
            "counted": ago(part.counted_unix_seconds, now),
        }
