"""The keys in force while serving: read again when the operator, or a round, changed them."""

from __future__ import annotations

from collections.abc import Callable

from aggregator.errors import AggregatorError
from aggregator.home import Home
from aggregator.key_folder import read_serving_keys
from aggregator.store import Store
from device_sdk.wire.errors import WireError
from device_sdk.wire.group_key import GroupKey
from device_sdk.wire.keyring import Keyring, ServingKeys

__all__ = ["FleetKeys"]


class FleetKeys:
    """Serving keys and group keys. ``watch`` what must be told of another keyring."""

    def __init__(self, home: Home, store: Store, unix_clock: Callable[[], float]) -> None:
        self._home = home
        self._store = store
        self._unix_clock = unix_clock
        self._watchers: list[Callable[[Keyring], None]] = []
        self._serving = self._read()
        self._group_keys = store.secrets.group_keys()

    @property
    def keyring(self) -> Keyring:
        """All keys that are honoured."""
        return Keyring(self._serving)

    def current(self) -> ServingKeys:
        """The keys of the descriptor in force."""
        return self._serving[-1]

    def group_keys(self) -> tuple[GroupKey, ...]:
        """What a session's reply tells."""
        return self._group_keys

    def watch(self, replace_keyring: Callable[[Keyring], None]) -> None:
        """Call this with every new keyring."""
        self._watchers.append(replace_keyring)

    def refresh(self) -> bool:
        """Read the store again; whether another descriptor is in force."""
        self._group_keys = self._store.secrets.group_keys()
        newest = self._store.secrets.descriptors()[-1].serial
        if newest == self.current().descriptor.serial:
            return False
        self._serving = self._read()
        for replace_keyring in self._watchers:
            replace_keyring(self.keyring)
        return True

    def _read(self) -> list[ServingKeys]:
        keys = read_serving_keys(self._home, self._store, self._unix_clock)
        if not keys:
            raise AggregatorError("there is no descriptor in force; run tessera-aggregator init")
        try:
            keys[-1].descriptor.require_unexpired(int(self._unix_clock()))
        except WireError as error:
            raise AggregatorError(f"{error}; run tessera-aggregator rotate keys") from None
        return keys
