"""The table ``[fedavg]`` of a task file: one model, averaged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aggregator.methods.binding import Binding
from aggregator.methods.fedavg.method import FedAvgMethod, FedAvgSettings
from device_sdk.artifact import Artifact


class FedAvgBinding(Binding[FedAvgSettings]):
    """One artifact: all devices train the same model."""

    __slots__ = ()
    settings_class = FedAvgSettings
    artifacts = range(1, 2)

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> FedAvgMethod:
        """Begins with the artifact's own parameters and buffers."""
        (artifact,) = artifacts
        kinds = {member.name: state.kind for state, member in artifact.manifest.members()}
        parameters = {n: a for n, a in artifact.initial.items() if kinds[n] == "parameter"}
        buffers = {n: a for n, a in artifact.initial.items() if kinds[n] == "buffer"}
        return FedAvgMethod(parameters, buffers, self.settings)
