"""The aggregator's keys: made, renewed, rotated, read for serving, and erased.

Whatever changes them does so inside a transaction of the store, files and all: the operator's
commands and a running ``serve`` wait for each other. Files are written before the rows that name
them are committed, and erased before those rows go; what a crash leaves over is erased by
:func:`tidy_keys`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aggregator.clock import moment_of
from aggregator.errors import AggregatorError
from aggregator.events import LogEvent
from aggregator.home import AggregatorHome
from aggregator.store import Store
from aggregator.store.rows import IssuedDescriptor
from device_sdk.system.files import flush_folder
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal import hpke
from device_sdk.wire.seal.broadcast import MOST_KEYS, GroupKey, new_group_key
from device_sdk.wire.seal.descriptor import (
    Delegation,
    Descriptor,
    Succession,
    extend_line,
    make_delegation,
    make_descriptor,
    make_succession,
    read_descriptor,
    root_of,
)
from device_sdk.wire.seal.keyring import Keyring, ServingKeys, serving_keys
from device_sdk.wire.seal.keys import (
    KeyKind,
    RandomBytes,
    erase_key,
    fingerprint,
    generate,
    read_key,
    signing_key,
    write_key,
)

_DAY_SECONDS = 86_400


_WARN_DAYS = 30
# Shares of a descriptor's life that are left when it is renewed.
_LEFT_BETWEEN_ROUNDS = 1 / 3
_LEFT_AT_MOST = 1 / 6


# The keys in force while serving: renewed in time, and read again when somebody changed them.


class FleetKeys:
    """Serving keys and group keys. ``watch`` what must be told of another keyring.

    The descriptor is renewed, for ``descriptor_seconds`` each time, for as long as the root key's
    delegation allows; in its last month there is a warning in the log once a day. Raises
    AggregatorError where there is no descriptor to serve under.
    """

    def __init__(
        self,
        home: AggregatorHome,
        store: Store,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
        random_bytes: RandomBytes,
        descriptor_seconds: int,
    ) -> None:
        self._home = home
        self._store = store
        self._clock, self._unix_clock = clock, unix_clock
        self._random_bytes = random_bytes
        self._descriptor_seconds = descriptor_seconds
        self._watchers: list[Callable[[Keyring[ServingKeys]], None]] = []
        # By the monotonic clock: a calendar that was ahead for a while silences nothing.
        self._next_warning_seconds = self._next_try_seconds = -math.inf
        self._cannot_renew = ""
        self._grace_ends_unix = math.inf
        tidy_keys(home, store, int(unix_clock()))
        self._serving = self._read()
        self._group_keys = store.secrets.group_keys()
        self.tend(between_rounds=True)
        if self._left_seconds() <= 0:
            raise AggregatorError(
                "the descriptor has expired by this machine's clock: set that right or, if it is "
                "right, run tessera-aggregator rotate keys"
            )

    @property
    def keyring(self) -> Keyring[ServingKeys]:
        return Keyring(self._serving)

    def current(self) -> ServingKeys:
        return self._serving[-1]

    def descriptors(self) -> list[Descriptor]:
        """Those that are honoured, the one in force last."""
        return [each.descriptor for each in self._serving]

    def group_keys(self) -> tuple[GroupKey, ...]:
        """What a session's reply tells."""
        return self._group_keys[-MOST_KEYS:]

    @property
    def problem(self) -> str:
        """Why devices refuse this aggregator, or will soon, for people; empty: they do not."""
        now = self._unix_clock()
        return delegation_problem(self.current().descriptor, now) or self._cannot_renew

    def watch(self, replace_keyring: Callable[[Keyring[ServingKeys]], None]) -> None:
        self._watchers.append(replace_keyring)

    def refresh(self) -> bool:
        """Read the store again; whether another descriptor is in force."""
        self._group_keys = self._store.secrets.group_keys()
        newest = self._store.secrets.descriptors()[-1].serial
        if newest == self.current().descriptor.serial:
            return False
        self._replace(self._read())
        return True

    def tend(self, *, between_rounds: bool) -> bool:
        """Do what is due: erase keys whose grace is over, renew the descriptor, warn.

        A device that takes up a new descriptor in the middle of a round may have to leave that
        round out, so it is renewed early between two rounds, and late within one. Returns whether
        another descriptor is in force.
        """
        before = self.current().descriptor.serial
        now = self._unix_clock()
        if now >= self._grace_ends_unix:
            tidy_keys(self._home, self._store, int(now))
            self._replace(self._read())
        self._warn()
        share = _LEFT_BETWEEN_ROUNDS if between_rounds else _LEFT_AT_MOST
        held = self.current().descriptor
        could_hold_longer = held.expires_unix_seconds < held.delegation.expires_unix_seconds
        ends_soon = self._left_seconds() <= share * self._descriptor_seconds
        # By a clock that was ahead: its keys would be used for longer than was meant.
        of_the_future = held.issued_unix_seconds > now + _DAY_SECONDS
        if of_the_future or (could_hold_longer and ends_soon):
            self._renew(now)
        return self.current().descriptor.serial != before

    def _renew(self, now_unix_seconds: float) -> None:
        if self._clock() < self._next_try_seconds:
            return
        try:
            renewed = renew_descriptor(
                self._home,
                self._store,
                int(now_unix_seconds),
                self._random_bytes,
                self._descriptor_seconds,
            )
        except AggregatorError as error:
            # Serving goes on under the old one while it holds: there is time to put this right.
            self._cannot_renew = f"the descriptor cannot be renewed: {error}"
            LogEvent.DESCRIPTOR_KEPT.log(problem=self._cannot_renew)
            self._next_try_seconds = self._next_warning_seconds = self._clock() + _DAY_SECONDS
            return
        LogEvent.DESCRIPTOR_RENEWED.log(
            days=(renewed.expires_unix_seconds - now_unix_seconds) / _DAY_SECONDS
        )
        self._replace(self._read())

    def _left_seconds(self) -> float:
        return self.current().descriptor.expires_unix_seconds - self._unix_clock()

    def _warn(self) -> None:
        now = self._clock()
        if self.problem and now >= self._next_warning_seconds:
            self._next_warning_seconds = now + _DAY_SECONDS
            LogEvent.KEYS_END.log(problem=self.problem)

    def _replace(self, serving: list[ServingKeys]) -> None:
        self._serving, self._cannot_renew = serving, ""
        for replace_keyring in self._watchers:
            replace_keyring(self.keyring)

    def _read(self) -> list[ServingKeys]:
        ends = [each.honoured_until_unix_seconds for each in self._store.secrets.descriptors()]
        # Of the next keys to be erased, those included that are honoured no more.
        self._grace_ends_unix = min((end for end in ends if end is not None), default=math.inf)
        return read_serving_keys(self._home, self._store, self._unix_clock)


