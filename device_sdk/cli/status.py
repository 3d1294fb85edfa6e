"""`tessera-device status`: what the home folder tells, also beside a running device."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
from collections.abc import Mapping

from device_sdk.cli.arguments import CommandError, add_home
from device_sdk.device import Device
from device_sdk.status import DeviceStatus, TaskStatus
from device_sdk.system.printable import printable, text_table

DESCRIPTION = """\
Shows a device's identity, its data, its last round and what waits to be sent, and, where another
process runs it, what that process is at and what is wrong now. Reads the home folder only."""

# What the running process does not tell, or this one cannot know.
_LEFT_OUT = ("sent_bytes", "refused", "slowdown")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_home(parser)
    parser.add_argument("--task", metavar="NAME", help="of a device with several, this one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Read and print."""
    with Device.open(arguments.home, read_only=True) as device:
        tasks = device.tasks()
        named = arguments.task
        if named is None and len(tasks) > 1:
            named = next((each.name for each in tasks if each.takes_part), None)
        try:
            status = device.status(task=named)
        except ValueError as error:
            raise CommandError(str(error)) from error
    if arguments.json:
        known = {k: v for k, v in dataclasses.asdict(status).items() if k not in _LEFT_OUT}
        known["tasks"] = [dataclasses.asdict(each) for each in tasks]
        print(json.dumps(known, indent=2))
    else:
        rows = [(name, printable(value)) for name, value in _rows(status)]
        print(text_table(rows))
        if len(tasks) > 1:
            print()
            print(text_table([_task_row(each) for each in tasks], _TASK_COLUMNS))
    return 0


_TASK_COLUMNS = ("task", "cohort", "method", "newest round", "model here", "takes part")


def _task_row(task: TaskStatus) -> tuple[str, ...]:
    newest = "none yet" if task.round is None else f"{task.round}: {task.outcome}"
    if task.working_on is not None:
        newest = f"{task.working_on} is in hand"
    version = "none yet" if task.version is None else f"version {task.version}"
    why = printable(f"no: {task.why_not}") if task.why_not else "yes"
    return task.name, task.cohort, task.method, newest, version, why


def _rows(status: DeviceStatus) -> list[tuple[str, str]]:
    rows = [
        ("device", status.device_id),
        ("broker", status.broker),
        ("task", status.task + (" (this device has left)" if status.left else "")),
        ("now", _now(status)),
        ("local data", local_data(status)),
        ("newest round", _round(status)),
        ("last trained", _trained(status)),
        ("model here", "none yet" if status.version is None else f"version {status.version}"),
        *_evaluation(status),
        ("last receipt", _receipt(status)),
        ("outbox", f"{status.outbox} updates, {status.outbox_bytes:,} bytes"),
        ("time last seen", _time(status.time_unix_seconds)),
    ]
    if status.k_reason:
        what = "model" if status.artifact else "k"
        rows.insert(8, (f"{what} chosen because", status.k_reason))
    return rows


def local_data(status: DeviceStatus) -> str:
    """How much there is to learn from, and what the task's catalogue does not know of it."""
    said = f"{status.users} users, {status.interactions} interactions"
    if not status.unknown_items:
        return said
    return f"{said}; {status.unknown_items} of {status.items} items unknown to the catalogue"


def _now(status: DeviceStatus) -> str:
    if not status.running:
        return "no process runs it"
    if status.problem:
        return status.problem
    if status.working_on is not None:
        return f"round {status.working_on} is in hand"
    if status.session:
        return "in session; waiting for a round"
    return "connected; waiting for the aggregator" if status.connected else "connecting ..."


def _round(status: DeviceStatus) -> str:
    if status.round is None:
        return "none yet"
    return f"{status.round}: {status.outcome}" + (f" ({status.detail})" if status.detail else "")


def _trained(status: DeviceStatus) -> str:
    if status.trained_round is None:
        return "none yet"
    what = f"model {status.artifact}" if status.artifact else f"k = {status.k}"
    return f"round {status.trained_round}, {what}"


def _evaluation(status: DeviceStatus) -> list[tuple[str, str]]:
    """A row for each stage, and one for what is missing; none for a task that asks for nothing."""
    rows = [
        (f"quality, {stage}", f"version {status.evaluated_version}: {_figures(figures)}")
        for stage, figures in status.evaluation.items()
    ]
    if status.evaluation_detail:
        rows.append(("not evaluated", status.evaluation_detail))
    return rows


def _figures(figures: Mapping[str, float | None]) -> str:
    shown = [
        f"{name} {'not defined' if value is None else format(value, '.4g')}"
        for name, value in figures.items()
        if name not in ("samples", "users")
    ]
    sizes = [f"{figures[name]:.0f} {name}" for name in ("samples", "users") if name in figures]
    return f"{', '.join(shown)} of {' and '.join(sizes)}"


def _receipt(status: DeviceStatus) -> str:
    if status.receipted_round is None:
        return "none yet"
    why = f" ({status.reason})" if status.reason else ""
    return f"round {status.receipted_round}: {status.verdict}{why}"


def _time(unix_seconds: int) -> str:
    if unix_seconds == 0:
        return "never in a session"
    return datetime.datetime.fromtimestamp(unix_seconds, datetime.UTC).isoformat(" ") + " (UTC)"
