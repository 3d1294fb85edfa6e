"""A device of whichever release runs this: a round's outcome, or why there was none, as JSON.

Given a broker's URL, a code, its home, the method and its number. A home that is there is opened.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from device_sdk import Device, LocalData
from device_sdk.world import Pace

ITEMS = 40
_PACE = Pace(
    answer_seconds=3.0,
    fetch_seconds=3.0,
    reopen_seconds=0.5,
    most_seconds=5.0,
    ask_seconds=0.2,
)
_ENROL_SECONDS = 120.0
_ROUND_SECONDS = 300.0


def local_data(method: str, number: int) -> LocalData | None:
    """Two clouds of points; for mutual learning some of them are public."""
    if method == "scatter":
        return None
    rng = np.random.default_rng(number)
    label = rng.integers(0, 10, 45)
    x = (rng.normal(size=(45, 8)) + label[:, None]).astype(np.float32)
    if method == "mutual":
        return LocalData({"x": x[:30], "y": label[:30]}, public={"x": x[30:], "y": label[30:]})
    return LocalData({"x": x, "label": label}, holdout=1 / 3)


def main(url: str, code: str, home: str, method: str, number: int) -> None:
    """Take part until an update is counted, or the device says that it failed."""
    data = local_data(method, number)
    if Path(home).exists():
        device = Device.open(home, pace=_PACE, data=data)
    else:
        device = Device.enrol(
            url, code, home, timeout_seconds=_ENROL_SECONDS, pace=_PACE, data=data
        )
    with device:
        before = device.status().round
        if method == "scatter":
            for item in range(number, ITEMS, 3):
                device.record(f"item-{item}")
        device.start()
        until = time.monotonic() + _ROUND_SECONDS
        said = "nothing was heard of a round"
        while time.monotonic() < until:
            seen = device.status()
            if seen.verdict == "counted" and seen.round != before:
                said = ""
                break
            if seen.outcome in ("failed", "declined"):
                said = seen.detail
                break
            time.sleep(0.1)
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
