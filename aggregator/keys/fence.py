"""One aggregator a fleet: a copy of the home that serves too is noticed, and one of them ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from aggregator.clock import moment_of
from aggregator.errors import AggregatorError
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.announcement import Presence, read_announcement
from device_sdk.wire.seal.descriptor import Descriptor, read_descriptor

_WAIT_SECONDS = 0.5
_PRESENCE, _DESCRIPTOR = "presence", "descriptor"


def next_start(last_unix_seconds: int | None, now_unix_seconds: int) -> int:
    """Of a home's next life: after its ``last`` one, whatever the calendar says; None: it had
    none."""
    if last_unix_seconds is None:
        return now_unix_seconds
    return max(now_unix_seconds, last_unix_seconds + 1)


class Fence:
    """Listens to the fleet's own presence and descriptor, and says when we may announce ourselves.

    Each life of a home starts later than its last one, as the home remembers it. So a presence
    under our keys that is not ours is of

    * an earlier life of this home: ignored;
    * a life after the last one this home knows of, but before ours: this home is a copy, or an
      older state, of one that served meanwhile. It ends before it has said anything;
    * a life after ours: somebody else took over. The older one ends.

    One whose keys were renewed meanwhile signs with some that this home has never had. Its
    descriptor is under the same root all the same, or under a successor of it: one that is not
    ours, and not older than ours, ends this home's life too.

    Args:
        known_unix_seconds: start of this home's last life before ours that passed; None if none
            did.
        descriptors: those whose keys may have signed, the one in force last.
        clock: monotonic seconds.
        unix_clock: Unix time in seconds.
    """

    def __init__(
        self,
        ours: Presence,
        known_unix_seconds: int | None,
        folder: Path,
        descriptors: Callable[[], Sequence[Descriptor]],
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
    ) -> None:
        self._ours = ours
        self.started_unix_seconds = ours.started_unix_seconds
        """Of our life."""
        self._known_unix_seconds = known_unix_seconds
        self._folder = folder
        self._descriptors = descriptors
        self._clock, self._unix_clock = clock, unix_clock
        self._until_seconds: float | None = None
        self._awaited: set[str] = set()
        self.passed = False
        """Whether :meth:`may_announce` was true since the last connection."""

    def connected(self) -> None:
        """A connection was made: what the broker retains comes first, or nothing does."""
        self.passed = False
        self._until_seconds = self._clock() + _WAIT_SECONDS
        self._awaited = {_PRESENCE, _DESCRIPTOR}

    def heard_presence(self, message: bytes) -> None:
        """A presence came. Raises AggregatorError where another aggregator serves the fleet,
        ``WireError`` for one that none of our keys signed."""
        presence = self._read(message)
        self._came(_PRESENCE)
        if presence.incarnation == self._ours.incarnation:
            return
        theirs, ours = _order(presence), _order(self._ours)
        started = moment_of(presence.started_unix_seconds)
        if theirs > ours:
            raise AggregatorError(
                f"another serve with this aggregator's keys started at {started} "
                f"and has taken the fleet over: {self._folder} and its home are copies of one "
                f"another, and only one may serve. {self._remedy(presence)}"
            )
        known = self._known_unix_seconds
        if known is not None and presence.started_unix_seconds > known:
            raise AggregatorError(
                f"a serve with this aggregator's keys, of which {self._folder} knows nothing, "
                f"started at {started}: this home is a copy, or was restored "
                f"from a backup. {self._remedy(presence)}"
            )

    def heard_descriptor(self, message: bytes) -> None:
        """A descriptor came. Raises AggregatorError where another aggregator uses keys that this
        home does not have, ``WireError`` for one that does not follow from our root."""
        known = self._descriptors()
        if any(message == each.message for each in known):
            self._came(_DESCRIPTOR)
            return
        ours = known[-1]
        theirs = read_descriptor(message, ours.root_fingerprint)
        self._came(_DESCRIPTOR)
        if theirs.root != ours.root:
            raise AggregatorError(
                "the fleet's root key was replaced, and the new one is among keys that "
                f"{self._folder} knows nothing of: this home is a copy, or was restored from a "
                "backup made before that. Use a home from after it. If there is none, run "
                "tessera-aggregator restored and then rotate root, both with --home "
                f"{self._folder}, start serve, and run tessera-device trust on each device"
            )
        if theirs.serial >= ours.serial:
            keys = (
                f"keys that {self._folder} knows nothing of (descriptor {theirs.serial}; ours is "
                f"{ours.serial})"
            )
            remedy = self._remedy(newer=theirs)
            if self.passed:
                raise AggregatorError(
                    f"another serve has taken the fleet over, with {keys}: its home and "
                    f"{self._folder} are copies of one another, and only one may serve. {remedy}"
                )
            raise AggregatorError(
                f"a serve of this fleet used {keys}: this home is a copy, or was restored from a "
                f"backup. {remedy}"
            )

    def may_announce(self) -> bool:
        """True once for each connection, when nothing that came speaks against it."""
        if self._until_seconds is None or self._clock() < self._until_seconds:
            return False
        self._until_seconds = None
        self.passed = True
        return True

    def _read(self, message: bytes) -> Presence:
        wrong = WireError("unknown-descriptor", "no descriptor of ours is honoured")
        for descriptor in self._descriptors():
            try:
                return read_announcement(Presence, message, descriptor)
            except WireError as error:
                wrong = error
        raise wrong

    def _came(self, what: str) -> None:
        self._awaited.discard(what)
        if self._until_seconds is not None and not self._awaited:
            self._until_seconds = self._clock()

    def _remedy(self, presence: Presence | None = None, newer: Descriptor | None = None) -> str:
        home = f"--home {self._folder}"
        commands = [f"tessera-aggregator restored {home}"]
        if presence is not None and presence.started_unix_seconds >= int(self._unix_clock()):
            # Its clock was ahead: by ours the next start could be too early again.
            commands[0] += f" --after {presence.started_unix_seconds}"
        if newer is not None:
            # By this machine's clock alone, which may be behind, devices could refuse the next too.
            above = newer.delegation.last_serial
            commands.append(f"tessera-aggregator rotate keys {home} --after {above}")
        return (
            "If the other one is to go on, leave this one stopped. If this one is, stop the other "
            f"for good, run {' and '.join(commands)}, and start serve"
        )


def _order(presence: Presence) -> tuple[int, bytes]:
    return presence.started_unix_seconds, presence.incarnation
