"""When the aggregator announces itself, and which other life ends it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aggregator.errors import AggregatorError
from aggregator.keys.fence import Fence
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.announcement import Presence, announce
from device_sdk.wire.seal.descriptor import Descriptor, make_descriptor, make_succession
from device_sdk.wire.seal.keyring import ServingKeys
from tests.fakes.parties import EXPIRES, NOW, Clock, delegation_of, key_from, make_serving

OURS = Presence(b"m" * 16, 1_700_000_000)
LAST_LIFE = 1_600_000_000
OLD, NEW = make_serving(1), make_serving(2)


def fence(
    clock: Clock, known: int | None = LAST_LIFE, keys: tuple[ServingKeys, ...] = (OLD, NEW)
) -> Fence:
    now = float(OURS.started_unix_seconds + 1)
    return Fence(
        OURS, known, Path("the-home"), lambda: [k.descriptor for k in keys], clock, lambda: now
    )


def presence(started: int, incarnation: bytes = b"z" * 16, keys: ServingKeys = NEW) -> bytes:
    return announce(Presence(incarnation, started), keys.descriptor, keys.signing)


def test_it_announces_once_a_connection_after_half_a_second_of_silence() -> None:
    clock = Clock(10.0)
    made = fence(clock)
    assert not made.may_announce() and not made.passed, "no connection yet"
    for _ in range(2):
        made.connected()
        clock.seconds += 0.4375
        assert not made.may_announce() and not made.passed
        clock.seconds += 0.0625
        assert made.may_announce() and made.passed
        assert not made.may_announce() and made.passed
        clock.seconds += 100.0
        assert not made.may_announce()


def test_what_the_broker_retains_ends_the_wait() -> None:
    clock = Clock(10.0)
    made = fence(clock)
    made.connected()
    made.heard_presence(presence(LAST_LIFE))
    assert not made.may_announce(), "the descriptor may still come"
    made.heard_descriptor(NEW.descriptor.message)
    assert made.may_announce() and made.passed
    # A presence that comes later is no reason to announce again.
    made.heard_presence(presence(LAST_LIFE))
    assert not made.may_announce() and made.passed
    made.connected()
    assert not made.passed
    with pytest.raises(WireError):
        made.heard_presence(b"")  # and one that is none ends no wait
    assert not made.may_announce()


@pytest.mark.parametrize("passed", [True, False])
def test_one_that_renewed_its_descriptor_since_it_was_copied_is_known_by_it(passed: bool) -> None:
    """As ``restored`` does."""
    clock = Clock(10.0)
    made, renewed = fence(clock), make_serving(3)
    made.connected()
    clock.seconds += 100.0 * passed
    assert made.may_announce() is passed
    said = "has taken the fleet over" if passed else "is a copy, or was restored from a backup"
    with pytest.raises(AggregatorError, match=said):
        made.heard_descriptor(renewed.descriptor.message)


def handed_over() -> Descriptor:
    """The first descriptor of a root that took the place of ours."""
    line = [make_succession(key_from("root"), key_from("next").public_key().public_bytes_raw())]
    public = NEW.descriptor.signing, NEW.descriptor.sessions, NEW.descriptor.hpke
    delegation = delegation_of("next")
    return make_descriptor(key_from("delegate"), delegation, 1, NOW, EXPIRES, *public, line)


def test_a_root_that_took_our_root_s_place_ends_it_whatever_the_serial() -> None:
    """Serials are a root's own."""
    with pytest.raises(AggregatorError, match="root key was replaced"):
        fence(Clock()).heard_descriptor(handed_over().message)


def test_two_that_renewed_apart_from_each_other_have_one_serial() -> None:
    expires = NEW.descriptor.expires_unix_seconds + 1
    twin = make_descriptor(
        key_from("delegate"),
        NEW.descriptor.delegation,
        NEW.descriptor.serial,
        NOW,
        expires,
        NEW.descriptor.signing,
        NEW.descriptor.sessions,
        NEW.descriptor.hpke,
    )
    with pytest.raises(AggregatorError, match="is a copy, or was restored from a backup"):
        fence(Clock()).heard_descriptor(twin.message)


def test_descriptors_that_vouch_for_nobody_change_nothing() -> None:
    made = fence(Clock(), keys=(NEW,))
    for serving in (NEW, OLD):  # ours, and an older one, whose keys were replaced
        made.heard_descriptor(serving.descriptor.message)
    stranger = make_serving(9, root="stranger")
    forged = bytearray(make_serving(3).descriptor.message)
    forged[-1] ^= 1
    for message, reason in (
        (stranger.descriptor.message, "wrong-root"),
        (bytes(forged), "bad-signature"),
        (b"", "truncated"),
    ):
        with pytest.raises(WireError) as caught:
            made.heard_descriptor(message)
        assert caught.value.reason == reason
    for keys in (OLD, stranger, make_serving(3)):
        with pytest.raises(WireError) as caught:
            made.heard_presence(presence(OURS.started_unix_seconds + 1, keys=keys))
        assert caught.value.reason == "bad-signature"
    made.heard_presence(presence(LAST_LIFE, keys=NEW))


