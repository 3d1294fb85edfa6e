"""What holds of every message alike: it is read as it was written, or refused."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import device_sdk.evaluation
import device_sdk.wire
from device_sdk.fields import entries_of, kind_of, plain
from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import Record, decode, decode_value, encode
from tests.fakes.messages import any_of, messages

for package in (device_sdk.wire, device_sdk.evaluation):
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(found.name)
EVERY = sorted(messages(), key=lambda kind: kind.__name__)
of_every = pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
brisk = settings(max_examples=12, suppress_health_check=list(HealthCheck))
ODD = (None, True, -1, 2**64 - 1, 0.5, "", "x" * 70, b"", b"x" * 70, [], [None], {}, {"a": None})


def test_every_message_is_here() -> None:
    assert {kind.__name__ for kind in EVERY} == {
        "BroadcastHead", "Catalogue", "ContentHead", "DescriptorBody", "EnrolAnswer",
        "OpenRequest", "PackedReport", "Placement", "Presence", "ProvenRequest", "Receipt",
        "Report", "RoundManifest", "ServedTasks", "SessionReply", "Standing", "Successor",
    }  # fmt: skip


@of_every
@brisk
@given(st.data())
def test_a_message_is_read_as_it_was_written(kind: type[Record], data: st.DataObject) -> None:
    message = data.draw(any_of(kind))
    sent = encode(message)
    assert decode(kind, sent) == message
    assert encode(decode(kind, sent)) == sent
    look: Any = kind_of(kind)
    assert look.quick_read(plain(message)) == look.read(plain(message)) == message
    changed = bytearray(sent)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    for other in (bytes(changed), sent[: data.draw(st.integers(0, len(sent)))]):
        read_or_refused(kind, other)


@of_every
@brisk
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_canonical(kind: type[Record], sent: bytes) -> None:
    read_or_refused(kind, sent)


def read_or_refused(kind: type[Record], sent: bytes) -> None:
    try:
        message = decode(kind, sent)
    except WireError:
        return
    assert encode(message) == sent


@of_every
@brisk
@given(st.data())
def test_an_odd_value_is_refused_and_not_repeated(kind: type[Record], data: st.DataObject) -> None:
    value = plain(data.draw(any_of(kind)))
    entry = data.draw(st.sampled_from(entries_of(kind)))
    look: Any = kind_of(kind)
    for odd in ODD:
        changed = value | {entry.key: odd}
        try:
            read = decode_value(kind, changed)
        except WireError as error:
            assert error.reason in ("bad-field", "wrong-fields", "bad-name")
            assert "xxx" not in str(error)
            with pytest.raises((LookupError, TypeError, ValueError)):
                look.quick_read(changed)
            continue
        assert plain(read) == changed and read == look.read(changed)


@of_every
@brisk
@given(st.data())
def test_no_field_too_few_or_too_many(kind: type[Record], data: st.DataObject) -> None:
    value = plain(data.draw(any_of(kind)))
    with pytest.raises(WireError, match="wrong-fields"):
        decode_value(kind, value | {"more": 1})
    for entry in entries_of(kind):
        if entry.required:
            lacking = {key: each for key, each in value.items() if key != entry.key}
            with pytest.raises(WireError, match="wrong-fields"):
                decode_value(kind, lacking)
        elif entry.key not in value:
            with pytest.raises(WireError, match="left out"):
                decode_value(kind, value | {entry.key: entry.kind.plain(entry.default)})


@of_every
def test_a_bound_comes_before_memory(kind: type[Record]) -> None:
    with pytest.raises(WireError, match="too-large"):
        decode(kind, bytes(kind.MOST_BYTES + 1))
    with pytest.raises(WireError, match="wrong-fields"):
        decode(kind, cbor.encode([]))
    first = min(entries_of(kind), key=lambda entry: (len(entry.key), entry.key))
    head = bytes((0xA1, 0x60 + len(first.key))) + first.key.encode()
    for announced in (b"\x9a\xff\xff\xff\xff", b"\x5a\xff\xff\xff\xff", b"\xba\xff\xff\xff\xff"):
        with pytest.raises(WireError, match="bad-cbor"):
            decode(kind, head + announced)


@of_every
def test_its_types_alone_say_what_a_message_is(kind: type[Record]) -> None:
    assert "__post_init__" not in inspect.getsource(kind)
