"""Virtual devices in one process: the real learners and methods without broker and crypto."""

from __future__ import annotations

from benchmarks.simulator.channel import Channel, DirectChannel
from benchmarks.simulator.scatter_fleet import FixedInteractions, mixed_columns, scatter_fleet
from benchmarks.simulator.simulation import Simulation, device_name

__all__ = [
    "Channel",
    "DirectChannel",
    "FixedInteractions",
    "Simulation",
    "device_name",
    "mixed_columns",
    "scatter_fleet",
]
