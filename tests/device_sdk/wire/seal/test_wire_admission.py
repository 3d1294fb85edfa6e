from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.admission import (
    AdmissionPurpose,
    TokenBucket,
    TokenBuckets,
    WorkBudget,
    admission_tag,
    check_admission,
)
from tests.fakes.parties import Clock
from tests.fakes.refusals import reason_of


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
        assert reason_of(check_admission, key, purpose, message, attempt) == "bad-admission"


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


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"a", b"b", b"c"]),
            st.sampled_from([0.0, 0.25, 0.5, 1.0, 8.0]),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_each_key_has_a_bucket_and_it_is_known_before_whether_it_lets_through(
    steps: list[tuple[bytes, float, bool]],
) -> None:
    clock = Clock()
    buckets = TokenBuckets(2, 1.0, clock)
    apart = {key: TokenBucket(2, 1.0, clock) for key in (b"a", b"b", b"c")}
    for key, pause, raises in steps:
        clock.seconds += pause
        asked = len(buckets)
        empty = buckets.is_empty(key)
        assert empty == apart[key].is_empty()
        assert len(buckets) == asked, "to ask makes no bucket"
        let = apart[key].allows()
        assert let != empty
        if raises and not let:
            assert reason_of(buckets.take, key) == "too-many"
        elif raises:
            buckets.take(key)
        else:
            assert buckets.allows(key) == let


def did_work(budget: WorkBudget, clock: Clock, seconds: float) -> bool:
    try:
        with budget.work():
            clock.seconds += seconds
    except WireError as error:
        assert error.reason == "busy"
        return False
    return True


def test_a_budget_holds_work_to_its_share_of_the_time() -> None:
    clock = Clock()
    budget = WorkBudget(0.25, clock, burst_seconds=1.0)
    # The eight pieces of a second, and what is gained while they are done.
    assert sum(did_work(budget, clock, 0.125) for _ in range(1000)) == 11
    clock.seconds += 0.5
    assert [did_work(budget, clock, 0.125) for _ in range(3)] == [True, False, False]
    clock.seconds += 1e6  # nothing is saved up beyond a second
    assert sum(did_work(budget, clock, 0.125) for _ in range(1000)) == 11


def test_work_that_fails_is_charged_and_a_clock_that_falls_takes_nothing() -> None:
    clock = Clock(100.0)
    budget = WorkBudget(0.5, clock, burst_seconds=1.0)
    with pytest.raises(ZeroDivisionError), budget.work():
        clock.seconds += 2.0
        raise ZeroDivisionError
    assert not did_work(budget, clock, 0.0)
    clock.seconds = 0.0
    assert not did_work(budget, clock, 0.0)
    clock.seconds = 5.0
    assert did_work(budget, clock, -5.0)


@given(
    st.floats(0.01, 1.0),
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 0.5)), min_size=1, max_size=60),
)
def test_never_more_than_the_share_a_burst_and_one_piece(
    share: float, asked: list[tuple[float, float]]
) -> None:
    clock = Clock()
    budget = WorkBudget(share, clock, burst_seconds=1.0)
    worked = 0.0
    for pause, piece in asked:
        clock.seconds += pause
        worked += piece if did_work(budget, clock, piece) else 0.0
    assert worked <= share * clock.seconds + 1.0 + 0.5 + 1e-6


@pytest.mark.parametrize(("share", "burst"), [(0.0, 1.0), (1.1, 1.0), (0.5, 0.0), (-1.0, 1.0)])
def test_a_budget_that_is_none_is_refused(share: float, burst: float) -> None:
    with pytest.raises(ValueError, match="share"):
        WorkBudget(share, Clock(), burst_seconds=burst)
