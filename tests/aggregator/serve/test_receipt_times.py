"""How long devices' updates wait for their receipts, and who is told."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from aggregator.cli import main
from aggregator.serve.metrics import Told, registry_of
from aggregator.serve.reach import Reach
from aggregator.serve.receipt_times import BOUNDS_SECONDS, ReceiptTimes
from device_sdk.system.lock import LiveFile
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.homes import invite, make_home, serving


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.0, 60.0)), max_size=20))
def test_shares_had_theirs_within_the_bound_that_is_told(groups: list[tuple[int, float]]) -> None:
    times = ReceiptTimes()
    for updates, seconds in groups:
        times = times.with_group(updates, seconds)
    waited = np.repeat([seconds for _, seconds in groups], [updates for updates, _ in groups])
    for share in (0.5, 0.9, 1.0):
        had = [
            bound for bound in BOUNDS_SECONDS if len(waited) and np.mean(waited <= bound) >= share
        ]
        assert times.within(share) == (had[0] if had else None)
    assert times.seconds == pytest.approx(waited.sum())


def test_prometheus_and_status_tell_how_long_receipts_took(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, mosquitto.url, "quorum = 1")
    with serving(home) as served:
        (code,) = invite(home)
        with ScriptedDevice(mosquitto.url, code, 1) as device:
            device.enrol().join()
            for number in (1, 2):
                device.take_part(number)
        told = generate_latest(registry_of(Told(served.service.snapshot))).decode()
        times = served.service.receipt_times
    (family,) = (
        each
        for each in text_string_to_metric_families(told)
        if each.name == "tessera_receipt_seconds"
    )
    assert family.type == "histogram"
    counted = {each.labels.get("le", each.name): each.value for each in family.samples}
    assert counted["+Inf"] == counted["tessera_receipt_seconds_count"] == sum(times.counts) == 2
    assert counted["tessera_receipt_seconds_sum"] == times.seconds > 0
    live = LiveFile(home.live_file)
    said = Reach("mqtt://here", True, receipt_half_seconds=0.025, receipt_nine_tenths_seconds=0.5)
    live.tell(asdict(said))
    assert main(["status", "--home", str(home.folder)]) == 0
    live.close()
    line = "receipts     half within 0.025 s, nine tenths within 0.5 s of an update's arrival"
    assert line in capsys.readouterr().out.splitlines()
