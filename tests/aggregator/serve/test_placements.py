"""Where devices are heard: on their own shards, and what they are told of their place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from device_sdk.wire.publish.receipts import RecordType
from device_sdk.wire.publish.topics import UpTopic
from device_sdk.wire.seal.placement import own_placement, shard_of
from tests.attacks.conftest import MakeStage, make_stage, memory_path  # noqa: F401
from tests.attacks.simulated_broker import AGGREGATOR, Parcel
from tests.attacks.stage import Stage
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.homes import invite, make_home, serving

MIRROR = "https://chunks.example"


@pytest.fixture
def stage(make_stage: MakeStage) -> Stage:  # noqa: F811
    """Three devices that have taken part in one round; a mirror has been set up since."""
    made = make_stage()
    made.run_until(lambda: made.parts.first.aggregation.version == 1)
    made.run(1.0)
    made.parts.placements._placement_of = lambda each: replace(own_placement(each), mirror=MIRROR)
    return made


def mirrors(stage: Stage) -> list[str]:
    """What each device has stored."""
    held = [device.home.membership.load() for device in stage.devices]
    return [each.mirror if each is not None else "" for each in held]


@pytest.mark.parametrize(("lost", "told"), [(1, True), (9, False)])
def test_a_placement_that_is_lost_comes_again_behind_the_first_word(
    stage: Stage, lost: int, told: bool
) -> None:
    device, dropped = stage.devices[0], []

    def drop(parcel: Parcel) -> bool:
        if (parcel.to, parcel.payload[1]) == (device.name, RecordType.PLACEMENT):
            dropped.append(parcel)
            return len(dropped) <= lost
        return False

    stage.drop = drop
    for each in stage.devices:
        each.restart()
    wanted = stage.version + 1
    stage.run_until(lambda: stage.version >= wanted)
    stage.run(1.0)
    assert len(dropped) == 2, "with the session, and behind the first word"
    assert mirrors(stage) == [MIRROR if told else "", MIRROR, MIRROR]


def own(stage: Stage) -> list[int]:
    return [shard_of(device.grant.device_id) for device in stage.devices]


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
