"""The brokers that runs are made with; each can be killed, paused and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from tests.brokers.amqtt_broker import AMQTT_PROGRAM
from tests.brokers.mosquitto import RECOMMENDED, Mosquitto, free_port, wait_for_port

BROKERS = ("mosquitto", "mosquitto-persistent", "amqtt")


class Broker(Protocol):
    """A broker on a port that stays the same."""

    port: int

    @property
    def pid(self) -> int:
        """Of its process."""

    def start(self) -> None:
        """Start it and wait for its port."""

    def kill(self) -> None:
        """kill -9."""

    def replace(self) -> None:
        """Another one on its port, with nothing in it."""

    def alive(self) -> bool:
        """Whether its process runs: garbage ends some brokers."""


class _Mosquitto(Mosquitto):
    stored: Path | None = None

    def replace(self) -> None:
        self.kill()
        if self.stored is not None:
            self.stored.unlink(missing_ok=True)
        self.start()

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None


class Amqtt:
    """A :class:`Broker` without settings of ours."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """See :class:`Broker`."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """See :class:`Broker`."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", AMQTT_PROGRAM, str(self.port), "tcp"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": ""},
        )
        wait_for_port(self.port)

    def kill(self) -> None:
        """See :class:`Broker`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def replace(self) -> None:
        """See :class:`Broker`: it keeps nothing."""
        self.kill()
        self.start()

    def alive(self) -> bool:
        """See :class:`Broker`."""
        return self._process is not None and self._process.poll() is None


def make_broker(name: str, folder: Path) -> Broker:
    """One of ``BROKERS``, not started yet. Raises ValueError for another name."""
    quiet = ["allow_anonymous true", "log_type error", *RECOMMENDED]
    match name:
        case "mosquitto":
            return _Mosquitto(folder, quiet)
        case "mosquitto-persistent":
            lines = [*quiet, "persistence true", f"persistence_location {folder}/"]
            made = _Mosquitto(folder, [*lines, "autosave_interval 2"], persistence=True)
            made.stored = folder / "mosquitto.db"
            return made
        case "amqtt":
            return Amqtt()
    raise ValueError(f"{name!r} is no broker known here; expected one of {', '.join(BROKERS)}")
