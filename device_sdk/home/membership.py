"""What enrolment left with a device: where its fleet meets, and its credential."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from device_sdk.home.database import HomeStore
from device_sdk.link.broker_url import BrokerUrl, BrokerWay, parse_broker_url
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

    A home that was restored from a backup, or has a clone, counts from too low a number, and nobody
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
class Moves:
    """What a device knows of its fleet's moves.

    Attributes:
        serial: of the descriptor whose key signed the newest announcement that it heeds; 0 before
            the first.
        revision, until_unix_seconds: what that one says.
        url: where it leads to; empty: nowhere.
        found: URLs of announced brokers where the aggregator was found, the last one first, since
            the one that the device calls its own. All are kept until newer keys confirm one of
            them: the own one may be gone by then, and the one that is announced may never be there.
        given_url: what its owner said last, where it has moved since; else empty.
    """

    serial: int = 0
    revision: int = 0
    url: str = ""
    until_unix_seconds: int = 0
    found: tuple[str, ...] = ()
    given_url: str = ""

    @property
    def reached(self) -> bool:
        """Whether the aggregator was found where the newest announcement leads, by a session."""
        return self.url in self.found

    def heard(self, said: Successor, serial: int, own: BrokerUrl) -> Moves:
        """After an announcement that the descriptor of this serial signed; the same where it is no
        newer one. One that names the device's ``own`` broker leads nowhere.

        Newer is what a newer descriptor's key signed, and of one descriptor's the higher revision.
        So whatever number one key, or one clock, has ever counted up to, it binds the device no
        longer than that descriptor is in force.
        """
        url, until = said.url, said.until_unix_seconds
        if url and parse_broker_url(url).address == own.address:
            url = ""
        is_newer = (serial, said.revision) > (self.serial, self.revision)
        is_signed_anew = (said.revision, url, until) == (
            *(self.revision, self.url, self.until_unix_seconds),
        )
        if not is_newer or (is_signed_anew and self.serial):
            return self
        return replace(
            self, serial=serial, revision=said.revision, url=url, until_unix_seconds=until
        )

    def with_found(self, url: str) -> Moves:
        """The first ones and the last are kept: who has stolen keys, and announces one broker of
        his own after the other, displaces none that the device knew before."""
        if url in self.found:
            return self
        return replace(self, found=(url, *self.found[len(self.found) >= _MOST_FOUND :]))


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

    moves: Moves = Moves()

    def broker(self, cell: str) -> BrokerWay:
        """A cell's broker, or the successor, reached as the one that this device enrolled at;
        empty: that one."""
        if cell.startswith(SUCCESSOR):
            url = cell.removeprefix(SUCCESSOR) or self.moves.url
            return self.way.at(parse_broker_url(url)) if url else self.way
        return self.way.at(self.way.url.at(*split_cell(cell))) if cell else self.way

    @property
    def places(self) -> tuple[str, ...]:
        """Where the fleet may be, its cells aside, each as :meth:`broker` takes it. First where it
        is to be: at the successor, or at the own one where none is announced."""
        ends = (SUCCESSOR, "") if self.moves.url else ("",)
        known = {self.broker(each).url.address for each in ends}
        found = [
            SUCCESSOR + url
            for url in self.moves.found
            if parse_broker_url(url).address not in known
        ]
        return (ends[0], *found, *ends[1:])

    @property
    def tried(self) -> tuple[str, ...]:
        """Every place, each as :meth:`broker` takes it, in the order in which a device that starts
        looks for the aggregator."""
        every = (self.grant.cell, *self.places) if self.grant.cell else self.places
        first = every.index(self.first_place)
        return every[first:] + every[:first]

    def why(self, place: str) -> str:
        """Why the aggregator may be there, for people."""
        if place == SUCCESSOR:
            found = "there" if self.moves.reached else "not there yet"
            return f"the fleet is there, or goes there; this device found it {found}"
        if place.startswith(SUCCESSOR):
            return "announced before, and this device found the fleet there"
        if place:
            return "the cell of the fleet that the aggregator assigned to this device"
        return "this device's own: it joined there, or was set to it since"

    @property
    def first_place(self) -> str:
        """Where to look for the aggregator first: where it was found last."""
        if self.grant.cell or not self.moves.url:
            return self.grant.cell
        return self.places[0 if self.moves.reached else 1]


class MembershipStore(HomeStore):
    """Membership, descriptor and the largest time signed: each has one row at most."""

    def load(self) -> Membership | None:
        """The membership; None before enrolment."""
        row = self._database.row(
            "SELECT way, prefix, task, cohort, root_fingerprint, mirror, least_serial, is_wish, "
            "has_left, moves, device_id, handle, admission_key, shard, cell FROM membership"
        )
        if row is None:
            return None
        way, prefix, task, cohort, root_fingerprint, mirror, least_serial, is_wish, left = row[:9]
        moves = json.loads(row[9])
        moves["found"] = tuple(moves.get("found", ()))
        return Membership(
            BrokerWay.from_text(way),
            *(prefix, task, cohort, root_fingerprint, Grant(*row[10:]), least_serial),
            *(bool(is_wish), bool(left), mirror, Moves(**moves)),
        )

    def announced(self, successor: Successor, serial: int) -> bool:
        """Keep an announcement, signed under the descriptor of this serial; whether it is newer
        than the one that was heeded last: see :meth:`Moves.heard`."""
        return self._change(
            lambda known: (known.way, known.moves.heard(successor, serial, known.way.url))
        )

    def reached(self, url: str) -> None:
        """The aggregator was found at a broker that it announced, at present or before."""
        self._change(lambda known: (known.way, known.moves.with_found(url)))

    def moved(self) -> None:
        """The announced broker is this device's from now on, and those before are forgotten."""

        def move(known: Membership) -> tuple[BrokerWay, Moves]:
            given = known.moves.given_url or known.way.url.text
            moves = replace(known.moves, url="", found=(), given_url=given)
            return (known.broker(SUCCESSOR), moves) if known.moves.url else (known.way, known.moves)

        self._change(move)

    def save(self, membership: Membership, descriptor: Descriptor, unix_seconds: int) -> None:
        """Store the outcome of an enrolment, once. ``unix_seconds``: no later time falls below."""
        grant = membership.grant
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT INTO membership (one, way, prefix, task, cohort, root_fingerprint, "
                "device_id, handle, admission_key, shard, least_serial, is_wish, cell) "
                "VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    membership.way.text,
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
            self.save_descriptor(descriptor)
            self.raise_time(unix_seconds)

    def give_way(self, way: BrokerWay, *, insists: bool = False) -> None:
        """Reach the fleet's broker so, as the device's owner says. Files are kept by their paths.

        The URL that was said last says nothing new, unless he ``insists``: a device that has moved
        since stays where it is, and an announcement holds. Elsewhere it is forgotten, and heeded
        again where it is shown there.
        """

        def give(known: Membership) -> tuple[BrokerWay, Moves]:
            here, moves, new = known.way.url.address, known.moves, way
            said = moves.given_url
            if not insists and said and parse_broker_url(said).address == way.url.address:
                new = way.at(parse_broker_url(here))
            if new.url.address != here:
                moves = replace(moves, url="", found=(), given_url="", revision=moves.revision - 1)
            return new, moves

        self._change(give)

    def _change(self, change: Callable[[Membership], tuple[BrokerWay, Moves]]) -> bool:
        """Whether it is another one. In one transaction: the device's owner and its agent may both
        be at it, in two processes."""
        with self._database.transaction() as sql:
            known = self.load()
            if known is None or (changed := change(known)) == (known.way, known.moves):
                return False
            way, moves = changed
            values = way.text, json.dumps(asdict(moves))
            sql.execute("UPDATE membership SET way = ?, moves = ?", values)
        return True

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

        That is its descriptor, the marks of rounds that were published under it, its time, and how
        new its announcement is.
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
                self._change(lambda known: (known.way, replace(known.moves, serial=0, revision=0)))

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
