"""Whom a word on another broker moves, and for how long: the aggregator's; no thief's for good."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from device_sdk.home.membership import SUCCESSOR, Membership
from device_sdk.link.broker_url import BrokerWay, parse_broker_url
from device_sdk.link.events import Message
from device_sdk.wire.publish.topics import PresenceTopic, SuccessorTopic
from device_sdk.wire.seal.announcement import Successor, announce
from tests.fakes.in_memory import Bench

NEW, OTHER = "mqtts://new:8883", "mqtt://other:1"
GRACE = 3600.0
DAY = 86_400.0


class Fleet(Bench):
    """A bench whose aggregator announces another broker; at those in ``silent`` it is not."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.silent: set[str] = set()
        take = self.aggregator._take

        def take_where_it_is(message: Message) -> None:
            if not {self.here, self.address} & self.silent:
                take(message)

        self.aggregator._take = take_where_it_is  # type: ignore[method-assign]

    def announce(self, revision: int, url: str = NEW, seconds: float = GRACE) -> bytes:
        until = int(self.aggregator.unix_seconds() + seconds)
        keys = self.aggregator.descriptor, self.aggregator._signing
        message = announce(Successor(revision, url, until), *keys)
        self.show(message)
        return message

    def show(self, message: bytes) -> None:
        topic = self.aggregator.topics.write(SuccessorTopic())
        self.broker.publish(topic, message, retain=True)

    def rotate(self, days: int) -> None:
        self.aggregator.rotate_descriptor(lifetime_seconds=int(days * DAY))
        self.aggregator.forget_sessions()
        self.aggregator.publish_standing()
        self.run(60)

    def find(self, seconds: float = GRACE) -> str:
        """The URL of the broker where it has a session after so long, or at its next turns."""
        self.run(seconds)
        for _ in range(20):
            if not self.participant.sessions.is_settled:
                self.run(10)
        return self.membership.broker(self.here).url.address

    @property
    def address(self) -> str:
        return self.membership.broker(self.here).url.address

    @property
    def here(self) -> str:
        return self.participant.cell.here

    @property
    def membership(self) -> Membership:
        found = self.home.membership.load()
        assert found is not None
        return found

    def take_part(self) -> None:
        seen = len(self.aggregator.seen.bodies)
        self.aggregator.open_round(deadline_seconds=3000)
        self.run(60)
        assert len(self.aggregator.seen.bodies) > seen and self.home.rounds.outbox() == []


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    made = Fleet(tmp_path / "home")
    made.run(5)
    return made


def test_a_device_moves_within_the_grace_and_forgets_the_old_broker_once_newer_keys_say_so(
    fleet: Fleet,
) -> None:
    fleet.announce(1)
    fleet.run(GRACE / 4)
    assert fleet.here == SUCCESSOR and fleet.membership.broker(SUCCESSOR).url.address == NEW
    fleet.take_part()
    fleet.restart()
    fleet.run(5)
    assert [fleet.here, len(fleet.moves)] == [SUCCESSOR, 1], "at once, after a restart"
    fleet.run(1.5 * DAY)
    assert fleet.membership.way.url.host == "unused", "the keys that announced it cannot confirm it"
    fleet.rotate(30)
    assert fleet.membership.way.url.address == NEW and not fleet.membership.moves.url
    given = BrokerWay.parse("mqtt://unused")
    fleet.home.membership.give_way(given)
    assert fleet.membership.way.url.address == NEW, "what an app gives at each start"
    fleet.home.membership.give_way(BrokerWay.parse(OTHER))
    assert fleet.membership.way.url.address == OTHER
    fleet.take_part()


@pytest.mark.parametrize("is_away", [True, False])
def test_a_device_comes_back_from_a_broker_where_nobody_is_and_tries_again(
    fleet: Fleet, is_away: bool
) -> None:
    (fleet.away if is_away else fleet.silent).add(SUCCESSOR)
    fleet.announce(1)
    fleet.run(GRACE / 2)
    fleet.run(70)
    tries = [at for at, place in fleet.moves if place == SUCCESSOR]
    assert len(tries) >= 2 and fleet.here == ""
    fleet.take_part()
    fleet.away.clear()
    fleet.silent.clear()
    fleet.run(GRACE)
    assert fleet.here == SUCCESSOR
    fleet.take_part()


