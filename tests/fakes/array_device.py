"""A device's process that trains on arrays: ``array_device.py HOME PLACE DATA [POINT CALLS]``.

It runs until it is killed, or kills itself at the CALLS-th passage of POINT
(``tests.faults.crash_points``). ``DATA`` is a key of the table below.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from device_sdk.device import Device
from device_sdk.local_data import LocalData
from device_sdk.world import TrainingOptions
from tests.brokers.links import QUICK
from tests.fakes.brisk import BRISK
from tests.fakes.linear_sizes import FEATURES, TARGETS


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


def shared_data(place: int) -> LocalData:
    """The labelled samples, of which the last five are shown to the others."""
    own = labelled_data(place).train
    samples = {"x": own["x"], "y": own["label"]}
    return LocalData(
        {name: array[:-5] for name, array in samples.items()},
        {name: array[-5:] for name, array in samples.items()},
    )


def classed_data(place: int) -> LocalData:
    """The labelled samples, under the names that classifiers use."""
    own = labelled_data(place).train
    return LocalData({"x": own["x"], "y": own["label"]})


DATA = {
    "measured": local_data,
    "labelled": labelled_data,
    "shared": shared_data,
    "classed": classed_data,
}


def main() -> None:
    home, data = Path(sys.argv[1]), DATA[sys.argv[3]](int(sys.argv[2]))
    if len(sys.argv) > 4:
        # Where nothing is to end it, the aggregator need not be loaded.
        from tests.faults.crash_points import arm

        arm(sys.argv[4], int(sys.argv[5]))
    # With attention, every device mixes for itself: what it can afford is not the question here.
    options = TrainingOptions(placement="device")
    with Device.open(home, pace=BRISK, link_settings=QUICK, data=data, options=options) as device:
        device.start()
        print("started", flush=True)
        sys.stdin.read()  # until whoever started this process ends it


if __name__ == "__main__":
    main()
