"""Devices that an aggregator of before granted another shard than theirs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from device_sdk.home.home import Home
from device_sdk.wire.codec.message import MessageType
from device_sdk.wire.publish.topics import UpTopic
from device_sdk.wire.seal.placement import FIRST_SHARD, Placement, shard_of
from tests.attacks.conftest import MakeStage, make_stage, memory_path  # noqa: F401
from tests.attacks.simulated_broker import AGGREGATOR, Parcel
from tests.attacks.stage import Stage
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.homes import invite, make_home, serving

OPEN = MessageType.SESSION_OPEN
ROWS = "SELECT device_id, shard FROM devices"


@pytest.fixture
def stage(make_stage: MakeStage) -> Stage:  # noqa: F811
    """Three devices of before, on the first shard, that have taken part in one round."""
    made = make_stage()
    for device in made.devices:
        device.kill()
        home = Home(device.folder)
        home.membership.place(Placement(FIRST_SHARD))
        home.close()
        made.store.devices.move({device.grant.device_id: FIRST_SHARD})
    made.parts.registry.reload()
    for device in made.devices:
        device.start()
    made.run_until(lambda: made.parts.first.aggregation.version == 1)
    made.run(1.0)
    return made


def shards(stage: Stage, kind: int | None = None) -> list[set[int]]:
    """Where each device has sent messages of a type."""
    found: list[set[int]] = [set() for _ in stage.devices]
    for text, payload in stage.broker.seen:
        topic = stage.topics.parse(text)
        if isinstance(topic, UpTopic) and kind in (None, payload[1]):
            (place,) = (d.place for d in stage.devices if d.grant.handle == topic.handle)
            found[place].add(topic.shard)
    return found


def own(stage: Stage) -> list[int]:
    return [shard_of(device.grant.device_id) for device in stage.devices]


def restart(stage: Stage) -> None:
    stage.kill_aggregator()
    stage.start_aggregator()
    stage.broker.seen.clear()


def rounds(stage: Stage, more: int = 1) -> None:
    """All devices are part of so many further versions."""
    wanted = stage.parts.first.aggregation.version + more
    stage.run_until(lambda: stage.parts.first.aggregation.version >= wanted)
    stage.run(1.0)


def table(stage: Stage) -> dict[bytes, int]:
    return dict(stage.store.database.rows(ROWS))


def test_a_device_of_before_moves_at_its_next_session(stage: Stage) -> None:
    rounds(stage)
    assert shards(stage) == [{FIRST_SHARD}] * 3, "it stays for as long as the session lasts"
    told = [device.home.membership.load() for device in stage.devices]
    assert [each.grant.shard for each in told if each is not None] == own(stage)
    assert set(table(stage).values()) == {FIRST_SHARD}
    restart(stage)
    rounds(stage)
    assert shards(stage, OPEN) == [{each} for each in own(stage)]
    stage.broker.seen.clear()
    rounds(stage)
    assert shards(stage) == [{each} for each in own(stage)]
    assert table(stage) == {d.grant.device_id: shard_of(d.grant.device_id) for d in stage.devices}
    assert stage.parts.refusals.counts.keys() <= {"unknown-session"}
    assert all(device.participant.refusals.counts() == {} for device in stage.devices)


def test_who_moved_is_told_no_more(stage: Stage) -> None:
    restart(stage)
    rounds(stage)
    device_id = stage.devices[0].grant.device_id
    assert list(stage.parts.placements.opened(device_id)) == []
    assert list(stage.parts.placements.heard(device_id)) == []


def test_who_never_hears_of_its_shard_goes_on_where_it_is(make_stage: MakeStage) -> None:  # noqa: F811
    """As a device does that is too old to know the record."""
    stage = make_stage()
    stage.kill_aggregator()
    stage.start_aggregator()
    for device in stage.devices:
        device.participant.cell.told(Placement(FIRST_SHARD))
        device.participant.cell.told = lambda placement: None  # type: ignore[method-assign]
    rounds(stage, 2)
    restart(stage)
    rounds(stage, 2)
    assert shards(stage) == [{FIRST_SHARD}] * 3
    assert stage.parts.refusals.counts.keys() <= {"unknown-session"}


def test_a_placement_that_is_lost_comes_again_behind_the_first_word(stage: Stage) -> None:
    device = stage.devices[0]
    device.home.membership.place(Placement(FIRST_SHARD))
    device.kill()
    device.start()
    lost: list[Parcel] = []

    def drop(parcel: Parcel) -> bool:
        # The first envelope in a session that was just opened, where it is not a receipt's.
        if parcel.to == device.name and parcel.payload[1] == 21 and not lost:
            lost.append(parcel)
            return True
        return False

    stage.drop = drop
    rounds(stage)
    assert len(lost) == 1
    membership = device.home.membership.load()
    assert membership is not None and membership.grant.shard == own(stage)[0]


def test_a_home_that_comes_back_from_a_backup_is_heard_and_moves_again(
    stage: Stage, tmp_path: Path
) -> None:
    device = stage.devices[0]
    device.home.membership.place(Placement(FIRST_SHARD))
    device.kill()
    shutil.copytree(device.folder, tmp_path / "backup")
    device.start()
    rounds(stage)
    restart(stage)
    rounds(stage)
    assert shards(stage, OPEN)[0] == {own(stage)[0]}
    device.kill()
    shutil.rmtree(device.folder)
    shutil.copytree(tmp_path / "backup", device.folder)
    stage.broker.seen.clear()
    stage.judged = False  # its home has forgotten what it sent since
    device.start()
    stage.run(600.0)
    assert shards(stage, OPEN)[0] == {FIRST_SHARD}
    membership = device.home.membership.load()
    assert membership is not None and membership.grant.shard == own(stage)[0]
    restart(stage)
    stage.run(60.0)
    assert shards(stage, OPEN)[0] == {own(stage)[0]}


def test_nobody_is_heard_on_a_shard_that_is_not_its_own(stage: Stage) -> None:
    handle = stage.devices[0].grant.handle
    strange = UpTopic((own(stage)[0] + 1) % 4096 or 2, handle)
    assert stage.parts.registry.owner(strange) is None, "what comes there is nobody's"
    stage.link.deliver(Parcel(AGGREGATOR, stage.topics.write(strange), stage.sent_up(0)[0], False))
    stage.settle()
    assert stage.refusals("wrong-topic") == 1


def test_a_device_that_enrols_now_has_its_own_shard(mosquitto: Mosquitto, tmp_path: Path) -> None:
    home = make_home(tmp_path, mosquitto.url, "quorum = 1")
    (code,) = invite(home)
    with serving(home) as served, ScriptedDevice(mosquitto.url, code) as device:
        grant = device.enrol().require_grant()
        assert (grant.shard, grant.cell) == (shard_of(grant.device_id), "")
        device.join().take_part(1)
        assert served.parts.registry.by_handle(grant.handle).shard == grant.shard
        again = device.enrol().require_grant()
    assert again == grant
