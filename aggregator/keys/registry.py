"""Who may speak: the devices that enrolled and were not revoked, by handle and by id."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from aggregator.events import LogEvent
from aggregator.store import Store
from aggregator.store.devices import Devices
from aggregator.store.rows import DeviceRow, Labels, RoundRow
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.manifest import selected
from device_sdk.wire.publish.topics import UpTopic
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


_SEEN_SECONDS = 60

Admits: TypeAlias = Callable[[Labels], bool]
"""Whether a task takes devices with these labels."""


def _id_of(row: DeviceRow) -> bytes:
    return row.device_id


class Registry:
    """The table of devices, in memory. ``rows``: all of it, where that was just read."""

    def __init__(self, devices: Devices, rows: Sequence[DeviceRow] | None = None) -> None:
        self._devices = devices
        self._by_handle: dict[bytes, DeviceRow] = {}
        self._by_id: dict[bytes, DeviceRow] = {}
        self._revoked: dict[bytes, bytes] = {}  # handle to device id
        self._clashed: dict[bytes, int] = {}
        self._seen: dict[bytes, int] = {}  # device id to Unix seconds, likewise
        self._seen_written: dict[bytes, int] = {}
        self.revision = 0
        """Rises with every change."""
        self.labels_revision = 0
        """Rises when labels may have changed: a device that joins has those of its code."""
        self._stored_revision = 0
        self.reload(rows)

    def __len__(self) -> int:
        return len(self._by_id)

    def revoked_ids(self) -> Iterable[bytes]:
        return self._revoked.values()

    def refresh(self) -> list[DeviceRow]:
        """Take in what other processes changed; those here that were revoked since, by id."""
        stored = self._devices.revision()
        if stored == self._stored_revision:
            return []
        changed = self._devices.changed_since(self._stored_revision)
        if changed is None:
            return self.reload()
        gone = self._take(self._devices.find_each(self._here(changed)))
        self._stored_revision = stored
        return gone

    def _here(self, device_ids: Sequence[bytes]) -> list[bytes]:
        """Those of them whose rows are to be in memory."""
        return list(device_ids)

    def _take(self, rows: Iterable[DeviceRow]) -> list[DeviceRow]:
        """Rows as they are now; those here that were revoked since, by id."""
        rows, gone = list(rows), []  # all of them read, before any is taken
        for row in rows:
            if row.revoked_unix_seconds is None:
                self._by_handle[row.handle] = self._by_id[row.device_id] = row
                continue
            self._revoked[row.handle] = row.device_id
            if self._by_id.pop(row.device_id, None) is not None:
                del self._by_handle[row.handle]
                gone.append(row)
        if rows:
            self.revision += 1
            self.labels_revision += 1
        return sorted(gone, key=_id_of)

    def reload(self, rows: Sequence[DeviceRow] | None = None) -> list[DeviceRow]:
        """Read the table again; the devices that were revoked since, by id."""
        stored = self._devices.revision()
        rows = list(self._devices.all()) if rows is None else rows
        self._stored_revision = stored
        active = [row for row in rows if row.revoked_unix_seconds is None]
        self.revision += 1
        self.labels_revision += 1
        gone = self._by_id.keys() - {row.device_id for row in active}
        revoked = sorted((self._by_id[each] for each in gone), key=_id_of)
        self._by_handle = {row.handle: row for row in active}
        self._by_id = {row.device_id: row for row in active}
        self._revoked = {
            row.handle: row.device_id for row in rows if row.revoked_unix_seconds is not None
        }
        return revoked

    def add(self, row: DeviceRow) -> None:
        """A device enrolled; its row is in the table."""
        self.revision += 1
        self._by_handle[row.handle] = row
        self._by_id[row.device_id] = row

    def by_handle(self, handle: bytes) -> DeviceRow:
        """The device of a handle. Raises ``WireError``: ``revoked``, ``unknown-handle``."""
        row = self._by_handle.get(handle)
        if row is None:
            if handle in self._revoked:
                raise WireError("revoked", "the device was revoked")
            raise WireError("unknown-handle", "no device has this topic")
        return row

    def sender(self, topic: UpTopic) -> DeviceRow:
        """The device of a topic. Raises ``WireError``: as :meth:`by_handle`, or ``wrong-topic`` for
        a shard that is not the device's."""
        row = self.by_handle(topic.handle)
        if topic.shard != row.shard:
            raise WireError("wrong-topic", "the device belongs to another shard")
        return row

    def owner(self, topic: UpTopic) -> bytes | None:
        """The id of a topic's device; None for a topic of nobody's. For any thread."""
        row = self._by_handle.get(topic.handle)
        return None if row is None or topic.shard != row.shard else row.device_id

    def saw(self, device_id: bytes, unix_seconds: float) -> None:
        """A device opened a session, or something came in one."""
        now = int(unix_seconds)
        # Either way: a clock may be set back.
        if abs(now - self._seen_written.get(device_id, 0)) >= _SEEN_SECONDS:
            self._seen[device_id] = now

    def clashed(self, device_id: bytes, unix_seconds: float) -> None:
        """Two machines have a device's identity: each opened a session after the other had."""
        if device_id not in self._clashed:
            LogEvent.IDENTITY_COPIED.log(device=device_id)
        self._clashed[device_id] = int(unix_seconds)
        self._devices.note_clashes({device_id: int(unix_seconds)})

    def save_seen(self) -> None:
        """Write down who was seen. To be called every second or so: one that says something all
        the time is written once a minute."""
        if self._seen:
            written, self._seen = self._seen, {}
            self._devices.note_seen(written)
            self._devices.when_kept(lambda: self._seen_written.update(written))

    def by_id(self, device_id: bytes) -> DeviceRow | None:
        """The device of an id, unless it was revoked."""
        return self._by_id.get(device_id)

    def admission_key(self, sender: str) -> bytes | None:
        """A device's admission key, by its id in hexadecimal; None if revoked or unknown."""
        row = self._by_id.get(bytes.fromhex(sender))
        return None if row is None else row.admission_key

    def is_selected(self, device_id: bytes, task: str, row: RoundRow, admits: Admits) -> bool:
        """Whether a task's round selects a device that is not revoked; one that came later, or
        whose labels the task does not admit, never is."""
        device = self._by_id.get(device_id)
        if device is None or device.first_round > row.opening or not admits(device.labels):
            return False
        return selected(row.seed, row.threshold, task, row.round, device_id)

    def selected(self, task: str, row: RoundRow, admits: Admits) -> Iterator[bytes]:
        """Ids of all devices that a round selects."""
        for device_id in self._by_id:
            if self.is_selected(device_id, task, row, admits):
                yield device_id

    def eligible(self, admits: Admits) -> int:
        """How many devices a task admits."""
        return sum(1 for device in self._by_id.values() if admits(device.labels))

    def devices(self) -> Iterable[DeviceRow]:
        """Those that are not revoked."""
        return self._by_id.values()


