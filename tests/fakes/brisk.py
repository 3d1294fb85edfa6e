"""Short waits for tests."""

from __future__ import annotations

from device_sdk.world import Pace

BRISK = Pace(answer_seconds=0.5, fetch_seconds=0.5, reopen_seconds=0.2, most_seconds=1.0)
