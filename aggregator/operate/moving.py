"""The fleet's broker, and its move to another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aggregator.clock import moment_of
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.operate.lookup import SECONDS_LIMIT, require_number
from aggregator.serve.successor import (
    ask_for_move,
    call_off,
    find_move,
    next_move,
    require_movable,
    where_serve_is,
)
from aggregator.store import Store
from aggregator.task.file import read_task
from device_sdk.link.broker_url import BrokerWay, parse_broker_url, printed_url


@dataclass(frozen=True, slots=True)
class FleetBroker:
    """Where ``serve`` is, or will be when it runs: at one broker, or at two during a move.
    ``said``: what an operator is told of the move, in lines; empty for none."""

    ways: tuple[BrokerWay, ...]
    said: tuple[str, ...]

    @classmethod
    def read(cls, home: AggregatorHome, store: Store, now: float) -> FleetBroker:
        """``now``: Unix seconds. Raises TaskError."""
        named = read_task(home.task_file).fleet.broker.way
        ways = where_serve_is(find_move(store), named, now)
        return cls(tuple(ways), tuple(move_lines(store, named, now)))


def move(
    home: AggregatorHome,
    store: Store,
    now: float,
    url: str,
    grace_seconds: int,
    own: str | None,
    parts: Mapping[str, Any],
) -> None:
    """Ask for a move, as ``Fleet`` says; inside a transaction. Raises AggregatorError."""
    require_number("the grace in seconds", grace_seconds, 1, SECONDS_LIMIT)
    fleet = read_task(home.task_file).fleet
    require_movable(fleet.cluster)
    named = fleet.broker.way
    here, *_ = where_serve_is(find_move(store), named, now)
    try:
        told = parse_broker_url(url)
        if told.user is not None:
            raise ValueError(
                "devices have users of their own: leave it out of the URL, and give --user"
            )
        reached = parse_broker_url(own or url)
        way = named if reached.address == named.url.address else here.at(reached)
        new = way.changed(**parts)
        new.read()
    except ValueError as error:
        raise AggregatorError(str(error)) from None
    if new.url.address == here.url.address:
        raise AggregatorError(f"serve is at {here} already")
    ask_for_move(store, next_move(store, named, told.address, new, int(now) + grace_seconds, now))


def stay(home: AggregatorHome, store: Store, now: float) -> None:
    """Call a move off; inside a transaction. Raises AggregatorError."""
    require_movable(read_task(home.task_file).fleet.cluster)
    found = find_move(store)
    if found is None or found.is_called_off:
        raise AggregatorError("no move is under way")
    if found.is_over(now):
        raise AggregatorError(
            f"the fleet has moved to {found.new}: to go back, move to the old broker's URL"
        )
    ask_for_move(store, call_off(store, found, now))


def move_lines(store: Store, named: BrokerWay | None, now: float) -> list[str]:
    """What an operator is told of a move, if there is one; ``named``: by the task file."""
    move = find_move(store)
    if move is None or (named is not None and not move.is_about(named)):
        return []
    told, until = move.announced.url and printed_url(move.announced.url), move.until_unix_seconds
    said = f"both serve until {moment_of(until)}"
    if not move.is_reached:
        said += f", and until a device has been at {move.new}: none has yet"
    if not move.is_over(now) and move.is_called_off:
        return [f"stays        devices come back by themselves to {move.new}: {said}"]
    if not move.is_over(now):
        return [f"moves        to {told}: devices go there by themselves; {said}"]
    if named is not None and named.url.address != move.new.url.address:
        asks = ", with the query that it has," if move.new.url.has_query else ""
        return [
            f'moved        to {told or move.new}: write broker.url = "{move.new}"{asks} in the '
            "task file, which still names the broker before"
        ]
    return []
