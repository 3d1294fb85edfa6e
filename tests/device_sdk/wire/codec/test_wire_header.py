"""The first two bytes of every message, and how long it may be."""

from __future__ import annotations

import pytest

from device_sdk.wire.codec.message import MessageType, check_prefix, prefix
from tests.fakes.refusals import reason_of

HEAD = prefix(MessageType.PRESENCE)


@pytest.mark.parametrize("length", [10, 11, 20])
def test_both_limits_belong_to_what_is_allowed(length: int) -> None:
    check_prefix(HEAD + bytes(length - 2), MessageType.PRESENCE, 10, 20)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (HEAD + bytes(7), "truncated"),
        (b"", "truncated"),
        (HEAD + bytes(19), "too-large"),
        (b"\x00" + HEAD[1:] + bytes(10), "bad-version"),
        (b"\x02" + HEAD[1:] + bytes(10), "bad-version"),
        (prefix(MessageType.MANIFEST) + bytes(10), "bad-type"),
        (b"\x02\x01" + bytes(10), "bad-version"),
    ],
)
def test_anything_else_is_refused_for_its_reason(message: bytes, reason: str) -> None:
    assert reason_of(check_prefix, message, MessageType.PRESENCE, 10, 20) == reason
