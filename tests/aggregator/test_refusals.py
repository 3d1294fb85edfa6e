"""What the log says of refused input."""

from __future__ import annotations

import logging

import pytest

from aggregator.refusals import Refusals
from device_sdk.wire.codec.errors import WireError


def test_sessions_of_the_life_before_are_told_once_and_are_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "aggregator")
    refusals = Refusals()
    for _ in range(3):
        refusals.note(WireError("unknown-session", "no session with this id is open here"))
    refusals.note(WireError("bad-signature", "the tag is wrong"), b"one")
    assert refusals.counts == {"unknown-session": 3, "bad-signature": 1}
    usual, other = caplog.records
    assert usual.levelno == logging.INFO and "open new ones (logged once)" in usual.message
    assert other.levelno == logging.WARNING and "refused from 6f6e65" in other.message
