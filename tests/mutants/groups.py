"""What is mutated together, and the tests that should notice."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GROUPS", "Group"]

_WIRE = "device_sdk/wire"
_TESTS = "tests/device_sdk/wire"


@dataclass(frozen=True)
class Group:
    """``sources`` are mutated, and each mutant meets those of ``tests`` that pass its function.

    Narrow tests are quick, and they have to be enough: what only a whole fleet's run would notice
    is not tested.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]


GROUPS = {
    "envelope": Group(
        (f"{_WIRE}/envelope.py", f"{_WIRE}/header.py", f"{_WIRE}/padding.py", f"{_WIRE}/replay.py"),
        (
            f"{_TESTS}/test_wire_envelope.py",
            f"{_TESTS}/test_wire_header.py",
            f"{_TESTS}/test_wire_vectors.py",
        ),
    ),
    "session": Group(
        (f"{_WIRE}/session.py",),
        (f"{_TESTS}/test_wire_session.py", f"{_TESTS}/test_wire_vectors.py"),
    ),
    "keys": Group(
        (f"{_WIRE}/hpke.py", f"{_WIRE}/signature.py", f"{_WIRE}/keys.py", f"{_WIRE}/cohort_key.py"),
        (
            f"{_TESTS}/test_wire_keys.py",
            f"{_TESTS}/test_cohort_key.py",
            f"{_TESTS}/test_wire_vectors.py",
        ),
    ),
    "chunks": Group((f"{_WIRE}/chunks.py",), (f"{_TESTS}/test_wire_chunks.py",)),
    "broadcast": Group(
        (f"{_WIRE}/broadcast.py", f"{_WIRE}/chunk_set.py", f"{_WIRE}/content.py"),
        (
            f"{_TESTS}/test_wire_broadcast.py",
            f"{_TESTS}/test_wire_content.py",
            f"{_TESTS}/test_wire_vectors.py",
        ),
    ),
    "admission": Group(
        (f"{_WIRE}/admission.py", f"{_WIRE}/freshness.py", f"{_WIRE}/presence.py"),
        (
            f"{_TESTS}/test_wire_admission.py",
            f"{_TESTS}/test_wire_session.py",
            f"{_TESTS}/test_wire_descriptor.py",
            f"{_TESTS}/test_wire_vectors.py",
        ),
    ),
    "handshake": Group(
        (
            f"{_WIRE}/handshake.py",
            f"{_WIRE}/device_session.py",
            f"{_WIRE}/session_table.py",
            f"{_WIRE}/group_key.py",
        ),
        (
            f"{_TESTS}/test_wire_session.py",
            f"{_TESTS}/test_wire_descriptor.py",
            f"{_TESTS}/test_wire_vectors.py",
        ),
    ),
    "descriptor": Group(
        (f"{_WIRE}/descriptor.py", f"{_WIRE}/delegation.py", f"{_WIRE}/succession.py"),
        (f"{_TESTS}/test_wire_descriptor.py", f"{_TESTS}/test_wire_vectors.py"),
    ),
    "enrolment": Group(
        (
            f"{_WIRE}/enrolment.py",
            f"{_WIRE}/enrolment_message.py",
            f"{_WIRE}/enrolment_code.py",
        ),
        (f"{_TESTS}/test_wire_enrolment.py", f"{_TESTS}/test_wire_vectors.py"),
    ),
    "ingest": Group(
        (
            "aggregator/ingest.py",
            "aggregator/enrolment.py",
            "aggregator/repeats.py",
            "aggregator/deadline.py",
            "aggregator/fence.py",
            "aggregator/topic_limits.py",
        ),
        (
            "tests/aggregator/test_ingest.py",
            "tests/aggregator/test_enrolment.py",
            "tests/aggregator/test_deadline.py",
            "tests/aggregator/test_fence.py",
            "tests/aggregator/test_topic_limits.py",
        ),
    ),
}
