"""Decoders of what lies in the clear once a message is opened."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from device_sdk.evaluation.report import EvaluationTerms, read_evaluations, write_evaluations
from device_sdk.events import parse_live
from device_sdk.link.broker_url import parse_broker_url
from device_sdk.link.buffered_client import PacketCutter
from device_sdk.link.dial import FrameReader
from device_sdk.link.proxy import parse_head, parse_proxy_url
from device_sdk.methods.teacher_logits.contract import (
    SoftForm,
    decode_soft_outputs,
    encode_soft_outputs,
)
from device_sdk.wire.arrays.exchange import Broadcast, Update, decode_update, encode_update
from device_sdk.wire.arrays.factored import decode_factored
from device_sdk.wire.arrays.sparse import decode_sparse
from device_sdk.wire.arrays.tensors import Codec, TensorLimits, decode_tensors, encode_tensors
from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import decode, encode
from device_sdk.wire.publish.catalogue import Catalogue
from device_sdk.wire.publish.chunks import PART_BYTES, Reassembler, ReassemblyLimits
from device_sdk.wire.publish.content import ContentHead
from device_sdk.wire.publish.manifest import RoundManifest
from device_sdk.wire.publish.receipts import (
    Receipt,
    read_contribution,
    read_update,
    with_report,
    write_receipt,
    write_update,
)
from device_sdk.wire.publish.report import (
    MOST_OUTCOME_BYTES,
    Report,
)
from device_sdk.wire.publish.task_messages import (
    OfferedArtifact,
    OfferedAttachment,
    OfferedContent,
    OfferedShare,
    Standing,
    TaskTerms,
    read_attachment,
    read_broadcast,
    write_broadcast,
)
from device_sdk.wire.publish.topics import Topics
from device_sdk.wire.seal.broadcast import WRAPPED_BYTES
from device_sdk.wire.seal.enrolment_message import parse_code
from device_sdk.wire.seal.placement import Placement
from device_sdk.wire.seal.session import Fragment
from tests.fuzz.target import Target

_VECTORS = Path(__file__).resolve().parent.parent / "vectors"
_LIMITS = TensorLimits(most_bytes=1 << 20)
_TOPICS = Topics("site-1/tessera")


@lru_cache
def vectors(name: str) -> dict[str, Any]:
    """A file of test vectors."""
    loaded: dict[str, Any] = json.loads((_VECTORS / f"{name}.json").read_text())
    return loaded


def _packets(data: bytes) -> None:
    head, stream = (data[:3] + bytes(3))[:3], data[3:]
    most, size, odd = head[0] % 8 + 1, head[1] + 1, head[2] & 1
    everything, some = PacketCutter(), PacketCutter(lambda topic: len(topic) % 2 == odd)
    passed, selected, answers = b"", b"", b""
    for start in range(0, len(stream), size):
        everything.add(stream[start : start + size])
        some.add(stream[start : start + size])
        passed += _all_of(everything, most)[0]
        ready, due = _all_of(some, most)
        selected, answers = selected + ready, answers + due
    assert stream.startswith(passed), "what is passed on is not what came"
    assert len(selected) <= len(passed) and len(answers) <= len(passed) - len(selected)
    for five in (False, True):
        _read_packets(stream, size, most, five)


def _read_packets(stream: bytes, size: int, most: int, five: bool) -> None:
    """What is read is what was sent, in its order."""
    cutter, at = PacketCutter(five=five), 0
    for start in range(0, len(stream), size):
        cutter.add(stream[start : start + size])
        go_on = True
        while go_on:
            parts, answers = cutter.cut(most, read=True)
            assert not answers
            for part in parts:
                if isinstance(part, bytes):
                    assert stream[at : at + len(part)] == part
                    at += len(part)
                    continue
                owed = 0
                for message in part.messages:
                    head = stream[at]
                    assert head & 0xF4 == 0x30 and bool(head & 1) is message.retained
                    at = stream.index(message.topic.encode(), at) + len(message.topic.encode())
                    packet_id, at = stream[at : at + (head & 2)], at + (head & 2) + five
                    assert part.answers[owed : owed + 4][2:] == packet_id
                    owed += 4 if packet_id else 0
                    assert stream[at : at + len(message.payload)] == message.payload
                    at += len(message.payload)
                assert owed == len(part.answers)
            go_on = cutter.more


def _all_of(cutter: PacketCutter, most: int) -> tuple[bytes, bytes]:
    parts, answers = cutter.cut(most)
    while cutter.more:
        found, due = cutter.cut(most)
        parts, answers = parts + found, answers + due
    return b"".join(part for part in parts if isinstance(part, bytes)), answers


def _cbor(data: bytes) -> None:
    value = cbor.decode(data, limit_bytes=1 << 16)
    assert cbor.encode(value) == data, "accepted bytes that are not the canonical ones"


def _tensors(data: bytes) -> None:
    arrays = decode_tensors(data, limits=_LIMITS)
    assert sum(array.nbytes for array in arrays.values()) <= _LIMITS.most_bytes
    for array in arrays.values():
        assert array.dtype.kind != "f" or np.isfinite(array).all()
    decode_tensors(encode_tensors(arrays, Codec.FLOAT32))


def _sparse(data: bytes) -> None:
    found = decode_sparse(data, items=1000, width=12)
    assert np.isfinite(found.values).all()
    assert (np.diff(found.rows) > 0).all()
    assert found.rows.size == 0 or 0 <= found.rows[0] <= found.rows[-1] < 1000


def _factored(data: bytes) -> None:
    found = decode_factored(data, items=1000, width=4)
    assert np.isfinite(found.pulls).all() and np.isfinite(found.factor).all()
    assert (np.diff(found.rows) > 0).all()
    assert found.rows.size == 0 or 0 <= found.rows[0] <= found.rows[-1] < 1000
    assert found.pulls.shape == (len(found.rows), len(found.factor))
    assert found.factor.shape[0] <= min(found.users, 4) and found.factor.shape[1] == 4
    assert 1 <= found.k <= 4
    assert ((found.counts >= 1) & (found.counts <= found.users)).all()


def _manifest(data: bytes) -> None:
    assert encode(decode(RoundManifest, data)) == data


def _receipt(data: bytes) -> None:
    assert write_receipt(decode(Receipt, data)) == data


def _standing(data: bytes) -> None:
    assert encode(decode(Standing, data)) == data


def _placement(data: bytes) -> None:
    assert encode(decode(Placement, data)) == data


def _update(data: bytes) -> None:
    update = read_update(data, bytes(16))
    assert data.endswith(update.body)


def _contribution(data: bytes) -> None:
    found = read_contribution(data, bytes(16))
    assert found.report is not None
    assert write_update(found.identity, with_report(found.report, found.body)) == data


def _report(data: bytes) -> None:
    report = decode(Report, data)
    assert encode(report) == data, "accepted bytes that are not the canonical ones"
    assert len(encode(report.without_evaluation())) <= MOST_OUTCOME_BYTES


@lru_cache
def _a_manifest() -> RoundManifest:
    return decode(RoundManifest, bytes.fromhex(vectors("codecs")["manifest"]["body"]))


def _broadcast(data: bytes) -> None:
    read_broadcast(data, _a_manifest())


def _attachment(data: bytes) -> None:
    for array in read_attachment(data, "first").tensors.values():
        assert array.dtype.kind != "f" or np.isfinite(array).all()


def _soft(data: bytes) -> None:
    """The first byte says which form of soft outputs the rest are arrays of."""
    if not data:
        return
    form = SoftForm("int8" if data[0] & 1 else "float16", data[0] >> 1 & 3)
    rows = decode_soft_outputs(decode_tensors(data[1:], limits=_LIMITS), 3, 5, form)
    assert rows.shape == (3, 5)
    assert np.isfinite(rows).all()
    assert np.abs(rows.sum(axis=1) - 1).max() < 1e-3


def _body(data: bytes) -> None:
    update = decode_update(data, 7)
    assert update.round_id == 7
    assert not update.sender, "who sent it is the session's to say"
    for array in update.tensors.values():
        assert array.dtype.kind != "f" or np.isfinite(array).all()


def _evaluations(data: bytes) -> None:
    report = read_evaluations(data)
    assert write_evaluations(report) == data, "accepted bytes that are not the canonical ones"
    for each in report.results:
        assert each.samples > 0
        assert np.isfinite(each.statistics).all()


def _chunks(data: bytes) -> None:
    """Each ten bytes are a fragment: sender, id, index, total, length and part's length."""
    limits = ReassemblyLimits(most_message_bytes=4 * PART_BYTES, most_bytes=6 * PART_BYTES)
    now = 0.0
    reassembler = Reassembler(lambda: now, limits)
    for start in range(0, len(data) - 9, 10):
        now += data[start + 9] / 4
        numbers = data[start : start + 9]
        length = int.from_bytes(numbers[4:7], "little") % (5 * PART_BYTES)
        part = bytes((numbers[7],)) * min(numbers[8] * 400, PART_BYTES)
        if numbers[8] >= 250:
            part = bytes(PART_BYTES if numbers[8] < 253 else length % PART_BYTES)
        try:
            fragment = Fragment(bytes(7) + numbers[1:2], numbers[2] % 8, numbers[3] % 8, length)
        except ValueError:
            continue  # envelopes with such a header are refused before
        try:
            whole = reassembler.add(numbers[0] % 3, 16, fragment, part)
        except WireError:
            continue
        assert whole is None or len(whole) == length
        assert reassembler.held_bytes <= limits.most_bytes


