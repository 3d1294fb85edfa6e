"""The table ``[mutual]`` of a task file: public samples and what devices make of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aggregator.methods.binding import Binding
from aggregator.methods.mutual.method import MutualMethod, MutualSettings
from device_sdk.artifact import Artifact
from device_sdk.methods.mutual.contract import sample_entries


class MutualBinding(Binding[MutualSettings]):
    """Models of any kind, as long as they take the same samples."""

    __slots__ = ()
    settings_class = MutualSettings

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> MutualMethod:
        """Nothing of the artifacts but what their samples are."""
        entries = [sample_entries(artifact.manifest) for artifact in artifacts]
        if any(each != entries[0] for each in entries[1:]):
            raise ValueError("the artifacts take different samples, which devices could not share")
        return MutualMethod(entries[0], self.settings)
