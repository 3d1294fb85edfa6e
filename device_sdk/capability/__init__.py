"""What this device affords: the largest option whose work ends in so many seconds."""

from __future__ import annotations

from device_sdk.capability.bench import WorkSizes, choose_latent_dimension, choose_solved_dimension
from device_sdk.capability.fit import Choice, choose_k
from device_sdk.capability.machine import Machine, describe_machine
from device_sdk.capability.stopwatch import Measurement, Request, Workload
from device_sdk.system.clock import Clock, MonotonicClock

__all__ = [
    "Choice",
    "Clock",
    "Machine",
    "Measurement",
    "MonotonicClock",
    "Request",
    "WorkSizes",
    "Workload",
    "choose_k",
    "choose_latent_dimension",
    "choose_solved_dimension",
    "describe_machine",
]
