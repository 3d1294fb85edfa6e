"""The aggregator of a run, in a process of its own: the product's service, a tampered clock."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from aggregator import clock
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome, serve_lock
from aggregator.refusals import Refusals
from aggregator.rounds.ingest import Inbox, Ingest
from aggregator.serve.assembly import LINK_SETTINGS, World, assemble
from aggregator.serve.service import Service
from aggregator.task.file import read_task
from tests.faults.counters import Counters
from tests.faults.crash_points import arm
from tests.faults.hooks import after, before
from tests.faults.known import KnownBinding, served_late
from tests.faults.known_ladder import LadderBinding

BRISK_LINK = replace(
    LINK_SETTINGS,
    keepalive_seconds=1,
    stall_seconds=1.0,
    connect_timeout_seconds=1.0,
    version_probe_seconds=0.3,
    backoff_first_seconds=0.05,
    backoff_most_seconds=0.3,
)


def serve(
    folder: str,
    counters: str,
    log: str,
    brisk: bool,
    point: str,
    calls: int,
    *,
    ladder: bool = False,
    late: bool = False,
) -> None:
    """Serve the home ``folder`` until killed; at ``point``, if any, it kills itself.

    ``brisk``: with waits of a second instead of the product's own. Ends with code 1 when the disk
    is full, as the command does.
    """
    logging.raiseExceptions = False  # the log's disk is full now and then, too
    logging.basicConfig(filename=log, level=logging.INFO, force=True)
    shorten_settling()
    shared = Counters(Path(counters))
    if point:
        arm(point, calls)
    count_arrivals(shared)

    def unix_clock() -> float:
        return time.time() + shared.read("clock_offset_millis") / 1000

    home = AggregatorHome(Path(folder))
    task = served_late(read_task(home.task_file), late=late)
    task = replace(task, binding=LadderBinding() if ladder else KnownBinding())
    link = BRISK_LINK if brisk else LINK_SETTINGS
    world = World(time.monotonic, unix_clock, np.random.default_rng(), link=link)
    try:
        with serve_lock(home):
            parts = assemble(home, home.open_store(), task, world)
            service = Service(parts)
            parts.link.start()
            service.run(lambda: False, lambda: None)
    except sqlite3.Error as error:
        logging.error("ended by the disk: %s", error)
        os._exit(1)
    except AggregatorError as error:
        # A disk that is full already when the database is opened is told in the product's words.
        if not isinstance(error.__context__, sqlite3.Error):
            logging.exception("ended by a defect")
            os._exit(2)
        logging.error("could not start: %s", error)
        os._exit(1)
    except Exception:
        logging.exception("ended by a defect")
        os._exit(2)


def shorten_settling() -> None:
    """In this process a calendar has to keep to its new time for seconds; the product's minute is
    longer than a run."""
    vars(clock).update(SETTLE_SECONDS=2.0)


def count_arrivals(shared: Counters) -> None:
    """In this process, from now on."""

    def refused(refusals: Refusals, error: Any, *rest: Any) -> None:
        if error.reason in ("replayed", "too-old"):
            shared.add("replays")

    before(Inbox, "offer", lambda *values, **named: shared.add("arrivals"))
    before(Refusals, "note", refused)
    after(Ingest, "_repeat", lambda *values, **named: shared.add("repeats"))
