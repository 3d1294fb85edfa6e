"""A task is held: its rounds stand still until somebody has looked, and nothing committed is lost.

Where a round is open or being closed it is that round that is held; else it is the next one.
"""

from __future__ import annotations

import logging

from aggregator.errors import MethodFault
from aggregator.store import TaskStore
from aggregator.task.file import Task
from device_sdk.system.printable import in_words

_LOG = logging.getLogger(__name__)


def hold(store: TaskStore, why: str) -> None:
    """Hold the task, and say why; inside a transaction."""
    latest = store.rounds.latest()
    if latest and latest[0].unfinished:
        store.rounds.hold(latest[0].round, why)
    else:
        store.facts.unpublished = why


def hold_failed(store: TaskStore, task: Task, error: Exception) -> None:
    """Hold the task for what failed in its affairs, in its method's code above all; inside a
    transaction. The log has the traceback."""
    what = str(error) if isinstance(error, MethodFault) else in_words(error)
    why = (
        f"{what}. Nothing that was committed is lost. Mend or change the package that offers the "
        f"method {task.binding.method_name!r} and restart serve, which tries it again; or replace "
        "the task"
    )
    _LOG.error("the task is held, and no other: %s", why, exc_info=error)
    hold(store, why)
    store.facts.failed = True


def held(store: TaskStore) -> str | None:
    """Why the task is held; None where it is not."""
    latest = store.rounds.latest()
    return store.facts.unpublished or (latest[0].held if latest else None)


def let_go(store: TaskStore) -> int:
    """Let it go on, without what is in quarantine; inside a transaction. How many updates those
    were."""
    latest = store.rounds.latest()
    store.facts.unpublished, store.facts.failed = None, False
    if latest:
        store.rounds.hold(latest[0].round, None)
    return store.log.drop_quarantined()


def try_again(store: TaskStore) -> None:
    """A life begins, perhaps of a program that was mended: what failed may succeed now. All else
    that holds a task is the operator's to judge, and holds on."""
    if store.facts.failed and not store.log.quarantined():
        with store.database.transaction():
            let_go(store)
