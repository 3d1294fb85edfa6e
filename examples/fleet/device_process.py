"""One operating-system process that holds many devices, each with a home and identity of its own.

    python -m examples.fleet.device_process ASSIGNMENT.json

The demo starts several. What comes out goes to a journal file; over MQTT go only the devices' own
messages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import signal
import threading
import time

from device_sdk.errors import DeviceError
from device_sdk.system.lock import FileLock
from examples.fleet.assignment import Assignment, read_assignment, read_verdicts
from examples.fleet.held_device import HeldDevice
from examples.fleet.journal import Enrolled, JournalWriter, Trouble

_POLL_SECONDS = 0.05
_DONE_CHECK_SECONDS = 0.25


def main(argv: list[str]) -> int:
    """Run the devices of an assignment until its rounds are over; 0, or 1 where none could."""
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    assignment = read_assignment(Path(argv[0]))
    stopping = _stop_when_told()
    journal = JournalWriter(Path(assignment.journal))
    devices = [HeldDevice(each, assignment) for each in assignment.devices]
    try:
        enrolled = [device for device in devices if _enrol(device, journal, stopping)]
        timed = [device for device in enrolled if device.assigned.times]
        _measure(timed, assignment, journal, stopping)
        running = _start(enrolled, Path(assignment.verdict), stopping)
        _take_part(running, journal, stopping)
        _report(running, assignment, journal)
        return 0 if running or stopping.is_set() else 1
    finally:
        for device in devices:
            device.close()
        journal.close()


def _enrol(device: HeldDevice, journal: JournalWriter, stopping: threading.Event) -> bool:
    if stopping.is_set():
        return False
    try:
        device.enrol()
    except DeviceError as error:
        journal.write(Trouble(device.assigned.name, f"could not enrol: {error}"))
        return False
    journal.write(Enrolled(device.assigned.name))
    return True


def _measure(
    devices: list[HeldDevice],
    assignment: Assignment,
    journal: JournalWriter,
    stopping: threading.Event,
) -> None:
    """One device after the other, while no other process times anything."""
    with _turn(Path(assignment.turn), stopping):
        for device in devices:
            if stopping.is_set():
                return
            measured = device.measure(stopping.is_set)
            if measured is not None:
                journal.write(measured)
            elif not stopping.is_set():
                name = device.assigned.name
                journal.write(Trouble(name, "took part in no round in time to be timed"))


def _start(
    devices: list[HeldDevice], verdict_file: Path, stopping: threading.Event
) -> list[HeldDevice]:
    """Start all once it is known what each class takes; none when told to stop before."""
    while (verdicts := read_verdicts(verdict_file)) is None:
        if stopping.wait(_POLL_SECONDS):
            return []
    for device in devices:
        device.start(verdicts[device.assigned.capacity])
    return devices


def _take_part(
    devices: list[HeldDevice], journal: JournalWriter, stopping: threading.Event
) -> None:
    problems: dict[str, str] = {}
    next_check_seconds = 0.0
    while not stopping.is_set():
        for device in devices:
            quality = device.evaluate()
            if quality is not None:
                journal.write(quality)
        if time.monotonic() >= next_check_seconds:
            next_check_seconds = time.monotonic() + _DONE_CHECK_SECONDS
            done = [device.is_done() for device in devices]
            for device, is_done in zip(devices, done, strict=True):
                # A device that is done has what it came for, whatever its connection says.
                name, problem = device.assigned.name, "" if is_done else device.problem()
                before = problems.get(name, "")
                if problem == before:
                    continue
                if before:
                    journal.write(Trouble(name, before, over=True))
                if problem:
                    journal.write(Trouble(name, problem))
                problems[name] = problem
            if all(done):
                break
        stopping.wait(_POLL_SECONDS)
    for device in devices:
        quality = device.evaluate()
        if quality is not None:
            journal.write(quality)


def _report(devices: list[HeldDevice], assignment: Assignment, journal: JournalWriter) -> None:
    for device in devices:
        journal.write(device.account())
        for name in assignment.shown:
            try:
                shown = device.show(name)
            except DeviceError as error:  # stopped before its first round
                journal.write(Trouble(device.assigned.name, str(error)))
                break
            if shown is not None:
                journal.write(shown)


@contextmanager
def _turn(path: Path, stopping: threading.Event) -> Iterator[None]:
    """Wait for the fleet's lock; it goes with its process, however that ends."""
    lock = FileLock(path)
    try:
        while not stopping.is_set() and not lock.try_acquire():
            stopping.wait(_POLL_SECONDS)
        yield
    finally:
        lock.close()


def _stop_when_told() -> threading.Event:
    """Set by SIGTERM, SIGINT, or the end of the process that started this one."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopping.set())

    def watch() -> None:
        # Not sys.stdin, whose lock would still be held when the interpreter ends.
        while os.read(0, 1024):
            pass
        stopping.set()

    threading.Thread(target=watch, name="parent", daemon=True).start()
    return stopping


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
