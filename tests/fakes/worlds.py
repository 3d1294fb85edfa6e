"""A device's world around a home that was never enrolled."""

from __future__ import annotations

import numpy as np

from device_sdk.home.home import Home
from device_sdk.home.membership import Membership
from device_sdk.link.broker_url import BrokerWay
from device_sdk.local_data import DataSource
from device_sdk.system.clock import Clock
from device_sdk.wire.seal.enrolment_message import Grant
from device_sdk.world import DeviceWorld, TrainingOptions


def world_of(
    home: Home,
    device_id: bytes,
    rng: np.random.Generator,
    work_clock: Clock,
    source: DataSource | None,
    **options: object,
) -> DeviceWorld:
    """A member's of the task ``t``. ``options``: of the training."""
    grant = Grant(device_id, bytes(16), bytes(32), 0)
    membership = Membership(
        BrokerWay.parse("mqtt://nowhere"), "tessera", "t", "all", bytes(32), grant
    )
    chosen = TrainingOptions(**options)  # type: ignore[arg-type]
    return DeviceWorld(
        home, membership, chosen, work_clock=work_clock, rng=rng, source=lambda: source
    )
