"""Measuring how large a model this device can train in time."""

from __future__ import annotations

from device_sdk.capability.choice import Choice, Request, choose_k, choose_latent_dimension
from device_sdk.capability.machine import Machine, describe_machine
from device_sdk.capability.report import choice_to_json, choice_to_text
from device_sdk.capability.stopwatch import BlockSize, Measurement, Workload
from device_sdk.system.clock import Clock, MonotonicClock

__all__ = [
    "BlockSize",
    "Choice",
    "Clock",
    "Machine",
    "Measurement",
    "MonotonicClock",
    "Request",
    "Workload",
    "choice_to_json",
    "choice_to_text",
    "choose_k",
    "choose_latent_dimension",
    "describe_machine",
]