class HeldRegistry(Registry):
    """The rows of those devices alone that somebody here has to do with.

    A row is read when its device is first heard of, many at once (:meth:`look_up`), and stays until
    :meth:`let_go`. So nothing is read at the start, and it does not matter how many have enrolled,
    nor to which worker a device comes. What changes in the table is read for rows that are held:
    one that was read before a change is among them when :meth:`refresh` asks for changes.
    """

    def __init__(self, devices: Devices) -> None:
        self._fresh: set[bytes] = set()  # read since the last time that some were let go
        super().__init__(devices)

    def reload(self, rows: Sequence[DeviceRow] | None = None) -> list[DeviceRow]:
        stored = self._devices.revision()
        gone = self._take(self._devices.find_each(list(self._by_id)))
        self._stored_revision = stored
        return gone

    def look_up(self, handles: Iterable[bytes]) -> list[bytes]:
        """Read the rows of these topics' devices that are not held; the ids of those found that are
        not revoked."""
        unknown = [each for each in set(handles) if each not in self._by_handle]
        found = []
        for row in self._devices.by_handles(unknown):
            if row.revoked_unix_seconds is not None:
                self._revoked[row.handle] = row.device_id
                continue
            self._by_handle[row.handle] = self._by_id[row.device_id] = row
            found.append(row.device_id)
        self._fresh.update(found)
        return found

    def let_go(self, is_needed: Callable[[bytes], bool]) -> list[bytes]:
        """Forget the devices that nobody needs, but for those that were read since the last call:
        they may just be about to say something. The ids of those forgotten."""
        unneeded = [
            device_id
            for device_id in self._by_id
            if device_id not in self._fresh and not is_needed(device_id)
        ]
        for device_id in unneeded:
            del self._by_handle[self._by_id.pop(device_id).handle]
            self._seen_written.pop(device_id, None)
        self._fresh.clear()
        self._revoked.clear()
        return unneeded

    def _here(self, device_ids: Sequence[bytes]) -> list[bytes]:
        return [each for each in device_ids if each in self._by_id]


def credential(row: DeviceRow) -> RegisteredDevice:
    """What a session is opened against."""
    return RegisteredDevice(row.device_id, row.identity, row.admission_key)
