"""A second device, written from `docs/` alone: it tells whether the pages suffice to write one.

It enrols with a code, opens a session, takes part in one round of `scatter`, and prints its
receipt's verdict. It imports nothing of this project: what it knows of the wire is from
`docs/wire.md`, `docs/wire-tensors.md`, `docs/task-messages.md`, the pages behind them and
`docs/methods/scatter.md`, after whose sections its own are named.

    python second_device.py mqtt://127.0.0.1:1883 film-1 film-2 ... < code

It is no device to use. It lives for one round and keeps nothing on a disk (identity and counter
belong there before anything is sent), so it knows no earlier manifest, takes no user's step, and
ends where a real one waits for the next descriptor, manifest or session. It takes no turns between
presences and speaks MQTT 5 only. Not here: other methods, attachments and cohorts, artifacts (it
trains with NumPy), messages in parts.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import hmac
import os
import queue
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from struct import pack, unpack
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import cbor2
import numpy as np
import paho.mqtt.client as mqtt
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF


class Refused(Exception):
    """What came is not what the pages say; the reason is theirs."""


def check(condition: object, reason: str) -> None:
    if not condition:
        raise Refused(reason)


# --- Primitives -----------------------------------------------------------------------------------

SUITE = hpke.Suite(hpke.KEM.MLKEM768_X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.CHACHA20_POLY1305)


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def labelled(label: str, message: bytes) -> bytes:
    return f"tessera/1 {label}\0".encode() + message


def derive(secret: bytes, salt: bytes, info: bytes, length: int = 32) -> bytes:
    return HKDF(SHA256(), length, salt, info).derive(secret)


P, W = 2**255 - 19, 2707385501144840649318225287225658788936804267575313519463743609750303402022
SMALL_ORDER = {0, 1, P - 1, P, P + 1, W, P - W}


def verify(key: bytes, label: str, signature: bytes, message: bytes) -> None:
    check(int.from_bytes(key, "little") % 2**255 not in SMALL_ORDER, "bad-key")
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, labelled(label, message))
    except (InvalidSignature, ValueError):
        raise Refused("bad-signature") from None


def unseal(key: bytes, nonce: bytes, sealed: bytes, outside: bytes) -> bytes:
    try:
        return ChaCha20Poly1305(key).decrypt(nonce, sealed, outside)
    except InvalidTag:
        raise Refused("bad-tag") from None


def seal_to(key: bytes, info: bytes, plain: bytes) -> bytes:
    try:
        lattice = MLKEM768PublicKey.from_public_bytes(key[:1184])
        curve = X25519PublicKey.from_public_bytes(key[1184:])
        return SUITE.encrypt(plain, hpke.MLKEM768X25519PublicKey(lattice, curve), info)
    except ValueError:
        raise Refused("bad-key") from None


# --- Every message's first two bytes, canonical CBOR ----------------------------------------------


def check_head(message: bytes, kind: int, least: int, most: int) -> None:
    check(len(message) >= least, "truncated")
    check(len(message) <= most, "too-large")
    check(message[0] == 1, "bad-version")
    check(message[1] == kind, "bad-type")


def write_cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


RUN = os.urandom(8)
"""Who we are among those with our identity: drawn once, since this program starts once."""


@dataclass(frozen=True)
class Unless:
    """A field that is left out where it is `usual`."""

    usual: Any
    kind: type = object


def read_cbor(data: bytes, /, **fields: Any) -> dict[str, Any]:
    """A map with exactly these fields, each of a type, or a byte string of so many bytes."""
    try:
        value = cbor2.loads(data, max_depth=16)
        check(write_cbor(value) == data, "bad-cbor")
    except (cbor2.CBORError, ValueError, TypeError):
        raise Refused("bad-cbor") from None
    return check_map(value, **fields)


def check_map(value: Any, /, **fields: Any) -> dict[str, Any]:
    usual = {name: kind.usual for name, kind in fields.items() if isinstance(kind, Unless)}
    check(type(value) is dict and value.keys() | usual.keys() == fields.keys(), "wrong-fields")
    check(all(value[name] != usual[name] for name in value.keys() & usual.keys()), "bad-field")
    value = usual | value
    for name, kind in fields.items():
        found = value[name]
        if isinstance(kind, Unless):
            check(isinstance(found, kind.kind), "bad-field")
        elif isinstance(kind, int):
            check(type(found) is bytes and len(found) == kind, "bad-field")
        else:
            right = type(found) is int and found >= 0 if kind is int else isinstance(found, kind)
            check(right, "bad-field")
    return value


# --- Enrolment code, descriptor, presence ---------------------------------------------------------


class Code(NamedTuple):
    root: bytes
    token: bytes
    secret: bytes
    least_serial: int
    made: int


def read_code(text: str) -> Code:
    letters = "".join(text.split()).replace("-", "").upper().translate(str.maketrans("018", "OIB"))
    try:
        raw = base64.b32decode(letters)
    except ValueError:
        raise Refused("bad-code") from None
    check(len(raw) == 55, "bad-code")
    check(sha256(labelled("enrolment code", raw[:50]))[:5] == raw[50:], "bad-code")
    serial, made = (int.from_bytes(raw[at : at + 5], "little") for at in (40, 45))
    return Code(raw[:16], raw[16:24], raw[24:40], serial, made)


class Descriptor(NamedTuple):
    root: bytes  # fingerprint of the root that is trusted from now on
    digest: bytes
    serial: int
    issued: int
    expires: int
    hpke: bytes
    sessions: bytes
    signing: bytes


def fingerprint(root: bytes) -> bytes:
    return sha256(labelled("root", root))[:16]


def read_descriptor(message: bytes, code: Code) -> Descriptor:
    check_head(message, 1, 219, 4096)
    at = 3 + 128 * message[2]
    check(message[2] <= 8 and len(message) >= at + 216, "truncated")
    successions = [message[i : i + 128] for i in range(3, at, 128)]
    delegation, signature, body = message[at:][:152], message[at + 152 :][:64], message[at + 216 :]
    root, delegate = delegation[:32], delegation[32:64]
    roots = [*(each[:32] for each in successions), root]
    check(code.root in map(fingerprint, roots), "wrong-root")
    verify(root, "delegation", delegation[88:], delegation[:88])
    check(len(set(roots)) == len(roots), "bad-succession")
    for each, following in zip(successions, roots[1:], strict=True):
        check(each[32:64] == following, "bad-succession")
        verify(each[:32], "succession", each[64:], each[:64])
    verify(delegate, "descriptor", signature, message[2 : at + 152] + body)
    kinds = {"expires": int, "issued": int, "serial": int}
    said = read_cbor(body, hpke=1216, sessions=32, signing=32, **kinds)
    first, last, ends = unpack("<QQQ", delegation[64:88])
    check(0 < first <= said["serial"] <= last < 2**40, "bad-delegation")
    check(said["issued"] < said["expires"], "bad-field")
    check(said["expires"] <= ends, "bad-delegation")
    check(said["serial"] >= code.least_serial, "serial-fell")
    check(said["expires"] > code.made, "descriptor-expired")
    return Descriptor(root=fingerprint(root), digest=sha256(message), **said)


def read_presence(message: bytes, by: Descriptor) -> bytes:
    """The incarnation."""
    check_head(message, 2, 66, 256)
    verify(by.signing, "presence", message[2:66], by.digest + message[66:])
    return read_cbor(message[66:], incarnation=16, started=int)["incarnation"]


# --- Enrolment, session ---------------------------------------------------------------------------


@dataclass
class Joining:
    """What requests are made with, and their answers read."""

    code: Code
    by: Descriptor
    incarnation: bytes
    identity: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    counter: int = 0

    def request(self, kind: int, who: bytes, key: bytes, labels: str, body: Callable) -> bytes:
        """What enrolment requests and opens have in common; `body` is made for HPKE's info."""
        sealing, signing, admission = labels.split(", ")
        self.counter += 1
        fresh = self.incarnation + pack("<Q", self.counter)
        head = pack("<BBQ", 1, kind, self.by.serial) + who + fresh
        info = f"tessera/1 {sealing}".encode() + self.by.digest + fresh
        plain = write_cbor(body(info))
        signature = self.identity.sign(labelled(signing, info + plain))
        sealed = seal_to(self.by.hpke, info, signature + plain)
        return head + hmac.digest(key, labelled(admission, head + sealed), "sha256")[:16] + sealed

    def enrolment(self, mailbox: bytes, secret: bytes) -> bytes:
        own = self.identity.public_key().public_bytes_raw()
        token = self.code.token

        def body(info: bytes) -> dict[str, bytes]:
            proved = labelled("enrol proof", info + token + own + mailbox + secret)
            proof = hmac.digest(self.code.secret, proved, "sha256")
            fields = {"identity": own, "mailbox": mailbox, "secret": secret}
            return {**fields, "proof": proof, "token": token}

        who = token + sha256(labelled("requester", own))[:16]
        return self.request(3, who, self.code.secret, "enrol, enrol request, enrol admission", body)

    def grant(self, answer: bytes, request: bytes, secret: bytes) -> dict[str, Any]:
        check_head(answer, 4, 14 + 16 + 64, 1024)
        key = derive(secret, sha256(request), b"tessera/1 enrol answer")
        plain = unseal(key, answer[2:14], answer[14:], answer[:2])
        verify(self.by.signing, "enrol answer", plain[:64], sha256(request) + plain[64:])
        said = read_cbor(plain[64:], verdict=object, time=int)
        check(isinstance(said["verdict"], dict), str(said["verdict"]))
        check(self.by.expires > said["time"], "descriptor-expired")
        return check_map(said["verdict"], admission=32, device=16, handle=16, shard=int)

    def opening(self, grant: dict[str, Any], ephemeral: bytes, secret: bytes) -> bytes:
        body = {"device": grant["device"], "ephemeral": ephemeral, "run": RUN, "secret": secret}
        labels = "open, session open, session open admission"
        return self.request(5, b"", grant["admission"], labels, lambda _info: body)

    def session(
        self, reply: bytes, sent: bytes, key: hpke.MLKEM768X25519PrivateKey, secret: bytes
    ) -> Session:
        check_head(reply, 6, 2, 4096)
        try:
            plain = SUITE.decrypt(reply[2:], key, b"tessera/1 reply" + sha256(sent))
        except (InvalidTag, ValueError):
            raise Refused("cannot-unseal") from None
        verify(self.by.sessions, "session reply", plain[:64], sha256(sent) + plain[64:])
        fields = {
            "clash": Unless(False, bool),
            "incarnation": 16,
            "keys": list,
            "secret": 32,
            "session": 8,
        }
        fields |= {"time": int}
        said = read_cbor(plain[64:], **fields)
        keys = [check_map(each, epoch=int, key=32) for each in said["keys"]]
        check(self.by.expires > said["time"], "descriptor-expired")
        both, salt = secret + said["secret"], sha256(sent, reply)
        up = derive(both, salt, b"tessera/1 device to aggregator", 44)
        down = derive(both, salt, b"tessera/1 aggregator to device", 44)
        behind = said["time"] - time.monotonic()
        return Session(said["session"], up, down, {e["epoch"]: e["key"] for e in keys}, behind)


