"""The keys in force while serving: read again when the operator, or a round, changed them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from aggregator.errors import AggregatorError
from aggregator.home import Home
from aggregator.key_folder import read_serving_keys
from aggregator.store import Store
from device_sdk.wire.descriptor import Descriptor
from device_sdk.wire.errors import WireError
from device_sdk.wire.group_key import GroupKey
from device_sdk.wire.keyring import Keyring, ServingKeys

__all__ = ["FleetKeys"]

_LOG = logging.getLogger(__name__)
_DAY_SECONDS = 86_400
_WARN_DAYS = 30


class FleetKeys:
    """Serving keys and group keys. ``watch`` what must be told of another keyring.

    Warns in the log, once a day, in the last month before the descriptor expires.
    """

    def __init__(self, home: Home, store: Store, unix_clock: Callable[[], float]) -> None:
        self._home = home
        self._store = store
        self._unix_clock = unix_clock
        self._watchers: list[Callable[[Keyring], None]] = []
        self._next_warning_unix = 0.0
        self._serving = self._read()
        self._warn_of_expiry()
        self._group_keys = store.secrets.group_keys()

    @property
    def keyring(self) -> Keyring:
        """All keys that are honoured."""
        return Keyring(self._serving)

    def current(self) -> ServingKeys:
        """The keys of the descriptor in force."""
        return self._serving[-1]

    def descriptors(self) -> list[Descriptor]:
        """Those that are honoured, the one in force last."""
        return [each.descriptor for each in self._serving]

    def group_keys(self) -> tuple[GroupKey, ...]:
        """What a session's reply tells."""
        return self._group_keys

    def watch(self, replace_keyring: Callable[[Keyring], None]) -> None:
        """Call this with every new keyring."""
        self._watchers.append(replace_keyring)

    def refresh(self) -> bool:
        """Read the store again; whether another descriptor is in force."""
        self._group_keys = self._store.secrets.group_keys()
        self._warn_of_expiry()
        newest = self._store.secrets.descriptors()[-1].serial
        if newest == self.current().descriptor.serial:
            return False
        self._serving = self._read()
        for replace_keyring in self._watchers:
            replace_keyring(self.keyring)
        return True

    def _warn_of_expiry(self) -> None:
        now = self._unix_clock()
        left = self.current().descriptor.expires_unix_seconds - now
        if left >= _WARN_DAYS * _DAY_SECONDS or now < self._next_warning_unix:
            return
        self._next_warning_unix = now + _DAY_SECONDS
        when = f"expires in {left / _DAY_SECONDS:.1f} days" if left > 0 else "has expired"
        _LOG.warning(
            "the descriptor %s, and devices refuse it from then on: run tessera-aggregator rotate "
            "keys (it needs keys/root.key)",
            when,
        )

    def _read(self) -> list[ServingKeys]:
        keys = read_serving_keys(self._home, self._store, self._unix_clock)
        if not keys:
            raise AggregatorError("there is no descriptor in force; run tessera-aggregator init")
        try:
            keys[-1].descriptor.require_unexpired(int(self._unix_clock()))
        except WireError as error:
            raise AggregatorError(f"{error}; run tessera-aggregator rotate keys") from None
        return keys
