"""A broker that takes small packets only: what is sent is cut to fit, or nothing is begun."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from device_sdk import Device, TrainingOptions
from device_sdk.link.events import MqttVersion, VersionChoice
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.links import QUICK
from tests.fakes.homes import command, invite, make_home, serving
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

ROUND = "least_deadline_seconds = 0.1\npause_seconds = 0.1"
ITEMS = 3000
MOST = 8_000


def enrolled(url: str, code: str, folder: Path, **more: Any) -> Device:
    home = folder / "device"
    return Device.enrol(
        url, code, home, timeout_seconds=PATIENCE_SECONDS, link_settings=QUICK, **more
    )


class OldProtocol(VersionChoice):
    """MQTT 3.1.1 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.current = MqttVersion.V311

    def rejected(self) -> bool:
        return False


@pytest.mark.parametrize("limit", ["max_packet_size", "message_size_limit", "3.1.1"])
def test_chunks_and_updates_are_cut_to_what_the_broker_takes(
    tmp_path: Path,
    make_mosquitto: MakeMosquitto,
    limit: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first is told to clients, the second is found out: Mosquitto refuses such messages, or,
    by MQTT 3.1.1, acknowledges and drops them, which is said."""
    if limit == "3.1.1":
        monkeypatch.setattr("device_sdk.link.link.VersionChoice", OldProtocol)
        limit = "message_size_limit"
    broker = make_mosquitto("allow_anonymous true", f"{limit} {MOST}")
    home = make_home(tmp_path, broker.url, ROUND)
    lines = [f"item-{row}\tThe long title of number {row}" for row in range(ITEMS)]
    (home.folder / "items.tsv").write_text("\n".join(lines))
    text = home.task_file.read_text().replace("[task]", '[task]\nupdate_codec = "float32"')
    home.task_file.write_text(text)
    (code,) = invite(home)
    with (
        serving(home, link_settings=QUICK) as served,
        enrolled(broker.url, code, tmp_path, options=TrainingOptions(k=8)) as device,
    ):
        device.record_all((f"item-{row}", "anna") for row in range(ITEMS))
        device.start()
        ingest = served.parts.first.ingest
        wait_until(lambda: ingest.counted >= 2, lambda: device.status().problem)
        assert device.status().sent_bytes > 3 * MOST, "in parts"
        largest = served.parts.store.retained.largest_bytes()
        assert MOST / 3 < largest <= MOST, "as large as they may be, or the next half below"


def test_no_round_opens_where_nothing_fits_and_rounds_go_on_once_it_does(
    tmp_path: Path,
    make_mosquitto: MakeMosquitto,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broker = make_mosquitto("allow_anonymous true")
    home = make_home(tmp_path, broker.url, ROUND)
    (code,) = invite(home)
    with (
        serving(home, link_settings=QUICK) as served,
        enrolled(broker.url, code, tmp_path) as device,
    ):
        device.record_all((f"item-{row}", "anna") for row in range(5))
        device.start()
        ingest, first = served.parts.first.ingest, served.parts.first
        wait_until(lambda: ingest.counted >= 2)
        broker.stop()
        text = broker.configuration.read_text()
        broker.configuration.write_text(f"{text}max_packet_size 3000\n")
        broker.start()
        with caplog.at_level(logging.ERROR):
            wait_until(lambda: "takes packets of at most 3,000 bytes" in caplog.text)
            before = first.rounds.next_number()
            command(home, "status")
            assert "problem      no round opens: the broker takes" in capsys.readouterr().out
        assert first.rounds.next_number() == before and caplog.text.count("no round opens") == 1
        broker.stop()
        broker.configuration.write_text(text)
        broker.start()
        wanted = ingest.counted + 2
        wait_until(lambda: ingest.counted >= wanted)
        assert first.store.facts.no_room is None
