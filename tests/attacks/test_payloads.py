"""Bombs and garbage, and updates that are well-formed and mean harm."""

from __future__ import annotations

import os
import struct
import tracemalloc

import numpy as np
import pytest

from aggregator.keys.enrolment import make_codes
from aggregator.methods.scatter import ScatterBinding, ScatterTable
from aggregator.methods.server_optimizer import OptimizerSettings
from aggregator.serve.uplink import Refusal
from device_sdk.link.events import Message
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.codec.message import MessageType, prefix
from device_sdk.wire.publish.receipts import RecordType
from device_sdk.wire.publish.topics import EnrolRequestTopic
from device_sdk.wire.seal import hpke
from device_sdk.wire.seal.admission import AdmissionPurpose, admission_tag
from device_sdk.wire.seal.enrolment_message import REQUESTER_BYTES, enrol_info
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.session import MAX_PAYLOAD_BYTES, Fragment
from device_sdk.wire.seal.signature import SIGNATURE_BYTES
from tests.attacks.conftest import MakeStage
from tests.attacks.stage import Stage
from tests.fakes.scatter_updates import one_user
from tests.faults.known import WIDTH, known_body

_ROUND = "quorum = 1\nwait_for_devices = 3\ndeadline_seconds = 60\npause_seconds = 5"


def _megabytes(stage: Stage, messages: list[tuple[str, bytes]]) -> float:
    tracemalloc.start()
    for topic, payload in messages:
        stage.parts.uplink.receive(Message(topic, payload, False))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6


def test_garbage_of_every_size_is_refused_in_bounded_memory(stage: Stage) -> None:
    rng = np.random.default_rng(3)
    topics = [stage.up_topic(0), stage.topics.write(EnrolRequestTopic()), "tessera/nonsense", ""]
    messages = []
    for size in (0, 1, 2, 19, 35, 36, 100, 4096, 98_304, 98_305, 1_000_000):
        for kind in range(0, 256, 15):
            payload = bytearray(rng.bytes(size))
            payload[:2] = bytes((1, kind))[:size]
            messages += [(topic, bytes(payload)) for topic in topics]
    for topic, payload in messages:
        answer = stage.parts.uplink.receive(Message(topic, payload, False))
        assert isinstance(answer, Refusal), (topic, payload[:40])
    assert _megabytes(stage, messages) < 5


def test_deep_and_huge_cbor_is_refused_in_bounded_memory(stage: Stage) -> None:
    # Only who holds a code gets as far as the decoder: the HMAC is right, and the seal.
    [code] = make_codes(stage.store, 1, int(stage.unix()), os.urandom)
    with stage.store.database.transaction():
        stage.store.tokens.add(code, int(stage.unix()), int(stage.unix()) + 3600, None)
    descriptor = stage.parts.keys.current().descriptor
    freshness = Freshness(stage.incarnation(), 1)
    head = prefix(MessageType.ENROL_REQUEST) + struct.pack("<Q", descriptor.serial) + code.token_id
    head += bytes(REQUESTER_BYTES) + freshness.to_bytes()
    messages = []
    for bomb in (
        b"\x81" * 2500,  # arrays in arrays
        b"\x9b" + b"\xff" * 8,  # 2^64 - 1 items
        b"\x5b" + b"\x7f" + b"\xff" * 7,  # a string of 2^63 bytes
        b"\xbb" + b"\xff" * 8,
        b"\xc2" * 2500,
    ):
        public = hpke.public_key(descriptor.hpke)
        sealed = hpke.seal(public, enrol_info(descriptor, freshness), bytes(SIGNATURE_BYTES) + bomb)
        tag = admission_tag(code.secret, AdmissionPurpose.ENROL, head + sealed)
        messages.append((stage.topics.write(EnrolRequestTopic()), head + tag + sealed))
    for topic, payload in messages:
        answer = stage.parts.uplink.receive(Message(topic, payload, False))
        assert isinstance(answer, Refusal) and answer.error.reason == "bad-cbor", answer
    assert _megabytes(stage, messages) < 2


def test_an_insider_s_parts_that_promise_gigabytes_hold_only_what_came(stage: Stage) -> None:
    session = stage.devices[0].participant.sessions
    messages = []
    for number in range(200):
        length = 32 << 20
        total = -(-length // MAX_PAYLOAD_BYTES)
        fragment = Fragment(struct.pack("<Q", number), 0, total, length)
        sealed = session.seal(RecordType.UPDATE, bytes(MAX_PAYLOAD_BYTES), fragment)
        messages.append((stage.up_topic(0), sealed))
    assert _megabytes(stage, messages) < 2
    too_long = Fragment(bytes(8), 0, 2**31, 2**32 - 1)
    sealed = session.seal(RecordType.UPDATE, os.urandom(100), too_long)
    answer = stage.parts.uplink.receive(Message(stage.up_topic(0), sealed, False))
    assert isinstance(answer, Refusal) and answer.error.reason == "too-large"


def _values_body(place: int, values: float, rows: int = 64) -> bytes:
    tensors = one_user(WIDTH, range(rows), np.ones(rows))
    body = encode_scatter_update(Update(1, tensors), WIDTH, "float32")
    return body[: -4 * (rows + WIDTH)] + np.full(rows + WIDTH, values, "<f4").tobytes()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e13, 3e38])
def test_updates_that_are_not_finite_or_absurd_are_refused(
    make_stage: MakeStage, value: float
) -> None:
    def body(place: int, generation: int, number: int) -> bytes:
        if place == 0:
            return _values_body(place, value)
        return known_body(place, generation, number)

    stage = make_stage(judged=False, round_lines=_ROUND, body=body)
    stage.liars = {0}
    stage.await_version(2)
    stage.run(1.0)
    assert stage.verdict(0, 1) == "refused"
    assert stage.verdict(1, 1) == stage.verdict(2, 1) == "counted"
    assert np.isfinite(stage.parts.first.aggregation.state()["items"]).all()


def _bpr_values_body(values: float) -> bytes:
    whole = np.full((64, WIDTH), values, np.float32)
    tensors = {"columns": np.arange(WIDTH), "rows": np.arange(64), "values": whole}
    return encode_scatter_update(Update(1, tensors), WIDTH, "float32")


def _binding(clip_norm: float) -> ScatterBinding:
    optimizer = OptimizerSettings(name="plain", learning_rate=1.0)
    return ScatterBinding(
        "scatter",
        ScatterTable(
            "bpr",
            aggregator="mean",
            optimizer=optimizer,
            clip_norm=clip_norm,
            columns=WIDTH,
            spread=0.1,
        ),
    )


@pytest.mark.parametrize("value", [1.0, 1e6, 1e11])
def test_a_huge_constant_update_moves_no_more_than_its_clipped_share(
    make_stage: MakeStage, value: float
) -> None:
    def body(place: int, generation: int, number: int) -> bytes:
        return _bpr_values_body(value if place == 0 else 0.0)

    stage = make_stage(judged=False, round_lines=_ROUND, body=body, binding=_binding(1.0))
    before = stage.parts.first.aggregation.state()["items"]
    stage.await_version(1)
    after = stage.parts.first.aggregation.state()["items"]
    # Three took part, and the hostile one's norm was cut to 1.
    assert stage.version == 1 and stage.parts.first.ingest.counted == 3
    assert float(np.linalg.norm(after - before)) == pytest.approx(1.0 / 3, rel=1e-3)