# --- Envelope -------------------------------------------------------------------------------------


@dataclass
class Session:
    id: bytes
    up: bytes  # key 32, IV 12
    down: bytes
    group_keys: dict[int, bytes]
    behind: float  # what the monotonic clock is behind the aggregator's time
    sent: int = 0
    seen: set[int] = field(default_factory=set)

    def now(self) -> float:
        return self.behind + time.monotonic()

    def seal(self, kind: int, payload: bytes) -> bytes:
        check(len(payload) <= 98247, "too-large for one envelope")
        head = pack("<BBH", 1, kind, 0) + self.id + pack("<Q", self.sent)
        nonce = xor(self.up[32:], self.sent)
        self.sent += 1
        plain = (payload + b"\x80").ljust(padded(len(payload)), b"\0")
        return head + ChaCha20Poly1305(self.up[:32]).encrypt(nonce, plain, head + b"\1")

    def open(self, kind: int, message: bytes) -> bytes:
        check_head(message, kind, 36, 98304)
        check(message[2:4] == b"\0\0", "bad-flags")
        check(message[4:12] == self.id, "unknown-session")
        number = int.from_bytes(message[12:20], "little")
        check(number < 2**20, "session-exhausted")
        nonce = xor(self.down[32:], number)
        plain = unseal(self.down[:32], nonce, message[20:], message[:20] + b"\2")
        payload, mark, rest = plain.rstrip(b"\0").rpartition(b"\x80")
        check(mark and not rest and len(plain) == padded(len(payload)), "bad-padding")
        check(number not in self.seen, "replayed")
        check(number + 1024 > max(self.seen, default=0), "too-old")
        self.seen.add(number)
        return payload


