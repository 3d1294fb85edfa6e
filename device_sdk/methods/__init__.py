"""The device's halves of the federated methods: one file each, named as the aggregator's half."""

from __future__ import annotations

from device_sdk.methods.learner import FetchingLearner, Learner, LearnerError

__all__ = ["FetchingLearner", "Learner", "LearnerError"]
