"""Keys, delegates and roots that change under a running fleet: nothing is lost, nobody is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aggregator.home import AggregatorHome
from aggregator.keys.enrolment import make_codes
from aggregator.keys.folder import rotate_keys, rotate_root
from aggregator.rounds.machine import RoundEvent, RoundOpened
from device_sdk.enrol import trust
from device_sdk.errors import EnrolmentRefused
from device_sdk.home.home import Home
from device_sdk.wire.publish.topics import DescriptorTopic, ManifestTopic, PresenceTopic
from device_sdk.wire.seal.enrolment_message import EnrolmentCode
from device_sdk.world import Pace
from tests.attacks.conftest import MakeStage
from tests.attacks.simulated_broker import Parcel
from tests.attacks.stage import Stage

HOUR, DAY = 3600, 86_400
TOPIC = "tessera/all/descriptor"


def _descriptor_of(stage: Stage, place: int) -> bytes:
    held = stage.devices[place].participant.sessions.descriptor
    return held.message


def _code(stage: Stage) -> EnrolmentCode:
    [code] = make_codes(stage.store, 1, int(stage.unix()), lambda count: b"c" * count)
    return code


def test_a_descriptor_renews_itself_under_a_running_fleet(make_stage: MakeStage) -> None:
    """Twenty-nine days of rounds, seven renewals: each round counts everybody's update."""
    stage = make_stage(
        round_lines=f"quorum = 3\ndeadline_seconds = {HOUR}\npause_seconds = {4 * HOUR}\n"
        "[keys]\ndescriptor_days = 6",
        pace=Pace(most_seconds=4 * HOUR),
    )
    stage.idle_seconds = HOUR / 4
    assert stage.command("rotate", "keys", "--descriptor-expires", "6d") == 0
    stage.fleet.aggregator.root_key.unlink()  # in a drawer
    stage.run(DAY)
    serials, began = set(), stage.now_seconds
    while stage.now_seconds < began + 28 * DAY:  # renewed every fourth day, give or take hours
        stage.run(HOUR)
        held = stage.parts.keys.current().descriptor
        serials.add(held.serial)
        held.require_unexpired(int(stage.unix()) + DAY)
        assert {_descriptor_of(stage, place) for place in range(3)} == {held.message}
    assert len(serials) == 8
    rounds = stage.closed()
    assert len(rounds) > 28 * 24 / 5 - 5
    assert all(row.participants == 3 for row in rounds), "no update was lost, nobody left a round"
    # The keys of before are gone, but for those in their grace.
    assert len(stage.store.secrets.descriptors()) <= 2
    assert len(list(stage.fleet.aggregator.keys.iterdir())) <= 7


@pytest.mark.parametrize("rotations", [1, 3])
def test_devices_that_slept_through_rotations_of_the_root_follow(
    stage: Stage, rotations: int
) -> None:
    """One is awake all the time, one sleeps with its process ended, one without a connection."""
    stage.devices[1].kill()
    stage.broker.forget(stage.devices[2].name)
    stage.devices[2].participant.connected(False)
    before = stage.store.facts.root_fingerprint
    for _ in range(rotations):
        assert stage.command("rotate", "root") == 0
        stage.run(90.0)
    now = stage.store.facts.root_fingerprint
    assert now != before
    assert stage.devices[0].participant.sessions.root_fingerprint == now
    stage.devices[1].start()
    stage.devices[2].restart()
    stage.await_version(stage.version + 2)
    for device in stage.devices:
        assert device.participant.sessions.root_fingerprint == now
        membership = device.home.membership.load()
        assert membership is not None and membership.root_fingerprint == now, "it is on the disk"
    stage.devices[1].restart()
    stage.next_version()
    assert stage.closed()[0].participants == 3


