"""Who may speak: a task's devices, the codes that let devices in, and the keys they are told."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from aggregator.store.database import Table
from aggregator.store.rows import DeviceRow, IssuedDescriptor, Labels, TokenRow
from aggregator.store.schema import columns_of, or_replace, packed
from device_sdk.wire.seal.broadcast import GroupKey
from device_sdk.wire.seal.enrolment_message import EnrolmentCode

STAYS = "NOT EXISTS (SELECT 1 FROM devices WHERE device_id = ?3 AND revoked_unix IS NOT NULL)"
"""Of a statement whose third value is a device: what it told may wait while it is revoked."""

# The registry: a device's row is its credential.

# Devices that are looked for. The engines compare text alike only where nothing is a pattern.

_STATE = (
    "CASE WHEN revoked_unix IS NOT NULL THEN 'revoked' "
    "WHEN clashes.seen_unix > ? THEN 'on two machines' "
    "WHEN coalesce(sightings.seen_unix, enrolled_unix) <= ? THEN 'silent' ELSE 'active' END"
)
_SOUGHT = (
    "FROM devices LEFT JOIN sightings USING (device_id) LEFT JOIN clashes USING (device_id) WHERE "
)
_HAS = "replace({0}, ?, '') <> {0}"
_ID_DIGITS = 32


@dataclass(frozen=True, slots=True)
class DevicesSought:
    """Which devices are meant; nothing said: all.

    Attributes:
        text: in the name or the operator's labels, whatever the case of its letters, or the first
            digits of the id.
        labels: of the operator, that a device must have.
        state: as a DeviceState says.
        task: its number: of the devices that took part in it, or that are ``admitted`` to it by
            labels, of each name of which one of the values will do.
        clashed_after, silent_until: what makes out the state, in Unix seconds.
    """

    text: str = ""
    labels: Labels = field(default_factory=dict)
    state: str = ""
    task: int | None = None
    admitted: Mapping[str, Sequence[str]] = field(default_factory=dict)
    clashed_after: int = 0
    silent_until: int = 0

    @property
    def times(self) -> tuple[int, int]:
        """For ``_STATE``."""
        return self.clashed_after, self.silent_until

    def where(self) -> tuple[str, list[Any]]:
        """As a condition, all but the state."""
        said, values = ["TRUE"], []
        if self.text:
            one, given = _named(self.text)
            said.append(one)
            values += given
        for pair in sorted(self.labels.items()):
            said.append(_HAS.format("labels"))
            values.append(_label(*pair))
        if self.task is not None:
            any_of = [
                f"({' OR '.join([_HAS.format('labels')] * len(each))})"
                for each in self.admitted.values()
            ]
            admitted = " AND ".join(["revoked_unix IS NULL", *any_of])
            said.append(
                f"({admitted} OR EXISTS (SELECT 1 FROM participations WHERE task = ? "
                "AND participations.device_id = devices.device_id))"
            )
            values += [_label(name, each) for name, of in self.admitted.items() for each in of]
            values.append(self.task)
        return " AND ".join(said), values


def _named(text: str) -> tuple[str, list[Any]]:
    # As the engines do, of ASCII alone.
    low = "".join(each.lower() if each.isascii() else each for each in text)
    inside = json.dumps(low)[1:-1]
    said = [_HAS.format("lower(name)"), _HAS.format("lower(labels)")]
    values: list[Any] = [low, inside]
    if ends := _ids_from(low):
        said.append("device_id BETWEEN ? AND ?")
        values += ends
    return f"({' OR '.join(said)})", values


def _ids_from(digits: str) -> list[bytes]:
    """The first and the last id that begins so; empty where none can."""
    if not 0 < len(digits) <= _ID_DIGITS or set(digits) - set("0123456789abcdef"):
        return []
    return [bytes.fromhex(digits.ljust(_ID_DIGITS, each)) for each in "0f"]


def _label(name: str, value: str) -> str:
    """As it stands in the JSON of a device's labels, and nowhere else in it."""
    return packed({name: value})[1:-1]


_KEPT_CHANGES = 10_000
"""Who looks less often than that reads the table anew."""


