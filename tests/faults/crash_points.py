"""Named points at which a process of a run kills itself, wrapped around the product's methods."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from typing import Any

from aggregator.cluster.coordinator import Coordinating, GatheredAggregation
from aggregator.cluster.follower import ShareKeeper
from aggregator.cluster.worker import StoredMarks
from aggregator.publish.publisher import Publisher
from aggregator.rounds import replacement
from aggregator.rounds.aggregation import Aggregation
from aggregator.rounds.evaluator import Evaluator
from aggregator.rounds.ingest import Ingest
from aggregator.rounds.machine import RoundMachine
from aggregator.serve.outgoing import Outgoing
from aggregator.serve.tasks import TaskBoard
from aggregator.serve.uplink import Uplink
from aggregator.store.cluster import Shares, Workers
from aggregator.store.evaluations import Evaluations
from aggregator.store.publications import Retained
from aggregator.store.rounds import Rounds, UpdateLog
from aggregator.store.tasks import Tasks
from aggregator.store.versions import Checkpoints, Versions
from aggregator.task import request
from device_sdk.home.membership import MembershipStore
from device_sdk.home.round_store import RoundStore
from device_sdk.link.link import Link
from device_sdk.rounds.current_round import CurrentRound
from device_sdk.rounds.open_round import OpenRound
from device_sdk.rounds.sender import Sender
from tests.faults.hooks import after, before
from tests.faults.known import KnownSums

# owner (or module), method, before or after it, and whether a call with these arguments counts
_Point = tuple[Any, str, str, Callable[..., bool]]


def _always(*values: Any, **named: Any) -> bool:
    return True


def _setting(column: str) -> Callable[..., bool]:
    return lambda tasks, number, **to: to.keys() == {column}


def _something(table: object, said: Collection[object]) -> bool:
    return bool(said)


def _retained(*values: Any, **named: Any) -> bool:
    return bool(named.get("retain"))


def _update(link: object, topic: str, payload: bytes, **named: Any) -> bool:
    return "/up/" in topic and payload[1] in (16, 18)


AGGREGATOR_POINTS: dict[str, _Point] = {
    "in the update's transaction": (UpdateLog, "append", "after", _always),
    "between commit and absorb": (Aggregation, "absorb", "before", _always),
    "between absorb and receipt": (Aggregation, "absorb", "after", _always),
    "after a receipt": (Outgoing, "send_receipts", "after", _always),
    "after a session's reply": (Uplink, "receive", "after", _always),
    "after a verdict was settled": (Ingest, "commit", "after", _always),
    "around a partial checkpoint": (Aggregation, "_checkpoint", "before", _always),
    "after a partial checkpoint": (Aggregation, "_checkpoint", "after", _always),
    "before a round's close": (RoundMachine, "_close", "before", _always),
    "in the close's transaction": (Aggregation, "commit_version", "after", _always),
    "between close and opening": (RoundMachine, "_close", "after", _always),
    "in the opening's transaction": (Publisher, "seal_round", "after", _always),
    "between opening and publication": (RoundMachine, "_open", "after", _always),
    "before a published chunk": (Link, "publish", "before", _retained),
    "after a published chunk": (Link, "publish", "after", _retained),
    "while clearing old chunks": (Retained, "cleared", "before", _always),
}
WORKER_POINTS: dict[str, _Point] = {
    "after its slot was taken": (Workers, "start", "after", _always),
    "in an open's transaction": (StoredMarks, "save", "after", _always),
    "after a session's reply": (Uplink, "receive", "after", _always),
    "before a round is followed": (ShareKeeper, "begin", "before", _always),
    "after a round is followed": (ShareKeeper, "begin", "after", _always),
    "in the update's transaction": (UpdateLog, "append", "after", _always),
    "before the sums' transaction": (ShareKeeper, "keep", "before", _always),
    "in the sums' transaction": (Shares, "put", "after", _always),
    "between commit and receipt": (ShareKeeper, "absorb", "before", _always),
    "after a verdict was settled": (Ingest, "commit", "after", _always),
    "after a receipt": (Outgoing, "send_receipts", "after", _always),
}
COORDINATOR_POINTS: dict[str, _Point] = {
    "before the coordinator is made": (Coordinating, "begin_life", "before", _always),
    "in the life's transaction": (Coordinating, "begin_life", "after", _always),
    "before a round's close": (RoundMachine, "_close", "before", _always),
    "in the entry's transaction": (Rounds, "end_entry", "after", _always),
    "before a share is merged": (KnownSums, "merge", "before", _always),
    "after the gathering": (GatheredAggregation, "gather", "after", _always),
    "in the close's transaction": (Aggregation, "commit_version", "after", _always),
    "between close and opening": (RoundMachine, "_close", "after", _always),
    "in the opening's transaction": (Publisher, "seal_round", "after", _always),
    "between opening and publication": (RoundMachine, "_open", "after", _always),
    "before a published chunk": (Link, "publish", "before", _retained),
    "after a published chunk": (Link, "publish", "after", _retained),
    "while clearing old chunks": (Retained, "cleared", "before", _always),
}
ONCE_A_START = (
    "after its slot was taken",
    "before the coordinator is made",
    "in the life's transaction",
)
TASK_POINTS: dict[str, _Point] = {
    "before a task's file is written": (request, "_write", "before", _always),
    "after a task's file was written": (request, "_write", "after", _always),
    "in the transaction of a file that was written": (
        Tasks,
        "change",
        "after",
        _setting("unwritten"),
    ),
    "in the adding's transaction": (Tasks, "add", "after", _always),
    "before a task is served": (TaskBoard, "_add", "before", _always),
    "after a task is served": (TaskBoard, "_add", "after", _always),
    "in a wish's transaction": (Tasks, "change", "after", _setting("request")),
    "before a replacement": (replacement, "commit", "before", _always),
    "after a replacement": (replacement, "commit", "after", _always),
    "in the replacement's transaction": (Checkpoints, "put", "after", _always),
    "in a state's transaction": (Tasks, "change", "after", _setting("state")),
    "in the retirement's transaction": (Tasks, "erase", "after", _always),
    "before a retirement": (TaskBoard, "_retire", "before", _always),
    "after a retirement": (TaskBoard, "_retire", "after", _always),
}
EVALUATION_POINTS: dict[str, _Point] = {
    "in the transaction of what was said": (Evaluations, "note", "after", _something),
    "after what was said was settled": (Ingest, "commit", "after", _always),
    "before a round's figures": (Evaluator, "settle", "before", _always),
    "before what was said is forgotten": (Evaluations, "forget", "before", _always),
    "after an evaluated round's close": (RoundMachine, "_close", "after", _always),
}
ROLLBACK_POINTS: dict[str, _Point] = {
    "before a rollback": (Aggregation, "go_back", "before", _always),
    "in a rollback's transaction": (Versions, "ask_for", "before", _always),
    "after a rollback": (Aggregation, "go_back", "after", _always),
}
DEVICE_POINTS: dict[str, _Point] = {
    "in the device's transaction": (RoundStore, "post", "after", _always),
    "between commit and send": (CurrentRound, "_close", "after", _always),
    "before a send": (Sender, "_send", "before", _always),
    "after a send": (Link, "publish", "after", _update),
    "before a receipt is settled": (RoundStore, "settle", "before", _always),
    "after a receipt was settled": (RoundStore, "settle", "after", _always),
    "before a manifest's mark": (RoundStore, "save_mark", "before", _always),
    "after a manifest's mark": (RoundStore, "save_mark", "after", _always),
    "after a session's time": (MembershipStore, "raise_time", "after", _always),
    "while fetching": (OpenRound, "add", "after", _always),
}


def at_each_passage(point: str, act: Callable[[], None]) -> None:
    """Call ``act`` whenever this process passes a point."""
    serving = AGGREGATOR_POINTS | EVALUATION_POINTS | ROLLBACK_POINTS | TASK_POINTS
    clustered = WORKER_POINTS | COORDINATOR_POINTS
    everywhere = serving | clustered | DEVICE_POINTS
    owner, name, when, counts = everywhere[point]

    def passed(*values: Any, **named: Any) -> None:
        if counts(*values, **named):
            act()

    if when == "before":
        before(owner, name, passed)
    else:
        after(owner, name, lambda result, *values, **named: passed(*values, **named))


def arm(point: str, calls: int) -> None:
    """Make this process kill itself, by SIGKILL, at the ``calls``-th passage of a point."""
    left = calls

    def act() -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    at_each_passage(point, act)
