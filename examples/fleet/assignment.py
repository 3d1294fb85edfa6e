"""What one device process is told: its devices, and the data that is theirs alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.recommendation.split import LeaveOneOut
from device_sdk.system.files import write_atomically


@dataclass(frozen=True, slots=True)
class AssignedUser:
    """One user's data, as rows of the catalogue. Only ``train`` is recorded on the device."""

    name: str
    train: tuple[int, ...]
    held_out: int
    negatives: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AssignedDevice:
    """``home``: the device's own folder. ``slowdown``: what it emulates.

    ``times``: it picks its k itself, for its class.
    """

    name: str
    capacity: str
    home: str
    code: str
    slowdown: float
    times: bool
    users: tuple[AssignedUser, ...]

    def split(self, items: int) -> LeaveOneOut:
        """What its users are tested with; users in the order in which they are recorded."""
        return LeaveOneOut(
            items,
            tuple(np.asarray(user.train, np.int64) for user in self.users),
            np.asarray([user.held_out for user in self.users], np.int64),
            tuple(np.asarray(user.negatives, np.int64) for user in self.users),
        )


@dataclass(frozen=True, slots=True)
class Assignment:
    """``columns``: K. ``train_seconds``: what a round's training is given. ``yardstick_seconds``:
    the reference of every ``WorkClock``.

    ``verdict``: file in which the demo will write the k that each class trains.
    ``turn``: lock file of the fleet; who holds it may time its work. ``shown``: users' names.
    """

    broker_url: str
    rounds: int
    columns: int
    train_seconds: float
    yardstick_seconds: float
    journal: str
    verdict: str
    turn: str
    item_ids: tuple[str, ...]
    titles: tuple[str, ...]
    shown: tuple[str, ...]
    devices: tuple[AssignedDevice, ...]

    def write(self, path: Path) -> None:
        """Readable by its owner only: it holds codes and what users did."""
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            json.dump(asdict(self), file)


def write_verdicts(path: Path, ks: Mapping[str, int]) -> None:
    """k by class; appears whole."""
    write_atomically(path, json.dumps(dict(ks)).encode())


def read_verdicts(path: Path) -> dict[str, int] | None:
    """k by class; None while they are not written."""
    if not path.exists():
        return None
    ks: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))
    return ks


def read_assignment(path: Path) -> Assignment:
    """What :meth:`Assignment.write` wrote."""
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    devices = []
    for device in values.pop("devices"):
        users = tuple(
            AssignedUser(
                user["name"], tuple(user["train"]), user["held_out"], tuple(user["negatives"])
            )
            for user in device.pop("users")
        )
        devices.append(AssignedDevice(users=users, **device))
    for name in ("item_ids", "titles", "shown"):
        values[name] = tuple(values[name])
    return Assignment(devices=tuple(devices), **values)
