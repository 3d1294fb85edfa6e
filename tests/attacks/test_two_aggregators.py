"""Two aggregators from one home: a copy, a backup that was started, a machine that came back."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.keys.fence import Fence
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.announcement import Presence, announce
from tests.attacks.conftest import MakeStage
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.homes import ServeProcess, command, make_home
from tests.fakes.refusals import changed_bytes


def test_of_two_copies_one_serves(mosquitto: Mosquitto, tmp_path: Path) -> None:
    original, copy = make_home(tmp_path, mosquitto.url), AggregatorHome(tmp_path / "copy")
    first = ServeProcess(original)
    first.start()
    first.await_connections(1)
    time.sleep(2.0)
    assert first.stop() == 0
    shutil.copytree(original.folder, copy.folder)
    served, beside, instead = ServeProcess(original), ServeProcess(copy), ServeProcess(copy)
    try:
        served.start()
        served.await_connections(2)
        time.sleep(2.0)
        # The copy does not know of the life that serves now: it leaves that one alone.
        beside.start()
        assert beside.wait() == 1
        assert "this home is a copy, or was restored from a backup" in beside.log.read_text()
        assert served.ended() is None
        # Told to take the place of the other, it does, and the other one ends.
        time.sleep(1.0)
        assert command(copy, "restored") == 0
        instead.start()
        assert served.wait() == 1
        said = served.log.read_text()
        assert "has taken the fleet over" in said
        assert f"tessera-aggregator restored --home {original.folder}" in said
        assert instead.ended() is None
    finally:
        for each in (served, beside, instead):
            each.kill()


def test_a_home_whose_clock_was_set_back_is_no_copy(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.await_version(1)
    stage.kill_aggregator()
    stage.offset_seconds = -7 * 86_400.0
    stage.start_aggregator()
    stage.run(10.0)
    assert stage.parts.fence.passed


def test_a_forged_or_an_old_presence_or_descriptor_ends_nobody(make_stage: MakeStage) -> None:
    stage = make_stage()
    fence: Fence = stage.parts.fence
    stage.await_version(1)
    keys = stage.parts.keys.current()
    message = announce(Presence(bytes(16), 1), keys.descriptor, keys.signing)
    fence.heard_presence(message)
    for _, changed in [*changed_bytes(message)][2::7]:
        with pytest.raises(WireError):
            fence.heard_presence(changed)
    fence.heard_descriptor(keys.descriptor.message)
    for _, changed in [*changed_bytes(keys.descriptor.message)][2::97]:
        with pytest.raises(WireError):
            fence.heard_descriptor(changed)
    assert stage.command("rotate", "keys") == 0
    stage.run(70.0)
    fence.heard_descriptor(keys.descriptor.message)  # an old one of ours, shown again


def test_the_later_of_two_lives_stays_also_within_a_second(make_stage: MakeStage) -> None:
    stage = make_stage()
    keys = stage.parts.keys.current()
    ours = Presence(b"m" * 16, 1000)
    clock = stage.clock
    fence = Fence(ours, 900, Path("home"), stage.parts.keys.descriptors, clock, clock)

    def hear(incarnation: bytes, started: int) -> None:
        presence = Presence(incarnation, started)
        fence.heard_presence(announce(presence, keys.descriptor, keys.signing))

    hear(b"m" * 16, 1000)  # our own
    hear(b"z" * 16, 900)  # our last life, or one that started with it
    for incarnation, started in ((b"a" * 16, 1001), (b"n" * 16, 1000)):
        with pytest.raises(AggregatorError, match="has taken the fleet over"):
            hear(incarnation, started)
    for incarnation, started in ((b"z" * 16, 901), (b"l" * 16, 1000)):
        with pytest.raises(AggregatorError, match="knows nothing"):
            hear(incarnation, started)


@pytest.mark.parametrize("what", ["keys", "root"])
def test_a_backup_of_before_the_keys_changed_ends_before_it_is_heard(
    make_stage: MakeStage, tmp_path: Path, what: str
) -> None:
    stage = make_stage(judged=False)
    stage.hand = "run tessera-aggregator restored"
    stage.await_version(1)
    stage.kill_aggregator()
    home = stage.fleet.aggregator.folder
    shutil.copytree(home, tmp_path / "backup")
    stage.start_aggregator()
    assert stage.command("rotate", what) == 0
    stage.await_version(3)
    stage.kill_aggregator()
    shutil.rmtree(home)
    shutil.copytree(tmp_path / "backup", home)
    said = len(stage.broker.seen)
    stage.start_aggregator()
    with pytest.raises(AggregatorError, match=r"keys that .* knows nothing of"):
        stage.run(100.0)
    assert [topic for topic, _ in stage.broker.seen[said:] if "/all/" in topic] == []


def test_two_copies_that_renewed_their_keys_in_the_same_hour_do_not_both_serve(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    stage = make_stage(judged=False)
    stage.hand = "run tessera-aggregator restored"
    stage.await_version(1)
    stage.kill_aggregator()
    home = stage.fleet.aggregator.folder
    shutil.copytree(home, tmp_path / "copy")
    stage.offset_seconds = 25 * 86_400.0  # the descriptor is renewed at the next start
    stage.start_aggregator()
    stage.run_until(lambda: stage.parts.fence.passed)
    serial = stage.parts.keys.current().descriptor.serial
    stage.kill_aggregator()
    shutil.rmtree(home)
    shutil.copytree(tmp_path / "copy", home)
    said = len(stage.broker.seen)
    stage.start_aggregator()
    assert stage.parts.keys.current().descriptor.serial == serial
    with pytest.raises(AggregatorError, match=r"keys that .* knows nothing of"):
        stage.run(10.0)
    assert [topic for topic, _ in stage.broker.seen[said:] if "/all/" in topic] == []
