"""What enrolment left with a device: where its fleet meets, and its credential."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from device_sdk.home.database import HomeStore
from device_sdk.link.broker_url import BrokerWay, TlsFiles, parse_broker_url
from device_sdk.wire.seal.announcement import Successor
from device_sdk.wire.seal.descriptor import Descriptor, DescriptorSeen, read_descriptor
from device_sdk.wire.seal.enrolment_message import Grant
from device_sdk.wire.seal.placement import Placement, split_cell

# The counter of this device's requests to the aggregator: enrolments and opens.

_LIMIT = 2**63 - 1
_STEP_DOUBLINGS = 4
_MOST_DOUBLINGS = 32
_LEAPS = 3


class RequestCounter(HomeStore):
    """Rises for as long as the home exists: the aggregator answers a counter once in its life.

    A home that came back from a backup, or has a clone, counts from too low a number, and nobody
    tells it so. So the steps grow while nothing is answered, 1, 16, 256 and up to 2^32: it passes
    in a handful of attempts what was counted by answered ones, and in about as many attempts what
    was counted by unanswered ones. Who swallows every answer would need 2^31 attempts to exhaust
    the counter.
    """

    def next(self) -> int:
        """The counter of a new request, committed. Raises ``sqlite3.Error``."""
        with self._database.transaction() as sql:
            query = "SELECT highest, unanswered FROM request_counter"
            row = self._database.row(query)
            highest, unanswered = (0, 0) if row is None else (int(row[0]), int(row[1]))
            step = 1 << min(_STEP_DOUBLINGS * unanswered, _MOST_DOUBLINGS)
            highest = min(_LIMIT, highest + step)
            sql.execute(
                "INSERT OR REPLACE INTO request_counter VALUES (1, ?, ?)", (highest, unanswered + 1)
            )
        return highest

    def leap(self) -> None:
        """Somebody else may count here, too: pass what he has counted, as far as a few requests of
        his may have come. Raises ``sqlite3.Error``."""
        for _ in range(_LEAPS):
            self.next()

    def answered(self) -> None:
        """The last request was answered: the next step is 1 again. Raises ``sqlite3.Error``."""
        with self._database.transaction() as sql:
            sql.execute("UPDATE request_counter SET unanswered = 0")


SUCCESSOR = ">"
"""In the place of a cell: the broker that the aggregator announced. With a URL behind it: one that
it announced before."""
_MOST_FOUND = 4


@dataclass(frozen=True, slots=True)
class KnownSuccessor:
    """The newest announcement that this device heeds.

    Attributes:
        announced: what it says.
        serial: of the descriptor whose key signed it.
        reached: whether the aggregator was found there, by a session.
    """

    announced: Successor
    serial: int
    reached: bool = False


@dataclass(frozen=True)
class Membership:
    """One device's place in one fleet."""

    way: BrokerWay
    """To the broker that the device enrolled at, or was told by its owner."""
    prefix: str
    task: str
    cohort: str
    root_fingerprint: bytes
    """Of the root that is trusted now; it changes when the root in force hands over."""
    grant: Grant
    """Its placement is the newest that the aggregator told."""
    least_serial: int = 0
    """Of descriptors under this root, where the device has accepted none yet."""
    is_wish: bool = True
    """Whether task and cohort were named when it enrolled: it takes part in no other then."""
    has_left: bool = False
    """Whether it told the aggregator that it leaves, and was heard."""
    mirror: str = field(default="", repr=False)
    """The URL of the fleet's mirror, as the newest placement told it."""

    successor: KnownSuccessor | None = None
    """Where the fleet moves to; None where it does not."""
    found: tuple[str, ...] = ()
    """URLs of announced brokers where the aggregator was found, the last one first, since the one
    that the device calls its own. All are kept until newer keys confirm one of them: the own one
    may be gone by then, and the one that is announced may never be there."""

    def broker(self, cell: str) -> BrokerWay:
        """A cell's broker, or the successor, reached as the one that this device enrolled at;
        empty: that one."""
        if cell == SUCCESSOR:
            if self.successor is None:
                return self.way
            return self.way.at(parse_broker_url(self.successor.announced.url))
        if cell.startswith(SUCCESSOR):
            return self.way.at(parse_broker_url(cell.removeprefix(SUCCESSOR)))
        return self.way.at(self.way.url.at(*split_cell(cell))) if cell else self.way

    @property
    def places(self) -> tuple[str, ...]:
        """Where the fleet may be, its cells aside, each as :meth:`broker` takes it. First where it
        is to be: at the successor, or at the own one where none is announced."""
        ends = ("",) if self.successor is None else (SUCCESSOR, "")
        known = {self.broker(each).url.address for each in ends}
        found = [
            SUCCESSOR + url for url in self.found if parse_broker_url(url).address not in known
        ]
        return (ends[0], *found, *ends[1:])

    @property
    def first_place(self) -> str:
        """Where to look for the aggregator first: where it was found last."""
        if self.grant.cell or self.successor is None:
            return self.grant.cell
        return self.places[0 if self.successor.reached else 1]


