"""Rounds through a real Mosquitto."""

from __future__ import annotations

import hashlib
from pathlib import Path

from aggregator.rounds.machine import RoundClosed
from device_sdk.artifact import MANIFEST_FILE
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.publish.artifact_bundle import unpack_artifact
from device_sdk.wire.publish.receipts import Verdict
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.homes import ITEMS, WIDTH, invite, make_home, serving
from tests.fakes.scatter_updates import of_triples


def test_two_devices_make_versions(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """Of the loss that trains an artifact, which travels as well."""
    home = make_home(tmp_path, mosquitto.url, "quorum = 2", 'loss = "bpr"')
    text = home.task_file.read_text()
    home.task_file.write_text(text.replace("[task]\n", '[task]\nartifact = "shipped:mf"\n'))
    update = Update(1, of_triples(range(3), range(WIDTH)))
    body = encode_scatter_update(update, WIDTH, "float32")
    with serving(home) as served:
        codes = invite(home, 2)
        with (
            ScriptedDevice(mosquitto.url, codes[0], 1) as anna,
            ScriptedDevice(mosquitto.url, codes[1], 2) as bert,
        ):
            for device in (anna, bert):
                device.enrol().join()
            for number in (1, 2):
                verdicts = [d.take_part(number, body).verdict for d in (anna, bert)]
                assert verdicts == [Verdict.COUNTED, Verdict.COUNTED]
            manifest = anna.await_round(3)
            assert manifest.version == 2
            terms, broadcast = anna.fetch(manifest)
            assert broadcast.tensors["items"].shape == (ITEMS, WIDTH)
            assert terms.method == "scatter"
            catalogue = anna.fetch_catalogue(manifest)
            assert catalogue.titles[3] == "Title 3"
            bundle = anna.fetch_content(manifest.artifact_id)
            files = unpack_artifact(bundle, manifest.artifact_id)
            assert hashlib.sha256(files[MANIFEST_FILE]).digest() == manifest.artifact_id
    closed = [event for event in served.rounds if isinstance(event, RoundClosed)]
    assert [event.next_version for event in closed[:2]] == [1, 2]
