from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.session import (
    FRAGMENT_BYTES,
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    WINDOW,
    Direction,
    DirectionKeys,
    EnvelopeCipher,
    Fragment,
    ReplayWindow,
    pad,
    padded_length,
    read_header,
    unpad,
)
from tests.fakes.parties import SeededBytes
from tests.fakes.refusals import changed_bytes, reason_of

KEYS = DirectionKeys(SeededBytes("key")(32), SeededBytes("iv")(12))
UP = EnvelopeCipher(KEYS, Direction.UP)
SESSION = b"session!"
FRAGMENT = Fragment(b"message!", 1, 3, 200_000)


def refused(reason: str, message: bytes, cipher: EnvelopeCipher = UP) -> None:
    assert reason_of(lambda: cipher.open(message, read_header(message))) == reason


@given(
    st.integers(16, 255),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=3000),
    st.none() | st.just(FRAGMENT),
)
def test_round_trip(kind: int, sequence: int, payload: bytes, fragment: Fragment | None) -> None:
    message = UP.seal(kind, SESSION, sequence, payload, fragment)
    header = read_header(message)
    assert (header.message_type, header.session_id) == (kind, SESSION)
    assert (header.sequence, header.fragment) == (sequence, fragment)
    assert UP.open(message, header) == payload


def test_the_layout_byte_for_byte() -> None:
    message = UP.seal(17, SESSION, 5, b"abc", FRAGMENT)
    assert message[:20] == b"\x01\x11\x01\x00" + SESSION + b"\x05" + bytes(7)
    assert message[20:40] == b"message!" + struct.pack("<III", 1, 3, 200_000)
    assert len(message) == 40 + 128 + 16
    assert UP.nonce(0) == KEYS.iv
    assert UP.nonce(0x0102)[:2] == bytes([KEYS.iv[0] ^ 2, KEYS.iv[1] ^ 1])
    assert UP.nonce(2**64 - 1)[8:] == KEYS.iv[8:]


@pytest.mark.parametrize("fragment", [None, FRAGMENT])
def test_every_changed_bit_is_refused(fragment: Fragment | None) -> None:
    message = UP.seal(16, SESSION, 9, b"payload", fragment)
    seen = set()
    for bit in range(8):
        for _, changed in changed_bytes(message, 1 << bit):
            seen.add(reason_of(lambda each=changed: UP.open(each, read_header(each))))
    expected = {"bad-tag", "bad-version", "bad-type", "bad-flags"}
    assert seen == (expected if fragment is None else expected | {"bad-fragment"})


def test_another_direction_key_or_length_is_refused() -> None:
    message = UP.seal(16, SESSION, 9, b"payload")
    refused("bad-tag", message, EnvelopeCipher(KEYS, Direction.DOWN))
    refused("bad-tag", message, EnvelopeCipher(DirectionKeys(bytes(32), KEYS.iv), Direction.UP))
    refused("bad-tag", message + b"x")
    refused("bad-tag", message[:-1])
    refused("truncated", message[:35])
    refused("truncated", UP.seal(16, SESSION, 9, b"", FRAGMENT)[:55])
    refused("too-large", bytes(MAX_MESSAGE_BYTES + 1))
    for kind in (15, 256):
        with pytest.raises(ValueError, match="16 to 255"):
            UP.seal(kind, SESSION, 0, b"")


def test_the_shortest_envelope_is_judged_by_its_tag() -> None:
    for fragment, least in ((None, 36), (FRAGMENT, 56)):
        message = UP.seal(16, SESSION, 9, b"", fragment)
        refused("bad-tag", message[:least])
        refused("truncated", message[: least - 1])


def test_the_largest_envelope_fits_the_message_limit() -> None:
    message = UP.seal(16, SESSION, 0, bytes(MAX_PAYLOAD_BYTES), FRAGMENT)
    assert len(message) == MAX_MESSAGE_BYTES
    assert UP.open(message, read_header(message)) == bytes(MAX_PAYLOAD_BYTES)
    with pytest.raises(ValueError, match="do not fit"):
        UP.seal(16, SESSION, 0, bytes(MAX_PAYLOAD_BYTES + 1))


def test_keys_of_other_lengths_are_refused() -> None:
    for key, iv in ((31, 12), (32, 11), (33, 12), (32, 13)):
        with pytest.raises(ValueError, match="32 bytes"):
            DirectionKeys(bytes(key), bytes(iv))


def test_keys_do_not_print_themselves() -> None:
    assert repr(KEYS) == "DirectionKeys(...)"
    assert KEYS.key.hex() not in repr(KEYS)
    assert repr(KEYS.key) not in repr(KEYS)