class Devices(Table):
    def add(self, row: DeviceRow) -> None:
        self._put("devices", row, replace=False)
        with self._database.transaction():
            self._changed(row.device_id)
            # Not with each change: workers note some, and may delete none.
            self._delete("device_changes", "AND revision <= ?", self.revision() - _KEPT_CHANGES)

    def all(self) -> Iterator[DeviceRow]:
        """Every device, revoked ones too, in the order of enrolment."""
        return self._all(DeviceRow, "devices", "ORDER BY enrolled_unix, device_id")

    def find(self, device_id: bytes) -> DeviceRow | None:
        return self._find(DeviceRow, "devices", device_id=device_id)

    def revoke(self, device_id: bytes, now_unix_seconds: int) -> bool:
        """Revoke, and delete its admission key and what it reported; whether it was not revoked
        before."""
        to = {"revoked_unix": now_unix_seconds, "admission_key": bytes(32)}
        changed = self._change("devices", to, "AND revoked_unix IS NULL", device_id=device_id)
        if changed:
            self._changed(device_id)
            self.forget_told(device_id)
        return changed > 0

    def forget_told(self, device_id: bytes) -> None:
        """Delete what a device reported, in all tasks."""
        for table in ("reports", "device_evaluations"):
            self._delete(table, device_id=device_id)
        self._change("participations", {"report": None, "width": None}, device_id=device_id)

    def set_labels(self, device_id: bytes, labels: Labels) -> None:
        """Replace a device's labels."""
        self._change("devices", {"labels": packed(labels)}, device_id=device_id)
        self._changed(device_id)

    def set_name(self, device_id: bytes, name: str | None) -> None:
        """Name a device, or no longer (None)."""
        self._change("devices", {"name": name}, device_id=device_id)

    def note_seen(self, seen: Mapping[bytes, int]) -> None:
        """When devices proved that they are there, in Unix seconds; of each the latest stays."""
        self._database.execute_many(
            "INSERT INTO sightings VALUES (?, ?) ON CONFLICT (device_id) DO UPDATE SET "
            "seen_unix = CASE WHEN excluded.seen_unix > sightings.seen_unix "
            "THEN excluded.seen_unix ELSE sightings.seen_unix END",
            sorted(seen.items()),
        )

    def note_clashes(self, seen: Mapping[bytes, int]) -> None:
        """When it showed that two machines have a device's identity, in Unix seconds."""
        self._database.execute_many(
            f"INSERT INTO clashes VALUES (?, ?) {or_replace('clashes')}", sorted(seen.items())
        )

    def clashes(self, device_ids: Sequence[bytes] | None = None) -> dict[bytes, int]:
        """What was noted so last, by the device's id; of all, or of these."""
        return self._times("clashes", device_ids)

    def seen_among(self, device_ids: Sequence[bytes]) -> set[bytes]:
        """Those of them that ever proved that they are there."""
        query = "SELECT device_id FROM sightings WHERE device_id"
        return {row[0] for row in self._database.rows_in(query, device_ids)}

    def seen(self, device_ids: Sequence[bytes] | None = None) -> dict[bytes, int]:
        """What was noted so last, by the device's id; of all, or of these."""
        return self._times("sightings", device_ids)

    def called(self, text: str) -> list[DeviceRow]:
        """Those of this name or, where there is none, those whose ids begin with these digits."""
        found = list(self._all(DeviceRow, "devices", name=text))
        ends = _ids_from(text.lower())
        if found or not ends:
            return found
        return list(self._all(DeviceRow, "devices", "AND device_id BETWEEN ? AND ?", *ends))

    def sought(self, wanted: DevicesSought, first: int, most: int) -> list[DeviceRow]:
        """These, in the order of enrolment, from the ``first``-th on (0), at most so many."""
        where, values = wanted.where()
        if wanted.state:
            where, values = f"{where} AND {_STATE} = ?", [*values, *wanted.times, wanted.state]
        columns = columns_of(DeviceRow)
        sql = (
            f"SELECT {', '.join(columns.names)} {_SOUGHT} {where} "
            "ORDER BY enrolled_unix, device_id LIMIT ? OFFSET ?"
        )
        return [columns.read(each) for each in self._database.rows(sql, [*values, most, first])]

    def states(self, wanted: DevicesSought) -> dict[str, int]:
        """How many of these are in which state, whichever is asked for."""
        where, values = wanted.where()
        sql = f"SELECT state, count(*) FROM (SELECT {_STATE} AS state {_SOUGHT} {where}) AS found"
        rows = self._database.rows(f"{sql} GROUP BY state", [*wanted.times, *values])
        return dict(rows)

    def _times(self, table: str, device_ids: Sequence[bytes] | None) -> dict[bytes, int]:
        sql = f"SELECT device_id, seen_unix FROM {table}"
        if device_ids is None:
            return dict(self._database.rows(sql))
        return dict(self._database.rows_in(f"{sql} WHERE device_id", device_ids))

    def find_each(self, device_ids: Sequence[bytes]) -> Iterator[DeviceRow]:
        """Those of these that there are, in no order."""
        return self._among(DeviceRow, "devices", "device_id", device_ids)

    def by_handles(self, handles: Sequence[bytes]) -> Iterator[DeviceRow]:
        """Those whose topics these are, in no order."""
        return self._among(DeviceRow, "devices", "handle", handles)

    def revision(self) -> int:
        """Rises with each change of the table but for names."""
        return int(self._value("max(revision)", "device_changes") or 0)

    def changed_since(self, revision: int) -> list[bytes] | None:
        """Ids of the devices that were changed after a revision; None where that is too long ago to
        tell."""
        query = "SELECT revision, device_id FROM device_changes WHERE revision > ? ORDER BY 1"
        found = list(self._database.rows(query, (revision,)))
        if len(found) < self.revision() - revision:
            return None
        return list(dict.fromkeys(device_id for _, device_id in found))

    def _changed(self, device_id: bytes) -> None:
        with self._database.transaction():
            row = {"revision": self.revision() + 1, "device_id": device_id}
            self._database.insert("device_changes", row)


