"""Tells devices their standing: their labels, and which tasks are for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from aggregator.shared import Shared
from aggregator.store.rows import DeviceRow
from aggregator.task.file import Task
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.receipts import RecordType
from device_sdk.wire.publish.task_messages import Standing
from device_sdk.wire.publish.topics import DownTopic
from device_sdk.wire.seal.placement import Placement
from device_sdk.wire.seal.session_table import SessionTable

PlacementOf: TypeAlias = Callable[[bytes], Placement]
"""Where the device of an id belongs."""


# Tells devices where they belong: those that opened a session elsewhere.


class Placements:
    """A placement follows the reply to an open, and comes once more behind the first thing that
    the device says in that session: nobody acknowledges it. It is told to devices that are not
    in their cell, or at a broker of small packets; ``here`` is the
    cell that these were heard in.
    ``always``: to all others too, for what a device knows of a mirror is known to nobody.
    """

    def __init__(
        self,
        shared: Shared,
        table: SessionTable,
        placement_of: PlacementOf,
        here: str = "",
        *,
        always: bool = False,
    ) -> None:
        self._registry, self._topics = shared.registry, shared.topics
        self._table = table
        self._placement_of = placement_of
        self._here, self._always = here, always
        self._unsure: set[bytes] = set()  # told in this session, and silent since

    def opened(self, device_id: bytes) -> Iterator[tuple[str, bytes]]:
        """Topic and message for a device whose session's reply was just sent."""
        self._unsure.discard(device_id)
        device = self._registry.by_id(device_id)
        is_elsewhere = device is not None and (
            self._placement_of(device_id) != Placement(device.shard, self._here)
        )
        if is_elsewhere or self._always:
            self._unsure.add(device_id)
            yield from self._send(device_id)

    def forget(self, device_id: bytes) -> None:
        """A device that has no session is told with the next one."""
        self._unsure.discard(device_id)

    def heard(self, device_id: bytes) -> Iterator[tuple[str, bytes]]:
        """Topic and message for a device that just said something."""
        if device_id in self._unsure:
            self._unsure.remove(device_id)
            yield from self._send(device_id)

    def _send(self, device_id: bytes) -> Iterator[tuple[str, bytes]]:
        device = self._registry.by_id(device_id)
        payload = encode(self._placement_of(device_id))
        try:
            sealed = self._table.seal_newest(device_id, RecordType.PLACEMENT, payload)
        except WireError:  # no session: it is told with the next one
            return
        if device is not None:
            yield self._topics.write(DownTopic(device.handle)), sealed


FIRST_SECONDS = 15.0
MOST_SECONDS = 900.0
_LOOK_SECONDS = 1.0
_MOST_A_LOOK = 1000


class _Repeat(NamedTuple):
    due_seconds: float
    wait_seconds: float
    """Until the one behind it."""


class _Served(Protocol):
    @property
    def task(self) -> Task: ...


class Board(Protocol):
    """The tasks that are served; see :class:`~aggregator.serve.tasks.TaskBoard`."""

    @property
    def served(self) -> Sequence[_Served]: ...
    @property
    def revision(self) -> int: ...


class Standings:
    """A standing holds for a session. It follows each opening, and is sent again when it changes.

    Nobody acknowledges one, and the broker keeps none for a device that is away. So it is repeated
    to a device that says nothing, after waits that double up to ``MOST_SECONDS``, and for the last
    time behind the first thing that the device says, for then it is there. A device that acts as if
    it did not know its standing is told again (:meth:`remind`).

    Only where a task chooses by labels: elsewhere nothing is to be said.
    """

    def __init__(self, shared: Shared, board: Board, table: SessionTable) -> None:
        self._registry, self._topics, self._clock = shared.registry, shared.topics, shared.clock
        self._board = board
        self._table = table
        self._told: dict[bytes, bytes] = {}
        self._silent: dict[bytes, _Repeat] = {}  # not heard of since; of those told
        self._revisions = (-1, -1)
        self._next_look_seconds = 0.0

    def opened(self, device_id: bytes) -> Iterator[tuple[str, bytes]]:
        """Topic and message for a device whose session's reply was just sent."""
        self._told.pop(device_id, None)
        device = self._registry.by_id(device_id)
        if device is not None and self._is_used():
            self._note(device)
            yield from self._repeat(device_id)

    def forget(self, device_id: bytes) -> None:
        """A device that has no session is told with the next one."""
        self._told.pop(device_id, None)
        self._silent.pop(device_id, None)

    def heard(self, device_id: bytes) -> Iterator[tuple[str, bytes]]:
        """Topic and message for a device that just said something."""
        if self._silent.pop(device_id, None) is not None:
            yield from self._send(device_id)

    def remind(self, device_ids: Iterable[bytes]) -> None:
        """These may not know their standing: they said nothing in a round that selected them, or
        sent something for a task that is not for them."""
        for device_id in device_ids:
            if device_id in self._told:
                self._silent.setdefault(device_id, _Repeat(self._clock(), FIRST_SECONDS))

    def due(self) -> Iterator[tuple[str, bytes]]:
        """Topics and messages for the devices whose standing is another one than they know, or who
        may not know it. To be called often."""
        now = self._clock()
        if self._look_for_changes():
            self._next_look_seconds = now
        if now < self._next_look_seconds:
            return
        self._next_look_seconds = now + _LOOK_SECONDS
        due = [each for each, repeat in self._silent.items() if repeat.due_seconds <= now]
        for device_id in due[:_MOST_A_LOOK]:
            yield from self._repeat(device_id)

    def _look_for_changes(self) -> bool:
        revisions = (self._registry.labels_revision, self._board.revision)
        if revisions == self._revisions:
            return False
        self._revisions = revisions
        used = self._is_used()
        for device in self._registry.devices():
            if used or device.device_id in self._told:
                self._note(device)
        return True

    def _is_used(self) -> bool:
        return any(parts.task.selector for parts in self._board.served)

    def _note(self, device: DeviceRow) -> None:
        """What a device is to be told from now on; due at once where that is new."""
        tasks = sorted(
            (parts.task.name, parts.task.cohort)
            for parts in self._board.served
            if parts.task.selector.admits(device.labels)
        )
        payload = encode(Standing(device.labels, tuple(tasks)))
        if self._told.get(device.device_id) != payload:
            self._told[device.device_id] = payload
            self._silent[device.device_id] = _Repeat(self._clock(), FIRST_SECONDS)

    def _repeat(self, device_id: bytes) -> Iterator[tuple[str, bytes]]:
        wait_seconds = self._silent.pop(device_id).wait_seconds
        # At the end: where more are due than are told at once, the next look begins with them.
        self._silent[device_id] = _Repeat(
            self._clock() + wait_seconds, min(2 * wait_seconds, MOST_SECONDS)
        )
        yield from self._send(device_id)

    def _send(self, device_id: bytes) -> Iterator[tuple[str, bytes]]:
        device = self._registry.by_id(device_id)
        try:
            if device is None:
                raise WireError("revoked", "the device was revoked")
            payload = self._told[device_id]
            sealed = self._table.seal_newest(device_id, RecordType.STANDING, payload)
        except WireError:  # no session: it is told with the next one
            self.forget(device_id)
        else:
            yield self._topics.write(DownTopic(device.handle)), sealed
