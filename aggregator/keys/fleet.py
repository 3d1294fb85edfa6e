"""The keys in force while serving: renewed in time, and read again when somebody changed them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from aggregator.clock import moment_of
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.keys.folder import read_serving_keys, renew_descriptor, tidy_keys
from aggregator.store import Store
from device_sdk.wire.seal.broadcast import MOST_KEYS, GroupKey
from device_sdk.wire.seal.descriptor import Descriptor
from device_sdk.wire.seal.keyring import Keyring, ServingKeys
from device_sdk.wire.seal.keys import RandomBytes

_LOG = logging.getLogger(__name__)
_DAY_SECONDS = 86_400
_WARN_DAYS = 30
# Shares of a descriptor's life that are left when it is renewed.
_LEFT_BETWEEN_ROUNDS = 1 / 3
_LEFT_AT_MOST = 1 / 6


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
        ends = self.current().descriptor.delegation.expires_unix_seconds
        left = ends - self._unix_clock()
        if left >= _WARN_DAYS * _DAY_SECONDS:
            return self._cannot_renew
        return (
            f"the root key's delegation {'ends' if left > 0 else 'has ended'} at "
            f"{moment_of(ends)}, and devices refuse this aggregator from then on: run "
            "tessera-aggregator rotate keys (it needs keys/root.key)"
        )

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
            _LOG.error("%s", self._cannot_renew)
            self._next_try_seconds = self._next_warning_seconds = self._clock() + _DAY_SECONDS
            return
        _LOG.info(
            "the descriptor was renewed; the next holds for %.1f days",
            (renewed.expires_unix_seconds - now_unix_seconds) / _DAY_SECONDS,
        )
        self._replace(self._read())

    def _left_seconds(self) -> float:
        return self.current().descriptor.expires_unix_seconds - self._unix_clock()

    def _warn(self) -> None:
        now = self._clock()
        if self.problem and now >= self._next_warning_seconds:
            self._next_warning_seconds = now + _DAY_SECONDS
            _LOG.warning("%s", self.problem)

    def _replace(self, serving: list[ServingKeys]) -> None:
        self._serving, self._cannot_renew = serving, ""
        for replace_keyring in self._watchers:
            replace_keyring(self.keyring)

    def _read(self) -> list[ServingKeys]:
        ends = [each.honoured_until_unix_seconds for each in self._store.secrets.descriptors()]
        # Of the next keys to be erased, those included that are honoured no more.
        self._grace_ends_unix = min((end for end in ends if end is not None), default=math.inf)
        return read_serving_keys(self._home, self._store, self._unix_clock)
