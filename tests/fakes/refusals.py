"""Why the wire refuses what came, and messages that are almost right."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import strategies as st

from device_sdk.wire.codec.errors import WireError


def reason_of(call: Callable[..., object], *arguments: object, **named: object) -> str:
    """In one word; fails where nothing is refused."""
    with pytest.raises(WireError) as refused:
        call(*arguments, **named)
    return refused.value.reason


def changed_bytes(message: bytes, mask: int = 1) -> Iterator[tuple[int, bytes]]:
    """Each place, and the message with these bits flipped in its byte."""
    for place in range(len(message)):
        yield place, message[:place] + bytes((message[place] ^ mask,)) + message[place + 1 :]


def mutated(message: bytes, data: st.DataObject) -> bytes:
    """With one to three bytes set, cut out or put in."""
    found = bytearray(message)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(found) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert"])):
            case "set":
                found[at] = data.draw(st.integers(0, 255))
            case "cut" if len(found) > 1:
                del found[at]
            case _:
                found.insert(at, data.draw(st.integers(0, 255)))
    return bytes(found)
