"""The table ``[mutual]`` of a task file: public samples and what devices make of them."""

from __future__ import annotations

from collections.abc import Sequence

from aggregator.methods.binding import ArrayBinding
from aggregator.methods.mutual.method import MutualMethod, MutualSettings
from aggregator.tables import TomlTable
from device_sdk.artifact import Artifact
from device_sdk.methods.mutual.contract import sample_entries


def read_mutual(table: TomlTable) -> ArrayBinding[MutualSettings]:
    """Read the table. Raises TaskError, naming the key."""
    return ArrayBinding("mutual", table.read(MutualSettings), _method)


def _method(artifacts: Sequence[Artifact], settings: MutualSettings) -> MutualMethod:
    entries = [sample_entries(artifact.manifest) for artifact in artifacts]
    if any(each != entries[0] for each in entries[1:]):
        raise ValueError("the artifacts take different samples, which devices could not share")
    return MutualMethod(entries[0], settings)
