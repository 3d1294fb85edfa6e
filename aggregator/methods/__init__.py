"""The aggregator's halves of the federated methods: one file each, named as the device's half."""

from __future__ import annotations

from aggregator.methods.method import Method, Refused, RestoreError, RoundSummary

__all__ = ["Method", "Refused", "RoundSummary", "RestoreError"]
