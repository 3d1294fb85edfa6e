from __future__ import annotations

import pickle

import pytest

from device_sdk.wire.codec.errors import WireError


def test_a_reason_is_a_slug_and_survives_a_process_border() -> None:
    error = WireError("bad-tag", "what was wrong")
    assert str(error) == "bad-tag: what was wrong"
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.reason, str(copy)) == (error.reason, str(error))


@pytest.mark.parametrize("reason", ["", "Bad", "bad tag", "bad-", "-bad", "bad\n", "bad_tag"])
def test_other_reasons_are_a_programming_error(reason: str) -> None:
    with pytest.raises(ValueError, match="slug"):
        WireError(reason, "x")
