"""Enrolment, both ends: a device turns its code into a credential, exactly once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal import hpke
from device_sdk.wire.seal.admission import TokenBuckets, WorkBudget
from device_sdk.wire.seal.descriptor import Descriptor
from device_sdk.wire.seal.enrolment_message import (
    HANDLE_BYTES,
    MAILBOX_BYTES,
    NONCE_BYTES,
    REPLY_SECRET_BYTES,
    EnrolAnswer,
    EnrolHead,
    EnrolmentCode,
    EnrolRefusal,
    EnrolRequest,
    Grant,
    check_request_tag,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    read_request_head,
    requester_of,
)
from device_sdk.wire.seal.freshness import Freshness, FreshnessMarks
from device_sdk.wire.seal.handshake import ADMISSION_KEY_BYTES, DEVICE_ID_BYTES
from device_sdk.wire.seal.keyring import Keyring, ServingKeys
from device_sdk.wire.seal.keys import RandomBytes, draw
from device_sdk.wire.seal.placement import Placement, own_placement


@dataclass(frozen=True)
class Enrolled:
    """What a device takes from its enrolment."""

    grant: Grant
    time_unix_seconds: int
    """The aggregator's time, or that of the code where it is later."""


def require_current(code: EnrolmentCode, descriptor: Descriptor) -> None:
    """Refuse a descriptor that the code rules out, before anything is sent under its keys.

    Somebody who got hold of keys that were replaced may show an old one. Raises ``WireError``:
    ``wrong-root``, ``serial-fell``, ``descriptor-expired``.
    """
    if not descriptor.follows_from(code.root_fingerprint):
        raise WireError("wrong-root", "the code names another root than the descriptor's")
    if descriptor.serial < code.least_serial:
        raise WireError("serial-fell", "the code was made under a newer descriptor")
    descriptor.require_unexpired(code.made_unix_seconds)


class EnrolmentAttempt:
    """The device's end: :attr:`message` goes out, the answer comes to :attr:`mailbox`.

    ``identity`` must lie on disk, flushed, before the message is sent: the first key that arrives
    binds the code, and a device that lost its key could never use the code again. The message is
    answered once; a later attempt with the same identity gets the same answer. ``freshness``: of
    the life of the aggregator that is asked, with a counter that no other attempt ever had.
    """

    def __init__(
        self,
        code: EnrolmentCode,
        descriptor: Descriptor,
        identity: Ed25519PrivateKey,
        freshness: Freshness,
        *,
        random_bytes: RandomBytes = os.urandom,
        seal: hpke.Seal = hpke.seal,
    ) -> None:
        """Raises what :func:`require_current` raises."""
        require_current(code, descriptor)
        self._code_unix_seconds = code.made_unix_seconds
        self._descriptor = descriptor
        self._request = EnrolRequest(
            token_id=code.token_id,
            identity=identity.public_key().public_bytes_raw(),
            mailbox=draw(random_bytes, MAILBOX_BYTES),
            reply_secret=draw(random_bytes, REPLY_SECRET_BYTES),
        )
        self.message = encode_request(
            self._request, identity, code.secret, descriptor, freshness, seal
        )

    @property
    def mailbox(self) -> bytes:
        """16 random bytes that name the topic of the answer."""
        return self._request.mailbox

    def accept(self, answer_message: bytes) -> Enrolled:
        """What an answer grants.

        Raises ``WireError``: ``code-used``, ``code-expired``, ``revoked`` (the aggregator refused:
        final), ``descriptor-expired`` (by the time in the answer), or the reason why this message
        is no answer to the request (wait for another).
        """
        answer = decode_answer(
            answer_message, self.message, self._request.reply_secret, self._descriptor
        )
        now_unix_seconds = max(answer.time_unix_seconds, self._code_unix_seconds)
        self._descriptor.require_unexpired(now_unix_seconds)
        if isinstance(answer.verdict, EnrolRefusal):
            raise WireError(answer.verdict.value, "the aggregator refused the enrolment code")
        return Enrolled(answer.verdict, now_unix_seconds)


@dataclass(frozen=True)
class CodeUse:
    """The key that used a code, and what it was granted."""

    identity: bytes
    grant: Grant
    revoked: bool = False


@dataclass(frozen=True)
class Token:
    """The aggregator's row of one enrolment code."""

    token_id: bytes
    secret: bytes
    expires_unix_seconds: int
    binding: CodeUse | None = None

    def __repr__(self) -> str:
        return f"Token(token_id={self.token_id.hex()}, bound={self.binding is not None})"


@dataclass(frozen=True)
class EnrolmentOutcome:
    """What came of a request that was made with the code's secret."""

    token: Token
    """The row as it must be in the store *before* the answer is sent."""
    refusal: EnrolRefusal | None
    identity: bytes
    """The key that asked: with ``CODE_USED``, the stranger's, to be shown to the operator."""
    mailbox: bytes
    answer: bytes
    joined: bool
    """Whether this request bound the code: a device joined, and the row changed."""


