"""Who may use the console, as what: a file of the home, which only its owner can read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from aggregator.errors import AggregatorError
from device_sdk.system.files import read_small, write_atomically
from device_sdk.system.lock import FileLock

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_LEAST_CHARACTERS, MOST_CHARACTERS = 10, 1024
_MOST_BYTES = 4 << 20
_VERSION = 1


class Role(StrEnum):
    """What somebody may do: look, or everything."""

    VIEWER = "viewer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class ConsoleUser:
    """``password``: its argon2id hash; None for one whom a reverse proxy lets in alone."""

    name: str
    role: Role
    password: str | None

    @property
    def can_operate(self) -> bool:
        return self.role is Role.OPERATOR


class ConsoleUsers:
    """The file, read anew whenever it has changed: what a command writes holds from the next
    request on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: object = None
        self._found: Mapping[str, ConsoleUser] = {}

    def all(self) -> Mapping[str, ConsoleUser]:
        """By name. Raises AggregatorError."""
        try:
            state = self._path.stat()
            seen = (state.st_ino, state.st_mtime_ns, state.st_size)
            if seen != self._seen:
                self._found = _read(read_small(self._path, _MOST_BYTES))
                self._seen = seen
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            # Whoever has not logged in reads this, too: it says no path.
            said = error.strerror if isinstance(error, OSError) else error
            raise AggregatorError(
                f"the home's {self._path.name} cannot be read ({said}): put a copy back, or remove "
                "it and add the users again with tessera-aggregator console user add"
            ) from None
        return self._found

    def find(self, name: str) -> ConsoleUser | None:
        """Raises AggregatorError."""
        return self.all().get(name)

    def require(self, name: str) -> None:
        """Raises AggregatorError for a user that there is not."""
        _known(self.all(), name)

    def require_new(self, name: str) -> None:
        """Raises AggregatorError for a name that is taken, or none."""
        if not _NAME.fullmatch(name):
            raise AggregatorError(
                f"{name!r} is no user's name: 1 to 64 of A-Z a-z 0-9 . _ @ -, the first of them a "
                "letter or a digit"
            )
        if name in self.all():
            raise AggregatorError(f"there is a user {name} already: see console user password")

    def add(self, user: ConsoleUser) -> None:
        """Raises AggregatorError."""
        with self._changing() as users:
            self.require_new(user.name)
            users[user.name] = user

    def change(self, name: str, changed: Callable[[ConsoleUser], ConsoleUser]) -> ConsoleUser:
        """Raises AggregatorError."""
        with self._changing() as users:
            users[name] = changed(_known(users, name))
            return users[name]

    def remove(self, name: str) -> None:
        """Raises AggregatorError."""
        with self._changing() as users:
            del users[_known(users, name).name]

    @contextmanager
    def _changing(self) -> Iterator[dict[str, ConsoleUser]]:
        lock = FileLock(self._path.with_name(f"{self._path.name}.lock"))
        try:
            if not lock.try_acquire():
                raise AggregatorError(f"{self._path} is being changed by another command")
            users = dict(self.all())
            yield users
            said = {
                "version": _VERSION,
                "users": [asdict(users[name]) for name in sorted(users)],
            }
            write_atomically(self._path, json.dumps(said, indent=2).encode() + b"\n")
        finally:
            lock.close()


def _read(content: bytes) -> dict[str, ConsoleUser]:
    said: Any = json.loads(content)
    if said["version"] != _VERSION:
        raise ValueError(f"it is of version {said['version']!r}, and this release reads {_VERSION}")
    found = [
        ConsoleUser(str(each["name"]), Role(each["role"]), each["password"])
        for each in said["users"]
    ]
    if not all(isinstance(each.password, str | None) for each in found):
        raise ValueError("a password's hash is no text")
    return {each.name: each for each in found}


def _known(users: Mapping[str, ConsoleUser], name: str) -> ConsoleUser:
    if name not in users:
        raise AggregatorError(f"there is no user {name!r}; there is {', '.join(users) or 'none'}")
    return users[name]


# Passwords.


def hashed(password: str) -> str:
    """Its argon2id hash. Raises AggregatorError for one that is too short to be one."""
    if not _LEAST_CHARACTERS <= len(password) <= MOST_CHARACTERS:
        raise AggregatorError(
            f"a password has {_LEAST_CHARACTERS} to {MOST_CHARACTERS} characters; this one has "
            f"{len(password)}"
        )
    return PasswordHasher().hash(password)


class PasswordCheck:
    """Says whether a password is a user's. It takes as long for a name that nobody has."""

    def __init__(self, hasher: PasswordHasher | None = None) -> None:
        self._hasher = hasher or PasswordHasher()
        self._nobodys = self._hasher.hash("nobody has this one")

    def __call__(self, user: ConsoleUser | None, password: str) -> bool:
        known = None if user is None else user.password
        try:
            return self._hasher.verify(known or self._nobodys, password) and known is not None
        except (VerificationError, InvalidHashError):
            return False
