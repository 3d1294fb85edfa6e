"""The aggregator's halves of the federated methods: a file each, named as the device's half."""

from __future__ import annotations

from aggregator.methods.method import Method, Refused, RoundSummary
from device_sdk.methods.state import RestoreError

__all__ = ["Method", "Refused", "RoundSummary", "RestoreError"]