_HOUR_SECONDS = 3600
# A delegation's serials: one for each hour of seven years.
_SERIALS = 1 << 16
_KEY_FILE = re.compile(r"(signing|sessions|hpke|delegate)-([0-9]+)\.key")
_LEFT_BY_A_CRASH = re.compile(r"\..+\.key\.[0-9]+\.tmp")


@dataclass(frozen=True, slots=True)
class Lives:
    """How long things hold, in seconds, unless the operator chooses otherwise."""

    descriptor_seconds: int = 30 * _DAY_SECONDS
    delegation_seconds: int = 365 * _DAY_SECONDS
    grace_seconds: int = 7 * _DAY_SECONDS
    """How long the keys of a replaced descriptor are honoured, at most as long as it held."""

    def __post_init__(self) -> None:
        if self.descriptor_seconds < 1 or self.grace_seconds < 0:
            raise AggregatorError("a descriptor holds for a second at least, its grace for none")
        if self.grace_seconds > 30 * _DAY_SECONDS:
            raise AggregatorError(
                "old keys are honoured for 30 days at most: who has stolen them is honoured, too"
            )
        if not self.descriptor_seconds <= self.delegation_seconds <= 5 * 365 * _DAY_SECONDS:
            raise AggregatorError(
                "a delegation holds for 5 years at most, and for as long as a descriptor at least"
            )


USUAL_LIVES = Lives()


@dataclass(frozen=True, slots=True)
class _Mandate:
    """What descriptors are made with."""

    delegate: Ed25519PrivateKey
    delegation: Delegation
    successions: tuple[Succession, ...]


