"""Enrolment requests in, committed identities and answers out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aggregator.events import LogEvent
from aggregator.keys.folder import current_descriptor
from aggregator.keys.registry import Registry
from aggregator.refusals import Refusals
from aggregator.store import Store
from aggregator.store.rows import DeviceRow, TokenRow
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.enrolment import CodeUse, EnrolmentDesk, EnrolmentOutcome, Token
from device_sdk.wire.seal.enrolment_message import EnrolmentCode, EnrolRefusal, Grant, new_code
from device_sdk.wire.seal.keys import RandomBytes
from device_sdk.wire.seal.placement import Placement, own_placement

# Enrolment codes that bind what is in force when they are made.


def make_codes(
    store: Store, count: int, now_unix_seconds: int, random_bytes: RandomBytes
) -> list[EnrolmentCode]:
    """Codes of now; whoever commits them hands them out. Raises AggregatorError."""
    descriptor = current_descriptor(store)
    root, serial = descriptor.root_fingerprint, descriptor.serial
    return [new_code(root, serial, now_unix_seconds, random_bytes) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class EnrolmentAnswer:
    mailbox: bytes
    message: bytes


@dataclass(frozen=True)
class Enrolment:
    """Judges requests by the :class:`EnrolmentDesk` and commits what it decides.

    ``first_round`` tells from which round on a device that enrols now takes part, ``placement_of``
    where the device of an id belongs; the desk goes by the same.
    """

    desk: EnrolmentDesk
    store: Store
    registry: Registry
    refusals: Refusals
    unix_clock: Callable[[], float]
    first_round: Callable[[], int]
    placement_of: Callable[[bytes], Placement] = own_placement

    def answer(self, message: bytes) -> EnrolmentAnswer:
        """The answer, after all it says is durable.

        Raises ``WireError`` where none is due: ``unknown-token``, or the desk's reasons.
        """
        row = self.store.tokens.find(self.desk.read_head(message).token_id)
        if row is None:
            raise WireError("unknown-token", "no such enrolment code was made here")
        outcome = self.desk.answer(message, self._token(row))
        if outcome.joined and outcome.token.binding is not None:
            self._join(row, outcome.token.binding)
        elif outcome.refusal is not None:
            self._note(row, outcome, outcome.refusal)
        return EnrolmentAnswer(outcome.mailbox, outcome.answer)

    def _token(self, row: TokenRow) -> Token:
        binding = None
        device = None if row.device_id is None else self.store.devices.find(row.device_id)
        if device is not None:
            placement = self.placement_of(device.device_id)
            grant = Grant(
                device.device_id,
                device.handle,
                device.admission_key,
                placement.shard,
                placement.cell,
            )
            revoked = device.revoked_unix_seconds is not None
            binding = CodeUse(device.identity, grant, revoked)
        return Token(row.token_id, row.secret, row.expires_unix_seconds, binding)

    def _join(self, token: TokenRow, binding: CodeUse) -> None:
        now_unix_seconds = int(self.unix_clock())
        grant = binding.grant
        device = DeviceRow(
            device_id=grant.device_id,
            identity=binding.identity,
            handle=grant.handle,
            admission_key=grant.admission_key,
            shard=grant.shard,
            token_id=token.token_id,
            enrolled_unix_seconds=now_unix_seconds,
            first_round=self.first_round(),
            labels=token.labels,
            name=token.name,
        )
        with self.store.database.transaction():
            if not self.store.tokens.bind(token.token_id, device.device_id):
                raise WireError("unknown-token", "the enrolment code was withdrawn just now")
            self.store.devices.add(device)
        self.registry.add(device)
        LogEvent.ENROLLED.log(device=device.device_id)

    def _note(self, row: TokenRow, outcome: EnrolmentOutcome, refusal: EnrolRefusal) -> None:
        self.refusals.note_reason(refusal.value, row.device_id or b"")
        if refusal is EnrolRefusal.CODE_USED:
            # The operator has to see this: the code leaked, or went to two devices.
            self.store.tokens.note_stranger(row.token_id, outcome.identity)
            LogEvent.CODE_LEAKED.log(device=row.device_id or "nobody", key=outcome.identity)
