"""Enrolment's request and answer, as bytes.

Request: ``version 1 | type 1 | descriptor serial 8 | token id 8 | requester 16 | incarnation 16 |
counter 8 | admission tag 16 | sealed``, the sealed part (HPKE) ``signature 64 | request``. Answer:
``version 1 | type 1 | nonce 12 | sealed``, the sealed part (ChaCha20-Poly1305 under a key that the
request's secret gives) ``signature 64 | answer``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import struct
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from device_sdk.fields import Declared, Key, Length, Within
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import (
    Count,
    MessageType,
    Record,
    check_prefix,
    decode,
    encode,
    prefix,
)
from device_sdk.wire.seal import hpke, signature
from device_sdk.wire.seal.admission import (
    TAG_BYTES,
    AdmissionPurpose,
    admission_tag,
    check_admission,
)
from device_sdk.wire.seal.descriptor import SERIAL_LIMIT, Descriptor
from device_sdk.wire.seal.freshness import FRESHNESS_BYTES, Freshness
from device_sdk.wire.seal.handshake import AdmissionKey, DeviceId
from device_sdk.wire.seal.keyring import ServingKeys
from device_sdk.wire.seal.keys import FINGERPRINT_BYTES, RandomBytes, draw
from device_sdk.wire.seal.placement import Cell, Placement, Shard
from device_sdk.wire.seal.signature import SIGNATURE_BYTES, PublicKey, Purpose

TOKEN_ID_BYTES = 8
SECRET_BYTES = 16
_NUMBER_BYTES = 5
TIME_LIMIT = 2 ** (8 * _NUMBER_BYTES) - 1
_CHECKSUM_BYTES = 5
_SECRET_AT = FINGERPRINT_BYTES + TOKEN_ID_BYTES
_SERIAL_AT = _SECRET_AT + SECRET_BYTES
_TIME_AT = _SERIAL_AT + _NUMBER_BYTES
_BODY_BYTES = _TIME_AT + _NUMBER_BYTES
_CHARACTERS = (_BODY_BYTES + _CHECKSUM_BYTES) * 8 // 5
_GROUP = 8
# What people type for letters that base32 does not share with the digits.
_MISTAKEN = str.maketrans("018", "OIB")


@dataclass(frozen=True)
class EnrolmentCode(Declared):
    """A single-use right to enrol. Whoever holds it can enrol, so it is shown once."""

    root_fingerprint: Annotated[bytes, Length(FINGERPRINT_BYTES)]
    token_id: Annotated[bytes, Length(TOKEN_ID_BYTES)]
    secret: Annotated[bytes, Length(SECRET_BYTES)]
    least_serial: Annotated[int, Within(0, SERIAL_LIMIT)]
    """Of the descriptor in force when the code was made: no older one is believed."""
    made_unix_seconds: Annotated[int, Within(0, TIME_LIMIT)]
    """What had expired then has expired."""

    def __repr__(self) -> str:
        return f"EnrolmentCode(token_id={self.token_id.hex()}, ...)"

    def to_text(self) -> str:
        """Eleven groups of eight characters, joined by hyphens."""
        body = self.root_fingerprint + self.token_id + self.secret
        for number in (self.least_serial, self.made_unix_seconds):
            body += number.to_bytes(_NUMBER_BYTES, "little")
        text = base64.b32encode(body + _checksum(body)).decode()
        return "-".join(text[at : at + _GROUP] for at in range(0, len(text), _GROUP))


def new_code(
    root_fingerprint: bytes,
    least_serial: int,
    made_unix_seconds: int,
    random_bytes: RandomBytes = os.urandom,
) -> EnrolmentCode:
    """A fresh code under a root and its descriptor of ``least_serial``."""
    token_id = draw(random_bytes, TOKEN_ID_BYTES)
    secret = draw(random_bytes, SECRET_BYTES)
    return EnrolmentCode(root_fingerprint, token_id, secret, least_serial, made_unix_seconds)


def parse_code(text: str) -> EnrolmentCode:
    """Read a code as typed: any case; spaces and hyphens anywhere; 0, 1, 8 for O, I, B.

    Raises ``WireError("bad-code")``.
    """
    letters = "".join(text.split()).replace("-", "").upper().translate(_MISTAKEN)
    if len(letters) != _CHARACTERS:
        raise WireError(
            "bad-code", f"an enrolment code has {_CHARACTERS} characters, {len(letters)} were given"
        )
    try:
        raw = base64.b32decode(letters)
    except (binascii.Error, ValueError) as error:  # ValueError: letters outside ASCII
        raise WireError("bad-code", "an enrolment code has only A to Z and 2 to 7") from error
    body, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    if not hmac.compare_digest(checksum, _checksum(body)):
        raise WireError("bad-code", "the code's checksum is wrong; compare it with the original")
    return EnrolmentCode(
        body[:FINGERPRINT_BYTES],
        body[FINGERPRINT_BYTES:_SECRET_AT],
        body[_SECRET_AT:_SERIAL_AT],
        int.from_bytes(body[_SERIAL_AT:_TIME_AT], "little"),
        int.from_bytes(body[_TIME_AT:], "little"),
    )


_LIKE_A_CODE = re.compile(rf"[A-Za-z2-7]{{{_GROUP}}}(?:-?[A-Za-z2-7]{{{_GROUP}}}){{4,}}")


def without_codes(text: str) -> str:
    """``text`` with nothing in it that may be an enrolment code, or the most of one."""
    return _LIKE_A_CODE.sub("(an enrolment code)", text)


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(b"tessera/1 enrolment code\x00" + body).digest()[:_CHECKSUM_BYTES]


HANDLE_BYTES = 16
REQUESTER_BYTES = 16
MAILBOX_BYTES = 16
REPLY_SECRET_BYTES = 32
NONCE_BYTES = 12
MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 1024

_PROOF_BYTES = 32
_SERIAL = struct.Struct("<Q")
_TOKEN_AT = 2 + _SERIAL.size
_REQUESTER_AT = _TOKEN_AT + TOKEN_ID_BYTES
_FRESHNESS_AT = _REQUESTER_AT + REQUESTER_BYTES
_TAG_AT = _FRESHNESS_AT + FRESHNESS_BYTES
_SEALED_AT = _TAG_AT + TAG_BYTES
_ANSWER_SEALED_AT = 2 + NONCE_BYTES


class EnrolRefusal(Enum):
    """Why a code that is real was refused; the value travels in the answer."""

    CODE_USED = "code-used"
    CODE_EXPIRED = "code-expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class EnrolHead:
    """What a request says in clear. Proves nothing yet."""

    serial: int
    """Of the descriptor that it was sealed to."""
    token_id: bytes
    requester: bytes
    """:func:`requester_of` the identity inside, 16 bytes."""
    freshness: Freshness


@dataclass(frozen=True)
class EnrolRequest(Declared):
    """What a device asks for with its code."""

    token_id: Annotated[bytes, Length(TOKEN_ID_BYTES), Key("token")]
    identity: PublicKey
    """Of the device, Ed25519."""
    mailbox: Annotated[bytes, Length(MAILBOX_BYTES)]
    """Random name of the topic that the answer goes to."""
    reply_secret: Annotated[bytes, Length(REPLY_SECRET_BYTES), Key("secret")]
    """Fresh secret that the answer is sealed under."""

    def proven(self, code_secret: bytes, info: bytes) -> bytes:
        """32 bytes: HMAC-SHA256 under the code's secret over all of the request and its info."""
        covered = self.token_id + self.identity + self.mailbox + self.reply_secret
        return hmac.digest(
            code_secret, b"tessera/1 enrol proof\x00" + info + covered, hashlib.sha256
        )


