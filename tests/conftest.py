"""What every test shares: no telemetry, one thread for arrays, settings of hypothesis and gc."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Generator
from itertools import groupby, islice
from pathlib import Path

# Before any test module can import onnxruntime, torch or numpy. `make test` has more workers
# than cores, and with arrays as small as these torch's further threads spend their time spinning.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from aggregator.store import sqlite
from tests.brokers.fixtures import amqtt_url, make_link, make_mosquitto, mosquitto, nats_cluster
from tests.fakes.small_folder import small_folder
from tests.fakes.waiting import PATIENCE_SECONDS
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


def pytest_configure() -> None:
    """A busy machine, or a slow disk, is no reason to give a store's file up."""
    sqlite._BUSY_SECONDS = PATIENCE_SECONDS


def _is_slow(item: pytest.Item) -> bool:
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return item.get_closest_marker("slow") is not None or folder in ("faults", "packaging")


def _mark_exhaustive(items: list[pytest.Item]) -> None:
    """Of a test that is ``sampled(n)``, all cases but ``n``, which are spread evenly."""
    sampled = [item for item in items if item.get_closest_marker("sampled") is not None]
    for _, found in groupby(sampled, key=lambda item: item.nodeid.partition("[")[0]):
        cases = list(found)
        marker = cases[0].get_closest_marker("sampled")
        assert marker is not None
        (count,) = marker.args
        kept = {place * len(cases) // count for place in range(count)}
        for place, item in enumerate(cases):
            if place not in kept:
                item.add_marker("exhaustive")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow ones first, with every other worker: most of them wait, while the others compute. A
    file's stay together: what its fixtures set up for all of them is set up once."""
    _mark_exhaustive(items)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = [item for item in items if _is_slow(item)]
    others = iter([item for item in items if not _is_slow(item)])
    files = [list(file) for _, file in groupby(slow, key=lambda item: item.path)]
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        # What "worksteal" gives each at first, of which the others take from the end.
        size = (len(items) - len(ordered)) // (workers - worker)
        own = files[worker // 2 :: (workers + 1) // 2] if worker % 2 == 0 else []
        first = [item for file in own for item in file]
        ordered += [*first, *islice(others, max(0, size - len(first)))]
    items[:] = [*ordered, *others]


def _seed_torch() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        # `torch.manual_seed` notes the whole stack, in half a millisecond, for a GPU used later.
        torch.default_generator.manual_seed(0)


def pytest_collectstart() -> None:
    """What a module draws of torch while it is imported does not go by the modules before it."""
    _seed_torch()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Nor does what a test draws, weights above all, go by the tests before it on its worker."""
    _seed_torch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """What a command that a test ran made of the log is not the log of the tests after it."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    ran = yield
    root.setLevel(level)
    root.handlers[:] = handlers
    return ran


def pytest_collection_finish() -> None:
    """What the modules made stays to the end: no collection need walk over it again, and those that
    exports set off with all that they allocate come seldom."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


def pytest_xdist_auto_num_workers() -> int:
    """Half of the tests' time is spent in waiting for processes: two workers for each core."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return 2 * cores
