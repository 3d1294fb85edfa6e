"""``tessera-aggregator``: the server of a fleet, and what its operator does with it."""

from __future__ import annotations

import sqlite3

from aggregator.errors import AggregatorError, MethodFault, StoreError
from device_sdk.system.command_line import Program

main = Program(
    name="tessera-aggregator",
    description="""\
The server of a fleet: enrols devices, runs rounds, keeps the model. Everything lies in one folder,
the home, which only its owner can read. All commands but restored may be used while serve runs;
demo, simulate and runs need no home.""",
    examples="""\
examples: a fleet in five steps
  tessera-aggregator init --home fleet       make keys, database and fleet/task.toml
  nano fleet/task.toml                       say which broker, which catalogue, which rounds
  tessera-aggregator invite --home fleet --count 3 --expires 24h
                                             enrolment codes, for tessera-device join URL
  tessera-aggregator serve --home fleet      run rounds, with a live view on a terminal
  tessera-aggregator devices --home fleet    who takes part; revoke ID sends one away

  tessera-aggregator invite --help           all options of a command
""",
    package="aggregator.cli",
    commands={
        "init": "make keys, database and a task file",
        "invite": "make enrolment codes",
        "serve": "run rounds, until told to stop",
        "check": "say what would keep serve from working, before it starts",
        "status": "show rounds, why they fail and where, version and refusals",
        "devices": "list the devices and how their rounds ended, and label them",
        "evaluations": "show how good each version is, as devices found out",
        "models": "list the versions of the model, keep one for good",
        "model": "write a version's model as safetensors or ONNX",
        "rollback": "make an older version's model the next version",
        "revoke": "send a device away for good",
        "rotate": "replace the serving keys, the root key or the group key",
        "console": "answer browsers with pages of the fleet, say who may see them",
        "audit": "show who did what with the fleet",
        "release": "let a round go on that is held",
        "broker": "say where the broker is, or move the fleet to another one",
        "store": "say where everything is kept, or move it into a PostgreSQL database",
        "task": "add, replace, pause or retire a task, check a task file",
        "simulate": "try a task out on virtual devices, before there is a fleet",
        "demo": "see a fleet learn on this machine, in a minute or two",
        "runs": "list, show and compare what simulate recorded",
        "restored": "begin a new generation, after the home was restored from a backup",
    },
    errors={
        AggregatorError: "{error}",
        MethodFault: "{error}: fix or change the package that offers the method",
        sqlite3.Error: "the database cannot be used: {error}. Nothing that was receipted is lost; "
        "mend the disk and start again",
        StoreError: "the store cannot be used: {error}. Nothing that was receipted is lost; start "
        "again when it answers",
        OSError: "{error}",
    },
    extra="aggregator",
    needs=("rich", "sklearn"),
)
