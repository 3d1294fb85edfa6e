"""What every test shares: onnxruntime's telemetry off, and hypothesis' settings."""

from __future__ import annotations

import os

# Before any test module can import onnxruntime.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

from hypothesis import HealthCheck, settings

from tests.brokers.fixtures import amqtt_url, make_mosquitto, mosquitto
from tests.brokers.links import make_link

__all__ = ["amqtt_url", "make_link", "make_mosquitto", "mosquitto"]

# A busy machine is not a bug, so no profile has a deadline per example.
settings.register_profile(
    "dev", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# `make test` draws the same examples each time: a red run means that the code changed.
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True, database=None)
settings.load_profile("dev")
