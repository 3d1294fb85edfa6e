"""Leaving the fleet: told to the aggregator until it answers."""

from __future__ import annotations

import math

from device_sdk.rounds.actions import Actions, Publish
from device_sdk.rounds.session import SessionKeeper
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.receipts import Receipt, RecordType, leave_digest
from device_sdk.world import DeviceWorld


class Farewell:
    """One record, again and again, under whatever session is open."""

    def __init__(self, world: DeviceWorld, sessions: SessionKeeper, actions: Actions) -> None:
        self._home, self._pace, self._clock = world.home, world.pace, world.clock
        self._digest = leave_digest(world.membership.grant.device_id)
        self._sessions = sessions
        self._actions = actions
        self._next_seconds = 0.0
        self._unanswered = 0
        self.done = False
        """Whether the aggregator has heard it; the home says so too."""

    def session_opened(self) -> None:
        """There is a new session: say it at once."""
        self._next_seconds, self._unanswered = 0.0, 0

    def on_receipt(self, receipt: Receipt) -> None:
        """A receipt came."""
        if receipt.digest == self._digest:
            self._home.membership.leave()
            self.done = True

    def tick(self) -> None:
        """Say it, if that is due."""
        now = self._clock()
        if now < self.next_seconds():
            return
        self._next_seconds = now + self._pace.answer_seconds
        if self._unanswered >= self._pace.unanswered_sends:
            # The aggregator may have forgotten the session: the next one comes under a new one.
            self._sessions.reopen()
            return
        self._unanswered += 1
        try:
            sealed = self._sessions.seal(RecordType.LEAVE, b"")
        except WireError:
            return  # the session has just run out: the keeper opens another
        self._actions.append(Publish(self._sessions.up_topic, sealed))

    def next_seconds(self) -> float:
        """The monotonic time at which :meth:`tick` has something to do; infinite for never."""
        if self.done or not self._sessions.is_open:
            return math.inf
        return self._next_seconds
