"""What many tests do alike: let a device join with short waits, and run a program to its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from device_sdk.device import Device
from tests.brokers.links import QUICK
from tests.fakes.brisk import BRISK
from tests.fakes.waiting import PATIENCE_SECONDS


def joined(
    url: str,
    code: str,
    home: Path | str,
    timeout_seconds: float = PATIENCE_SECONDS,
    **more: Any,
) -> Device:
    """A device that has enrolled. ``more``: for :meth:`Device.enrol`."""
    usual = {"pace": BRISK, "link_settings": QUICK} | more
    return Device.enrol(url, code, home, timeout_seconds=timeout_seconds, **usual)


def opened(home: Path | str, **more: Any) -> Device:
    """A device that has joined before, as it starts again. ``more``: for :meth:`Device.open`."""
    return Device.open(home, **{"pace": BRISK, "link_settings": QUICK} | more)


def run_python(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, once it has ended. ``more``: for ``subprocess.run``."""
    usual = {"capture_output": True, "text": True, "timeout": PATIENCE_SECONDS, "check": False}
    return subprocess.run([sys.executable, *map(str, arguments)], **usual | more)