@pytest.mark.parametrize("first", ["descriptor", "presence", "manifest"])
def test_whatever_comes_first_after_a_rotation_of_the_root_nobody_is_left(
    stage: Stage, first: str
) -> None:
    """The broker holds back the two other messages for a while."""
    topics = {
        "descriptor": stage.topics.write(DescriptorTopic()),
        "presence": stage.topics.write(PresenceTopic()),
        "manifest": stage.topics.write(ManifestTopic("default", "all")),
    }
    late = {topic for name, topic in topics.items() if name != first}
    kept: list[Parcel] = []

    def hold(parcel: Parcel) -> bool:
        if parcel.topic in late and parcel.to != "aggregator":
            kept.append(parcel)
            return True
        return False

    stage.drop = hold
    assert stage.command("rotate", "root") == 0
    began = stage.version
    stage.run_until(lambda: stage.parts.first.rounds.current is not None)
    stage.run(10.0)
    stage.drop = lambda parcel: False
    for parcel in {each.topic: each for each in kept if each.to == "device-0"}.values():
        stage.broker.publish(parcel.topic, stage.broker.retained[parcel.topic], retain=True)
    stage.run_until(lambda: stage.version >= began + 2)
    assert stage.closed()[0].participants == 3
    now = stage.store.facts.root_fingerprint
    assert all(d.participant.sessions.root_fingerprint == now for d in stage.devices)


def test_an_update_under_way_through_every_rotation_is_counted(stage: Stage) -> None:
    """Sent before the rotation, delivered after it."""
    for what in ("keys", "root", "group"):
        held: list[Parcel] = []

        def hold(parcel: Parcel, held: list[Parcel] = held) -> bool:
            if parcel.to == "aggregator" and parcel.payload[1:2] == b"\x12":
                held.append(parcel)
                return True
            return False

        stage.drop = hold
        stage.run_until(lambda held=held: len({each.topic for each in held}) == 3)  # type: ignore[misc]
        version = stage.version
        assert stage.command("rotate", what) == 0
        stage.settle()
        stage.drop = lambda parcel: False
        for parcel in held:
            stage.broker.publish(parcel.topic, parcel.payload)
        stage.settle()
        stage.run_until(lambda version=version: stage.version == version + 1)  # type: ignore[misc]
        assert stage.closed()[0].participants == 3


def test_an_expired_descriptor_is_refused_by_a_device_that_knows_the_time(stage: Stage) -> None:
    """Not only by the time in a reply, which whoever has the old keys would sign himself."""
    device = stage.devices[0]
    old = _descriptor_of(stage, 0)
    held = stage.parts.keys.current().descriptor
    device.home.membership.raise_time(held.expires_unix_seconds)
    device.kill()
    # Its own store lost the descriptor; the time stays.
    home = Home(device.folder)
    with home.database.transaction() as sql:
        sql.execute("DELETE FROM descriptor")
    home.close()
    device.start()
    stage.settle()
    assert stage.broker.retained[TOPIC] == old
    assert device.participant.sessions.descriptor is None
    assert stage.refused(0)["descriptor-expired"] >= 1
    assert not device.participant.sessions.is_open
    stage.now_seconds += 25 * 86_400.0  # it takes the one that comes next


def test_manifests_under_an_expired_descriptor_are_refused_until_a_newer_one_comes(
    stage: Stage,
) -> None:
    device = stage.devices[0]
    held = stage.parts.keys.current().descriptor
    jobs = device.jobs
    device.participant.sessions.time.replied(held.expires_unix_seconds)
    stage.await_version(3)
    assert device.jobs == jobs
    assert stage.refused(0)["descriptor-expired"] >= 1
    assert "expired" in device.participant.problem
    stage.now_seconds += 25 * 86_400.0


def test_the_old_root_s_second_word_leads_nobody_astray(stage: Stage) -> None:
    """Whoever stole the old root key branches off: those who followed the operator stay."""
    aggregator = stage.fleet.aggregator
    thief = Path(str(aggregator.folder) + "-stolen")
    thief.mkdir()
    stolen_keys = {path.name: path.read_bytes() for path in aggregator.keys.iterdir()}
    stolen_base = aggregator.database.read_bytes()
    assert stage.command("rotate", "root") == 0
    stage.await_version(stage.version + 2)
    _steal(thief, stolen_keys, stolen_base)
    forged = _forge(thief, int(stage.unix()))
    honest = stage.broker.retained[TOPIC]
    stage.broker.publish(TOPIC, forged, retain=True)
    stage.settle()
    for place in range(3):
        assert _descriptor_of(stage, place) == honest
        assert stage.refused(place)["wrong-root"] >= 1
    stage.broker.publish(TOPIC, honest, retain=True)
    stage.next_version()