@dataclass(frozen=True)
class ProvenRequest(EnrolRequest, Record):
    """A request as it is sent."""

    proof: Annotated[bytes, Length(_PROOF_BYTES)]
    """HMAC(code's secret, `"tessera/1 enrol proof"`, info `||` token `||` identity `||` mailbox
    `||` secret field)."""

    MOST_BYTES = MAX_REQUEST_BYTES


@dataclass(frozen=True)
class Grant(Declared):
    """What the aggregator assigns to a device: id, handle and key at random and for good, and the
    placement of that day."""

    device_id: Annotated[DeviceId, Key("device")]
    handle: Annotated[bytes, Length(HANDLE_BYTES)]
    """Name of the device's topics."""
    admission_key: Annotated[AdmissionKey, Key("admission")]
    shard: Shard
    cell: Cell = ""
    """See :class:`~device_sdk.wire.seal.placement.Placement`."""

    @property
    def placement(self) -> Placement:
        """Shard and cell."""
        return Placement(self.shard, self.cell)

    def __repr__(self) -> str:
        return f"Grant(device_id={self.device_id.hex()}, shard={self.shard}, ...)"


@dataclass(frozen=True)
class EnrolAnswer(Record):
    """What the aggregator answers to a request made with the code's secret."""

    verdict: Grant | EnrolRefusal
    time_unix_seconds: Annotated[Count, Key("time")]
    """The aggregator's time."""

    MOST_BYTES = MAX_ANSWER_BYTES


def requester_of(identity: bytes) -> bytes:
    """16 bytes that tell one identity's requests from another's before they are unsealed."""
    return hashlib.sha256(b"tessera/1 requester\x00" + identity).digest()[:REQUESTER_BYTES]


def enrol_info(descriptor: Descriptor, freshness: Freshness) -> bytes:
    """HPKE's info for an enrolment: bound to every byte of the descriptor, and to this one time."""
    return b"tessera/1 enrol" + descriptor.digest + freshness.to_bytes()


