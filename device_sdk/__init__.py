"""Tessera on the device: train, predict and take part in rounds with numpy and onnxruntime."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

# Official onnxruntime wheels since 1.29 write a device id and an event database into the user's
# cache folder as soon as they are imported; only this variable, set before that, prevents it.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

if TYPE_CHECKING:
    from device_sdk.artifact.errors import ArtifactError
    from device_sdk.device import Device
    from device_sdk.errors import (
        AlreadyEnrolled,
        BatchError,
        CheckpointError,
        DeviceError,
        EnrolmentFailed,
        EnrolmentRefused,
        GraphRunError,
        HomeBroken,
        HomeError,
        HomeLocked,
        NonFiniteStep,
        NotEnrolled,
        NothingLearnt,
        ProviderError,
        RuntimeMissing,
        StateError,
        UnknownUser,
    )
    from device_sdk.link.broker_url import TlsFiles
    from device_sdk.local_data import LocalData
    from device_sdk.status import DeviceStatus
    from device_sdk.system.printable import PrintableFormatter
    from device_sdk.trainer import Trainer
    from device_sdk.world import TrainingOptions

__all__ = [
    "AlreadyEnrolled",
    "ArtifactError",
    "BatchError",
    "CheckpointError",
    "Device",
    "DeviceError",
    "DeviceStatus",
    "EnrolmentFailed",
    "EnrolmentRefused",
    "GraphRunError",
    "HomeBroken",
    "HomeError",
    "HomeLocked",
    "LocalData",
    "NonFiniteStep",
    "NotEnrolled",
    "NothingLearnt",
    "PrintableFormatter",
    "ProviderError",
    "RuntimeMissing",
    "StateError",
    "TlsFiles",
    "Trainer",
    "TrainingOptions",
    "UnknownUser",
]

# Loaded on first use: `device_sdk.artifact` and `device_sdk.wire` must import without onnxruntime.
_HOMES = {
    "AlreadyEnrolled": "device_sdk.errors",
    "ArtifactError": "device_sdk.artifact.errors",
    "BatchError": "device_sdk.errors",
    "CheckpointError": "device_sdk.errors",
    "Device": "device_sdk.device",
    "DeviceError": "device_sdk.errors",
    "DeviceStatus": "device_sdk.status",
    "EnrolmentFailed": "device_sdk.errors",
    "EnrolmentRefused": "device_sdk.errors",
    "GraphRunError": "device_sdk.errors",
    "HomeBroken": "device_sdk.errors",
    "HomeError": "device_sdk.errors",
    "HomeLocked": "device_sdk.errors",
    "LocalData": "device_sdk.local_data",
    "NonFiniteStep": "device_sdk.errors",
    "NotEnrolled": "device_sdk.errors",
    "NothingLearnt": "device_sdk.errors",
    "PrintableFormatter": "device_sdk.system.printable",
    "ProviderError": "device_sdk.errors",
    "RuntimeMissing": "device_sdk.errors",
    "StateError": "device_sdk.errors",
    "TlsFiles": "device_sdk.link.broker_url",
    "Trainer": "device_sdk.trainer",
    "TrainingOptions": "device_sdk.world",
    "UnknownUser": "device_sdk.errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'device_sdk' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
