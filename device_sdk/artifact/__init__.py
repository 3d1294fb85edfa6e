"""The artifact: a folder that holds a model's train step as an ONNX graph, and all about it.

Importable without onnxruntime, torch or the onnx package: the exporter writes artifacts with it,
the aggregator reads them, the device loads them.
"""

from __future__ import annotations

from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.load import Artifact, load_artifact, read_manifest
from device_sdk.artifact.manifest import (
    FORMAT_VERSION,
    INITIAL_FILE,
    MANIFEST_FILE,
    Axis,
    FileEntry,
    Manifest,
    OptimizerSpec,
)
from device_sdk.artifact.parts import GraphFile, Member, MetricSource, Port, StateTensor

__all__ = [
    "FORMAT_VERSION",
    "INITIAL_FILE",
    "MANIFEST_FILE",
    "Artifact",
    "ArtifactError",
    "Axis",
    "FileEntry",
    "GraphFile",
    "Manifest",
    "Member",
    "MetricSource",
    "OptimizerSpec",
    "Port",
    "StateTensor",
    "load_artifact",
    "read_manifest",
]
