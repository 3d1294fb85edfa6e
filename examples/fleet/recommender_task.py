"""The recommender's aggregator, made as an operator would: its task file, and enrolment codes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aggregator.demo.serving import aggregator_command
from device_sdk.wire.publish.catalogue import Catalogue


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """``train_seconds``: what a round's training may take on a device; ``columns``: K.

    ``least_deadline_seconds``: no round closes sooner without everybody. A device whose broker left
    it without an answer has noticed, connected and sent again by then.
    """

    devices: int
    rounds: int
    columns: int
    train_seconds: float
    deadline_seconds: float
    least_deadline_seconds: float = 30.0
    pause_seconds: float = 0.2


def make_aggregator(
    home: Path, broker_url: str, catalogue: Catalogue, settings: FleetSettings
) -> list[str]:
    """`init`, the task file, and `invite`: one enrolment code for each device.

    Raises FleetError with what a command said.
    """
    aggregator_command("init", "--home", str(home))
    lines = [
        # One line each, whatever a title holds.
        f"{item}\t{' '.join(title.split())}"
        for item, title in zip(catalogue.items, catalogue.titles, strict=True)
    ]
    (home / "items.tsv").write_text("\n".join([*lines, ""]), encoding="utf-8")
    (home / "task.toml").write_text(task_file(broker_url, settings), encoding="utf-8")
    printed = aggregator_command(
        "invite", "--home", str(home), "--count", str(settings.devices), "--expires", "1h"
    )
    return printed.split()


def task_file(broker_url: str, settings: FleetSettings) -> str:
    """The text of ``task.toml``."""
    return f"""\
# Written by the demo. docs/aggregator.md explains every key.
[task]
catalogue = "items.tsv"
broadcast_codec = "float16"
update_codec = "int8"

[broker]
url = "{broker_url}"

[round]
quorum = {max(1, settings.devices // 2)}
wait_for_devices = {settings.devices}
deadline_seconds = {settings.deadline_seconds}
least_deadline_seconds = {settings.least_deadline_seconds}
pause_seconds = {settings.pause_seconds}
most_rounds = {settings.rounds}
train_seconds = {settings.train_seconds:.6f}

[scatter]
columns = {settings.columns}

[scatter.least_squares]
most_columns = 0  # the width stays as it is: what a class trains is of the same columns throughout
"""
