"""Which tasks an aggregator serves: signed, of one life, and read strictly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import MessageType, prefix
from device_sdk.wire.seal import signature
from device_sdk.wire.seal.announcement import (
    MOST_TASKS,
    Presence,
    ServedTasks,
    TasksWatch,
    announce,
    read_announcement,
)
from device_sdk.wire.seal.signature import Purpose
from tests.fakes.parties import make_serving

SERVING = make_serving(5)
DESCRIPTOR = SERVING.descriptor
LIFE = b"l" * 16
NAMES = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?", fullmatch=True)
SERVED = ServedTasks(LIFE, 3, (("films", "all"), ("films", "phones"), ("music", "all")))


def signed(body: bytes, purpose: Purpose = Purpose.TASKS) -> bytes:
    made = signature.sign(SERVING.signing, purpose, DESCRIPTOR.digest + body)
    return prefix(MessageType.TASKS) + made + body


def said(**changed: cbor.CborValue) -> bytes:
    return signed(cbor.encode({"incarnation": LIFE, "revision": 0, "tasks": [], **changed}))


def reason_of(message: bytes) -> str:
    with pytest.raises(WireError) as caught:
        read_announcement(ServedTasks, message, DESCRIPTOR)
    return caught.value.reason


def entry(task: cbor.CborValue = "films", cohort: cbor.CborValue = "all") -> cbor.CborValue:
    return {"task": task, "cohort": cohort}


def test_as_many_of_the_longest_names_as_there_may_be_fit() -> None:
    names = [(f"{n:064d}", "c" * 64) for n in range(MOST_TASKS + 1)]
    served = ServedTasks(LIFE, 2**63 - 1, tuple(names[:-1]))
    message = announce(served, DESCRIPTOR, SERVING.signing)
    assert (
        len(message) <= ServedTasks.MOST_BYTES
        and read_announcement(ServedTasks, message, DESCRIPTOR) == served
    )
    with pytest.raises(ValueError, match=r"257 items.; expected a list of at most 256 items"):
        replace(served, names=tuple(names))
    assert reason_of(said(tasks=[entry(*name) for name in names])) == "bad-field"
    assert reason_of(message + bytes(ServedTasks.MOST_BYTES)) == "too-large"


def test_every_changed_byte_is_noticed() -> None:
    message = announce(SERVED, DESCRIPTOR, SERVING.signing)
    for place in range(len(message)):
        changed = bytearray(message)
        changed[place] ^= 1
        expected = ["bad-version", "bad-type"][place] if place < 2 else "bad-signature"
        assert reason_of(bytes(changed)) == expected
    for cut, reason in ((66, "truncated"), (67, "bad-signature")):
        assert reason_of(message[:cut]) == reason


def test_what_was_signed_for_something_else_is_no_list() -> None:
    message = announce(SERVED, DESCRIPTOR, SERVING.signing)
    with pytest.raises(WireError, match="tasks signature"):
        read_announcement(ServedTasks, message, make_serving(6).descriptor)
    assert reason_of(signed(message[66:], Purpose.PRESENCE)) == "bad-signature"
    presence = announce(Presence(LIFE, 1), DESCRIPTOR, SERVING.signing)
    assert reason_of(presence) == "bad-type"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"incarnation": bytes(15)}, "bad-field"),
        ({"incarnation": "l" * 16}, "bad-field"),
        ({"revision": -1}, "bad-field"),
        ({"revision": 2**63}, "bad-field"),
        ({"revision": True}, "bad-field"),
        ({"tasks": {}}, "bad-field"),
        ({"tasks": [["films", "all"]]}, "wrong-fields"),
        ({"tasks": [{"task": "films"}]}, "wrong-fields"),
        ({"tasks": [{"task": "films", "cohort": "all", "more": 1}]}, "wrong-fields"),
        ({"tasks": [entry(b"films")]}, "bad-field"),
        ({"tasks": [entry("x" * 65)]}, "bad-name"),
        ({"tasks": [entry("Films")]}, "bad-name"),
        ({"tasks": [entry(cohort="")]}, "bad-name"),
        ({"tasks": [entry("é")]}, "bad-name"),
        ({"tasks": [entry("b"), entry("a")]}, "bad-field"),
        ({"tasks": [entry(), entry()]}, "bad-field"),
        ({"started": 1}, "wrong-fields"),
    ],
)
def test_what_is_signed_and_not_a_list_is_refused(
    changed: dict[str, cbor.CborValue], reason: str
) -> None:
    assert read_announcement(ServedTasks, said(), DESCRIPTOR).names == ()
    assert reason_of(said(**changed)) == reason


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"incarnation": b""}, "16 bytes"),
        ({"revision": -1}, "revision"),
        ({"revision": 2**63}, "revision"),
        ({"names": (("Films", "all"),)}, r"names\[0\].task is 'Films'"),
        ({"names": (("films", ""),)}, r"names\[0\].cohort is ''"),
        ({"names": (("b", "all"), ("a", "all"))}, "rising value"),
        ({"names": (("a", "all"), ("a", "all"))}, "each once"),
    ],
)
def test_what_cannot_be_told_is_not_made(wrong: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(SERVED, **wrong)  # type: ignore[arg-type]


def test_people_are_told_what_there_is_and_not_all_of_a_long_list() -> None:
    assert str(ServedTasks(LIFE, 0, (("a", "b"),))) == "task 'a' with cohort 'b'"
    assert str(ServedTasks(LIFE, 0, ())) == "none"
    many = str(ServedTasks(LIFE, 0, tuple((f"t{n:02}", "all") for n in range(11))))
    assert many.count("task ") == 8 and many.endswith("task 't07' with cohort 'all' and 3 more")


def test_the_newest_list_of_the_life_asked_for_counts() -> None:
    watch = TasksWatch()

    def known(life: bytes = LIFE) -> int | None:
        served = watch.of(life, DESCRIPTOR)
        return None if served is None else served.revision

    def show(revision: int, life: bytes = LIFE, names: Sequence[tuple[str, str]] = ()) -> None:
        served = ServedTasks(life, revision, tuple(names))
        watch.take(announce(served, DESCRIPTOR, SERVING.signing), DESCRIPTOR)

    assert known() is None
    show(2)
    assert known() == 2 and known(b"o" * 16) is None
    assert watch.of(None, DESCRIPTOR) is watch.of(LIFE, None) is None
    show(1)
    assert known() == 2, "an older one shown again"
    show(2, names=[("films", "all")])
    served = watch.of(LIFE, DESCRIPTOR)
    assert served is not None and served.serves("films", "all")
    show(9, b"o" * 16)
    assert known() is None and known(b"o" * 16) == 9
    show(1)
    assert known() == 1
    with pytest.raises(WireError):
        watch.take(b"", DESCRIPTOR)
    # Keys end with their descriptor, and what they signed with them.
    newer = make_serving(6)
    assert known() == 1 and watch.of(LIFE, newer.descriptor) is None
    watch.take(
        announce(ServedTasks(LIFE, 0, ()), newer.descriptor, newer.signing), newer.descriptor
    )
    assert known() is None and watch.of(LIFE, newer.descriptor) is not None
