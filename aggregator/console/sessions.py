"""Who is logged in: random tokens, of which only a hash is kept, in memory; and how often somebody
may try."""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from aggregator.console.users import ConsoleUser, ConsoleUsers
from device_sdk.wire.seal.keys import RandomBytes

IDLE_SECONDS = 2 * 3600.0
LONGEST_SECONDS = 12 * 3600.0
_MOST_OF_ALL, _MOST_OF_ONE = 4096, 32
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Visitor:
    """Whoever asks, and the token that stands in each of his forms, which nobody else knows."""

    user: ConsoleUser
    form_token: str

    def owns(self, form_token: str) -> bool:
        """Whether a form is of a page that was made for him."""
        return hmac.compare_digest(form_token.encode(), self.form_token.encode())


@dataclass(frozen=True, slots=True)
class _Session:
    """``password``: the hash at login: with another one it ends."""

    name: str
    password: str | None
    form_token: str
    began_seconds: float
    used_seconds: float


class Sessions:
    """``clock``: monotonic seconds. They end with the process."""

    def __init__(
        self, users: ConsoleUsers, clock: Callable[[], float], random_bytes: RandomBytes
    ) -> None:
        self._users, self._clock, self._random_bytes = users, clock, random_bytes
        self._known: OrderedDict[bytes, _Session] = OrderedDict()

    def begin(self, user: ConsoleUser) -> str:
        """The token of a new session, always one that nobody has seen before."""
        token, form_token = (self._random_bytes(_TOKEN_BYTES).hex() for _ in range(2))
        now = self._clock()
        own = [key for key, each in self._known.items() if each.name == user.name]
        for key in own[: max(0, len(own) - _MOST_OF_ONE + 1)]:
            del self._known[key]
        while len(self._known) >= _MOST_OF_ALL:
            self._known.popitem(last=False)
        self._known[_key(token)] = _Session(user.name, user.password, form_token, now, now)
        return token

    def find(self, token: str, *, used: bool = True) -> Visitor | None:
        """Whose it is, if it has not ended. ``used``: by him, and not by a page that is open.
        Raises AggregatorError."""
        key, now = _key(token), self._clock()
        session = self._known.get(key)
        if session is None:
            return None
        user = self._users.find(session.name)
        if (
            user is None
            or user.password != session.password
            or now - session.used_seconds >= IDLE_SECONDS
            or now - session.began_seconds >= LONGEST_SECONDS
        ):
            del self._known[key]
            return None
        if used:
            self._known[key] = replace(session, used_seconds=now)
        return Visitor(user, session.form_token)

    def end(self, token: str) -> None:
        """Log out."""
        self._known.pop(_key(token), None)


def _key(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


class TriedTooOften(Exception):
    """``seconds``: how long to wait."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"too many attempts: try again in {seconds:.0f} s")
        self.seconds = seconds


_FREE_ATTEMPTS = 4
_LONGEST_BY_NAME, _LONGEST_BY_ADDRESS = 60.0, 900.0
_FORGOTTEN_SECONDS = 3600.0
_MOST_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class _Attempts:
    failed: int
    last_seconds: float


class LoginLimits:
    """After a few failures each further attempt has to wait twice as long as the one before: by the
    name, for a minute at most, so that nobody keeps anybody out for long; by the address, for a
    quarter of an hour. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: OrderedDict[tuple[str, str], _Attempts] = OrderedDict()

    def attempt(self, name: str, address: str) -> None:
        """One begins, which counts as failed until it has succeeded: many at once are many. Raises
        TriedTooOften."""
        now, kinds = self._clock(), _kinds(name, address)
        waits = [self._wait(kind, most, now) for kind, most in kinds]
        if max(waits) > 0:
            raise TriedTooOften(max(waits))
        for kind, _ in kinds:
            failed = self._failed(kind, now)
            self._known[kind] = _Attempts(failed + 1, now)
            self._known.move_to_end(kind)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def succeeded(self, name: str, address: str) -> None:
        """It was the right password: whoever knows one may still not guess others' from there."""
        by_name, by_address = (kind for kind, _ in _kinds(name, address))
        self._known.pop(by_name, None)
        found = self._known.get(by_address)
        if found is not None:
            self._known[by_address] = replace(found, failed=found.failed - 1)

    def _failed(self, kind: tuple[str, str], now: float) -> int:
        found = self._known.get(kind)
        forgotten = found is None or now - found.last_seconds >= _FORGOTTEN_SECONDS
        return 0 if found is None or forgotten else found.failed

    def _wait(self, kind: tuple[str, str], most: float, now: float) -> float:
        failed = self._failed(kind, now)
        if failed < _FREE_ATTEMPTS:
            return 0.0
        pause = min(most, 2.0 ** min(failed - _FREE_ATTEMPTS, 20))
        return max(0.0, self._known[kind].last_seconds + pause - now)


def _kinds(name: str, address: str) -> tuple[tuple[tuple[str, str], float], ...]:
    return (
        (("name", name[:64]), _LONGEST_BY_NAME),
        (("address", address[:64]), _LONGEST_BY_ADDRESS),
    )