@pytest.mark.parametrize("is_away", [True, False])
def test_a_broker_that_was_reached_is_kept_until_a_newer_one_is_confirmed(
    fleet: Fleet, is_away: bool
) -> None:
    """From A to B, A goes; a word for C, which is not there: the device is at B, also after a
    restart, until C comes. Then B goes, and the word after that finds nobody either."""
    gone = fleet.away if is_away else fleet.silent
    fleet.announce(1)
    fleet.run(GRACE / 4)
    assert fleet.here == SUCCESSOR
    gone |= {"", SUCCESSOR}
    fleet.announce(2, OTHER)
    assert fleet.find() == NEW and SUCCESSOR in [place for _, place in fleet.moves[1:]]
    fleet.take_part()
    fleet.restart()
    fleet.run(5)
    assert fleet.membership.broker(fleet.here).url.address == NEW, "at once"
    fleet.take_part()
    gone.remove(SUCCESSOR)
    fleet.run(GRACE)
    assert fleet.here == SUCCESSOR
    fleet.take_part()
    gone |= {SUCCESSOR, SUCCESSOR + NEW}
    fleet.announce(3, "mqtt://third")
    assert fleet.find() == OTHER
    fleet.take_part()
    gone.clear()
    fleet.run(GRACE)
    assert fleet.here == SUCCESSOR
    fleet.rotate(30)
    now = fleet.membership
    assert now.way.url.address == "mqtt://third:1883" and now.places == ("",), "all before it go"


def test_a_thief_s_brokers_displace_none_that_was_reached_before(fleet: Fleet) -> None:
    fleet.rotate(1)
    fleet.announce(1, seconds=1)
    fleet.run(GRACE)
    assert fleet.here == SUCCESSOR
    fleet.away.add("")
    for number in range(2, 12):
        fleet.announce(number, f"mqtt://thief-{number}", seconds=1)
        fleet.run(60)
        assert fleet.here == SUCCESSOR
    fleet.run(DAY)
    fleet.silent |= {SUCCESSOR, *(place for place in fleet.membership.places if "thief" in place)}
    fleet.rotate(30)
    assert fleet.find() == NEW and len(fleet.membership.moves.found) <= 4
    fleet.take_part()


def test_an_old_word_moves_nobody_and_a_newer_one_does(fleet: Fleet) -> None:
    first = fleet.announce(1)
    fleet.announce(2, OTHER)
    fleet.run(GRACE)
    assert fleet.membership.broker(fleet.here).url.address == OTHER
    moves = len(fleet.moves)
    fleet.show(first)
    fleet.run(DAY)
    assert len(fleet.moves) == moves
    fleet.announce(3, "")
    fleet.run(GRACE)
    assert fleet.here == "" and not fleet.membership.moves.url
    fleet.take_part()


def test_the_last_number_that_there_is_binds_no_longer_than_the_keys_that_signed_it(
    fleet: Fleet,
) -> None:
    """A store that was set wrongly, a clock or a thief: after the next descriptor devices heed
    what is announced, whatever number it has, and the same word signed anew is no new one."""
    until = int(fleet.aggregator.unix_seconds() + GRACE)
    fleet.announce(2**63 - 1, OTHER)
    fleet.run(GRACE)
    fleet.announce(7)
    fleet.run(60)
    assert fleet.find() == OTHER, "of one descriptor's words the highest number counts"
    moves = len(fleet.moves)
    fleet.rotate(30)
    fleet.announce(2**63 - 1, OTHER, until - fleet.aggregator.unix_seconds() + 0.5)
    fleet.run(60)
    assert fleet.find() == OTHER and len(fleet.moves) == moves
    fleet.announce(7)
    assert fleet.find() == NEW
    fleet.announce(6, OTHER)
    fleet.run(GRACE)
    assert fleet.find() == NEW, "and from there on numbers rise again"
    fleet.take_part()


def test_words_of_no_key_in_force_or_of_no_broker_are_refused(fleet: Fleet) -> None:
    before = fleet.announce(1, seconds=-DAY)
    fleet.participant.refusals._counts.clear()
    fleet.rotate(30)
    moves = len(fleet.moves)
    fleet.show(before[:-1] + bytes((before[-1] ^ 1,)))
    for url in ("nonsense", "mqtt://user:word@host", "mqtt://"):
        fleet.announce(9, url)
    fleet.run(60)
    refused = fleet.participant.refusals.counts()
    assert refused["bad-signature"] and refused["bad-field"] == 3
    assert len(fleet.moves) == moves