def initialise(
    home: AggregatorHome,
    now_unix_seconds: int,
    random_bytes: RandomBytes,
    lives: Lives = USUAL_LIVES,
) -> Descriptor:
    """Make all keys, the first descriptor and the database. Raises AggregatorError."""
    home.make()
    store = home.create_store()
    seed = generate(KeyKind.ED25519, random_bytes)
    write_key(home.root_key, KeyKind.ED25519, seed)
    first = _first_serial(0, now_unix_seconds)
    maker = _Maker(home, now_unix_seconds, random_bytes, lives)
    descriptor = maker.delegated(signing_key(seed), (), first)
    with store.database.transaction():
        store.facts.generation = now_unix_seconds
        store.facts.root_fingerprint = descriptor.root_fingerprint
        store.facts.seed = int.from_bytes(random_bytes(8), "little") >> 1
        store.secrets.issue(first, descriptor.message, now_unix_seconds)
        store.secrets.add_group_key(new_group_key(1, random_bytes))
    store.database.close()
    return descriptor


def renew_descriptor(
    home: AggregatorHome,
    store: Store,
    now_unix_seconds: int,
    random_bytes: RandomBytes,
    descriptor_seconds: int,
) -> Descriptor:
    """New serving keys under a descriptor of the delegate's; the root is not needed.

    Raises AggregatorError where the delegation does not allow it any more, or its key is missing.
    """
    with store.database.transaction():
        current = current_descriptor(store)
        delegation = current.delegation
        expires = min(now_unix_seconds + descriptor_seconds, delegation.expires_unix_seconds)
        serial = _next_serial(current, now_unix_seconds)
        if expires <= now_unix_seconds or not delegation.allows(serial, expires):
            raise AggregatorError(
                "the root key's delegation has ended; run tessera-aggregator rotate keys (it "
                "needs keys/root.key)"
            )
        path = home.delegate_key(delegation.first_serial)
        try:
            delegate = signing_key(read_key(path, KeyKind.ED25519))
        except (OSError, WireError) as error:
            raise AggregatorError(
                f"the delegate's key cannot be used ({error}); run tessera-aggregator rotate keys "
                "(it needs keys/root.key)"
            ) from None
        mandate = _Mandate(delegate, delegation, current.successions)
        maker = _Maker(home, now_unix_seconds, random_bytes, USUAL_LIVES)
        descriptor = maker.issued(mandate, serial, expires)
        until = _grace_ends(current, now_unix_seconds, USUAL_LIVES)
        store.secrets.issue(serial, descriptor.message, until)
    return descriptor


def rotate_keys(
    home: AggregatorHome,
    store: Store,
    now_unix_seconds: int,
    random_bytes: RandomBytes,
    lives: Lives = USUAL_LIVES,
    *,
    after: int = 0,
) -> Descriptor:
    """A new delegate, and a descriptor of its own. Needs the root key. Its serials are above
    ``after``, one that devices have seen and a home from a backup does not know.

    Nothing that the delegate before it signs is believed any more by who has seen the new one.
    """
    with store.database.transaction():
        root = _read_root(home, store)
        maker = _Maker(home, now_unix_seconds, random_bytes, lives)
        descriptor = maker.rotated(store, root, after=after)
        store.facts.keys_problem = None
    tidy_keys(home, store, now_unix_seconds)
    return descriptor


def rotate_root(
    home: AggregatorHome,
    store: Store,
    now_unix_seconds: int,
    random_bytes: RandomBytes,
    lives: Lives = USUAL_LIVES,
) -> Descriptor:
    """A new root key in the place of the old one, which signs that and is erased; see rotate_keys.

    Devices that trust the old root follow, also when they come back after several rotations.
    """
    with store.database.transaction():
        old = _read_root(home, store)
        erase_key(home.next_root_key)  # of a rotation that was cut short: never in force
        seed = generate(KeyKind.ED25519, random_bytes)
        write_key(home.next_root_key, KeyKind.ED25519, seed)
        new = signing_key(seed)
        succession = make_succession(old, new.public_key().public_bytes_raw())
        maker = _Maker(home, now_unix_seconds, random_bytes, lives)
        descriptor = maker.rotated(store, new, succession)
        store.facts.root_fingerprint = descriptor.root_fingerprint
    tidy_keys(home, store, now_unix_seconds)
    return descriptor


