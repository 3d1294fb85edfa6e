from __future__ import annotations

import pytest

from device_sdk.wire.admission import (
    AdmissionPurpose,
    TokenBucket,
    TokenBuckets,
    admission_tag,
    check_admission,
)
from device_sdk.wire.errors import WireError
from tests.device_sdk.wire.parties import Clock


def may_take(bucket: TokenBucket) -> bool:
    try:
        bucket.take()
    except WireError as error:
        assert error.reason == "too-many"
        return False
    return True


def test_a_tag_is_bound_to_key_purpose_and_message() -> None:
    tag = admission_tag(b"key", AdmissionPurpose.ENROL, b"message")
    assert len(tag) == 16
    check_admission(b"key", AdmissionPurpose.ENROL, b"message", tag)
    for key, purpose, message, attempt in [
        (b"yek", AdmissionPurpose.ENROL, b"message", tag),
        (b"key", AdmissionPurpose.SESSION_OPEN, b"message", tag),
        (b"key", AdmissionPurpose.ENROL, b"messagf", tag),
        (b"key", AdmissionPurpose.ENROL, b"message", tag[:15]),
        (b"key", AdmissionPurpose.ENROL, b"message", b""),
    ]:
        with pytest.raises(WireError) as caught:
            check_admission(key, purpose, message, attempt)
        assert caught.value.reason == "bad-admission"


def test_a_bucket_allows_its_burst_and_then_its_rate() -> None:
    clock = Clock()
    bucket = TokenBucket(3, 0.5, clock)
    assert [may_take(bucket) for _ in range(5)] == [True, True, True, False, False]
    clock.seconds = 1.9
    assert not may_take(bucket)
    clock.seconds = 2.0
    assert may_take(bucket)
    assert not may_take(bucket)
    clock.seconds = 1.0  # a clock that falls takes nothing away and gives nothing
    assert not may_take(bucket)
    clock.seconds = 1000.0
    assert [may_take(bucket) for _ in range(4)] == [True, True, True, False]


def test_a_clock_that_falls_takes_no_tokens_away() -> None:
    clock = Clock(100.0)
    bucket = TokenBucket(2, 1.0, clock)
    clock.seconds = 0.0
    assert [may_take(bucket) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(("capacity", "rate"), [(0.5, 1.0), (1.0, 0.0), (1.0, -1.0)])
def test_a_bucket_that_lets_nothing_through_is_refused(capacity: float, rate: float) -> None:
    for make in (TokenBucket, TokenBuckets):
        with pytest.raises(ValueError, match="never"):
            make(capacity, rate, Clock())


def test_buckets_are_apart_and_full_ones_are_forgotten() -> None:
    clock = Clock()
    buckets = TokenBuckets(1, 1.0, clock)
    buckets.take(b"a")
    buckets.take(b"b")
    with pytest.raises(WireError):
        buckets.take(b"a")
    for number in range(20_000):
        clock.seconds += 0.01  # each bucket is full again after 100 more
        buckets.take(number.to_bytes(8, "big"))
    assert len(buckets) < 1300
    busy = TokenBuckets(1, 1.0, Clock())
    for number in range(3000):
        busy.take(number.to_bytes(8, "big"))
    assert len(busy) == 3000, "a bucket that is not full must not be forgotten"
