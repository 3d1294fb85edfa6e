"""What is true of a fleet: told the same by ``status``, metrics and whoever else asks."""

from __future__ import annotations

from dataclasses import dataclass

from aggregator.clock import moment_of
from aggregator.serve.successor import find_move
from aggregator.store import Store, TaskStore
from aggregator.task.request import ReplaceRequest
from device_sdk.link.broker_url import BrokerWay
from device_sdk.system.printable import printable


@dataclass(frozen=True, slots=True)
class Rollback:
    """What became of the version that was asked for last. ``version``: the one that waits;
    ``dropped``: why it did not become the next one."""

    version: int | None
    dropped: str | None

    @classmethod
    def of(cls, store: TaskStore) -> Rollback:
        """A task's."""
        request = store.fleet.tasks.find(store.number).request
        back_to = None if request is None else ReplaceRequest.read(request).back_to
        awaited = store.versions.awaited()
        return cls(back_to if awaited is None else awaited, store.facts.dropped_rollback)

    @property
    def said(self) -> str | None:
        """For people; None where there is nothing to say."""
        if self.version is not None:
            return f"version {self.version}'s model becomes the next version between two rounds"
        return None if self.dropped is None else printable(self.dropped)


def move_lines(store: Store, named: BrokerWay | None, now: float) -> list[str]:
    """What an operator is told of a move, if there is one; ``named``: by the task file."""
    move = find_move(store)
    if move is None or (named is not None and not move.is_about(named)):
        return []
    told, until = move.announced.url, moment_of(move.until_unix_seconds)
    said = f"both serve until {until}"
    if not move.is_reached:
        said += f", and until a device has been at {move.new}: none has yet"
    if not move.is_over(now) and move.is_called_off:
        return [f"stays        devices come back by themselves to {move.new}: {said}"]
    if not move.is_over(now):
        return [f"moves        to {told}: devices go there by themselves; {said}"]
    if named is not None and named.url.address != (url := move.new.url.address):
        return [
            f'moved        to {told or url}: write broker.url = "{url}" in the task file, which '
            "still names the broker before"
        ]
    return []
