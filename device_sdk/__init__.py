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
        LeaveUnanswered,
        NonFiniteStep,
        NotEnrolled,
        NothingLearnt,
        ProviderError,
        RuntimeMissing,
        StateError,
        UnknownUser,
    )
    from device_sdk.events import ConnectedEvent, ModelEvent, ProblemEvent, RoundEvent
    from device_sdk.link import LinkSettings
    from device_sdk.link.broker_url import BrokerWay, TlsFiles
    from device_sdk.local_data import LocalData
    from device_sdk.local_model import LocalModel
    from device_sdk.status import DeviceStatus, TaskStatus
    from device_sdk.system.printable import PrintableFormatter
    from device_sdk.system.version import __version__
    from device_sdk.trainer import Trainer
    from device_sdk.world import Pace, TrainingOptions

__all__ = [
    "AlreadyEnrolled",
    "ArtifactError",
    "BatchError",
    "BrokerWay",
    "CheckpointError",
    "ConnectedEvent",
    "Device",
    "DeviceError",
    "DeviceStatus",
    "EnrolmentFailed",
    "EnrolmentRefused",
    "GraphRunError",
    "HomeBroken",
    "HomeError",
    "HomeLocked",
    "LeaveUnanswered",
    "LinkSettings",
    "LocalData",
    "ModelEvent",
    "LocalModel",
    "NonFiniteStep",
    "NotEnrolled",
    "NothingLearnt",
    "Pace",
    "PrintableFormatter",
    "ProblemEvent",
    "ProviderError",
    "RoundEvent",
    "RuntimeMissing",
    "StateError",
    "TaskStatus",
    "TlsFiles",
    "Trainer",
    "TrainingOptions",
    "UnknownUser",
    "__version__",
]

# Loaded on first use: `device_sdk.artifact` and `device_sdk.wire` must import without onnxruntime.
# Where a name comes from, if not from `device_sdk.errors`.
_HOMES = {
    "ArtifactError": "device_sdk.artifact.errors",
    "ConnectedEvent": "device_sdk.events",
    "Device": "device_sdk.device",
    "DeviceStatus": "device_sdk.status",
    "LinkSettings": "device_sdk.link",
    "LocalData": "device_sdk.local_data",
    "ModelEvent": "device_sdk.events",
    "ProblemEvent": "device_sdk.events",
    "RoundEvent": "device_sdk.events",
    "LocalModel": "device_sdk.local_model",
    "Pace": "device_sdk.world",
    "PrintableFormatter": "device_sdk.system.printable",
    "TaskStatus": "device_sdk.status",
    "BrokerWay": "device_sdk.link.broker_url",
    "TlsFiles": "device_sdk.link.broker_url",
    "Trainer": "device_sdk.trainer",
    "TrainingOptions": "device_sdk.world",
    "__version__": "device_sdk.system.version",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'device_sdk' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "device_sdk.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
