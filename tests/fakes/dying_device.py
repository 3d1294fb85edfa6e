"""A device's process that ends itself by SIGKILL at a given point: ``dying_device.py HOME POINT``.

Points: ``before-commit``, ``after-commit``, ``after-send``, ``before-settle``, ``after-settle``,
``never``, or ``idle``: as never, with an ordinary link.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from device_sdk.device import Device
from device_sdk.home.round_store import RoundStore
from device_sdk.link import LinkSettings
from device_sdk.link.link import Link
from device_sdk.rounds.participant import Participant
from device_sdk.rounds.sender import Sender
from device_sdk.wire.publish.receipts import RecordType
from device_sdk.world import TrainingOptions
from tests.brokers.links import QUICK
from tests.fakes.brisk import BRISK


def die(*ignored: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: type, name: str, act: Callable[..., None]) -> None:
    original = getattr(owner, name)

    def wrapped(*values: Any, **named: Any) -> Any:
        act(*values)
        return original(*values, **named)

    setattr(owner, name, wrapped)


def after(owner: type, name: str, act: Callable[..., None]) -> None:
    original = getattr(owner, name)

    def wrapped(*values: Any, **named: Any) -> Any:
        result = original(*values, **named)
        act(*values)
        return result

    setattr(owner, name, wrapped)


def on_wire(link: Link, topic: str, payload: bytes) -> None:
    """Die once an update was given to the broker, with its report or without."""
    if "/up/" in topic and payload[1] in (RecordType.UPDATE, RecordType.CONTRIBUTION):
        link.stop(flush_seconds=2, timeout_seconds=2)
        die()


def main() -> None:
    home, point = Path(sys.argv[1]), sys.argv[2]
    match point:
        case "before-commit":
            after(RoundStore, "post", die)  # inside the transaction, which is then not committed
        case "after-commit":
            before(Sender, "add", lambda *values: die() if len(values) > 1 else None)
        case "after-send":
            after(Link, "publish", on_wire)
        case "before-settle":
            before(RoundStore, "settle", die)
        case "after-settle":
            after(
                Participant,
                "_on_down",
                lambda *values: values[1][1] == RecordType.RECEIPT and die(),
            )
    options = TrainingOptions(k=4)
    link_settings = LinkSettings() if point == "idle" else QUICK
    with Device.open(home, options=options, pace=BRISK, link_settings=link_settings) as device:
        device.start()
        print("started", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