@pytest.mark.parametrize(
    ("index", "total", "length"),
    [(3, 3, 1), (0, 0, 1), (0, 1, 0), (-1, 1, 1), (0, 2**32, 1), (0, 1, 2**32)],
)
def test_fragments_that_cannot_exist(index: int, total: int, length: int) -> None:
    with pytest.raises(ValueError, match=r"does not exist|index is|total is|length is"):
        Fragment(b"message!", index, total, length)


@pytest.mark.parametrize(("total", "length"), [(1, 1), (2**32 - 1, 2**32 - 1)])
def test_the_extreme_fragments_that_can(total: int, length: int) -> None:
    fragment = Fragment(b"message!", total - 1, total, length)
    message = UP.seal(16, SESSION, 0, b"", fragment)
    assert read_header(message).fragment == fragment


@settings(max_examples=300)
@given(st.binary(max_size=100))
def test_random_bytes_never_escape_as_another_error(data: bytes) -> None:
    for message in (data, b"\x01\x10\x00\x00" + data, b"\x01\x10\x01\x00" + data):
        with pytest.raises(WireError):
            UP.open(message, read_header(message))


@given(st.integers(0, 100_000))
def test_padding_keeps_its_bounds(length: int) -> None:
    most = 1 << 20
    total = padded_length(length, most)
    assert total > length
    assert total <= max(128, (length + 1) * 9 / 8)
    # Every length up to the bucket's end shares the bucket.
    assert padded_length(total - 1, most) == total


@given(st.binary(max_size=2000), st.integers(0, 30))
def test_padding_round_trip(plaintext: bytes, zeros: int) -> None:
    plaintext += bytes(zeros)  # zeros at the end must come back
    assert unpad(pad(plaintext, 4096), 4096) == plaintext


@pytest.mark.parametrize(
    "padded",
    [
        b"",
        bytes(128),
        b"a" * 128,
        b"a\x80" + bytes(127),
        b"a\x80" + bytes(125),
        b"\x80",
        pad(b"", 128) + bytes(128),
        pad(bytes(300), 4096) + bytes(4096),
    ],
)
def test_other_padding_is_refused(padded: bytes) -> None:
    assert reason_of(unpad, padded, 4096) == "bad-padding"


def test_there_are_eight_buckets_an_octave() -> None:
    assert len({padded_length(length, 1 << 20) for length in range(4095, 8191)}) == 9
    assert HEADER_BYTES == 20
    assert FRAGMENT_BYTES == 20


def test_a_late_number_is_taken_once() -> None:
    """The state machine below meets one number twice only now and then."""
    window = ReplayWindow()
    window.accept(1500)
    for age in (1, 2, 3, 500, 1023):
        window.accept(1500 - age)
        with pytest.raises(WireError, match="replayed"):
            window.accept(1500 - age)
    with pytest.raises(WireError, match="too-old"):
        window.accept(1500 - WINDOW)
    window.accept(1502)  # 477 falls out of the window
    for sequence in (1500, 1499, 1498, 1497, 1000):
        with pytest.raises(WireError, match="replayed"):
            window.accept(sequence)
    window.accept(1501)
    with pytest.raises(WireError, match="too-old"):
        window.accept(477)


class ReplayMachine(RuleBasedStateMachine):
    """The window against the obvious: a set of everything seen."""

    def __init__(self) -> None:
        super().__init__()
        self.window = ReplayWindow()
        self.seen: set[int] = set()
        self.top = -1
        self.order: list[int] = []

    def offer(self, sequence: int) -> None:
        highest = self.top
        if sequence <= highest - WINDOW:
            expected = "too-old"
        elif sequence in self.seen:
            expected = "replayed"
        else:
            expected = ""
        try:
            self.window.accept(sequence)
            outcome = ""
        except WireError as error:
            outcome = error.reason
        assert outcome == expected
        if not outcome:
            self.seen.add(sequence)
            self.order.append(sequence)
            self.top = max(self.top, sequence)

    @rule(sequence=st.integers(0, 3000))
    def anywhere(self, sequence: int) -> None:
        self.offer(sequence)

    @rule(back=st.integers(-3, 1030))
    def near_the_top(self, back: int) -> None:
        self.offer(max(0, max(self.top, 0) - back))

    @rule(edge=st.integers(-2, 2))
    def at_the_edge(self, edge: int) -> None:
        self.offer(max(0, max(self.top, 0) - WINDOW + edge))

    @rule(gap=st.integers(1, 2**63))
    def leap(self, gap: int) -> None:
        self.offer((max(self.top, 0) + gap) % 2**64)

    @rule(place=st.integers(0, 50))
    def again(self, place: int) -> None:
        if self.seen:
            self.offer(self.order[-1 - place % len(self.order)])

    @rule(count=st.integers(1, 1100))
    def run(self, count: int) -> None:
        start = self.top + 1
        for sequence in range(start, start + count):
            self.offer(sequence)

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.window._mask.bit_length() <= WINDOW


ReplayMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestReplayWindow = ReplayMachine.TestCase
