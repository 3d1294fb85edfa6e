"""An aggregator that lost a session, over a real broker.

The device's own waits are of half an hour, far beyond a test's patience: whatever happens in it
happens because the device was told.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from device_sdk import Device
from device_sdk.world import Pace
from tests.brokers.links import QUICK
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.homes import invite, make_home, serving
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

PATIENT = Pace(
    answer_seconds=1800.0,
    repeat_seconds=1800.0,
    reopen_seconds=1800.0,
    renew_seconds=0.1,
    most_seconds=3600.0,
)
ROUNDS = "quorum = 1\nwait_for_devices = 1\npause_seconds = 0.5"


def test_a_device_whose_session_is_lost_opens_another_at_once(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUNDS)
    (code,) = invite(home)
    with ExitStack() as stack:
        with serving(home) as served:
            device = stack.enter_context(
                Device.enrol(
                    mosquitto.url,
                    code,
                    tmp_path / "dev",
                    pace=PATIENT,
                    link_settings=QUICK,
                    timeout_seconds=PATIENCE_SECONDS,
                )
            )
            for item in range(5):
                device.record(f"item-{item}")
            device.start()
            ingest = served.parts.first.ingest
            wait_until(lambda: ingest.counted >= 1)
            served.parts.table.end(bytes.fromhex(device.device_id))
            lost_at = ingest.counted
            wait_until(lambda: served.parts.refusals.counts["unknown-session"] > 0)
            wait_until(lambda: ingest.counted >= lost_at + 2)
        # Another life, whose presence alone would bring a session within half an hour.
        with serving(home) as served:
            wait_until(lambda: served.parts.first.ingest.counted >= 1)
            assert served.parts.refusals.counts["unknown-session"] > 0
