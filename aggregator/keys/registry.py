"""Who may speak: the devices that enrolled and were not revoked, by handle and by id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aggregator.store import Store
from aggregator.store.devices import DeviceRow, Devices
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.manifest import selected
from device_sdk.wire.seal.session_table import RegisteredDevice

# Revoking a device: from the registry, and from what is published next.


def revoke(store: Store, device_id: bytes, now_unix_seconds: int) -> bool:
    """Revoke inside a transaction; whether the device was there and not revoked before.

    The group key, which the device knows, is replaced before the next publication.
    """
    if not store.devices.revoke(device_id, now_unix_seconds):
        return False
    store.facts.rotation_due = True
    return True


class Registry:
    """The table of devices, in memory."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._by_handle: dict[bytes, DeviceRow] = {}
        self._by_id: dict[bytes, DeviceRow] = {}
        self._revoked: dict[bytes, bytes] = {}  # handle to device id
        self.reload()

    def __len__(self) -> int:
        return len(self._by_id)

    def revoked_ids(self) -> Iterable[bytes]:
        return self._revoked.values()

    def reload(self) -> list[bytes]:
        """Read the table again; the ids of devices that were revoked since."""
        rows = list(self._devices.all())
        active = [row for row in rows if row.revoked_unix_seconds is None]
        gone = self._by_id.keys() - {row.device_id for row in active}
        self._by_handle = {row.handle: row for row in active}
        self._by_id = {row.device_id: row for row in active}
        self._revoked = {
            row.handle: row.device_id for row in rows if row.revoked_unix_seconds is not None
        }
        return sorted(gone)

    def add(self, row: DeviceRow) -> None:
        """A device enrolled; its row is in the table."""
        self._by_handle[row.handle] = row
        self._by_id[row.device_id] = row

    def by_handle(self, handle: bytes) -> DeviceRow:
        """The device of a topic. Raises ``WireError``: ``revoked``, ``unknown-handle``."""
        row = self._by_handle.get(handle)
        if row is None:
            if handle in self._revoked:
                raise WireError("revoked", "the device was revoked")
            raise WireError("unknown-handle", "no device has this topic")
        return row

    def owner(self, handle: bytes) -> bytes | None:
        """The id of a topic's device; None for one that is revoked or unknown. For any thread."""
        row = self._by_handle.get(handle)
        return None if row is None else row.device_id

    def by_id(self, device_id: bytes) -> DeviceRow | None:
        """The device of an id, unless it was revoked."""
        return self._by_id.get(device_id)

    def admission_key(self, sender: str) -> bytes | None:
        """A device's admission key, by its id in hexadecimal; None if revoked or unknown."""
        row = self._by_id.get(bytes.fromhex(sender))
        return None if row is None else row.admission_key

    def is_selected(
        self, device_id: bytes, seed: bytes, threshold: int, task: str, number: int
    ) -> bool:
        """Whether a round selects a device that is not revoked; one that came later never is."""
        row = self._by_id.get(device_id)
        if row is None or row.first_round > number:
            return False
        return selected(seed, threshold, task, number, device_id)

    def selected(self, seed: bytes, threshold: int, task: str, number: int) -> Iterator[bytes]:
        """Ids of all devices that a round selects."""
        for device_id in self._by_id:
            if self.is_selected(device_id, seed, threshold, task, number):
                yield device_id


def credential(row: DeviceRow) -> RegisteredDevice:
    """What a session is opened against."""
    return RegisteredDevice(row.device_id, row.identity, row.admission_key)
