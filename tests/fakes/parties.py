"""A root, an aggregator and devices with known keys, for the tests of the wire."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.wire.seal import hpke
from device_sdk.wire.seal.admission import TokenBuckets, WorkBudget
from device_sdk.wire.seal.broadcast import GroupKey, new_group_key
from device_sdk.wire.seal.descriptor import Delegation, Descriptor, make_delegation, make_descriptor
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.handshake import DeviceCredential, OpenedSession, SessionOpening
from device_sdk.wire.seal.keyring import Keyring, ServingKeys, serving_keys
from device_sdk.wire.seal.keys import signing_key
from device_sdk.wire.seal.session_table import RegisteredDevice, SessionTable

NOW = 1_800_000_000
EXPIRES = NOW + 86_400
DELEGATION_EXPIRES = NOW + 365 * 86_400
INCARNATION = bytes(range(16))


class Clock:
    """A clock that stands still until told otherwise."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


class SeededBytes:
    """A stream of bytes that a seed repeats: SHA-256 in counter mode."""

    def __init__(self, seed: str) -> None:
        self._seed = seed.encode()
        self._drawn = 0

    def __call__(self, count: int) -> bytes:
        out = b""
        while len(out) < count:
            block = self._seed + self._drawn.to_bytes(8, "big")
            out += hashlib.sha256(block).digest()
            self._drawn += 1
        return out[:count]


@dataclass
class CountingHpke:
    """The real HPKE, counted: shows that refusals come before public-key work."""

    seals: int = 0
    unseals: int = 0

    def seal(self, key: hpke.PublicKey, info: bytes, plaintext: bytes) -> bytes:
        self.seals += 1
        return hpke.seal(key, info, plaintext)

    def unseal(self, key: hpke.PrivateKey, info: bytes, sealed: bytes) -> bytes:
        self.unseals += 1
        return hpke.unseal(key, info, sealed)


def key_from(name: str) -> Ed25519PrivateKey:
    """An Ed25519 key that a name repeats."""
    return signing_key(SeededBytes(name)(32))


def make_serving(serial: int = 1, until: int | None = None, root: str = "root") -> ServingKeys:
    """Serving keys of a descriptor of its own for each serial."""
    signing, sessions = key_from(f"signing {serial}"), key_from(f"sessions {serial}")
    seed = SeededBytes(f"hpke {serial}")(hpke.SEED_BYTES)
    descriptor = make_descriptor(
        key_from("delegate"),
        delegation_of(root),
        serial,
        NOW,
        EXPIRES,
        signing.public_key().public_bytes_raw(),
        sessions.public_key().public_bytes_raw(),
        hpke.public_bytes(seed),
    )
    return serving_keys(descriptor, signing, sessions, seed, until)


def delegation_of(
    root: str = "root", first: int = 1, last: int = 1000, expires: int = DELEGATION_EXPIRES
) -> Delegation:
    """What a root lets the key "delegate" sign."""
    delegate = key_from("delegate").public_key().public_bytes_raw()
    return make_delegation(key_from(root), delegate, first, last, expires)


def make_credential(name: str) -> DeviceCredential:
    """The credential of an enrolled device."""
    source = SeededBytes(f"credential {name}")
    return DeviceCredential(source(16), key_from(f"identity {name}"), source(32))


def registered(credential: DeviceCredential) -> RegisteredDevice:
    """The registry's row of a credential."""
    return RegisteredDevice(
        credential.device_id,
        credential.identity.public_key().public_bytes_raw(),
        credential.admission_key,
    )


@dataclass
class Fleet:
    """An aggregator's session table and one device, "anna"."""

    serving: ServingKeys = field(default_factory=make_serving)
    clock: Clock = field(default_factory=Clock)
    unix_clock: Clock = field(default_factory=lambda: Clock(float(NOW)))
    counting: CountingHpke = field(default_factory=CountingHpke)
    anna: DeviceCredential = field(default_factory=lambda: make_credential("anna"))
    group_keys: tuple[GroupKey, ...] = (
        new_group_key(3, SeededBytes("group 3")),
        new_group_key(4, SeededBytes("group 4")),
    )
    burst: float = 1000.0
    counter: int = 0
    """Of the devices' last open: all share it."""

    def __post_init__(self) -> None:
        self.keyring = Keyring([self.serving])
        self.table = SessionTable(
            self.keyring,
            INCARNATION,
            TokenBuckets(self.burst, 1.0, self.clock),
            WorkBudget(1.0, self.clock),
            self.clock,
            self.unix_clock,
            random_bytes=SeededBytes("table"),
            seal=self.counting.seal,
            unseal=self.counting.unseal,
        )

    @property
    def descriptor(self) -> Descriptor:
        return self.serving.descriptor

    def fresh(self) -> Freshness:
        """Of a new request in this life of the aggregator."""
        self.counter += 1
        return Freshness(INCARNATION, self.counter)

    def opening(
        self,
        name: str = "1",
        who: DeviceCredential | None = None,
        freshness: Freshness | None = None,
    ) -> SessionOpening:
        """An attempt with randomness of its own, and the next counter unless one is given."""
        return SessionOpening(
            who or self.anna,
            self.descriptor,
            freshness or self.fresh(),
            self.clock,
            random_bytes=SeededBytes(f"open {name}"),
        )

    def grant(self, message: bytes, who: DeviceCredential | None = None) -> bytes:
        """The table's reply to an open."""
        return self.table.accept_open(registered(who or self.anna), message, self.group_keys)

    def open(self, name: str = "1", who: DeviceCredential | None = None) -> OpenedSession:
        """A granted session, of which the table has seen no envelope yet."""
        attempt = self.opening(name, who)
        return attempt.accept(self.grant(attempt.message, who), NOW)
