"""The table ``[attention]`` of a task file: whom each device learns from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aggregator.methods.attention.method import AttentionMethod, AttentionSettings
from aggregator.methods.binding import Binding
from device_sdk.artifact import Artifact
from device_sdk.artifact.flat_layout import layout_of


class AttentionBinding(Binding[AttentionSettings]):
    """Models of one kind in several widths."""

    __slots__ = ()
    settings_class = AttentionSettings

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> AttentionMethod:
        """Begins with the widest artifact's own parameters."""
        layouts = [layout_of(artifact.manifest) for artifact in artifacts]
        initial = layouts[-1].flatten(artifacts[-1].initial)
        return AttentionMethod(initial, layouts, self.settings)
