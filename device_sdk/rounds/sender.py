"""Sends what is in the outbox until each update has its receipt."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from device_sdk.home.round_store import OutboxRow
from device_sdk.rounds import Actions, Publish
from device_sdk.rounds.session import SessionKeeper
from device_sdk.system.clock import Backoff
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.chunks import LEAST_PART_BYTES, PART_BYTES, split
from device_sdk.wire.publish.receipts import (
    Receipt,
    RecordType,
    UpdateIdentity,
    with_report,
    write_update,
)
from device_sdk.wire.seal.session import payload_within
from device_sdk.world import DeviceWorld

_MOST_AROUND_BYTES = 512
"""What a packet has beside its message: its header, and the topic."""


@dataclass(slots=True)
class _Waiting:
    row: OutboxRow
    backoff: Backoff
    next_seconds: float
    unanswered: int = 0
    repeated: bool = False
    """Whether the early repetition was made: one for each update and connection."""
    deadline_seconds: float = math.inf
    """Of its round, by this device's clock: infinite after a restart."""


class Sender:
    """Seals each update afresh for every send; the plaintext's bytes are always the stored ones.

    An update without a receipt may have been counted or not, so none is ever thrown away: with
    ``most_outbox_updates`` or ``most_outbox_bytes`` (of bodies; the last one may go beyond it) in
    the outbox, what is given up are rounds to come, and only until receipts come. Reports alone are
    in nobody's way: a device that trained while many rounds went by has as many to send at once,
    and takes part in the one that is open.
    """

    def __init__(self, world: DeviceWorld, sessions: SessionKeeper, actions: Actions) -> None:
        self._store = world.home.rounds
        self._device_id = world.membership.grant.device_id
        self._options, self._pace = world.options, world.pace
        self._clock, self._rng = world.clock, world.rng
        self._sessions = sessions
        self._actions = actions
        self._connected = False
        self._part_bytes = PART_BYTES
        self.waiting: dict[bytes, _Waiting] = {}
        """Updates without a receipt, by digest."""
        self.sent_bytes = 0
        """Bytes of all envelopes with updates since the process started."""
        for row in self._store.outbox():
            self.add(row)

    @property
    def obstacle(self) -> str:
        """Why no further round is begun, for people; empty while one may be."""
        bodies = [len(each.row.body) for each in self.waiting.values() if each.row.body]
        updates, options = len(bodies), self._options
        if updates < options.most_outbox_updates and sum(bodies) < options.most_outbox_bytes:
            return ""
        return (
            f"{updates} updates ({sum(bodies):,} bytes) wait for receipts that do not come; no "
            "further round is trained until one does"
        )

    @property
    def is_full(self) -> bool:
        """Whether no report is to be added of a round that ended without an update."""
        return bool(self.obstacle) or len(self.waiting) >= self._options.most_outbox_updates

    def waits_for(self, task: str) -> bool:
        """Whether an update of the task is without its receipt."""
        rows = (each.row for each in self.waiting.values())
        return any(row.task == task and row.body for row in rows)

    def left_seconds(self) -> float:
        """Until the first deadline of a round that an update waits for; infinite for none."""
        now = self._clock()
        left = (each.deadline_seconds - now for each in self.waiting.values())
        return min((each for each in left if each > 0), default=math.inf)

    def add(self, row: OutboxRow, deadline_seconds: float = math.inf) -> None:
        """Send an update that lies in the outbox from now on; ``deadline_seconds`` of its round, by
        this device's clock."""
        backoff = Backoff(
            self._rng,
            first_seconds=self._pace.answer_seconds,
            most_seconds=self._pace.most_seconds,
        )
        self.waiting[row.digest] = _Waiting(
            row, backoff, self._clock(), deadline_seconds=deadline_seconds
        )
        self._sessions.needed_within(self.left_seconds())

    def connected(self, value: bool, most_packet_bytes: int | None = None) -> None:
        """The broker's connection came or went; after a new one everything is sent at once, in
        packets of the size that this broker takes, None for any."""
        self._connected = value
        if value:
            most = PART_BYTES
            if most_packet_bytes is not None:
                most = min(most, payload_within(most_packet_bytes - _MOST_AROUND_BYTES))
            self._part_bytes = max(LEAST_PART_BYTES, most)
        if value:
            for waiting in self.waiting.values():
                waiting.backoff.reset()
                waiting.repeated = False
            self.hurry()

    def too_large(self) -> None:
        """The broker refused a part for its size, which its word at the connection had allowed."""
        if self._part_bytes > LEAST_PART_BYTES:
            self._part_bytes = max(LEAST_PART_BYTES, self._part_bytes // 2)
            self.hurry()

    def session_opened(self) -> None:
        """There is a new session: what was not answered under the old one is sent under it.

        Waits go on growing: the session may be new only because receipts do not come.
        """
        for waiting in self.waiting.values():
            waiting.unanswered = 0
        self.hurry()

    def on_receipt(self, receipt: Receipt) -> OutboxRow | None:
        """A receipt came: the update's row is settled and gone. None when nothing waited for it."""
        row = self._store.settle(receipt)
        if row is not None:
            self.waiting.pop(row.digest, None)
        return row

    def tick(self) -> None:
        """Send what is due."""
        now = self._clock()
        if now < self.next_seconds():
            return
        for waiting in list(self.waiting.values()):
            if now < waiting.next_seconds:
                continue
            if waiting.unanswered >= self._pace.unanswered_sends:
                # The aggregator may have forgotten the session: the next send is under a new one.
                self._sessions.reopen()
                waiting.next_seconds = math.inf
                continue
            in_parts = self._send(waiting.row)
            waiting.unanswered += 1
            # Never sooner than a receipt can be expected; longer waits have full jitter.
            answer_seconds = self._pace.answer_seconds
            if waiting.repeated or in_parts:
                wait_seconds = max(answer_seconds, waiting.backoff.next_seconds())
            else:
                waiting.repeated = True
                soon = self._pace.repeat_seconds * float(self._rng.uniform(1.0, 1.5))
                wait_seconds = min(soon, answer_seconds)
            waiting.next_seconds = now + wait_seconds

    def next_seconds(self) -> float:
        """The monotonic time at which :meth:`tick` has something to do; infinite for never."""
        if not self._connected or not self._sessions.is_open:
            return math.inf
        return min((each.next_seconds for each in self.waiting.values()), default=math.inf)

    def hurry(self) -> None:
        """Something may be sent sooner than it was to be."""
        for waiting in self.waiting.values():
            # One that waits for a session keeps waiting for it.
            if waiting.unanswered < self._pace.unanswered_sends:
                waiting.next_seconds = self._clock()

    def _send(self, row: OutboxRow) -> bool:
        """Whether it goes in parts."""
        content, kind = row.body, RecordType.UPDATE
        if row.report is not None:
            content, kind = with_report(row.report, row.body), RecordType.CONTRIBUTION
        identity = UpdateIdentity(self._device_id, row.task, row.generation, row.round)
        payload = write_update(identity, content)
        # What one envelope carries at this broker, by all that is known of it.
        found = self._sessions.placement.packet_bytes
        told = payload_within(found - _MOST_AROUND_BYTES) if found else PART_BYTES
        part_bytes = max(LEAST_PART_BYTES, min(self._part_bytes, told))
        try:
            if len(payload) <= part_bytes:
                envelopes = [self._sessions.seal(kind, payload)]
            else:
                envelopes = [
                    self._sessions.seal(kind, part, fragment)
                    for fragment, part in split(payload, os.urandom(8), part_bytes)
                ]
        except WireError:
            return True  # the session has just run out: the keeper opens another, the update waits
        for envelope in envelopes:
            self.sent_bytes += len(envelope)
            self._actions.append(Publish(self._sessions.up_topic, envelope))
        return len(envelopes) > 1