def test_a_thief_of_the_keys_in_force_has_devices_no_longer_than_these_hold(fleet: Fleet) -> None:
    """He leads them to a broker of his own, and serves them there until the descriptor ends; the
    aggregator, which has newer keys, is at the old one."""
    fleet.rotate(1)
    fleet.announce(1, OTHER, seconds=1)
    fleet.run(GRACE)
    assert fleet.here == SUCCESSOR
    fleet.run(0.9 * DAY)
    assert fleet.here == SUCCESSOR and len(fleet.moves) == 1, "with a session there"
    fleet.silent.add(SUCCESSOR)  # what the keys that ended open is no session
    fleet.rotate(30)
    fleet.run(2 * GRACE)
    assert "" in [place for _, place in fleet.moves[1:]]
    fleet.take_part()


def test_a_renewed_password_or_a_broker_s_other_name_calls_no_move_off(fleet: Fleet) -> None:
    """The owner's word says how, or where, this device finds its fleet now; the fleet's word, shown
    there, where it goes next."""
    fleet.announce(1)
    fleet.away.add(SUCCESSOR)
    fleet.run(GRACE / 4)
    renewed = BrokerWay.parse("mqtt://edge@unused", password_file="renewed")
    fleet.home.membership.give_way(renewed)
    fleet.away.clear()
    fleet.run(GRACE)
    assert fleet.here == SUCCESSOR and fleet.membership.broker(SUCCESSOR).url.address == NEW
    fleet.rotate(30)
    assert fleet.membership.way == renewed.at(parse_broker_url(NEW))
    later = replace(renewed, password_file=Path("/later"))
    fleet.home.membership.give_way(later)
    assert fleet.membership.way == later.at(parse_broker_url(NEW)), "as before, but for the file"


def test_the_word_is_heeded_again_where_the_owner_sends_the_device(fleet: Fleet) -> None:
    fleet.announce(1)
    fleet.run(GRACE / 4)
    fleet.home.membership.give_way(BrokerWay.parse("mqtt://other-name"))
    fleet.restart()
    fleet.run(GRACE)
    assert fleet.here == SUCCESSOR and fleet.membership.broker(SUCCESSOR).url.address == NEW
    fleet.take_part()


def test_a_device_that_slept_through_two_moves_is_led_from_one_broker_to_the_next(
    fleet: Fleet,
) -> None:
    """Each of those that were left shows what it retained then, under the keys of then; the
    aggregator is at the last one alone."""
    fleet.announce(1, seconds=1)
    shown = {"mqtt://unused:1883": dict(fleet.broker.retained)}
    fleet.now_seconds += DAY
    for revision, url in ((2, OTHER), (3, "mqtt://third:3")):
        fleet.aggregator.rotate_descriptor(lifetime_seconds=int(30 * DAY))
        fleet.aggregator.forget_sessions()
        fleet.aggregator.publish_standing()
        fleet.announce(revision, url, seconds=1)
        shown[NEW if url == OTHER else OTHER] = dict(fleet.broker.retained)
        fleet.now_seconds += DAY
    shown["mqtt://third:3"] = shown[OTHER]
    fleet.silent |= shown.keys() - {"mqtt://third:3"}
    connect = fleet.set_connected

    def connect_there(value: bool) -> None:
        fleet.broker.retained = dict(shown[fleet.address])
        connect(value)

    fleet.set_connected = connect_there  # type: ignore[method-assign]
    fleet.broker.retained = dict(shown["mqtt://unused:1883"])
    fleet.restart()
    assert fleet.find(200) == "mqtt://third:3"


def test_the_life_that_is_asked_is_the_one_shown_where_the_device_is(fleet: Fleet) -> None:
    """It slept until the grace was over. The old broker still shows the aggregator's life of then;
    asked for that one by turns, the next life at the new broker would not answer."""
    topic = fleet.aggregator.topics.write(PresenceTopic())
    old = fleet.broker.retained[topic]
    fleet.now_seconds += DAY
    fleet.aggregator.forget_sessions()
    fleet.aggregator.publish_standing()
    new = fleet.broker.retained[topic]
    fleet.silent.add("")
    connect = fleet.set_connected

    def connect_there(value: bool) -> None:
        fleet.broker.retained[topic] = new if fleet.here == SUCCESSOR else old
        connect(value)
        fleet.participant.tick()  # before anything has come from there

    fleet.set_connected = connect_there  # type: ignore[method-assign]
    fleet.broker.retained[topic] = old
    fleet.announce(1, seconds=-DAY / 2)
    fleet.restart()
    fleet.run(300)
    assert fleet.here == SUCCESSOR and fleet.participant.sessions.is_settled
    assert len([place for _, place in fleet.moves if place == SUCCESSOR]) == 1
