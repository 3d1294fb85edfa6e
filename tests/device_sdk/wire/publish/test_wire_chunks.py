from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.chunks import (
    LEAST_PART_BYTES,
    PART_BYTES,
    Reassembler,
    ReassemblyLimits,
    split,
)
from device_sdk.wire.seal.session import Fragment

TYPE = 16
LAST = 300_000 - 3 * PART_BYTES


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def message(parts: int, fill: int) -> bytes:
    return bytes((fill,)) * (PART_BYTES * (parts - 1) + 10 + fill)


def reason(
    reassembler: Reassembler, sender: str, fragment: Fragment, part: bytes, kind: int = TYPE
) -> str:
    with pytest.raises(WireError) as caught:
        reassembler.add(sender, kind, fragment, part)
    return caught.value.reason


def test_parts_come_together_in_any_order() -> None:
    whole = b"".join(bytes((number,)) * 50_000 for number in range(6))
    parts = split(whole, b"message!")
    assert [len(part) for _, part in parts] == [
        *[PART_BYTES] * 3,
        LAST,
    ]
    reassembler = Reassembler(Clock())
    for fragment, part in [parts[2], parts[0], parts[0], parts[3]]:
        assert reassembler.add("a", TYPE, fragment, part) is None
    assert reassembler.held_bytes == 2 * PART_BYTES + LAST
    assert reassembler.add("a", TYPE, *parts[1]) == whole
    assert reassembler.held_bytes == 0


@given(st.integers(LEAST_PART_BYTES, PART_BYTES), st.integers(2, 5), st.data())
def test_parts_of_any_size_come_together_and_no_others_with_them(
    size: int, total: int, data: st.DataObject
) -> None:
    """As a broker's largest packet has it. A part of another size is refused, whichever it is."""
    last = data.draw(st.integers(1, size))
    whole = os.urandom((total - 1) * size + last)
    parts = data.draw(st.permutations(split(whole, b"message!", size)))
    reassembler = Reassembler(Clock())
    *most, end = [reassembler.add("a", TYPE, *each) for each in parts]
    assert end == whole and not any(most)
    other = data.draw(st.sampled_from(parts))
    cut = (other[0], other[1][:-1] if len(other[1]) > 1 else other[1] * 2)
    reassembler.add("a", TYPE, *next(each for each in parts if each is not other))
    assert reason(reassembler, "a", *cut) == "bad-fragment"


def test_a_message_that_fits_is_not_cut() -> None:
    with pytest.raises(ValueError, match="fit one envelope"):
        split(bytes(PART_BYTES), b"message!")


def test_senders_and_types_are_kept_apart() -> None:
    first, second = split(message(2, 1), b"message!")
    reassembler = Reassembler(Clock())
    assert reassembler.add("a", TYPE, *first) is None
    assert reassembler.add("b", TYPE, *second) is None
    assert reassembler.add("a", TYPE + 1, *second) is None
    assert reassembler.held_bytes == sum(len(part) for _, part in (first, second, second))
    assert reassembler.add("a", TYPE, *second) == message(2, 1)


