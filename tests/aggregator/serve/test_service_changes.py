"""What changes while the aggregator serves: keys, catalogue, deadlines, defects."""

from __future__ import annotations

from pathlib import Path

import pytest

from aggregator.errors import AggregatorError
from aggregator.task.file import read_catalogue_file
from device_sdk.wire.publish.receipts import Verdict
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.homes import ITEMS, command, invite, make_home, serving

ALONE = "quorum = 1"


def test_rotated_keys_are_taken_up_without_a_restart(mosquitto: Mosquitto, tmp_path: Path) -> None:
    home = make_home(tmp_path, mosquitto.url, ALONE)
    with serving(home), ScriptedDevice(mosquitto.url, invite(home)[0]) as anna:
        anna.enrol().join()
        anna.await_round(1)
        before = anna.require_descriptor().serial
        assert command(home, "rotate", "keys") == 0
        anna.wait_for(lambda: anna.require_descriptor().serial > before)
        # The live session goes on, the old round's manifest was signed by the old key.
        assert anna.take_part(1).verdict is Verdict.COUNTED
        anna.open_session()
        assert anna.take_part(2).verdict is Verdict.COUNTED
        assert anna.fetch_catalogue(anna.await_round(3)).items[0] == "item-0"


def test_items_are_appended_between_rounds(mosquitto: Mosquitto, tmp_path: Path) -> None:
    home = make_home(tmp_path, mosquitto.url, ALONE)
    file = home.folder / "items.tsv"
    with serving(home), ScriptedDevice(mosquitto.url, invite(home)[0]) as anna:
        anna.enrol().join()
        first = anna.await_round(1)
        before = anna.fetch(first)[1].tensors["items"]
        file.write_text(file.read_text() + "item-new\tA new one\n")
        assert anna.take_part(1).verdict is Verdict.COUNTED
        second = anna.await_round(2)
        assert second.version == 2  # one for the round, one for the new item
        catalogue = anna.fetch_catalogue(second)
        assert catalogue.rows["item-new"] == ITEMS
        items = anna.fetch(second)[1].tensors["items"]
        assert items.shape[0] == len(before) + 1
        # A file that moves items is reported, and the fleet goes on.
        file.write_text("item-20\tMoved\n" + file.read_text())
        assert anna.take_part(2, anna.body(items=ITEMS + 1)).verdict is Verdict.COUNTED
        assert anna.await_round(3).catalogue_id == second.catalogue_id
    file.write_text("a\n\nb\n")
    with pytest.raises(AggregatorError, match=r"items\[1\] is .*row 0 is line 1"):
        read_catalogue_file(file)


@pytest.mark.parametrize("setting", ['cohort = "other"', 'name = "other"'])
def test_settings_that_are_refused_change_nothing_of_what_waits_beside_them(
    mosquitto: Mosquitto, tmp_path: Path, setting: str
) -> None:
    home = make_home(tmp_path, mosquitto.url, ALONE)
    file, text = home.folder / "items.tsv", home.task_file.read_text()
    with serving(home) as served, ScriptedDevice(mosquitto.url, invite(home)[0]) as anna:
        anna.enrol().join()
        assert anna.take_part(1).verdict is Verdict.COUNTED
        anna.await_round(2)
        assert command(home, "rollback", "--to", "0") == 0
        file.write_text(file.read_text() + "item-new\n")
        home.task_file.write_text(text.replace("[task]\n", f"[task]\n{setting}\n"))
        assert anna.take_part(2).verdict is Verdict.COUNTED
        third = anna.await_round(3)
        store = served.parts.store.first
        assert [each.origin for each in store.versions.all()[:2]] == ["new items", "version 0"]
        assert third.version == 4 == served.parts.first.aggregation.version
        assert anna.fetch(third)[1].tensors["items"].shape[0] == ITEMS + 1
        assert len(anna.fetch_catalogue(third).items) == ITEMS + 1
        assert "goes on with the settings" in (store.fleet.tasks.find(store.number).problem or "")
        assert anna.take_part(3, anna.body(items=ITEMS + 1)).verdict is Verdict.COUNTED


def test_settings_beside_an_unusable_catalogue_lose_no_rollback(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    """The older version was taken in before the catalogue was found wrong: all of it is undone."""
    home = make_home(tmp_path, mosquitto.url, ALONE)
    file, text = home.folder / "items.tsv", home.task_file.read_text()
    with serving(home) as served, ScriptedDevice(mosquitto.url, invite(home)[0]) as anna:
        anna.enrol().join()
        assert anna.take_part(1).verdict is Verdict.COUNTED
        anna.await_round(2)
        assert command(home, "rollback", "--to", "0") == 0
        file.write_text("item-20\tMoved\n" + file.read_text())
        home.task_file.write_text(text.replace("quorum = 1\n", "quorum = 1\npause_seconds = 0.1\n"))
        assert anna.take_part(2).verdict is Verdict.COUNTED
        third = anna.await_round(3)
        store = served.parts.store.first
        origins = [(each.version, each.origin) for each in store.versions.all()[:2]]
        assert origins == [(3, "version 0"), (2, "")]
        assert third.version == 3 == served.parts.first.aggregation.version
        assert "does not begin with" in (store.fleet.tasks.find(store.number).problem or "")


@pytest.mark.parametrize("quorum", [1, 2])
def test_items_appended_while_nobody_served_are_taken_in_after_the_round(
    mosquitto: Mosquitto, tmp_path: Path, caplog: pytest.LogCaptureFixture, quorum: int
) -> None:
    lines = f"quorum = {quorum}\nwait_for_devices = 1\nshare = 1.0"
    home = make_home(tmp_path, mosquitto.url, lines)
    file = home.folder / "items.tsv"
    with ScriptedDevice(mosquitto.url, invite(home)[0]) as anna:
        with serving(home):
            anna.enrol().join()
            first = anna.await_round(1)
            before = anna.fetch(first)[1].tensors["items"]
            if quorum == 2:
                # One update waits for a second: it was made for the shorter catalogue.
                assert anna.take_part(1).verdict is Verdict.COUNTED
                waiting = anna.await_round(2)
                assert waiting.version == 0
        file.write_text(file.read_text() + "item-new\tA new one\n")
        caplog.set_level("INFO")
        with serving(home):
            assert "has 21 items, the model 20" in caplog.text
            number = quorum  # of the round that goes on, with an update from round 1 at 2
            anna.open_session()
            assert anna.take_part(number).verdict is Verdict.COUNTED
            last = anna.await_round(number + 1)
            assert last.version == 2  # one for the round, one for the new item
            assert anna.fetch_catalogue(last).rows["item-new"] == ITEMS
            assert anna.fetch(last)[1].tensors["items"].shape[0] == len(before) + 1
        # What is not usable is said at the start too; the round goes on with the catalogue it has.
        file.write_text("item-20\tMoved\n" + file.read_text())
        with serving(home):
            assert "stays as it was: the catalogue does not begin with the 21 items" in caplog.text
            anna.open_session()
            assert anna.take_part(number + 1, anna.body(items=21)).verdict is Verdict.COUNTED