@pytest.mark.parametrize("keys", [OLD, NEW])
def test_all_keys_that_may_have_signed_are_tried(keys: ServingKeys) -> None:
    with pytest.raises(AggregatorError, match="has taken the fleet over"):
        fence(Clock()).heard_presence(presence(OURS.started_unix_seconds + 1, keys=keys))
    fence(Clock()).heard_presence(presence(LAST_LIFE, keys=keys))


def test_what_none_of_our_keys_signed_is_refused_for_its_reason() -> None:
    message = presence(OURS.started_unix_seconds + 1, keys=make_serving(3))
    for keys, reason in (((OLD, NEW), "bad-signature"), ((), "unknown-descriptor")):
        with pytest.raises(WireError) as caught:
            fence(Clock(), keys=keys).heard_presence(message)
        assert caught.value.reason == reason


def test_our_own_and_earlier_lives_are_ignored() -> None:
    made = fence(Clock())
    for started in (OURS.started_unix_seconds - 1, OURS.started_unix_seconds + 1):
        made.heard_presence(presence(started, OURS.incarnation))  # whatever time our own would name
    for started in (0, LAST_LIFE - 1, LAST_LIFE):
        made.heard_presence(presence(started))


def test_a_home_that_never_served_takes_every_earlier_life_for_its_own() -> None:
    made = fence(Clock(), known=None)
    made.heard_presence(presence(OURS.started_unix_seconds - 1))
    with pytest.raises(AggregatorError, match="has taken the fleet over"):
        made.heard_presence(presence(OURS.started_unix_seconds + 1))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose own time is not that of Greenwich."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("elsewhere")
def test_another_life_is_told_with_its_time_and_what_to_do() -> None:
    made = fence(Clock())
    remedy = "tessera-aggregator restored --home the-home"
    with pytest.raises(AggregatorError, match="knows nothing") as caught:
        made.heard_presence(presence(LAST_LIFE + 1))
    assert "2020-09-13 12:26:41 UTC" in str(caught.value) and remedy in str(caught.value)
    with pytest.raises(AggregatorError, match="has taken the fleet over") as caught:
        made.heard_presence(presence(OURS.started_unix_seconds + 1))
    assert "2023-11-14 22:13:21 UTC" in str(caught.value) and remedy in str(caught.value)


@pytest.mark.parametrize("started", [2**40, 2**60, 2**63 - 1])
def test_a_life_beyond_every_calendar_is_told_by_its_second(started: int) -> None:
    with pytest.raises(AggregatorError, match=f"second {started} of Unix time"):
        fence(Clock()).heard_presence(presence(started))


@pytest.mark.parametrize(
    ("incarnation", "who"), [(b"a" * 16, "knows nothing"), (b"n" * 16, "has taken the fleet over")]
)
def test_of_two_lives_of_one_second_the_same_one_stays_on_both_sides(
    incarnation: bytes, who: str
) -> None:
    with pytest.raises(AggregatorError, match=who):
        fence(Clock()).heard_presence(presence(OURS.started_unix_seconds, incarnation))


def _said(hear: Callable[[], None]) -> str:
    with pytest.raises(AggregatorError) as ended:
        hear()
    return str(ended.value)


def test_what_is_to_be_run_is_said_as_it_is_to_be_typed() -> None:
    begin = "run tessera-aggregator restored --home the-home"
    choice = "If the other one is to go on, leave this one stopped. If this one is, stop the other "
    # Our next start is after theirs by itself, unless it was by a clock that was ahead of ours.
    later = OURS.started_unix_seconds + 1
    for started, after in (
        (LAST_LIFE + 1, ""),
        (OURS.started_unix_seconds, ""),
        (later, f" --after {later}"),
        (later + 900, f" --after {later + 900}"),
    ):
        said = _said(lambda at=started: fence(Clock()).heard_presence(presence(at)))  # type: ignore[misc]
        assert said.endswith(f". {choice}for good, {begin}{after}, and start serve"), said

    renewed = make_serving(3).descriptor
    above = renewed.delegation.last_serial
    keys = (
        f"{choice}for good, {begin} and tessera-aggregator rotate keys --home the-home "
        f"--after {above}, and start serve"
    )
    said = _said(lambda: fence(Clock()).heard_descriptor(renewed.message))
    assert said.endswith(f". {keys}") and "(descriptor 3; ours is 2)" in said, said

    assert _said(lambda: fence(Clock()).heard_descriptor(handed_over().message)) == (
        "the fleet's root key was replaced, and the new one is among keys that the-home knows "
        "nothing of: this home is a copy, or was restored from a backup made before that. Use a "
        "home from after it. If there is none, run tessera-aggregator restored and then rotate "
        "root, both with --home the-home, start serve, and run tessera-device trust on each device"
    )


def test_an_older_descriptor_ends_the_wait_as_ours_does() -> None:
    made = fence(Clock(10.0), keys=(NEW,))
    made.connected()
    made.heard_presence(presence(LAST_LIFE))
    made.heard_descriptor(OLD.descriptor.message)
    assert made.may_announce()