def encode_request(
    request: EnrolRequest,
    identity: Ed25519PrivateKey,
    code_secret: bytes,
    descriptor: Descriptor,
    freshness: Freshness,
    seal: hpke.Seal = hpke.seal,
) -> bytes:
    """The request message: proven, signed, sealed and tagged."""
    info = enrol_info(descriptor, freshness)
    body = encode(ProvenRequest(**vars(request), proof=request.proven(code_secret, info)))
    signed = signature.sign(identity, Purpose.ENROL_REQUEST, info + body)
    sealed = seal(hpke.public_key(descriptor.hpke), info, signed + body)
    head = (
        prefix(MessageType.ENROL_REQUEST)
        + _SERIAL.pack(descriptor.serial)
        + request.token_id
        + requester_of(request.identity)
        + freshness.to_bytes()
    )
    tag = admission_tag(code_secret, AdmissionPurpose.ENROL, head + sealed)
    return head + tag + sealed


def read_request_head(message: bytes) -> EnrolHead:
    """What a request says in clear. Raises ``WireError``: a parser's reason."""
    check_prefix(message, MessageType.ENROL_REQUEST, _SEALED_AT, MAX_REQUEST_BYTES)
    (serial,) = _SERIAL.unpack_from(message, 2)
    return EnrolHead(
        serial,
        message[_TOKEN_AT:_REQUESTER_AT],
        message[_REQUESTER_AT:_FRESHNESS_AT],
        Freshness.from_bytes(message, _FRESHNESS_AT),
    )


def check_request_tag(message: bytes, code_secret: bytes) -> None:
    """Judge the tag of a request whose head was read. Raises ``WireError("bad-admission")``."""
    covered = message[:_TAG_AT] + message[_SEALED_AT:]
    check_admission(code_secret, AdmissionPurpose.ENROL, covered, message[_TAG_AT:_SEALED_AT])


def decode_request(
    message: bytes,
    head: EnrolHead,
    code_secret: bytes,
    keys: ServingKeys,
    unseal: hpke.Unseal = hpke.unseal,
) -> EnrolRequest:
    """Unseal and verify an admitted request.

    Raises ``WireError``: ``cannot-unseal``, ``wrong-token``, ``wrong-requester``, ``bad-proof``,
    ``bad-key``, ``bad-signature``, or a parser's reason.
    """
    info = enrol_info(keys.descriptor, head.freshness)
    opened = unseal(keys.hpke, info, message[_SEALED_AT:])
    signed, body = opened[:SIGNATURE_BYTES], opened[SIGNATURE_BYTES:]
    request = decode(ProvenRequest, body)
    if request.token_id != head.token_id:
        raise WireError("wrong-token", "another token is sealed than the one outside")
    if requester_of(request.identity) != head.requester:
        raise WireError("wrong-requester", "another identity is sealed than the one outside")
    if not hmac.compare_digest(request.proof, request.proven(code_secret, info)):
        raise WireError("bad-proof", "the proof by the code's secret is wrong")
    identity = signature.public_key(request.identity)
    signature.verify(identity, Purpose.ENROL_REQUEST, info + body, signed)
    return request


def encode_answer(
    answer: EnrolAnswer,
    request_message: bytes,
    reply_secret: bytes,
    signing: Ed25519PrivateKey,
    nonce: bytes,
) -> bytes:
    """The answer message. ``nonce``: 12 fresh random bytes: nothing but this process's memory
    keeps it from answering one request twice (and first by a grant, later by ``revoked``)."""
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"the nonce has {NONCE_BYTES} bytes, {len(nonce)} given")
    body = encode(answer)
    request_digest = hashlib.sha256(request_message).digest()
    signed = signature.sign(signing, Purpose.ENROL_ANSWER, request_digest + body)
    head = prefix(MessageType.ENROL_ANSWER)
    cipher = _answer_cipher(reply_secret, request_digest)
    return head + nonce + cipher.encrypt(nonce, signed + body, head)


def decode_answer(
    message: bytes, request_message: bytes, reply_secret: bytes, descriptor: Descriptor
) -> EnrolAnswer:
    """Open and verify an answer.

    Raises ``WireError``: ``bad-tag``, ``bad-signature``, or a parser's reason.
    """
    check_prefix(message, MessageType.ENROL_ANSWER, _ANSWER_SEALED_AT, MAX_ANSWER_BYTES)
    request_digest = hashlib.sha256(request_message).digest()
    cipher = _answer_cipher(reply_secret, request_digest)
    try:
        opened = cipher.decrypt(
            message[2:_ANSWER_SEALED_AT], message[_ANSWER_SEALED_AT:], message[:2]
        )
    except InvalidTag as error:
        raise WireError("bad-tag", "not an answer to this request") from error
    signed, body = opened[:SIGNATURE_BYTES], opened[SIGNATURE_BYTES:]
    signing = signature.public_key(descriptor.signing)
    signature.verify(signing, Purpose.ENROL_ANSWER, request_digest + body, signed)
    return decode(EnrolAnswer, body)


def _answer_cipher(reply_secret: bytes, request_digest: bytes) -> ChaCha20Poly1305:
    kdf = HKDF(algorithm=SHA256(), length=32, salt=request_digest, info=b"tessera/1 enrol answer")
    return ChaCha20Poly1305(kdf.derive(reply_secret))
