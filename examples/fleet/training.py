"""The task's training settings, chosen on a validation item: docs/methods/scatter.md."""

from __future__ import annotations

from device_sdk.methods.scatter.contract import BprTraining

# For 48 devices of about 20 users, all of them in every round.
TRAINING = BprTraining(user_learning_rate=1.0, user_l2=0.01, item_l2=0.001, user_spread=0.01)
SERVER_RATE = 0.05
DECAY = 0.98
SPREAD = 0.01
