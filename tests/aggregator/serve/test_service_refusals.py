"""What the aggregator refuses through a real broker, and what it says then."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.receipts import RecordType, Verdict, write_update
from device_sdk.wire.publish.topics import UpTopic
from device_sdk.wire.seal.session import DeviceSessions
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.homes import Serving, command, invite, make_home, serving
from tests.fakes.outputs import output_of
from tests.fakes.waiting import wait_until

ROUND = "quorum = 2"


def counted(served: Serving, reason: str, times: int = 1) -> None:
    wait_until(lambda: served.parts.refusals.counts[reason] >= times)


def test_replayed_forged_misplaced_and_retained(mosquitto: Mosquitto, tmp_path: Path) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND)
    with serving(home) as served:
        codes = invite(home, 2)
        with (
            ScriptedDevice(mosquitto.url, codes[0], 1) as anna,
            ScriptedDevice(mosquitto.url, codes[1], 2) as bert,
        ):
            anna.enrol().join()
            bert.enrol().join()
            manifest = anna.await_round(1)
            payload = write_update(anna.identity_for(manifest), anna.body())
            envelope = anna.sessions.seal(RecordType.UPDATE, payload)
            anna.publish_up(envelope)
            wait_until(lambda: served.parts.first.ingest.counted == 1)
            anna.publish_up(envelope)
            counted(served, "replayed")
            forged = bytearray(anna.sessions.seal(RecordType.UPDATE, payload))
            forged[-1] ^= 1
            anna.publish_up(bytes(forged))
            counted(served, "bad-tag")
            # On another device's topic: refused although the envelope is right.
            bert.publish_up(anna.sessions.seal(RecordType.UPDATE, payload))
            counted(served, "wrong-topic")
            anna.publish_up(anna.sessions.seal(99, payload))
            counted(served, "bad-type")
            anna.publish_up(anna.sessions.seal(RecordType.UPDATE, b"short"))
            counted(served, "truncated")
            link = anna.require_link()
            link.publish(anna.topics.write(UpTopic(0, bytes(16))), b"\x01\x05hello")
            counted(served, "unknown-handle")
            nobody = b"\x01\x03" + bytes(8 + 8 + 16)
            link.publish("tessera/enrol/request", nobody + anna.fresh().to_bytes() + bytes(60))
            counted(served, "unknown-token")
            link.publish("tessera/enrol/request", nobody + bytes(24 + 60))
            counted(served, "old-incarnation")
            # An open that was recorded is opened once, and evicts nobody.
            opening = anna.new_opening()
            wrong = bytearray(opening.message)
            wrong[-1] ^= 1
            anna.publish_up(bytes(wrong))
            counted(served, "bad-admission")
            assert anna.send_and_wait(manifest, payload[24:])  # the session still works
            # Somebody leaves a message for the aggregator's next life.
            anna.publish_up(envelope, retain=True)
            time.sleep(0.2)
    with serving(home) as served:
        counted(served, "retained")


def test_revocation_ends_sessions_and_rotates_the_group_key(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, mosquitto.url, "quorum = 1")
    with serving(home) as served:
        codes = invite(home, 2)
        with (
            ScriptedDevice(mosquitto.url, codes[0], 1) as anna,
            ScriptedDevice(mosquitto.url, codes[1], 2) as bert,
        ):
            anna.enrol().join()
            bert.enrol().join()
            assert anna.take_part(1).verdict is Verdict.COUNTED
            first = anna.await_round(2)
            epoch = first.key_epoch
            device_id = anna.require_grant().device_id
            assert command(home, "revoke", device_id.hex()[:8]) == 0
            assert "was revoked before" in output_of(capsys, home, "revoke", device_id.hex())
            wait_until(lambda: not served.parts.table.has_session(device_id))
            anna.send(anna.identity_for(first), anna.body())
            counted(served, "revoked")
            opening = anna.new_opening()
            anna.publish_up(opening.message)
            counted(served, "revoked", 2)
            with pytest.raises(WireError, match="revoked"):
                anna.enrol()
            # bert's keys do not open the next manifest: it opens a session, which brings the new.
            round_number = bert.await_round(2).round
            assert bert.take_part(round_number).verdict is Verdict.COUNTED
            manifest = bert.await_round(round_number + 1)
            assert manifest.key_epoch == epoch + 1
            assert bert.fetch_catalogue(manifest).items[0] == "item-0"
            with pytest.raises(WireError, match="revoked"):
                served.parts.registry.by_handle(anna.require_grant().handle)


def test_a_session_survives_another_one_that_was_never_used(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = make_home(tmp_path, mosquitto.url, "quorum = 1")
    with serving(home), ScriptedDevice(mosquitto.url, invite(home)[0]) as anna:
        anna.enrol().join()
        live = anna.sessions
        anna.sessions = DeviceSessions()
        anna.open_session()
        anna.sessions = live
        assert anna.take_part(1).verdict is Verdict.COUNTED
