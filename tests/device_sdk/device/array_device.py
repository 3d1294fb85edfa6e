"""A device's process that trains on arrays until it is killed: ``array_device.py HOME PLACE DATA``.

``DATA`` is ``measured`` or ``labelled``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from device_sdk.device import Device
from device_sdk.local_data import LocalData
from tests.brokers.links import QUICK
from tests.device_sdk.device.brisk import BRISK
from tests.device_sdk.handmade import FEATURES, TARGETS


def local_data(place: int) -> LocalData:
    """The samples of device ``place``."""
    rng = np.random.default_rng(place)
    x = rng.standard_normal((10 + place, FEATURES), dtype=np.float32)
    true = np.random.default_rng(99).standard_normal((FEATURES, TARGETS), dtype=np.float32)
    return LocalData({"x": x, "y": x @ true + np.float32(0.1 * place)})


def labelled_data(place: int) -> LocalData:
    """The samples of device ``place``, each of one of ``TARGETS`` labels; it lacks one of them."""
    rng = np.random.default_rng(place)
    label = (place + rng.integers(0, TARGETS - 1, 12 + place)) % TARGETS
    centres = np.random.default_rng(99).standard_normal((TARGETS, FEATURES))
    x = centres[label] + 0.3 * rng.standard_normal((len(label), FEATURES))
    return LocalData({"x": x.astype(np.float32), "label": label.astype(np.int64)})


DATA = {"measured": local_data, "labelled": labelled_data}


def main() -> None:
    home, data = Path(sys.argv[1]), DATA[sys.argv[3]](int(sys.argv[2]))
    with Device.open(home, pace=BRISK, link_settings=QUICK, data=data) as device:
        device.start()
        print("started", flush=True)
        sys.stdin.read()  # until whoever started this process ends it


if __name__ == "__main__":
    main()
