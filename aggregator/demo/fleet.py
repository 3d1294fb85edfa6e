"""A fleet on this machine: a broker, an aggregator, and devices that learn from local arrays.

    task = FleetTask("fedavg", [folder], rounds=10, settings={"training": {"epochs": 2}})
    members = [FleetMember("anna", LocalData(train)), FleetMember("bert", LocalData(other))]
    with local_fleet(task, members, folder) as fleet:
        for row in fleet.rounds():
            print(row.round, row.metrics, fleet.devices["anna"].predict(batch))

The broker (Mosquitto, or amqtt in this process) and the aggregator (`tessera-aggregator serve`)
are what an operator would run; each device is a `device_sdk.Device` with a home and a thread of its
own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from aggregator.demo.broker import RunningBroker, mosquitto_path, running_broker
from aggregator.demo.child import FleetError
from aggregator.demo.serving import RunningAggregator, aggregator_command, serving
from aggregator.store.rows import RoundRow
from device_sdk import Device, EnrolmentFailed, LocalData, TrainingOptions
from device_sdk.link import LinkSettings
from device_sdk.local_data import DataSource
from device_sdk.system.clock import Clock
from device_sdk.world import Pace

_PACE = Pace(
    answer_seconds=3.0, fetch_seconds=3.0, reopen_seconds=0.5, most_seconds=10.0, ask_seconds=0.2
)
_START_SECONDS = 60.0
_ENROL_SECONDS = 5.0
_POLL_SECONDS = 0.05
Settings = Mapping[str, "bool | int | float | str | Settings"]


@dataclass(frozen=True)
class FleetTask:
    """What the fleet learns.

    Attributes:
        method: ``fedavg``, ``teacher_logits``, ``mutual``, ``prototypes`` or ``attention``.
        artifacts: folders made by `export`, smallest first.
        companions: attention's meta-networks, one for each artifact; else none.
        settings: the method's table of the task file; a mapping inside is a table below it.
        rounds: stop after so many.
        train_seconds: devices pick an artifact whose round fits into this; half the deadline if
            None.
        quorum: updates that make a version; all devices if None.
        pause_seconds: between rounds, for whoever evaluates there.
        evaluation: the task file's table of that name, empty for its defaults; None for none.
    """

    method: str
    artifacts: Sequence[Path]
    rounds: int
    settings: Settings = field(default_factory=dict)
    companions: Sequence[Path] = ()
    deadline_seconds: float = 120.0
    train_seconds: float | None = None
    quorum: int | None = None
    pause_seconds: float = 0.0
    broadcast_codec: str = "float16"
    update_codec: str = "float16"
    evaluation: Settings | None = None

    def to_toml(self, broker_url: str, devices: int) -> str:
        """The task file for a fleet of so many devices."""
        round_table: dict[str, Any] = {
            "quorum": self.quorum if self.quorum is not None else devices,
            "wait_for_devices": devices,
            "deadline_seconds": float(self.deadline_seconds),
            "least_deadline_seconds": min(5.0, self.deadline_seconds),
            "pause_seconds": float(self.pause_seconds),
            "most_rounds": self.rounds,
        }
        if self.train_seconds is not None:
            round_table["train_seconds"] = float(self.train_seconds)
        task: dict[str, Any] = {
            "method": self.method,
            "artifacts": [str(Path(each).resolve()) for each in self.artifacts],
            "companions": [str(Path(each).resolve()) for each in self.companions],
            "broadcast_codec": self.broadcast_codec,
            "update_codec": self.update_codec,
        }
        tables = {"task": task, "broker": {"url": broker_url}, "round": round_table}
        asked = {} if self.evaluation is None else {"evaluation": self.evaluation}
        return "\n".join(_tables({**tables, self.method: self.settings, **asked}))


@dataclass(frozen=True)
class FleetMember:
    """A device to be: its name for people, its samples, and its own choices.

    ``work_clock`` times its training; devices that share a machine measure each other with the
    machine's own.
    """

    name: str
    data: LocalData | DataSource
    options: TrainingOptions | None = None
    work_clock: Clock | None = None


@dataclass(frozen=True)
class LocalFleet:
    """A running fleet. ``devices`` by their members' names, in the order given."""

    task: FleetTask
    devices: Mapping[str, Device]
    broker: RunningBroker
    aggregator: RunningAggregator

    def rounds(self, patience_seconds: float = 600.0) -> Iterator[RoundRow]:
        """Each round as it closes, oldest first, until the task's last one.

        ``metrics`` are the method's; devices go on with the next round meanwhile. Raises FleetError
        where no round closes for ``patience_seconds``, or broker or aggregator end.
        """
        last, until = 0, time.monotonic() + patience_seconds
        while last < self.task.rounds:
            closed = [
                row
                for row in reversed(self.aggregator.rounds())
                if row.closed_unix_seconds is not None and row.round > last
            ]
            for row in closed:
                last, until = row.round, time.monotonic() + patience_seconds
                yield row
            self._require_alive(until)
            time.sleep(_POLL_SECONDS)

    def settle(self, timeout_seconds: float = 30.0) -> None:
        """Wait until every device has its last receipt. Raises FleetError after the timeout."""
        until = time.monotonic() + timeout_seconds
        for name, device in self.devices.items():
            while device.status().outbox:
                if time.monotonic() > until:
                    raise FleetError(f"{name} still waits for a receipt: {device.status()}")
                time.sleep(_POLL_SECONDS)

    def state(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """The method's state at the newest version, as its ``state()`` names it."""
        checkpoint = self.aggregator.store.first.checkpoints.get("version")
        if checkpoint is None:
            raise FleetError("the aggregator has no version yet")
        return checkpoint.state

    def sent_bytes(self) -> dict[str, int]:
        """Sealed bytes of updates that each device has sent since it started."""
        return {name: device.status().sent_bytes for name, device in self.devices.items()}

    def _require_alive(self, until: float) -> None:
        if not self.broker.alive() or not self.aggregator.child.running:
            raise FleetError(f"the fleet has ended:\n{self.aggregator.child.log_tail()}")
        if time.monotonic() > until:
            told = {name: device.status().problem for name, device in self.devices.items()}
            raise FleetError(
                f"no round has closed for long; devices say {told}, the aggregator:\n"
                f"{self.aggregator.child.log_tail()}"
            )


@contextmanager
def local_fleet(
    task: FleetTask, members: Sequence[FleetMember], folder: Path, *, broker: str | None = None
) -> Iterator[LocalFleet]:
    """Start everything, run until the block ends, and stop everything.

    Args:
        task: what to learn.
        members: the devices; their names must differ.
        folder: for homes and logs; made if missing. Nothing is written elsewhere.
        broker: Mosquitto's executable, or ``amqtt``; if None Mosquitto where there is one, else
            amqtt.

    Raises FleetError where a part does not start, ValueError for repeated names.
    """
    names = [member.name for member in members]
    if len(set(names)) != len(names) or not names:
        raise ValueError(f"the members' names are {names}; expected one or more, all different")
    folder = folder.resolve()  # child processes run in another folder
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        executable = mosquitto_path() if broker is None else broker
        executable = None if executable == "amqtt" else executable
        running = stack.enter_context(running_broker(folder, executable))
        home = folder / "aggregator"
        aggregator_command("init", "--home", str(home))
        (home / "task.toml").write_text(task.to_toml(running.url, len(members)), encoding="utf-8")
        printed = aggregator_command("invite", "--home", str(home), "--count", str(len(members)))
        aggregator = stack.enter_context(serving(home, folder))
        devices: dict[str, Device] = {}
        for member, code in zip(members, printed.split(), strict=False):
            place = folder / "devices" / member.name
            device = _enrolled(member, running, code, place, aggregator)
            devices[member.name] = stack.enter_context(device)
        for device in devices.values():
            device.start()
        yield LocalFleet(task, devices, running, aggregator)


def _enrolled(
    member: FleetMember, broker: RunningBroker, code: str, home: Path, aggregator: RunningAggregator
) -> Device:
    """Enrol, asking again for as long as the aggregator is starting."""
    # amqtt, which speaks MQTT 3.1.1, never answers one who says hello in MQTT 5.
    link = LinkSettings(version_probe_seconds=0.3) if broker.is_amqtt else None
    until = time.monotonic() + _START_SECONDS
    while True:
        try:
            return Device.enrol(
                broker.url,
                code,
                home,
                timeout_seconds=_ENROL_SECONDS,
                link_settings=link,
                options=member.options,
                pace=_PACE,
                work_clock=member.work_clock,
                data=member.data,
            )
        except EnrolmentFailed as error:
            if not aggregator.child.running or time.monotonic() > until:
                raise FleetError(
                    f"{member.name} could not join: {error}\n{aggregator.child.log_tail()}"
                ) from None


@contextmanager
def round_bar(console: Console, rounds: int, waiting: str) -> Iterator[Callable[[int, str], None]]:
    """A bar of so many rounds that says ``waiting`` until it is called with a round's number and
    what to say of it."""
    columns = (
        SpinnerColumn(),
        TextColumn("round {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(waiting, total=rounds)
        yield lambda number, said: progress.update(bar, completed=number, description=said)


def _tables(tables: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Lines of TOML; scalars of a table come before the tables inside it."""
    for name, table in tables.items():
        yield f"[{prefix}{name}]"
        for key, value in table.items():
            if not isinstance(value, Mapping):
                yield f"{key} = {json.dumps(value)}"  # for these values TOML's and JSON's agree
        inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
        yield from _tables(inner, f"{prefix}{name}.")