def test_lies_are_refused_and_forget_the_message() -> None:
    first, second = split(message(2, 1), b"message!")
    fragment, part = first
    for lie, lying_part in (
        (Fragment(b"message!", 1, 2, fragment.length + 1), second[1] + b"\x01"),
        (fragment, b"\x02" * PART_BYTES),
    ):
        reassembler = Reassembler(Clock())
        reassembler.add("a", TYPE, fragment, part)
        assert reason(reassembler, "a", lie, lying_part) == "bad-fragment"
        assert reassembler.held_bytes == 0
    fresh = Reassembler(Clock())
    assert reason(fresh, "a", Fragment(b"message!", 0, 1, 10), bytes(10)) == "bad-fragment"
    assert reason(fresh, "a", Fragment(b"message!", 0, 9, 200_000), part) == "bad-fragment"
    assert reason(fresh, "a", fragment, part[: len(part) // 2 - 1]) == "bad-fragment"
    huge = Fragment(b"message!", 0, -(-(2**31) // PART_BYTES), 2**31)
    assert reason(fresh, "a", huge, part) == "too-large"
    assert fresh.held_bytes == 0


def test_the_limits_themselves_are_allowed() -> None:
    whole = message(2, 1)
    at_most = Reassembler(Clock(), ReassemblyLimits(most_message_bytes=len(whole)))
    first, second = split(whole, b"message!")
    assert at_most.add("a", TYPE, *first) is None
    assert at_most.add("a", TYPE, *second) == whole
    below = Reassembler(Clock(), ReassemblyLimits(most_message_bytes=len(whole) - 1))
    assert reason(below, "a", *first) == "too-large"
    # What fits one envelope has one way to travel.
    single = Fragment(b"message!", 0, 1, PART_BYTES)
    assert reason(at_most, "a", single, bytes(PART_BYTES)) == "bad-fragment"
    ReassemblyLimits(1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="idle_seconds is 0; expected a number of at least 1"):
        ReassemblyLimits(idle_seconds=0)


def test_one_long_part_gives_way_at_a_time() -> None:
    """Each message that is given up makes room for its own bytes, and no more go than have to."""
    limits = ReassemblyLimits(most_messages_a_sender=9, most_bytes_a_sender=5 * PART_BYTES)
    reassembler = Reassembler(Clock(), limits)
    for number, length in enumerate((1, 3, 1)):
        for fragment, part in split(message(4, 1), bytes((number,)) * 8)[:length]:
            reassembler.add("a", TYPE, fragment, part)
    assert (reassembler.held_bytes, reassembler.evicted) == (5 * PART_BYTES, 0)
    reassembler.add("a", TYPE, *split(message(4, 1), b"the next")[0])
    assert (reassembler.held_bytes, reassembler.evicted) == (5 * PART_BYTES, 1)
    for fragment, part in split(message(4, 1), b"the last")[:3]:
        reassembler.add("a", TYPE, fragment, part)
    assert (reassembler.held_bytes, reassembler.evicted) == (5 * PART_BYTES, 2)


def test_a_short_part_alone_does_not_make_room_for_a_long_one() -> None:
    limits = ReassemblyLimits(most_messages_a_sender=9, most_bytes_a_sender=2 * PART_BYTES - 1)
    reassembler = Reassembler(Clock(), limits)
    short, long, new = (split(message(2, 1), bytes((number,)) * 8) for number in range(3))
    for fragment, part in (short[1], long[0], new[0]):
        reassembler.add("a", TYPE, fragment, part)
    assert (reassembler.held_bytes, reassembler.evicted) == (PART_BYTES, 2)


def test_idle_messages_are_forgotten() -> None:
    clock = Clock()
    reassembler = Reassembler(clock, ReassemblyLimits(idle_seconds=10))
    first, second = split(message(2, 1), b"message!")
    reassembler.add("a", TYPE, *first)
    clock.now = 9
    reassembler.add("a", TYPE, *first)  # a repetition is no progress
    clock.now = 10
    assert reassembler.add("a", TYPE, *second) is None
    assert reassembler.evicted == 1


class Reassembly(RuleBasedStateMachine):
    """Against an oracle that keeps a list of (key, parts) in order of the last touch."""

    LIMITS = ReassemblyLimits(
        most_message_bytes=4 * PART_BYTES,
        most_messages_a_sender=2,
        most_bytes_a_sender=3 * PART_BYTES,
        most_bytes=5 * PART_BYTES,
        idle_seconds=10,
    )

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.reassembler = Reassembler(self.clock, self.LIMITS)
        self.oracle: list[tuple[tuple[str, int], float, dict[int, int]]] = []

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(sender=st.sampled_from("abc"), number=st.integers(0, 2), index=st.integers(0, 3))
    def part(self, sender: str, number: int, index: int) -> None:
        whole = message(2 + number, number)
        parts = split(whole, bytes((number,)) * 8)
        fragment, part = parts[index % len(parts)]
        result = self.reassembler.add(sender, TYPE, fragment, part)

        key = (sender, number)
        self.expire()
        held = next((entry[2] for entry in self.oracle if entry[0] == key), {})
        if fragment.index in held:
            assert result is None
            return
        held = {**held, fragment.index: len(part)}
        self.oracle = [entry for entry in self.oracle if entry[0] != key]
        if len(held) == len(parts):
            assert result == whole
            return
        assert result is None
        self.oracle.append((key, self.clock.now, held))
        while True:
            own = [entry for entry in self.oracle if entry[0][0] == sender]
            size = sum(sum(entry[2].values()) for entry in own)
            if len(own) <= 2 and size <= 3 * PART_BYTES:
                break
            self.oracle.remove(own[0])
        while sum(sum(entry[2].values()) for entry in self.oracle) > 5 * PART_BYTES:
            self.oracle.pop(0)

    def expire(self) -> None:
        self.oracle = [entry for entry in self.oracle if self.clock.now - entry[1] < 10]

    @invariant()
    def same_as_the_oracle(self) -> None:
        self.reassembler.expire()
        self.expire()
        assert self.reassembler.held_bytes == sum(sum(e[2].values()) for e in self.oracle)
        assert self.reassembler.held_bytes <= self.LIMITS.most_bytes


TestReassembly = Reassembly.TestCase
TestReassembly.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