def tidy_keys(home: AggregatorHome, store: Store, now_unix_seconds: int) -> None:
    """Erase the keys whose grace is over, and finish what a crash cut short."""
    with store.database.transaction():
        _settle_root(home, store)
        issued = store.secrets.descriptors()
        for each in issued:
            until = each.honoured_until_unix_seconds
            if until is not None and until <= now_unix_seconds:
                erase_key(home.signing_key(each.serial))
                erase_key(home.sessions_key(each.serial))
                erase_key(home.hpke_key(each.serial))
                store.secrets.forget(each.serial)
        _erase_strays(home, store)


def read_serving_keys(
    home: AggregatorHome, store: Store, unix_clock: Callable[[], float]
) -> list[ServingKeys]:
    """The keys of every descriptor that is still honoured, the current one last."""
    current = current_descriptor(store)
    keys = []
    for issued in store.secrets.descriptors():
        until = issued.honoured_until_unix_seconds
        if until is not None and until <= unix_clock():
            continue
        try:
            root = root_of(issued.message)
            if not current.follows_from(root):
                continue  # so many roots ago that no device could follow
            descriptor = read_descriptor(issued.message, root)
            signing = signing_key(read_key(home.signing_key(issued.serial), KeyKind.ED25519))
            sessions = signing_key(read_key(home.sessions_key(issued.serial), KeyKind.ED25519))
            seed = read_key(home.hpke_key(issued.serial), KeyKind.HPKE)
            keys.append(serving_keys(descriptor, signing, sessions, seed, until))
        except (OSError, ValueError, WireError) as error:
            raise AggregatorError(
                f"the keys of descriptor {issued.serial} cannot be used: {error}"
            ) from None
    return keys


def current_descriptor(store: Store) -> Descriptor:
    """The descriptor in force. Raises AggregatorError."""
    issued = _newest(store)
    try:
        return read_descriptor(issued.message, store.facts.root_fingerprint)
    except WireError as error:
        raise AggregatorError(f"the descriptor in force is damaged: {error}") from None


def delegation_problem(descriptor: Descriptor, now_unix_seconds: float) -> str:
    """Of one that ends within a month, or has ended; else empty."""
    ends = descriptor.delegation.expires_unix_seconds
    left = ends - now_unix_seconds
    if left >= _WARN_DAYS * _DAY_SECONDS:
        return ""
    return (
        f"the root key's delegation {'ends' if left > 0 else 'has ended'} at {moment_of(ends)}, "
        "and devices refuse this aggregator from then on: run tessera-aggregator rotate keys (it "
        "needs keys/root.key)"
    )


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes keys of one moment, and writes them into the home."""

    home: AggregatorHome
    now_unix_seconds: int
    random_bytes: RandomBytes
    lives: Lives

    def rotated(
        self,
        store: Store,
        root: Ed25519PrivateKey,
        succession: Succession | None = None,
        after: int = 0,
    ) -> Descriptor:
        """A descriptor of another delegate's, which is in force then."""
        current = current_descriptor(store)
        successions, last = current.successions, current.delegation.last_serial
        until = _grace_ends(current, self.now_unix_seconds, self.lives)
        if succession is not None:
            successions = extend_line(successions, succession)
        first = _first_serial(max(last, after), self.now_unix_seconds)
        descriptor = self.delegated(root, successions, first)
        store.secrets.issue(first, descriptor.message, until)
        return descriptor

    def delegated(
        self, root: Ed25519PrivateKey, successions: Sequence[Succession], first_serial: int
    ) -> Descriptor:
        """The first descriptor of a new delegate's."""
        seed = generate(KeyKind.ED25519, self.random_bytes)
        delegate = signing_key(seed)
        delegation = make_delegation(
            root,
            delegate.public_key().public_bytes_raw(),
            first_serial,
            first_serial + _SERIALS - 1,
            self.now_unix_seconds + self.lives.delegation_seconds,
        )
        _write_anew(self.home.delegate_key(first_serial), KeyKind.ED25519, seed)
        mandate = _Mandate(delegate, delegation, tuple(successions))
        expires = self.now_unix_seconds + self.lives.descriptor_seconds
        return self.issued(mandate, first_serial, expires)

    def issued(self, mandate: _Mandate, serial: int, expires_unix_seconds: int) -> Descriptor:
        """A descriptor with keys of its own."""
        signing_seed = generate(KeyKind.ED25519, self.random_bytes)
        sessions_seed = generate(KeyKind.ED25519, self.random_bytes)
        hpke_seed = generate(KeyKind.HPKE, self.random_bytes)
        _write_anew(self.home.signing_key(serial), KeyKind.ED25519, signing_seed)
        _write_anew(self.home.sessions_key(serial), KeyKind.ED25519, sessions_seed)
        _write_anew(self.home.hpke_key(serial), KeyKind.HPKE, hpke_seed)
        return make_descriptor(
            mandate.delegate,
            mandate.delegation,
            serial,
            self.now_unix_seconds,
            expires_unix_seconds,
            signing_key(signing_seed).public_key().public_bytes_raw(),
            signing_key(sessions_seed).public_key().public_bytes_raw(),
            hpke.public_bytes(hpke_seed),
            mandate.successions,
        )


