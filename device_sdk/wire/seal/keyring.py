"""The aggregator's online keys, those of the previous descriptor included for a grace period."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal import hpke
from device_sdk.wire.seal.descriptor import Descriptor


@dataclass(frozen=True)
class HandshakeKeys:
    """The private keys that belong to one descriptor, as far as sessions need them: they open what
    devices seal, and sign replies and denials. A device believes nothing else that is signed with
    ``sessions``: no manifest, no list of tasks, no presence and no enrolment."""

    descriptor: Descriptor
    sessions: Ed25519PrivateKey
    hpke: hpke.PrivateKey
    honoured_until_unix_seconds: int | None = None
    """End of the grace period of a replaced descriptor; None while it is the current one."""


@dataclass(frozen=True)
class ServingKeys(HandshakeKeys):
    """All of them."""

    signing: Ed25519PrivateKey = field(kw_only=True)


def handshake_keys(
    descriptor: Descriptor,
    sessions: Ed25519PrivateKey,
    hpke_seed: bytes,
    honoured_until_unix_seconds: int | None = None,
) -> HandshakeKeys:
    """Pair a descriptor with its private keys. Raises ``ValueError`` when they do not belong."""
    if sessions.public_key().public_bytes_raw() != descriptor.sessions:
        raise ValueError(f"the sessions' key is not the one of descriptor {descriptor.serial}")
    if hpke.public_bytes(hpke_seed) != descriptor.hpke:
        raise ValueError(f"the HPKE key is not the one of descriptor {descriptor.serial}")
    return HandshakeKeys(
        descriptor, sessions, hpke.private_key(hpke_seed), honoured_until_unix_seconds
    )


def serving_keys(
    descriptor: Descriptor,
    signing: Ed25519PrivateKey,
    sessions: Ed25519PrivateKey,
    hpke_seed: bytes,
    honoured_until_unix_seconds: int | None = None,
) -> ServingKeys:
    """As :func:`handshake_keys`, with the signing key."""
    if signing.public_key().public_bytes_raw() != descriptor.signing:
        raise ValueError(f"the signing key is not the one of descriptor {descriptor.serial}")
    held = handshake_keys(descriptor, sessions, hpke_seed, honoured_until_unix_seconds)
    return ServingKeys(
        held.descriptor,
        held.sessions,
        held.hpke,
        held.honoured_until_unix_seconds,
        signing=signing,
    )


Held = TypeVar("Held", bound=HandshakeKeys, covariant=True)


class Keyring(Generic[Held]):
    """Keys by the serial of their descriptor."""

    def __init__(self, keys: Iterable[Held]) -> None:
        self._by_serial: dict[int, Held] = {}
        for entry in keys:
            serial = entry.descriptor.serial
            if serial in self._by_serial:
                raise ValueError(f"two sets of keys for the descriptor with serial {serial}")
            self._by_serial[serial] = entry
        if not self._by_serial:
            raise ValueError("a keyring needs the keys of at least the current descriptor")
        self._newest = max(self._by_serial)

    def __iter__(self) -> Iterator[Held]:
        """By serial, the newest last."""
        return (self._by_serial[serial] for serial in sorted(self._by_serial))

    @property
    def newest(self) -> Held:
        """Those of the current descriptor."""
        return self._by_serial[self._newest]

    def find(self, serial: int, now_unix_seconds: int) -> Held:
        """Keys for a message that names ``serial``.

        Raises ``WireError``: ``unknown-descriptor``, or ``retired-descriptor`` after its grace
        period, when its keys may be erased. The device has to fetch the current descriptor.
        """
        entry = self._by_serial.get(serial)
        if entry is None and serial > self._newest:
            raise WireError("unknown-descriptor", f"no keys for descriptor serial {serial}")
        until = None if entry is None else entry.honoured_until_unix_seconds
        if entry is None or (until is not None and now_unix_seconds >= until):
            raise WireError("retired-descriptor", f"descriptor {serial} is no longer honoured")
        return entry