def xor(iv: bytes, number: int) -> bytes:
    return bytes(a ^ b for a, b in zip(iv, number.to_bytes(12, "little"), strict=True))


def padded(length: int) -> int:
    step = 2 ** max(0, (length + 1).bit_length() - 4)
    return min(max(128, -(-(length + 1) // step) * step), 98248)


# --- Broadcast: manifests, heads, chunks ----------------------------------------------------------


@dataclass
class Reader:
    """Opens what is published for a task and a cohort."""

    task: str
    cohort: str
    by: Descriptor
    session: Session

    def signed(self, message: bytes) -> tuple[bytes, int, bytes, bytes]:
        """A manifest's or a head's body; epoch, broadcast id and the key of its chunks."""
        check_head(message, 7, 42 + 16 + 64, 98304)
        check(self.by.expires > self.session.now(), "descriptor-expired")
        epoch, broadcast = int.from_bytes(message[2:10], "little"), message[10:42]
        check(epoch in self.session.group_keys, "unknown-epoch")
        names = (self.task.encode(), self.cohort.encode())
        info = b"tessera/1 broadcast" + b"".join(pack("<H", len(name)) + name for name in names)
        info, group = info + message[2:10], self.session.group_keys[epoch]
        key, chunks = (derive(group, broadcast, info + use) for use in (b"manifest", b"chunks"))
        plain = unseal(key, bytes(12), message[42:], message[:42])
        verify(self.by.signing, "manifest", plain[:64], message[:42] + plain[64:])
        return plain[64:], epoch, broadcast, chunks

    def manifest(self, message: bytes) -> tuple[dict[str, Any], bytes]:
        """And the key of its chunks."""
        body, epoch, broadcast, key = self.signed(message)
        ids = ("artifact_id", "catalogue_id", "broadcast_id", "sampling_seed")
        names, numbers = ("task", "cohort", "codec"), ("generation", "round", "version")
        numbers += ("key_epoch", "threshold", "length")
        numbers += ("opened_unix_seconds", "deadline_unix_seconds")
        kinds = ((ids, 32), (names, str), (numbers, int))
        fields = {name: kind for each, kind in kinds for name in each}
        said = read_cbor(body, root_fingerprint=16, chunks=list, **fields)
        check(said["root_fingerprint"] == self.by.root, "wrong-root")
        inside = tuple(said[name] for name in ("task", "cohort", "key_epoch", "broadcast_id"))
        check(inside == (self.task, self.cohort, epoch, broadcast), "wrong-manifest")
        check(said["deadline_unix_seconds"] > self.session.now(), "expired-manifest")
        return said, key

    def head(self, message: bytes, content: bytes) -> tuple[dict[str, Any], bytes]:
        body, _epoch, broadcast, key = self.signed(message)
        said = read_cbor(body, chunks=list, content=32, kind=str, length=int)
        check((said["content"], said["kind"]) == (content, "catalogue"), "wrong-content")
        return said | {"broadcast_id": broadcast}, key


def selected(said: dict[str, Any], device: bytes) -> bool:
    task = said["task"].encode()
    hashed = said["sampling_seed"] + bytes([len(task)]) + task + pack("<Q", said["round"]) + device
    drawn = int.from_bytes(sha256(labelled("select", hashed))[:8], "little")
    return drawn < said["threshold"]


def read_chunk(message: bytes, index: int, said: dict[str, Any], key: bytes) -> bytes:
    check(sha256(message) == said["chunks"][index], "wrong-chunk")
    check_head(message, 8, 54, 98304)
    check(message[2:38] == pack("<I", index) + said["broadcast_id"], "wrong-chunk")
    return unseal(key, index.to_bytes(12, "little"), message[38:], message[:38])


# --- Named arrays ---------------------------------------------------------------------------------

FORMS = dict(enumerate(("<f4", "<f2", "<i8", "<i4", "<i2", "i1", "u1", "<u2", "?"), start=1))


def widen(scales: np.ndarray) -> np.ndarray:
    """bfloat16 to float32."""
    return (scales.astype(np.uint32) << 16).view(np.float32)


def read_arrays(data: bytes) -> dict[str, np.ndarray]:
    at = 0

    def take(count: int, kind: str = "u1") -> np.ndarray:
        nonlocal at
        start, at = at, at + int(count) * np.dtype(kind).itemsize
        check(at <= len(data), "truncated")
        return np.frombuffer(data[start:at], kind)

    arrays = {}
    for _ in range(take(1, "<u2")[0]):
        name = take(take(1)[0]).tobytes().decode("ascii")
        form, rank = (int(each) for each in take(2))
        shape = tuple(int(each) for each in take(rank, "<u4"))
        width = shape[-1] if shape else 1
        rows = int(np.prod(shape[:-1], dtype=object))
        if form in FORMS:
            values = take(rows * width, FORMS[form])
        elif form == 33:
            values = take(rows * width, "<f2").astype(np.float32)
        else:
            check(form in (32, 34), "bad-format")
            scales = widen(take(rows, "<u2"))[:, None]
            if form == 32:
                codes = take(rows * width, "i1").reshape(rows, width)
            else:
                pairs = take(rows * -(-width // 2)).reshape(rows, -1)
                halves = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(rows, -1)[:, :width]
                codes = (halves.astype(np.int8) ^ 8) - 8
            values = codes * scales
        check(values.dtype.kind != "f" or np.all(np.abs(values) <= 1e12), "bad-values")
        arrays[name] = values.reshape(shape)
    check(at == len(data), "bad-length")
    return arrays


# --- Scatter update's body, update, receipt -------------------------------------------------------


def leb128(number: int) -> bytes:
    low = bytes([number & 127 | (128 if number > 127 else 0)])
    return low + leb128(number >> 7) if number > 127 else low


def write_scatter(
    width: int, columns: np.ndarray, rows: np.ndarray, values: np.ndarray, codec: str
) -> bytes:
    form = {"float32": 1, "float16": 2, "int8": 3}[codec]
    if form == 3:
        bits = (np.abs(values).max(axis=1) / np.float32(127)).view(np.uint32)
        scales = ((bits >> 16) + (bits & 0xFFFF > 0)).astype("<u2")  # rounded up
        scales[widen(scales) < 1e-30] = 0
        steps = np.where(scales > 0, widen(scales), np.float32(np.inf))[:, None]
        codes = np.floor(values / steps + np.random.default_rng().random(values.shape))
        payload = scales.tobytes() + codes.clip(-127, 127).astype(np.int8).tobytes()
    else:
        payload = values.astype(FORMS[form]).tobytes()
    trained = np.isin(np.arange(width), columns)
    gaps = np.diff(rows, prepend=-1) - 1  # the first id's gap, to -1, less one is itself
    ids = b"".join(leb128(int(gap)) for gap in gaps)
    bitset = np.packbits(trained, bitorder="little").tobytes()
    return pack("<BH", form, width) + leb128(len(rows)) + bitset + ids + payload


def write_update(device: bytes, said: dict[str, Any], body: bytes) -> tuple[bytes, bytes]:
    """The message, and the digest by which its receipt names it."""
    task = said["task"].encode()
    head = pack("<QQB", said["generation"], said["round"], len(task)) + task
    named = bytes([len(device)]) + device + head + sha256(body)
    return head + body, sha256(labelled("update", named))


def read_receipt(payload: bytes) -> dict[str, Any]:
    check(len(payload) <= 256, "too-large")
    return read_cbor(payload, digest=32, reason=Unless("", str), verdict=str)


# --- Scatter aggregation: a round -----------------------------------------------------------------


class Triples(NamedTuple):
    liked: np.ndarray
    other: np.ndarray
    weight: np.ndarray


def draw_triples(items: int, liked: np.ndarray, most: int, rng: np.random.Generator) -> Triples:
    """Of one user: one a like, and half as many pseudo-items, which borrow their negatives."""
    unseen = np.setdiff1d(np.arange(items), liked)
    pseudo = rng.choice(unseen, -(-len(liked) // 2), replace=False)
    other = rng.choice(unseen, len(liked))
    weight = np.repeat([1, 0.1], [len(liked), len(pseudo)]).astype(np.float32)
    every = Triples(np.append(liked, pseudo), np.append(other, other[: len(pseudo)]), weight)
    kept = rng.permutation(len(weight))[: most or None]
    return Triples(*(part[kept] for part in every))


def gradients(
    items: np.ndarray, user: np.ndarray, columns: np.ndarray, of: Triples, settings: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """The rows that the triples touch, and the loss's gradients there in these columns."""
    apart = items[of.liked] - items[of.other]
    scored = np.arange(len(user)) if settings["scores"] == "residual" else columns
    slope = -of.weight / (1 + np.exp(apart[:, scored] @ user[scored]))  # of softplus(-score)
    pull, decay = slope[:, None] * user[columns], settings["item_l2"] * of.weight[:, None]
    sums = np.zeros((len(items), len(columns)), np.float32)
    np.add.at(sums, of.liked, pull + decay * items[of.liked][:, columns])
    np.add.at(sums, of.other, -pull + decay * items[of.other][:, columns])
    rows = np.union1d(of.liked, of.other)
    return rows, sums[rows]


# --- Topics, link ---------------------------------------------------------------------------------


class Link:
    """One connection; what comes is taken one by one. `patience` is for all of it, in seconds."""

    def __init__(self, url: str, client: bytes, prefix: str, patience: float) -> None:
        place = urlsplit(url)
        self.prefix, self.until = prefix + "/", time.monotonic() + patience
        self.came: queue.Queue[mqtt.MQTTMessage] = queue.Queue()
        version = mqtt.CallbackAPIVersion.VERSION2
        self.client = mqtt.Client(version, client.hex(), protocol=mqtt.MQTTv5)
        self.client.on_message = lambda _client, _data, message: self.came.put(message)
        self.client.username_pw_set(place.username, place.password)
        if place.scheme == "mqtts":
            self.client.tls_set()
        self.client.connect(place.hostname, place.port or 1883)
        self.client.loop_start()

    def listen(self, topic: str) -> None:
        self.client.subscribe(self.prefix + topic, qos=1)

    def say(self, topic: str, payload: bytes) -> None:
        self.client.publish(self.prefix + topic, payload, qos=1)

    def hear(self, prefix: str, seconds: float = 1e9) -> Iterator[tuple[str, bytes]]:
        """(rest of the topic, message) of those below a prefix, for so many seconds."""
        until = time.monotonic() + seconds
        while (left := min(until, self.until) - time.monotonic()) > 0:
            try:
                message = self.came.get(timeout=left)
            except queue.Empty:
                continue
            topic = message.topic.removeprefix(self.prefix)
            kept = topic.startswith("all/")  # only there retained messages are accepted
            if topic.startswith(prefix) and message.payload and (kept or not message.retain):
                yield topic.removeprefix(prefix), message.payload
        check(time.monotonic() < self.until, "nothing came in time")

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()

    def fetch(self, content: bytes, said: dict[str, Any], key: bytes, first: int) -> bytes:
        """The chunks of a manifest, whose first is at index 0, or of a head (1)."""
        topics, chunks = f"all/chunk/{content.hex()}/", {}
        if not said["chunks"]:
            return b""
        self.listen(topics + "+")
        for index, message in self.hear(topics):
            place = int(index) - first if index.isdecimal() else -1
            if 0 <= place < len(said["chunks"]):
                chunks[place] = read_chunk(message, place, said, key)
            if len(chunks) == len(said["chunks"]):
                break
        plain = b"".join(chunks[place] for place in sorted(chunks))
        check(len(plain) == said["length"], "bad-length")
        return plain


# --- The conversation -----------------------------------------------------------------------------

FINAL = ("code-used", "code-expired", "revoked", "descriptor-expired")


def ask(link: Link, to: str, answers: str, make: Callable, wait: float = 5, times: int = 1) -> Any:
    """Send what is made, each so many times and with waits, until its reader takes an answer."""
    while True:
        request, read = make()
        for _ in range(times):
            link.say(to, request)
            for _topic, message in link.hear(answers, wait):
                try:
                    return read(message)
                except Refused as refused:
                    if str(refused) in FINAL:
                        raise
                    print(f"not taken for an answer: {refused}", file=sys.stderr)


def take_part(code: Code, names: argparse.Namespace) -> dict[str, Any]:
    """From a code to a receipt; the numbers are the steps of the page's table."""
    # 1, 2. Descriptor and presence, in any order.
    mailbox = os.urandom(16)
    link = Link(names.url, mailbox, names.prefix, names.patience)
    for topic in ("all/descriptor", "all/presence"):
        link.listen(topic)
    shown: dict[str, bytes] = {}
    for topic, message in link.hear("all/"):
        shown[topic] = message
        if shown.keys() >= {"descriptor", "presence"}:
            break
    descriptor = read_descriptor(shown["descriptor"], code)
    joining = Joining(code, descriptor, read_presence(shown["presence"], descriptor))

    # 3, 4. Enrolment: each attempt is another request.
    def enrolment() -> tuple[bytes, Callable]:
        secret = os.urandom(32)
        request = joining.enrolment(mailbox, secret)
        return request, lambda answer: joining.grant(answer, request, secret)

    answers = f"enrol/answer/{mailbox.hex()}"
    link.listen(answers)
    grant = ask(link, "enrol/request", answers, enrolment)
    link.close()

    # 5, 6. Session, under the client id of an enrolled device.
    def opening() -> tuple[bytes, Callable]:
        lattice, scalar = MLKEM768PrivateKey.generate(), X25519PrivateKey.generate()
        key, secret = hpke.MLKEM768X25519PrivateKey(lattice, scalar), os.urandom(32)
        halves = lattice.public_key(), scalar.public_key()
        ephemeral = b"".join(half.public_bytes_raw() for half in halves)
        sent = joining.opening(grant, ephemeral, secret)
        return sent, lambda reply: joining.session(reply, sent, key, secret)

    link = Link(names.url, grant["handle"], names.prefix, names.patience)
    up, down = f"up/{grant['shard']}/{grant['handle'].hex()}", f"down/{grant['handle'].hex()}"
    link.listen(down)
    session = ask(link, up, down, opening, times=3)

    # 7, 8, 9. Manifest, broadcast, catalogue.
    reader = Reader(names.task, names.cohort, descriptor, session)
    place = f"all/manifest/{names.task}/{names.cohort}"
    link.listen(place)
    manifests = (reader.manifest(message) for _, message in link.hear(place))
    said, key = next(each for each in manifests if selected(each[0], grant["device"]))
    plain = link.fetch(said["broadcast_id"], said, key, 0)
    end = 4 + int.from_bytes(plain[:4], "little")
    head, items = (
        read_cbor(plain[4:end], settings=dict, terms=dict),
        read_arrays(plain[end:])["items"],
    )
    kinds = {"artifacts": Unless([], list), "attachments": Unless([], list)}
    kinds |= {"cohort_keys": Unless({}, dict), "method": str, "train_seconds": float}
    terms = check_map(head["terms"], **kinds, update_codec=str)
    check(terms["method"] == "scatter", "this device knows no other method")
    content = said["catalogue_id"]
    link.listen(f"all/chunk/{content.hex()}/0")
    _, message = next(link.hear(f"all/chunk/{content.hex()}/0"))
    plain = link.fetch(content, *reader.head(message, content), 1)
    check(sha256(plain) == content, "wrong-content")
    catalogue = read_cbor(plain, items=list, titles=list)["items"]

    # 10, 11. Training on half of the columns, update, receipt.
    rng, settings, width = np.random.default_rng(), head["settings"], items.shape[1]
    liked = np.array([catalogue.index(item) for item in names.items])
    user = (settings["user_spread"] * rng.standard_normal(width)).astype(np.float32)
    columns = np.sort(rng.permutation(width)[: -(-width // 2)])
    triples = draw_triples(len(items), liked, settings["most_triples"], rng)
    rows, values = gradients(items, user, columns, triples, settings)
    body = write_scatter(width, columns, rows, values, terms["update_codec"])
    update, digest = write_update(grant["device"], said, body)

    def receipt(message: bytes) -> dict[str, Any]:
        read = read_receipt(session.open(17, message))
        check(read["digest"] == digest, "the receipt of another update")
        return read

    read = ask(link, up, down, lambda: (session.seal(16, update), receipt), random.uniform(2, 3))
    link.close()
    return read


def main() -> int:
    parser = argparse.ArgumentParser(description="One round; the code is read from standard input.")
    parser.add_argument("url")
    parser.add_argument("items", nargs="+")
    parser.add_argument("--task", default="default")
    parser.add_argument("--cohort", default="all")
    parser.add_argument("--prefix", default="tessera")
    parser.add_argument("--patience", type=float, default=60, help="seconds for each connection")
    names = parser.parse_intermixed_args()
    try:
        receipt = take_part(read_code(sys.stdin.readline()), names)
    except Refused as refused:
        print(f"refused: {refused}", file=sys.stderr)
        return 1
    print(receipt["verdict"], receipt["reason"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
