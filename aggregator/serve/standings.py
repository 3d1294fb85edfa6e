"""Tells devices their standing: their labels, and which tasks are for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aggregator.serve.tasks import TaskBoard
from aggregator.shared import Shared
from aggregator.store.devices import DeviceRow
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.receipts import RecordType
from device_sdk.wire.publish.standing import Standing, write_standing
from device_sdk.wire.publish.topics import DownTopic
from device_sdk.wire.seal.session_table import SessionTable

Seal = Callable[[bytes, int, bytes], bytes]


class Standings:
    """A standing holds for a session. It follows each opening, and is sent again when it changes.

    Only where a task chooses by labels: devices of before do not know the record, and count it as
    something to refuse.
    """

    def __init__(self, shared: Shared, board: TaskBoard, table: SessionTable) -> None:
        self._registry, self._topics = shared.registry, shared.topics
        self._board = board
        self._table = table
        self._told: dict[bytes, bytes] = {}
        self._revisions = (-1, -1)

    def opened(self, device_id: bytes) -> Iterator[tuple[str, bytes]]:
        """Topic and message for a device whose session's reply was just sent."""
        self._told.pop(device_id, None)
        device = self._registry.by_id(device_id)
        if device is not None and self._is_used():
            yield from self._tell(device, self._table.seal_newest)

    def changed(self) -> Iterator[tuple[str, bytes]]:
        """Topics and messages for the devices whose standing is another one than they know."""
        revisions = (self._registry.labels_revision, self._board.revision)
        if revisions == self._revisions:
            return
        self._revisions = revisions
        used = self._is_used()
        for device in self._registry.devices():
            if used or device.device_id in self._told:
                live = self._table.has_session(device.device_id)
                seal = self._table.seal if live else self._table.seal_newest
                yield from self._tell(device, seal)

    def _is_used(self) -> bool:
        return any(parts.task.selector for parts in self._board.served)

    def _tell(self, device: DeviceRow, seal: Seal) -> Iterator[tuple[str, bytes]]:
        tasks = sorted(
            (parts.task.name, parts.task.cohort)
            for parts in self._board.served
            if parts.task.selector.admits(device.labels)
        )
        payload = write_standing(Standing(device.labels, tuple(tasks)))
        if self._told.get(device.device_id) == payload:
            return
        try:
            sealed = seal(device.device_id, RecordType.STANDING, payload)
        except WireError:
            return  # no session: it is told with the next one
        self._told[device.device_id] = payload
        yield self._topics.write(DownTopic(device.handle)), sealed
