"""A device's session with its aggregator, both ends in this process, for measuring envelopes."""

from __future__ import annotations

import numpy as np

from device_sdk.wire.publish.chunks import PART_BYTES, Reassembler, split
from device_sdk.wire.publish.receipts import (
    RecordType,
    UpdateIdentity,
    UpdateMessage,
    read_update,
    write_update,
)
from device_sdk.wire.seal.session import End, Session, derive_session_keys

_DEVICE_ID = bytes(16)
_TASK = "movies"


class SealedLine:
    """Carries update bodies from the device's end to the aggregator's as MQTT payloads.

    Everything of the wire but the handshake: the update's frame, fragments where one envelope is
    too small, padding, sealing, and the way back. ``rng`` draws the keys.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._open()

    def carry(self, body: bytes, round_id: int) -> tuple[UpdateMessage, int]:
        """What the aggregator reads, and the bytes of the MQTT payloads, without their topics."""
        if self._device.is_spent():
            self._open()
        payload = write_update(UpdateIdentity(_DEVICE_ID, _TASK, 1, round_id), body)
        if len(payload) <= PART_BYTES:
            envelopes = [self._device.seal(RecordType.UPDATE, payload)]
        else:
            envelopes = [
                self._device.seal(RecordType.UPDATE, part, fragment)
                for fragment, part in split(payload, self._rng.bytes(8))
            ]
        arrived: bytes | None = None
        for envelope in envelopes:
            received = self._aggregator.open(envelope)
            if received.fragment is None:
                arrived = received.payload
            else:
                arrived = self._parts.add(
                    _DEVICE_ID, received.message_type, received.fragment, received.payload
                )
        if arrived is None:
            raise RuntimeError("the last fragment of an update did not complete it")
        return read_update(arrived, _DEVICE_ID), sum(map(len, envelopes))

    def _open(self) -> None:
        # A handshake's messages enter the keys as a hash only: random bytes stand for them.
        keys = derive_session_keys(*(self._rng.bytes(32) for _ in range(4)))
        session_id = self._rng.bytes(8)
        self._device = Session(session_id, keys, End.DEVICE, _standing_clock)
        self._aggregator = Session(session_id, keys, End.AGGREGATOR, _standing_clock)
        self._parts = Reassembler(_standing_clock)


def _standing_clock() -> float:
    """No time passes between virtual rounds."""
    return 0.0
