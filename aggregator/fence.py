"""One aggregator a fleet: a copy of the home that serves too is noticed, and one of them ends."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from pathlib import Path

from aggregator.errors import AggregatorError
from device_sdk.wire.descriptor import Descriptor, read_descriptor
from device_sdk.wire.errors import WireError
from device_sdk.wire.presence import Presence, read_presence

__all__ = ["Fence"]

_WAIT_SECONDS = 0.5


class Fence:
    """Listens to the fleet's own presence and descriptor topics, and says when we may announce
    ourselves.

    Each life of a home starts later than its last one, as the home remembers it. So a presence
    under our keys that is not ours is of

    * an earlier life of this home: ignored;
    * a life after the last one this home knows of, but before ours: this home is a copy, or an
      older state, of one that served meanwhile. It ends before it has said anything;
    * a life after ours: somebody else took over. The older one ends.

    The other one may have renewed its descriptor, or rotated its keys, after the copy was made: so
    a descriptor that follows from our root, and is not older than ours, counts as one of ours.

    Args:
        known_unix_seconds: start of this home's last life before ours; None if it never served,
            or not with a version that wrote it down.
        descriptors: those of this home whose keys may have signed, the newest last.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        ours: Presence,
        known_unix_seconds: int | None,
        folder: Path,
        descriptors: Callable[[], Iterable[Descriptor]],
        clock: Callable[[], float],
    ) -> None:
        self._ours = ours
        self._known_unix_seconds = known_unix_seconds
        self._folder = folder
        self._descriptors = descriptors
        self._clock = clock
        self._until_seconds: float | None = None
        self._shown: Descriptor | None = None
        self._unread = b""
        self.passed = False
        """Whether :meth:`may_announce` was true since the last connection."""

    def connected(self) -> None:
        """A connection was made: what the broker retains comes first, or nothing does."""
        self.passed = False
        self._until_seconds = self._clock() + _WAIT_SECONDS

    def shown(self, message: bytes) -> None:
        """A descriptor came. Raises AggregatorError where another aggregator made it and serves the
        fleet, ``WireError`` for one that does not follow from our root."""
        ours = list(self._descriptors())
        if not ours or message in (each.message for each in ours):
            return
        descriptor = read_descriptor(message, ours[-1].root_fingerprint)
        if descriptor.root == ours[-1].root and descriptor.serial < ours[-1].serial:
            return  # what the broker kept of ours, or what keys make that were replaced since
        self._shown = descriptor
        if self._unread:
            self.heard(self._unread)  # topics keep no order among each other

    def heard(self, message: bytes) -> None:
        """A presence came. Raises AggregatorError where another aggregator serves the fleet,
        ``WireError`` for one that none of our keys signed."""
        presence = self._read(message)
        if self._until_seconds is not None:
            self._until_seconds = self._clock()
        if presence.incarnation == self._ours.incarnation:
            return
        theirs, ours = _order(presence), _order(self._ours)
        started = _moment(presence.started_unix_seconds)
        if theirs > ours:
            raise AggregatorError(
                f"another serve with this aggregator's keys started at {started} "
                f"and has taken the fleet over: {self._folder} and its home are copies of one "
                f"another, and only one may serve. {self._remedy()}"
            )
        known = self._known_unix_seconds
        if known is not None and presence.started_unix_seconds > known:
            raise AggregatorError(
                f"a serve with this aggregator's keys, of which {self._folder} knows nothing, "
                f"started at {started}: this home is a copy, or came back "
                f"from a backup. {self._remedy()}"
            )

    def may_announce(self) -> bool:
        """True once for each connection, when nothing that came speaks against it."""
        if self._until_seconds is None or self._clock() < self._until_seconds:
            return False
        self._until_seconds = None
        self.passed = True
        return True

    def _read(self, message: bytes) -> Presence:
        self._unread = b""
        wrong = WireError("unknown-descriptor", "no descriptor of ours is honoured")
        strange = [] if self._shown is None else [self._shown]
        for descriptor in (*strange, *self._descriptors()):
            try:
                return read_presence(message, descriptor)
            except WireError as error:
                wrong = error
        if wrong.reason == "bad-signature":
            self._unread = message
        raise wrong

    def _remedy(self) -> str:
        return (
            "If the other one is to go on, leave this one stopped. If this one is, stop the other "
            f"for good, run tessera-aggregator restored --home {self._folder}, and start serve"
        )


def _order(presence: Presence) -> tuple[int, bytes]:
    return presence.started_unix_seconds, presence.incarnation


def _moment(unix_seconds: int) -> str:
    try:
        moment = datetime.datetime.fromtimestamp(unix_seconds, datetime.UTC)
    except (OSError, OverflowError, ValueError):  # a calendar that was set beyond the year 9999
        return f"second {unix_seconds} of Unix time"
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
