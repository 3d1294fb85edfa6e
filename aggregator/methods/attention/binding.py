"""The table ``[attention]`` of a task file: whom each device learns from."""

from __future__ import annotations

from collections.abc import Sequence

from aggregator.methods.attention.method import AttentionMethod, AttentionSettings
from aggregator.methods.binding import ArrayBinding
from aggregator.tables import TomlTable
from device_sdk.artifact import Artifact
from device_sdk.artifact.flat_layout import layout_of


def read_attention(table: TomlTable) -> ArrayBinding[AttentionSettings]:
    """Read the table. Raises TaskError, naming the key."""
    return ArrayBinding("attention", table.read(AttentionSettings), _method)


def _method(artifacts: Sequence[Artifact], settings: AttentionSettings) -> AttentionMethod:
    layouts = [layout_of(artifact.manifest) for artifact in artifacts]
    initial = layouts[-1].flatten(artifacts[-1].initial)
    return AttentionMethod(initial, layouts, settings)
