"""The table ``[fedavg]`` of a task file: one model, averaged."""

from __future__ import annotations

from collections.abc import Sequence

from aggregator.methods.binding import ArrayBinding
from aggregator.methods.fedavg.method import FedAvgMethod, FedAvgSettings
from aggregator.tables import TomlTable
from device_sdk.artifact import Artifact


def read_fedavg(table: TomlTable) -> ArrayBinding[FedAvgSettings]:
    """Read the table. Raises TaskError, naming the key."""
    settings = table.read(FedAvgSettings)
    return ArrayBinding("fedavg", settings, _method, artifacts=range(1, 2))


def _method(artifacts: Sequence[Artifact], settings: FedAvgSettings) -> FedAvgMethod:
    (artifact,) = artifacts
    kinds = {member.name: state.kind for state, member in artifact.manifest.members()}
    parameters = {n: a for n, a in artifact.initial.items() if kinds[n] == "parameter"}
    buffers = {n: a for n, a in artifact.initial.items() if kinds[n] == "buffer"}
    return FedAvgMethod(parameters, buffers, settings)
