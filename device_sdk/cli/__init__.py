"""`tessera-device`: what this device can do, and learning on it, from the command line."""

from __future__ import annotations

import sqlite3

from device_sdk.artifact.errors import ArtifactError
from device_sdk.cli.arguments import CommandError
from device_sdk.errors import DeviceError
from device_sdk.system.command_line import Program

main = Program(
    name="tessera-device",
    description="""\
Runs on the device. join, run, status, recommend, broker, leave and trust belong to a fleet: the
device learns with others and sends them sealed updates, never its data. bench and train work alone:
nothing leaves the machine.""",
    examples="""\
examples:
  tessera-device join mqtts://broker.example --home ./device-1
  tessera-device run --home ./device-1 --interactions views.csv
                                  join a fleet with its operator's code, and take part in its rounds
  tessera-device bench --deadline 0.5 --items 3706 --interactions 2000
                                  the largest model that trains an epoch within half a second
  tessera-device train --interactions views.csv --recommend 10 --user anna
                                  learn from a file of interactions and recommend
  tessera-device bench --help     all options of a command
""",
    package="device_sdk.cli",
    commands={
        "join": "enrol this device with a code",
        "run": "take part in rounds",
        "status": "show a device's rounds, outbox and data",
        "recommend": "recommend items to a local user",
        "broker": "show or change the way to the fleet's broker",
        "leave": "leave the fleet for good",
        "trust": "believe another root key, on the operator's word",
        "bench": "measure how large a model this device can train in time",
        "train": "learn from a file of interactions and recommend",
    },
    errors={
        **dict.fromkeys((ArtifactError, CommandError, DeviceError), "{error}"),
        sqlite3.Error: "the home's database cannot be used: {error}. Mend the disk, or make room, "
        "and try again",
    },
)