def test_a_device_led_astray_comes_back_by_a_code_with_all_that_is_its_own(stage: Stage) -> None:
    """It slept, and what it saw first was the thief's."""
    aggregator = stage.fleet.aggregator
    thief = Path(str(aggregator.folder) + "-stolen")
    thief.mkdir()
    stolen = (
        {path.name: path.read_bytes() for path in aggregator.keys.iterdir()},
        (aggregator.database.read_bytes()),
    )
    device = stage.devices[1]
    device.kill()
    assert stage.command("rotate", "root") == 0
    stage.run(90.0)
    _steal(thief, *stolen)
    honest = stage.broker.retained[TOPIC]
    stage.broker.retained[TOPIC] = _forge(thief, int(stage.unix()))
    device.start()
    stage.settle()
    assert _descriptor_of(stage, 1) != honest, "who holds the root key can do this"
    stage.broker.publish(TOPIC, honest, retain=True)
    stage.run(60.0)
    assert _descriptor_of(stage, 1) != honest and stage.refused(1)["wrong-root"] >= 1
    device.kill()
    home = Home(device.folder)
    identity = home.identity().private_bytes_raw()
    home.membership.raise_time(int(stage.unix()) + 40 * DAY)  # the thief said so
    code = _code(stage)
    with pytest.raises(EnrolmentRefused, match="set that time back"):
        trust(home, code.to_text())
    trust(home, code.to_text(), set_clock_back=True)
    home.close()
    device.start()
    assert device.home.identity().private_bytes_raw() == identity
    stage.await_version(stage.version + 2)
    assert _descriptor_of(stage, 1) == stage.broker.retained[TOPIC]
    assert stage.closed()[0].participants == 3


def test_a_code_older_than_what_a_device_has_seen_is_not_trusted(stage: Stage) -> None:
    code = _code(stage)
    assert stage.command("rotate", "keys") == 0
    stage.run(90.0)
    device = stage.devices[0]
    device.kill()
    home = Home(device.folder)
    for text, what in [("AAAA", "cannot be used"), (code.to_text(), "older than the keys")]:
        with pytest.raises(EnrolmentRefused, match=what):
            trust(home, text, set_clock_back=True)
    home.close()
    device.start()
    stage.next_version()


def _steal(folder: Path, keys: dict[str, bytes], database: bytes) -> None:
    (folder / "keys").mkdir(mode=0o700)
    for name, content in keys.items():
        (folder / "keys" / name).write_bytes(content)
        (folder / "keys" / name).chmod(0o600)
    (folder / "aggregator.sqlite").write_bytes(database)


def _forge(folder: Path, now_unix_seconds: int) -> bytes:
    """A thief's own rotation of the root that he stole."""
    home = AggregatorHome(folder)
    store = home.open_store()
    rotate_keys(home, store, now_unix_seconds, os.urandom)
    made = rotate_root(home, store, now_unix_seconds, os.urandom)
    store.database.close()
    return made.message


def test_a_rotation_at_the_moment_that_a_round_opens_is_announced(stage: Stage) -> None:
    """The loop had looked for changes just before."""
    rounds, rotated = stage.parts.first.rounds, []
    tick = rounds.tick

    def then_rotate() -> RoundEvent | None:
        happened = tick()
        if isinstance(happened, RoundOpened) and not rotated:
            rotated.append(stage.command("rotate", "keys"))
        return happened

    rounds.tick = then_rotate  # type: ignore[method-assign]
    stage.await_version(stage.version + 3)
    assert rotated == [0]
    held = stage.parts.keys.current().descriptor.message
    assert held == stage.broker.retained[TOPIC] == _descriptor_of(stage, 0)
