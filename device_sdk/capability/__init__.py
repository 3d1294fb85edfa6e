"""What this device affords: the largest option whose work ends in so many seconds."""

from __future__ import annotations

from device_sdk.capability.bench import WorkSizes, bench_solved, bench_stepped
from device_sdk.capability.fit import Option, Request, TimedOption, Workload, choose, columns
from device_sdk.capability.machine import Machine, describe_machine
from device_sdk.system.clock import Clock, MonotonicClock

__all__ = [
    "Clock",
    "Machine",
    "TimedOption",
    "MonotonicClock",
    "Option",
    "Request",
    "WorkSizes",
    "Workload",
    "bench_solved",
    "bench_stepped",
    "choose",
    "columns",
    "describe_machine",
]