def _write_anew(path: Path, kind: KeyKind, seed: bytes) -> None:
    erase_key(path)  # of a rotation that was cut short: never published
    write_key(path, kind, seed)


def _first_serial(above: int, now_unix_seconds: int) -> int:
    # By the clock, so that an aggregator that was restored from a backup, and knows nothing of the
    # delegations made since, does not give out their serials again.
    return max(above + 1, now_unix_seconds // _HOUR_SECONDS * _SERIALS)


def _next_serial(current: Descriptor, now_unix_seconds: int) -> int:
    # By the clock as well: one for each hour since the delegation was made.
    delegation = current.delegation
    hours = now_unix_seconds // _HOUR_SECONDS - delegation.first_serial // _SERIALS
    return max(current.serial + 1, delegation.first_serial + hours)


def _grace_ends(replaced: Descriptor, now_unix_seconds: int, lives: Lives) -> int:
    return min(now_unix_seconds + lives.grace_seconds, replaced.expires_unix_seconds)


def _newest(store: Store) -> IssuedDescriptor:
    issued = store.secrets.descriptors()
    if not issued:
        raise AggregatorError("there is no descriptor in force; run tessera-aggregator init")
    return issued[-1]


def _read_root(home: AggregatorHome, store: Store) -> Ed25519PrivateKey:
    _settle_root(home, store)
    root = _signing_key(home.root_key, "the root key")
    if root is None:
        raise AggregatorError(
            f"{home.root_key} is not there: bring the root key back for this command"
        )
    if _fingerprint_of(root) != store.facts.root_fingerprint:
        raise AggregatorError(f"{home.root_key} is the root key of another aggregator")
    return root


def _signing_key(path: Path, what: str) -> Ed25519PrivateKey | None:
    try:
        return signing_key(read_key(path, KeyKind.ED25519))
    except FileNotFoundError:
        return None
    except (OSError, WireError) as error:
        raise AggregatorError(f"{what} cannot be used: {error}") from None


def _settle_root(home: AggregatorHome, store: Store) -> None:
    """A new root that is in force takes the old one's place; one that is not goes."""
    new = _signing_key(home.next_root_key, "the new root key")
    if new is None:
        return
    if _fingerprint_of(new) != store.facts.root_fingerprint:
        erase_key(home.next_root_key)
        return
    erase_key(home.root_key)
    os.replace(home.next_root_key, home.root_key)
    flush_folder(home.keys)


def _erase_strays(home: AggregatorHome, store: Store) -> None:
    """What no row names: left by commands that were cut short, or by delegates of before."""
    issued = store.secrets.descriptors()
    serials = {each.serial for each in issued}
    delegations = {current_descriptor(store).delegation.first_serial}
    for name in sorted(os.listdir(home.keys)):
        found = _KEY_FILE.fullmatch(name)
        if found is None:
            stray = _LEFT_BY_A_CRASH.fullmatch(name) is not None
        else:
            named = delegations if found[1] == "delegate" else serials
            stray = int(found[2]) not in named
        if stray:
            erase_key(home.keys / name)


def _fingerprint_of(root: Ed25519PrivateKey) -> bytes:
    return fingerprint(root.public_key().public_bytes_raw())
