"""A device's life against the other end, through a real broker."""

from __future__ import annotations

import pytest

from device_sdk.device import Device
from device_sdk.home.errors import NothingLearnt, UnknownUser
from tests.device_sdk.device.conftest import MakeDevice
from tests.device_sdk.device.small_aggregator import SmallAggregator


def await_receipt(aggregator: SmallAggregator, device: Device, round_id: int) -> None:
    aggregator.await_(lambda: device.status().receipted_round == round_id)


def test_rounds_are_trained_counted_and_recommended_from(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    device = make_device()
    device.record("film-30", user="ben")
    with pytest.raises(NothingLearnt, match="no round"):
        device.recommend(3, user="anna")
    device.start()
    for number in (1, 2):
        aggregator.open_round()
        await_receipt(aggregator, device, number)
        assert device.status().verdict == "counted"
        assert aggregator.close_round() == number
    status = device.status()
    assert (status.round, status.outcome, status.k, status.version) == (2, "trained", 4, 1)
    assert status.outbox == 0 and status.connected and status.session and not status.refused
    assert [identity.round for identity, _ in aggregator.seen.bodies] == [1, 2]
    assert aggregator.seen.opens == 1 and not aggregator.seen.refused

    best = device.recommend(40, user="anna")
    seen = {f"film-{n}" for n in range(1, 7)}
    assert len(best) == 34 and not seen & {item for item, _ in best}
    assert [score for _, score in best] == sorted((s for _, s in best), reverse=True)
    assert device.title(best[0][0]) == best[0][0].replace("film-", "Film ")
    assert len(device.recommend(5, user="ben")) == 5
    with pytest.raises(UnknownUser, match="'carl'"):
        device.recommend(3, user="carl")

    assert device.stop()
    device.close()
    with Device.open(device.home) as again:
        assert again.recommend(40, user="anna") == best
