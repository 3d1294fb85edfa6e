"""What is mutated together, and the tests that should notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """``sources`` are mutated, and each mutant meets those of ``tests`` that pass its function.

    Narrow tests are quick, and they have to be enough: what only a whole fleet's run would notice
    is not tested.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]


GROUPS = {
    "session": Group(
        ("device_sdk/wire/seal/session.py", "device_sdk/wire/codec/message.py"),
        (
            "tests/device_sdk/wire/seal/test_wire_envelope.py",
            "tests/device_sdk/wire/codec/test_wire_header.py",
            "tests/device_sdk/wire/seal/test_wire_session.py",
            "tests/device_sdk/wire/seal/test_wire_vectors.py",
        ),
    ),
    "keys": Group(
        (
            "device_sdk/wire/seal/hpke.py",
            "device_sdk/wire/seal/signature.py",
            "device_sdk/wire/seal/keys.py",
        ),
        (
            "tests/device_sdk/wire/seal/test_wire_keys.py",
            "tests/device_sdk/wire/seal/test_wire_vectors.py",
        ),
    ),
    "chunks": Group(
        ("device_sdk/wire/publish/chunks.py",),
        ("tests/device_sdk/wire/publish/test_wire_chunks.py",),
    ),
    "broadcast": Group(
        (
            "device_sdk/wire/seal/broadcast.py",
            "device_sdk/wire/publish/content.py",
            "device_sdk/wire/publish/manifest.py",
        ),
        (
            "tests/device_sdk/wire/seal/test_cohort_key.py",
            "tests/device_sdk/wire/seal/test_wire_broadcast.py",
            "tests/device_sdk/wire/seal/test_wire_descriptor.py",
            "tests/device_sdk/wire/publish/test_wire_content.py",
            "tests/device_sdk/wire/seal/test_wire_vectors.py",
        ),
    ),
    "admission": Group(
        (
            "device_sdk/wire/seal/admission.py",
            "device_sdk/wire/seal/freshness.py",
            "device_sdk/wire/seal/announcement.py",
        ),
        (
            "tests/device_sdk/wire/seal/test_no_session.py",
            "tests/device_sdk/wire/seal/test_wire_admission.py",
            "tests/device_sdk/wire/seal/test_wire_session.py",
            "tests/device_sdk/wire/seal/test_wire_descriptor.py",
            "tests/device_sdk/wire/seal/test_wire_vectors.py",
        ),
    ),
    "handshake": Group(
        (
            "device_sdk/wire/seal/handshake.py",
            "device_sdk/wire/seal/handshake.py",
            "device_sdk/wire/seal/session_table.py",
        ),
        (
            "tests/device_sdk/wire/seal/test_wire_session.py",
            "tests/device_sdk/wire/seal/test_wire_descriptor.py",
            "tests/device_sdk/wire/seal/test_wire_vectors.py",
        ),
    ),
    "descriptor": Group(
        (
            "device_sdk/wire/seal/descriptor.py",
            "device_sdk/wire/seal/descriptor.py",
        ),
        (
            "tests/device_sdk/wire/seal/test_wire_descriptor.py",
            "tests/device_sdk/wire/seal/test_wire_vectors.py",
        ),
    ),
    "enrolment": Group(
        (
            "device_sdk/wire/seal/enrolment.py",
            "device_sdk/wire/seal/enrolment_message.py",
            "device_sdk/wire/seal/enrolment_message.py",
        ),
        (
            "tests/device_sdk/wire/seal/test_wire_enrolment.py",
            "tests/device_sdk/wire/seal/test_wire_vectors.py",
        ),
    ),
    "ingest": Group(
        (
            "aggregator/rounds/ingest.py",
            "aggregator/keys/enrolment.py",
            "aggregator/rounds/ingest.py",
            "aggregator/rounds/machine.py",
            "aggregator/keys/fence.py",
            "aggregator/serve/broker_links.py",
        ),
        (
            "tests/aggregator/rounds/test_ingest.py",
            "tests/aggregator/keys/test_enrolment.py",
            "tests/aggregator/rounds/test_habits.py",
            "tests/aggregator/keys/test_fence.py",
            "tests/aggregator/serve/test_topic_limits.py",
        ),
    ),
}
