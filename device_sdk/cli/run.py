"""`tessera-device run`: take part in rounds until told to stop."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from device_sdk.cli.arguments import (
    CommandError,
    ProgressLine,
    add_home,
    add_providers,
    add_proxy,
    link_settings,
    log_to_stderr,
    read_file,
)
from device_sdk.conditions import on_mains_power, when_idle
from device_sdk.device import Device
from device_sdk.status import DeviceStatus
from device_sdk.system.command_line import positive_float, positive_int, slowdown
from device_sdk.system.printable import printable
from device_sdk.tables.options import add_reading, reading_of
from device_sdk.tables.text import Reading
from device_sdk.world import TrainingOptions

DESCRIPTION = """\
Takes part in the fleet's rounds in the foreground, and prints a line for each. Stops on Ctrl-C and
on SIGTERM; may be killed at any moment without harm. Only one process may run a home."""

EXAMPLES = """\
examples:
  tessera-device run --home ./device-1
  tessera-device run --home ./device-1 --interactions views.csv
                          first record what a file holds as if the app had
  tessera-device run --home ./device-1 --interactions log.tsv --columns user=1,item=3,time=2
                          the same of a file that does not say what its columns are
  tessera-device run --home ./device-1 --task clicks --task air
                          of the fleet's tasks these two, whatever was named when joining
  tessera-device run --home ./device-1 --on-mains-power --when-idle 300
                          train while plugged in and not in use
  tessera-device run --home ./device-1 --slowdown 8
                          as if this machine were eight times slower
"""

_GRACE_SECONDS = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_home(parser)
    parser.add_argument(
        "--interactions",
        type=Path,
        metavar="FILE",
        help="a table of interactions, one a row: user, item, time, ...; recorded before the "
        "start, each user's in the order of time",
    )
    parser.add_argument(
        "--k", type=positive_int, help="columns to train (default: measure what fits)"
    )
    parser.add_argument(
        "--slowdown",
        type=slowdown,
        default=1.0,
        metavar="X",
        help="emulate a device X times slower by sleeping (default: 1)",
    )
    parser.add_argument(
        "--when-none-fits",
        choices=("one", "decline"),
        default="one",
        help="where even k = 1 takes too long: train 1, or sit the round out (default: one)",
    )
    parser.add_argument(
        "--task",
        action="append",
        metavar="NAME",
        help="take part in this task of the fleet's (may be given several times); default: in the "
        "one named when joining, else in all that are for this device",
    )
    parser.add_argument(
        "--seconds-a-day",
        type=positive_float,
        metavar="S",
        help="train no more than this on one day, over all tasks (default: no bound)",
    )
    parser.add_argument(
        "--bytes-a-day",
        type=positive_int,
        metavar="N",
        help="send and receive no more than about this on one day (default: no bound)",
    )
    parser.add_argument(
        "--on-mains-power",
        action="store_true",
        help="train only while this machine runs on mains power; rounds wait as long as there is "
        "time (Linux, macOS; elsewhere: always)",
    )
    parser.add_argument(
        "--when-idle",
        type=positive_float,
        metavar="SECONDS",
        help="likewise, only after the machine had little to do for so long (at most 900)",
    )
    add_proxy(parser)
    add_providers(parser)
    add_reading(parser, "--interactions")
    parser.add_argument(
        "--for",
        type=positive_float,
        dest="for_seconds",
        metavar="SECONDS",
        help="stop after this long (default: never)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run until a signal comes."""
    log_to_stderr()
    stop = threading.Event()
    options = TrainingOptions(
        k=arguments.k,
        slowdown=arguments.slowdown,
        when_none_fits=arguments.when_none_fits,
        seconds_a_day=arguments.seconds_a_day,
        bytes_a_day=arguments.bytes_a_day,
        only_when=_only_when(arguments),
        providers=arguments.providers,
    )
    link = link_settings(arguments)
    try:
        opened = Device.open(
            arguments.home, options=options, link_settings=link, tasks=arguments.task
        )
    except ValueError as error:
        raise CommandError(f"--task: {error}") from error
    with opened as device:
        if arguments.interactions is None and reading_of(arguments) != Reading():
            raise CommandError("--columns and its like are for the file of --interactions")
        if arguments.interactions is not None:
            one = arguments.task[0] if arguments.task and len(arguments.task) == 1 else None
            _record(device, arguments, one)
        before = [
            (number, signal.signal(number, lambda *_: stop.set()))
            for number in (signal.SIGINT, signal.SIGTERM)
        ]
        try:
            device.start()
            _watch(device, stop, arguments.for_seconds)
        finally:
            device.stop(_GRACE_SECONDS)
            for number, handler in before:
                signal.signal(number, handler)
    return 0