class EnrolmentDesk:
    """The aggregator's end. Pure but for the random bytes drawn: the store is the caller's.

    The caller reads a request's head, looks the token up, gives its row here, commits the row that
    comes back, and then sends the answer to the mailbox.

    ``buckets`` bounds the requests under each code that cost public-key work, ``budget`` the work
    for all of them. ``placement_of`` says where a device of an id belongs. ``marks``: of a life
    that is not this process's alone.
    """

    def __init__(
        self,
        keyring: Keyring[ServingKeys],
        incarnation: bytes,
        buckets: TokenBuckets,
        budget: WorkBudget,
        unix_clock: Callable[[], float],
        *,
        placement_of: Callable[[bytes], Placement] = own_placement,
        marks: FreshnessMarks | None = None,
        random_bytes: RandomBytes = os.urandom,
        unseal: hpke.Unseal = hpke.unseal,
    ) -> None:
        self._placement_of = placement_of
        self._keyring = keyring
        self._marks = FreshnessMarks(incarnation) if marks is None else marks
        self._buckets = buckets
        self._budget = budget
        self._unix_clock = unix_clock
        self._random_bytes = random_bytes
        self._unseal = unseal

    def replace_keyring(self, keyring: Keyring[ServingKeys]) -> None:
        """Use other keys from now on."""
        self._keyring = keyring

    def read_head(self, message: bytes) -> EnrolHead:
        """What a request for this life says in clear, to look its code up. Proves nothing yet.

        Raises ``WireError``: ``old-incarnation``, or a parser's reason.
        """
        head = read_request_head(message)
        self._marks.require_this_life(head.freshness)
        return head

    def answer(self, message: bytes, token: Token) -> EnrolmentOutcome:
        """Judge a request: HMAC and counter first, budget and bucket, then the public-key work.

        Raises ``WireError`` (no answer is due): ``old-incarnation``, ``wrong-token``,
        ``bad-admission``, ``replayed``, ``unknown-descriptor``, ``retired-descriptor``, ``busy``,
        ``too-many``, ``cannot-unseal``, ``wrong-requester``, ``bad-proof``, ``bad-key``,
        ``bad-signature``, or a parser's reason.
        """
        head = self.read_head(message)
        if head.token_id != token.token_id:
            raise WireError("wrong-token", "the request names another token")
        check_request_tag(message, token.secret)
        if not self._marks.is_new(_sender(token, head), head.freshness):
            raise WireError("replayed", "a request with this counter, or a higher one, came before")
        now_unix_seconds = int(self._unix_clock())
        serving = self._keyring.find(head.serial, now_unix_seconds)
        with self._budget.work():
            self._buckets.take(token.token_id)
            request = decode_request(message, head, token.secret, serving, self._unseal)
            verdict, row = self._judge(request, token, now_unix_seconds)
            nonce = draw(self._random_bytes, NONCE_BYTES)
            said = EnrolAnswer(verdict, now_unix_seconds)
            answer = encode_answer(said, message, request.reply_secret, serving.signing, nonce)
        self._marks.raise_to(_sender(row, head), head.freshness)
        return EnrolmentOutcome(
            token=row,
            refusal=verdict if isinstance(verdict, EnrolRefusal) else None,
            identity=request.identity,
            mailbox=request.mailbox,
            answer=answer,
            joined=row is not token,
        )

    def _judge(
        self, request: EnrolRequest, token: Token, now_unix_seconds: int
    ) -> tuple[Grant | EnrolRefusal, Token]:
        binding = token.binding
        if binding is None:
            if now_unix_seconds >= token.expires_unix_seconds:
                return EnrolRefusal.CODE_EXPIRED, token
            grant = self._new_grant()
            return grant, replace(token, binding=CodeUse(request.identity, grant))
        if binding.identity != request.identity:
            return EnrolRefusal.CODE_USED, token
        if binding.revoked:
            return EnrolRefusal.REVOKED, token
        # Bound in time by this very key, so its expiry no longer matters: the first answer may
        # have been lost on the way.
        return binding.grant, token

    def _new_grant(self) -> Grant:
        device_id = draw(self._random_bytes, DEVICE_ID_BYTES)
        placement = self._placement_of(device_id)
        return Grant(
            device_id=device_id,
            handle=draw(self._random_bytes, HANDLE_BYTES),
            admission_key=draw(self._random_bytes, ADMISSION_KEY_BYTES),
            shard=placement.shard,
            cell=placement.cell,
        )


def _sender(token: Token, head: EnrolHead) -> bytes:
    """Whose mark a request is held against: that of the code's owner, or of all others together.

    So a thief's high counter cannot keep the owner from asking again, nor the owner's the thief
    from being noticed; and there are two marks a code at most, however many identities try it.
    """
    binding = token.binding
    is_owner = binding is not None and requester_of(binding.identity) == head.requester
    return token.token_id + (b"owner" if is_owner else b"others")