# Enrolment codes.

_UNUSED = "AND device_id IS NULL AND expires_unix > ?"


class Tokens(Table):
    def add(
        self,
        code: EnrolmentCode,
        created_unix: int,
        expires_unix: int,
        replaces: bytes | None,
        name: str | None = None,
        labels: Labels = MappingProxyType({}),
    ) -> None:
        """A code; whoever uses it is called ``name``, and has these labels."""
        row = TokenRow(code.token_id, code.secret, expires_unix, replaces, name=name, labels=labels)
        self._put("tokens", row, replace=False, created_unix=created_unix)

    def find(self, token_id: bytes) -> TokenRow | None:
        return self._find(TokenRow, "tokens", token_id=token_id)

    def bind(self, token_id: bytes, device_id: bytes) -> bool:
        """A device joined with it; whether there is still such a code."""
        return self._change("tokens", {"device_id": device_id}, token_id=token_id) > 0

    def withdraw(self, token_id: bytes) -> None:
        """Delete a code that nobody has used."""
        self._delete("tokens", "AND device_id IS NULL", token_id=token_id)

    def note_stranger(self, token_id: bytes, identity: bytes) -> None:
        """Another key tried to use a code that is bound."""
        self._database.execute(
            "UPDATE tokens SET strangers = strangers + 1, last_stranger = ? WHERE token_id = ?",
            (identity, token_id),
        )

    def tried_by_strangers(self) -> list[TokenRow]:
        """Codes that somebody else tried to use too: leaked, or handed out twice."""
        return list(self._all(TokenRow, "tokens", "AND strangers > 0"))

    def unused(self, now_unix_seconds: int) -> int:
        """How many codes can still be used."""
        return self._count("tokens", _UNUSED, now_unix_seconds)

    def usable(self, now_unix_seconds: int) -> list[TokenRow]:
        """These codes, the ones that end first before the others."""
        tail = f"{_UNUSED} ORDER BY expires_unix, token_id"
        return list(self._all(TokenRow, "tokens", tail, now_unix_seconds))


# Descriptors that were issued, and group keys by epoch.


class Secrets(Table):
    """Tables ``descriptors`` and ``group_keys``."""

    def descriptors(self) -> list[IssuedDescriptor]:
        """All that were issued, the current one last."""
        return list(self._all(IssuedDescriptor, "descriptors", "ORDER BY serial"))

    def issue(self, serial: int, message: bytes, retire_others_at_unix_seconds: int) -> None:
        """Make this descriptor the current one; no other is honoured longer than said."""
        self._database.execute(
            "UPDATE descriptors SET honoured_until_unix = CASE WHEN honoured_until_unix < ?1 "
            "THEN honoured_until_unix ELSE ?1 END",
            (retire_others_at_unix_seconds,),
        )
        self._put("descriptors", IssuedDescriptor(serial, message, None), replace=False)

    def forget(self, serial: int) -> None:
        """A descriptor whose keys are erased."""
        self._delete("descriptors", serial=serial)

    def group_keys(self) -> tuple[GroupKey, ...]:
        """Keys that sessions are told, epochs rising; the last one is used for what comes next."""
        return tuple(self._all(GroupKey, "group_keys", "ORDER BY epoch"))

    def add_group_key(self, key: GroupKey) -> None:
        self._put("group_keys", key, replace=False)

    def drop_group_keys(self, epochs: Iterable[int]) -> None:
        """Forget keys under which nothing is published any more."""
        self._database.execute_many(
            "DELETE FROM group_keys WHERE epoch = ?", [(epoch,) for epoch in epochs]
        )