def _only_when(arguments: argparse.Namespace) -> Callable[[], bool] | None:
    conditions = [on_mains_power()] if arguments.on_mains_power else []
    if arguments.when_idle is not None:
        try:
            conditions.append(when_idle(arguments.when_idle))
        except ValueError as error:
            raise CommandError(f"--when-idle: {error}") from error
    return (lambda: all(each() for each in conditions)) if conditions else None


def _record(device: Device, arguments: argparse.Namespace, task: str | None) -> None:
    found = read_file(arguments, "--interactions")
    before = device.status(task=_names(device)[0]).interactions
    line = ProgressLine(sys.stderr)
    line.show(f"recording {len(found):,} interactions ...")
    try:
        # Oldest first: a user's last item is the one that an evaluation holds back.
        news = device.record_all(((item, user) for user, item in found.pairs()), task=task)
    except ValueError as error:
        raise CommandError(f"--interactions: {error}") from None
    finally:
        line.clear()
    after = f", as newer than the {before} that were here" if before and news else ""
    print(f"recorded {news} new of {len(found)} interactions{after}", flush=True)


def _watch(device: Device, stop: threading.Event, for_seconds: float | None) -> None:
    status = device.status(task=_names(device)[0])
    slow = f", emulating a machine {status.slowdown:g} times slower" if status.slowdown > 1 else ""
    print(
        f"device {status.device_id} at {status.broker}: {status.users} users, "
        f"{status.interactions} interactions{slow}",
        flush=True,
    )
    shown: dict[str, str] = {}
    waited_seconds = 0.0
    while not stop.wait(0.5):
        waited_seconds += 0.5
        names = _names(device)
        for name in names:
            line = printable(status_line(device.status(task=name)))
            if len(names) > 1:
                line = f"{name}: {line}"
            if line != shown.get(name):
                print(line, flush=True)
                shown[name] = line
        if for_seconds is not None and waited_seconds >= for_seconds:
            return


def _names(device: Device) -> list[str]:
    """The tasks to tell of: those that it takes part in, or else any one."""
    tasks = device.tasks()
    return [each.name for each in tasks if each.takes_part] or [tasks[0].name]


def status_line(status: DeviceStatus) -> str:
    """One line for people: what the device is at."""
    if status.problem:
        return status.problem
    if not status.session:
        return "connected; waiting for the aggregator" if status.connected else "connecting ..."
    if status.working_on is not None:
        return f"round {status.working_on} is in hand"
    if status.round is None:
        return "in session; waiting for a round"
    line = f"round {status.round}: {status.outcome}"
    if status.outcome == "read":
        return f"the task rests at version {status.version}, which is here now"
    if status.outcome != "trained":
        return f"{line} ({status.detail})" if status.detail else line
    line += f" with k = {status.k} on version {status.version}"
    if status.unknown_items:
        line += f", {status.unknown_items} of {status.items} items unknown"
    if status.receipted_round == status.round:
        return f"{line}; {status.verdict}{f' ({status.reason})' if status.reason else ''}"
    return f"{line}; update of {status.outbox_bytes:,} bytes on its way"
