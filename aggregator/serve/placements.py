"""Tells devices where they belong: those that opened a session elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from aggregator.shared import Shared
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.receipts import RecordType
from device_sdk.wire.publish.topics import DownTopic
from device_sdk.wire.seal.placement import Placement
from device_sdk.wire.seal.session_table import SessionTable

PlacementOf: TypeAlias = Callable[[bytes], Placement]
"""Where the device of an id belongs."""


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