class MembershipStore(HomeStore):
    """Membership, descriptor and the largest time signed: each has one row at most."""

    def load(self) -> Membership | None:
        """The membership; None before enrolment."""
        row = self._database.row(
            "SELECT url, prefix, task, cohort, ca_file, certificate_file, key_file, "
            "root_fingerprint, device_id, handle, admission_key, shard, least_serial, is_wish, "
            "has_left, cell, mirror, password_file, client_id_prefix "
            "FROM membership"
        )
        if row is None:
            return None
        url, prefix, task, cohort = row[:4]
        tls = TlsFiles(*row[4:7]) if any(row[4:7]) else None
        root_fingerprint, device_id, handle, admission_key, shard, least_serial = row[7:13]
        grant = Grant(device_id, handle, admission_key, shard, row[15])
        wish, left = map(bool, row[13:15])
        mirror = row[16]
        password_file = None if row[17] is None else Path(row[17])
        way = BrokerWay(parse_broker_url(url), password_file, tls, row[18])
        return Membership(
            *(way, prefix, task, cohort, root_fingerprint, grant, least_serial, wish, left),
            *(mirror, self._successor(), self._found()),
        )

    def _successor(self) -> KnownSuccessor | None:
        row = self._database.row(
            "SELECT revision, url, until_unix_seconds, serial, reached FROM successor"
        )
        if row is None or not row[1]:
            return None
        return KnownSuccessor(Successor(*row[:3]), row[3], bool(row[4]))

    def _found(self) -> tuple[str, ...]:
        rows = self._database.rows("SELECT url FROM found_broker ORDER BY number DESC")
        return tuple(url for (url,) in rows)

    def announced(self, successor: Successor, serial: int) -> bool:
        """Keep an announcement, signed under the descriptor of this serial; whether it is newer
        than the one that was heeded last. One that names this device's own broker leads nowhere."""
        known = self.load()
        with self._database.transaction() as sql:
            row = self._database.row("SELECT revision, given_url FROM successor")
            if row is not None and successor.revision <= row[0]:
                return False
            given = "" if row is None else row[1]
            url = successor.url
            if known is not None and url and parse_broker_url(url).address == known.way.url.address:
                url = ""
            sql.execute(
                "INSERT OR REPLACE INTO successor VALUES (1, ?, ?, ?, ?, ?, ?)",
                (
                    *(given, successor.revision, url),
                    *(successor.until_unix_seconds, serial, url in self._found()),
                ),
            )
        return True

    def reached(self, url: str) -> None:
        """The aggregator was found at a broker that it announced, at present or before.

        The first ones and the last are kept: who has stolen keys, and announces one of his own
        after the other, displaces none that the device knew before.
        """
        with self._database.transaction() as sql:
            sql.execute("UPDATE successor SET reached = 1 WHERE url = ?", (url,))
            if url in (found := self._found()):
                return
            if len(found) >= _MOST_FOUND:
                sql.execute("DELETE FROM found_broker WHERE url = ?", (found[0],))
            sql.execute("INSERT INTO found_broker (url) VALUES (?)", (url,))

    def moved(self) -> None:
        """The announced broker is this device's from now on, and those before are forgotten."""
        known = self.load()
        if known is None or known.successor is None:
            return
        with self._database.transaction() as sql:
            sql.execute(
                "UPDATE successor SET url = '', "
                "given_url = CASE WHEN given_url = '' THEN ? ELSE given_url END",
                (known.way.url.text,),
            )
            sql.execute("DELETE FROM found_broker")
            self._set_way(known.broker(SUCCESSOR))

    def save(self, membership: Membership, descriptor: Descriptor, unix_seconds: int) -> None:
        """Store the outcome of an enrolment, once. ``unix_seconds``: no later time falls below."""
        grant = membership.grant
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT INTO membership (one, url, prefix, task, cohort, root_fingerprint, "
                "device_id, handle, admission_key, shard, least_serial, is_wish, cell) "
                "VALUES (1, '', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    membership.prefix,
                    membership.task,
                    membership.cohort,
                    membership.root_fingerprint,
                    grant.device_id,
                    grant.handle,
                    grant.admission_key,
                    grant.shard,
                    membership.least_serial,
                    membership.is_wish,
                    grant.cell,
                ),
            )
            self._set_way(membership.way)
            self.save_descriptor(descriptor)
            self.raise_time(unix_seconds)

    def give_way(self, way: BrokerWay, *, insists: bool = False) -> None:
        """Reach the fleet's broker so, as the device's owner says. Files are kept by their paths.

        The URL that was said last says nothing new, unless he ``insists``: a device that has moved
        since stays where it is, and an announcement holds. Elsewhere it is forgotten, and heeded
        again where it is shown there.
        """
        known = self.load()
        row = self._database.row("SELECT given_url FROM successor")
        if known is None:
            return
        here, said = known.way.url.address, row[0] if row is not None else ""
        if not insists and said and parse_broker_url(said).address == way.url.address:
            way = way.at(parse_broker_url(here))
        if way == known.way:
            return
        with self._database.transaction() as sql:
            if way.url.address != here:
                sql.execute(
                    "UPDATE successor SET url = '', given_url = '', revision = revision - 1"
                )
                sql.execute("DELETE FROM found_broker")
            self._set_way(way)

    def _set_way(self, way: BrokerWay) -> None:
        tls = way.tls if way.tls is not None else TlsFiles()
        files = [
            None if file is None else str(Path(file).absolute())
            for file in (way.password_file, tls.ca_file, tls.certificate_file, tls.key_file)
        ]
        with self._database.transaction() as sql:
            sql.execute(
                "UPDATE membership SET url = ?, client_id_prefix = ?, password_file = ?, "
                "ca_file = ?, certificate_file = ?, key_file = ?",
                (way.url.text, way.client_id_prefix, *files),
            )

    def place(self, placement: Placement) -> None:
        """Where this device belongs from now on."""
        with self._database.transaction() as sql:
            sql.execute(
                "UPDATE membership SET shard = ?, cell = ?, mirror = ?",
                (placement.shard, placement.cell, placement.mirror),
            )

    def leave(self) -> None:
        """The aggregator knows that this device has left: there is nothing to be sent any more."""
        with self._database.transaction() as sql:
            sql.execute("UPDATE membership SET has_left = 1")
            sql.execute("DELETE FROM outbox")

    def descriptor(self, root_fingerprint: bytes) -> Descriptor | None:
        """The newest descriptor accepted, verified again. Raises ``WireError`` if damaged."""
        row = self._database.row("SELECT message FROM descriptor")
        return None if row is None else read_descriptor(row[0], root_fingerprint)

    def save_descriptor(self, descriptor: Descriptor) -> None:
        """Keep a descriptor that was accepted, and trust the root it is under from now on.

        What was signed under the one before it tells the time no more: the time is at least the
        one at which this one was issued. Without one before it no time falls.
        """
        with self._database.transaction() as sql:
            if self._database.row("SELECT 1 FROM descriptor") is not None:
                sql.execute("DELETE FROM clock")
            self.raise_time(descriptor.issued_unix_seconds)
            sql.execute("INSERT OR REPLACE INTO descriptor VALUES (1, ?)", (descriptor.message,))
            sql.execute(
                "UPDATE membership SET root_fingerprint = ?", (descriptor.root_fingerprint,)
            )

    def trust(self, root_fingerprint: bytes, least_serial: int, unix_seconds: int) -> None:
        """Trust a root on the operator's word. What another one vouched for goes.

        That is its descriptor, the marks of rounds that were published under it, and its time.
        """
        with self._database.transaction() as sql:
            changed = sql.execute(
                "UPDATE membership SET root_fingerprint = ?1 WHERE root_fingerprint <> ?1",
                (root_fingerprint,),
            ).rowcount
            sql.execute("UPDATE membership SET least_serial = ?", (least_serial,))
            sql.execute("INSERT OR REPLACE INTO clock VALUES (1, ?)", (unix_seconds,))
            if changed:
                sql.execute("DELETE FROM descriptor")
                sql.execute("DELETE FROM mark")

    def signed_time(self) -> int:
        """The largest Unix time signed under the descriptor in force, 0 before the first."""
        row = self._database.row("SELECT largest_unix_seconds FROM clock")
        return 0 if row is None else int(row[0])

    def raise_time(self, unix_seconds: int) -> None:
        """Note a time; a smaller one than the largest changes nothing."""
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT INTO clock VALUES (1, ?) ON CONFLICT (one) DO UPDATE SET "
                "largest_unix_seconds = max(largest_unix_seconds, excluded.largest_unix_seconds)",
                (unix_seconds,),
            )


def seen(descriptor: Descriptor | None) -> DescriptorSeen | None:
    """What the next descriptor is compared with."""
    if descriptor is None:
        return None
    return DescriptorSeen(descriptor.root, descriptor.serial, descriptor.digest)
