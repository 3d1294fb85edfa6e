"""What every test shares: no telemetry, one thread for arrays, settings of hypothesis and gc."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

# Before any test module can import onnxruntime, torch or numpy. `make test` has more workers
# than cores, and with arrays as small as these torch's further threads spend their time spinning.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from tests.brokers.fixtures import amqtt_url, make_mosquitto, mosquitto, nats_cluster
from tests.brokers.links import make_link
from tests.fakes.small_folder import small_folder
from tests.servers.fixtures import make_database, postgres, store_url

__all__ = [
    "amqtt_url",
    "make_database",
    "make_link",
    "make_mosquitto",
    "mosquitto",
    "nats_cluster",
    "postgres",
    "small_folder",
    "store_url",
]

# What modules make while they are imported stays: nothing is gained by looking for garbage in it.
gc.disable()

# A busy machine is not a bug, so no profile has a deadline per example.
settings.register_profile(
    "dev", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# `make test` draws the same examples each time: a red run means that the code changed.
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True, database=None)
settings.load_profile("dev")


# Of tests that take half a minute each; all others end within seconds, most of them at once.
_LONG = ("faults", "fuzz", "packaging", "test_models.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long ones first: the last worker to end then ends soon after the others."""
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.relative_to(here).parts[0] not in _LONG)


def pytest_collection_finish() -> None:
    """What the modules made stays to the end: no collection need walk over it again, and those that
    exports set off with all that they allocate come seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


def pytest_xdist_auto_num_workers() -> int:
    """Half of the tests' time is spent in waiting for processes: two workers for each core."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return 2 * cores