def _topic(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    assert _TOPICS.write(_TOPICS.parse(text)) == text


def _code(data: bytes) -> None:
    parse_code(data.decode("utf-8", "replace"))


def _url(data: bytes) -> None:
    url = parse_broker_url(data.decode("utf-8", "replace"))
    assert 0 < url.port < 65_536
    if url.path is not None:
        assert url.path[0] == "/"
        assert all("!" <= each <= "~" for each in url.host + url.path)


def _proxy_url(data: bytes) -> None:
    proxy = parse_proxy_url(data.decode("utf-8", "replace"))
    assert 0 < proxy.port < 65_536 and ":" not in (proxy.user or "")


def _http_head(data: bytes) -> None:
    head = parse_head(data)
    assert 0 <= head.status < 1000 and len(head.reason) <= 100


def _frames(data: bytes) -> None:
    """However a server's bytes are cut, the same payload comes out, and no more than came."""
    size, stream = (data[0] % 16 if data else 0) + 1, data[1:]
    whole, reader = FrameReader(), FrameReader()
    payload = bytearray()
    try:
        for at in range(0, len(stream), size):
            payload += reader.read(stream[at : at + size])
    except ConnectionError:
        with pytest.raises(ConnectionError):
            whole.read(stream)
        raise
    assert whole.read(stream) == payload and len(payload) <= len(stream)
    assert (whole.closed, whole.ping) == (reader.closed, reader.ping)


def _running(data: bytes) -> None:
    live = parse_live(data)
    if live is None:
        raise ValueError("no running device's state")
    assert isinstance(live.problem_of("air"), str) and isinstance(live.process, int)
    assert isinstance(live.problem_of("default"), str)
    assert all(isinstance(number, int) for number in live.working_on.values())
    assert all(isinstance(reason, str) for reason in live.left_out.values())


def _hex(*texts: str) -> list[bytes]:
    return [bytes.fromhex(text) for text in texts]


def _tensor_encodings() -> Sequence[bytes]:
    return [
        data
        for section in ("tensors", "tensors_int4")
        for data in _hex(*_encodings(vectors("codecs")[section]))
    ]


def _broadcasts() -> Sequence[bytes]:
    arrays = {"items": np.arange(6, dtype=np.float32).reshape(3, 2)}
    broadcast = Broadcast(1, 0, arrays, {"scores": "residual", "user_l2": 0.5, "most": 3})
    plain = TaskTerms("scatter", "int8", 2.5)
    rich = TaskTerms(
        "attention",
        "float16",
        60.0,
        artifacts=(
            OfferedArtifact(b"\1" * 32, "gru", 9, OfferedContent(b"\2" * 32, "meta", 9)),
            OfferedArtifact(b"\4" * 32, "rung", 9, None, OfferedShare(b"\5" * 32, 9)),
        ),
        attachments=(OfferedAttachment("vector.a", b"\3" * 32, 9, "c.0"),),
        cohort_keys={"c.0": (bytes(WRAPPED_BYTES),)},
    )
    asking = TaskTerms("fedavg", "int8", 2.5, evaluation=EvaluationTerms(("loss", "auc")))
    rng = np.random.default_rng(0)
    return [write_broadcast(broadcast, terms, "float16", rng) for terms in (plain, rich, asking)]


def _soft_outputs() -> Sequence[bytes]:
    given = np.asarray([[0.5, 0.25, 0.25, 0, 0], [1, 0, 0, 0, 0], [0.2] * 5], dtype=np.float32)
    found = []
    for number in range(8):
        form = SoftForm("int8" if number & 1 else "float16", number >> 1)
        arrays = encode_soft_outputs(given, form)
        found.append(bytes((number,)) + encode_tensors(arrays, Codec.FLOAT32))
    return found


def _bodies() -> Sequence[bytes]:
    weight = np.arange(6, dtype=np.float32).reshape(3, 2)
    arrays: dict[str, NDArray[Any]] = {"weight": weight, "n": np.arange(2)}
    update = Update(7, arrays, {"samples": 12, "share": 0.5})
    rng = np.random.default_rng(0)
    return [encode_update(update, codec, rng) for codec in Codec]


def _contributions() -> Sequence[bytes]:
    found = vectors("codecs")["contributions"]
    return _hex(found["trained"]["payload"], found["failed"]["payload"])


_WIRE = (WireError,)
CODEC_TARGETS = (
    Target(
        "packets",
        _packets,
        lambda: [
            b"\x02\x10\x01" + b"\x20\x02\x00\x00" + b"\x30\x05\x00\x02upx" * 3,
            b"\x00\xff\x00" + b"\x32\x07\x00\x02up\x00\x09x\x40\x02\x00\x09\xd0\x00",
            b"\x07\x80\x00" + b"\x30\x80\x01\x00\x01t" + bytes(125) + b"\x30\xff\xff\xff\xff\x01",
        ],
        _WIRE,
    ),
    Target(
        "cbor",
        _cbor,
        lambda: _hex(*(entry["encoding"] for entry in vectors("sealing")["cbor"])),
        _WIRE,
    ),
    Target(
        "tensors",
        _tensors,
        _tensor_encodings,
        _WIRE,
    ),
    Target(
        "scatter",
        _sparse,
        lambda: _hex(*_encodings(vectors("codecs")["sparse"])),
        _WIRE,
    ),
    Target(
        "scatter-factored",
        _factored,
        lambda: [
            seed
            for each in vectors("codecs")["factored"].values()
            for seed in _hex(*_encodings(each))
        ],
        _WIRE,
    ),
    Target("manifest", _manifest, lambda: _hex(vectors("codecs")["manifest"]["body"]), _WIRE),
    Target(
        "receipt",
        _receipt,
        lambda: _hex(*vectors("codecs")["receipts"]["payloads"].values()),
        _WIRE,
    ),
    Target("standing", _standing, lambda: _hex(vectors("codecs")["standing"]["payload"]), _WIRE),
    Target(
        "placement",
        _placement,
        lambda: _hex(*(each["payload"] for each in vectors("placement")["placements"]["records"])),
        _WIRE,
    ),
    Target("update", _update, lambda: _hex(vectors("codecs")["update"]["payload"]), _WIRE),
    Target("contribution", _contribution, _contributions, _WIRE),
    Target("report", _report, lambda: _hex(*vectors("codecs")["reports"].values()), _WIRE),
    Target("broadcast", _broadcast, _broadcasts, _WIRE),
    Target("body", _body, _bodies, _WIRE),
    Target(
        "evaluations",
        _evaluations,
        lambda: _hex(
            vectors("evaluation")["report"]["encoding"], vectors("evaluation")["empty_report"]
        ),
        _WIRE,
    ),
    Target("attachment", _attachment, _tensor_encodings, _WIRE),
    # A method names these refusals: the decoder says what was wrong with a ValueError.
    Target("soft-outputs", _soft, _soft_outputs, (WireError, ValueError)),
    Target("chunks", _chunks, lambda: [bytes(range(40))], _WIRE),
    Target("content", partial(decode, ContentHead), lambda: [_content_head()], _WIRE),
    Target("catalogue", partial(decode, Catalogue), lambda: [_catalogue()], _WIRE),
    Target(
        "topic",
        _topic,
        lambda: [text.encode() for text in vectors("codecs")["topics"].values()],
        _WIRE,
        256,
    ),
    Target(
        "code",
        _code,
        lambda: [vectors("sealing")["enrolment"]["code"].encode()],
        _WIRE,
        256,
    ),
    Target(
        "url",
        _url,
        lambda: [
            b"mqtts://user:secret@broker.example:8883",
            b"ws://user@broker.example:9001/mqtt",
            b"wss://[::1]/a/b?token=%2F&c",
        ],
        (ValueError,),
        256,
    ),
    Target("proxy-url", _proxy_url, lambda: [b"http://user:secret@proxy:3128"], (ValueError,), 256),
    Target(
        "running",
        _running,
        lambda: [
            b'{"connected":true,"session":true,"working_on":{"default":7},"problem":"x",'
            b'"problems":{"air":"y"},"process":12,"unix_seconds":1800000000,'
            b'"left_out":{"films":"z"}}'
        ],
        (ValueError,),
        512,
    ),
    Target(
        "http-head",
        _http_head,
        lambda: [
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: WebSocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nSec-WebSocket-Protocol: mqtt"
        ],
        (ConnectionError,),
        1024,
    ),
    Target(
        "frames",
        _frames,
        lambda: [
            b"\x03"
            + b"\x82\x04\x20\x02\x00\x00"
            + b"\x89\x02hi"
            + b"\x8a\x00"
            + b"\x88\x02\x03\xe8",
            b"\x08" + b"\x02\x7e\x00\x80" + bytes(128) + b"\x00\x01a" + b"\x80\x01b",
            b"\x0f" + b"\x82\x7f\x00\x00\x00\x00\x00\x00\x00\x03abc" + b"\x82\x00",
        ],
        (ConnectionError,),
    ),
)


def _encodings(section: dict[str, Any]) -> list[str]:
    return list(section["encodings"].values())


def _content_head() -> bytes:
    return cbor.encode(
        {"chunks": [bytes(32)], "content": bytes(32), "kind": "catalogue", "length": 9}
    )


def _catalogue() -> bytes:
    return encode(Catalogue(("a", "b"), ("A film", "")))
