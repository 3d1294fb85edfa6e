"""The aggregator's folder: where its keys, its database and its task file lie."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from aggregator.errors import AggregatorError
from aggregator.store import Database, Store

__all__ = ["Home"]


@dataclass(frozen=True, slots=True)
class Home:
    """The layout. ``root.key`` may be moved away: only ``rotate`` needs it."""

    folder: Path

    @property
    def keys(self) -> Path:
        """Folder of the key files, mode 0700."""
        return self.folder / "keys"

    @property
    def root_key(self) -> Path:
        """The root's private key."""
        return self.keys / "root.key"

    @property
    def next_root_key(self) -> Path:
        """The root key to be, until ``rotate root`` has put it in the place of the old one."""
        return self.keys / "next-root.key"

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return self.folder / "aggregator.sqlite"

    @property
    def task_file(self) -> Path:
        """What is learnt, and how."""
        return self.folder / "task.toml"

    def delegate_key(self, first_serial: int) -> Path:
        """The key that signs the descriptors of a delegation, named by its first serial."""
        return self.keys / f"delegate-{first_serial}.key"

    def signing_key(self, serial: int) -> Path:
        """The online signing key of a descriptor."""
        return self.keys / f"signing-{serial}.key"

    def hpke_key(self, serial: int) -> Path:
        """The HPKE key of a descriptor."""
        return self.keys / f"hpke-{serial}.key"

    def make(self) -> None:
        """Make the folders. Raises AggregatorError when they cannot be made or are in use."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.keys.mkdir(mode=0o700, exist_ok=True)
            taken = sorted(os.listdir(self.keys))
        except OSError as error:
            raise AggregatorError(f"{self.folder} cannot be made: {error}") from None
        if taken or self.database.exists():
            raise AggregatorError(
                f"{self.folder} holds an aggregator already; choose another --home, or keep this"
            )

    def open_store(self) -> Store:
        """The store. Raises AggregatorError when there is none."""
        return Store(Database(self.database))
