"""The aggregator's keys: made, rotated, and read for serving."""

from __future__ import annotations

from collections.abc import Callable

from aggregator.errors import AggregatorError
from aggregator.home import Home
from aggregator.store import Database, Store
from device_sdk.wire import hpke
from device_sdk.wire.descriptor import Descriptor, make_descriptor, read_descriptor
from device_sdk.wire.errors import WireError
from device_sdk.wire.group_key import new_group_key
from device_sdk.wire.keyring import ServingKeys, serving_keys
from device_sdk.wire.keys import (
    KeyKind,
    RandomBytes,
    fingerprint,
    generate,
    read_key,
    signing_key,
    write_key,
)

__all__ = ["DESCRIPTOR_SECONDS", "GRACE_SECONDS", "initialise", "read_serving_keys", "rotate_keys"]

DESCRIPTOR_SECONDS = 365 * 86_400
"""How long a descriptor holds unless the operator chooses otherwise."""
GRACE_SECONDS = 7 * 86_400
"""How long a replaced descriptor's keys are honoured."""


def initialise(
    home: Home,
    now_unix_seconds: int,
    random_bytes: RandomBytes,
    descriptor_seconds: int = DESCRIPTOR_SECONDS,
) -> Descriptor:
    """Make all keys, the first descriptor and the database. Raises AggregatorError."""
    home.make()
    write_key(home.root_key, KeyKind.ED25519, generate(KeyKind.ED25519, random_bytes))
    descriptor = _issue_keys(home, 1, now_unix_seconds + descriptor_seconds, random_bytes)
    store = Store(Database(home.database, create=True))
    with store.database.transaction():
        store.facts.generation = now_unix_seconds
        store.facts.root_fingerprint = fingerprint(descriptor.root)
        store.facts.seed = int.from_bytes(random_bytes(8), "little") >> 1
        store.secrets.issue(1, descriptor.message, now_unix_seconds)
        store.secrets.add_group_key(new_group_key(1, random_bytes))
    store.database.close()
    return descriptor


def rotate_keys(
    home: Home,
    store: Store,
    now_unix_seconds: int,
    random_bytes: RandomBytes,
    descriptor_seconds: int = DESCRIPTOR_SECONDS,
    grace_seconds: int = GRACE_SECONDS,
) -> Descriptor:
    """New signing and HPKE keys under a descriptor of the next serial. Needs the root key."""
    serial = max(issued.serial for issued in store.secrets.descriptors()) + 1
    for left_over in (home.signing_key(serial), home.hpke_key(serial)):
        left_over.unlink(missing_ok=True)  # of a rotation that was cut short: never published
    descriptor = _issue_keys(home, serial, now_unix_seconds + descriptor_seconds, random_bytes)
    if fingerprint(descriptor.root) != store.facts.root_fingerprint:
        raise AggregatorError(f"{home.root_key} is the root key of another aggregator")
    with store.database.transaction():
        store.secrets.issue(serial, descriptor.message, now_unix_seconds + grace_seconds)
    return descriptor


def read_serving_keys(
    home: Home, store: Store, unix_clock: Callable[[], float]
) -> list[ServingKeys]:
    """The keys of every descriptor that is still honoured, the current one last."""
    root = store.facts.root_fingerprint
    keys = []
    for issued in store.secrets.descriptors():
        until = issued.honoured_until_unix_seconds
        if until is not None and until <= unix_clock():
            continue
        try:
            signing = signing_key(read_key(home.signing_key(issued.serial), KeyKind.ED25519))
            seed = read_key(home.hpke_key(issued.serial), KeyKind.HPKE)
            keys.append(serving_keys(read_descriptor(issued.message, root), signing, seed, until))
        except (OSError, ValueError, WireError) as error:
            raise AggregatorError(
                f"the keys of descriptor {issued.serial} cannot be used: {error}"
            ) from None
    return keys


def _issue_keys(
    home: Home, serial: int, expires_unix_seconds: int, random_bytes: RandomBytes
) -> Descriptor:
    try:
        root = signing_key(read_key(home.root_key, KeyKind.ED25519))
    except FileNotFoundError:
        raise AggregatorError(
            f"{home.root_key} is not there: bring the root key back for this command"
        ) from None
    except (OSError, WireError) as error:
        raise AggregatorError(f"the root key cannot be used: {error}") from None
    signing_seed = generate(KeyKind.ED25519, random_bytes)
    hpke_seed = generate(KeyKind.HPKE, random_bytes)
    write_key(home.signing_key(serial), KeyKind.ED25519, signing_seed)
    write_key(home.hpke_key(serial), KeyKind.HPKE, hpke_seed)
    return make_descriptor(
        root,
        serial,
        expires_unix_seconds,
        signing_key(signing_seed).public_key().public_bytes_raw(),
        hpke.public_bytes(hpke_seed),
    )
