"""The demo's aggregator: `tessera-aggregator` as an operator would run it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aggregator.home import AggregatorHome
from aggregator.store import Store
from aggregator.store.rows import RoundRow
from device_sdk.wire.publish.catalogue import Catalogue
from examples.fleet.child import REPOSITORY, Child
from examples.fleet.errors import FleetError

_COMMAND_SECONDS = 300.0


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


@dataclass(frozen=True)
class RunningAggregator:
    """The process, and a look into its database (rounds and counters, as `status` prints them)."""

    child: Child
    store: Store

    def rounds(self, most: int = 1000) -> list[RoundRow]:
        """The newest rounds, newest first, without the last one that only publishes."""
        return [row for row in self.store.first.rounds.latest(most) if row.threshold > 0]

    def arrived(self, row: RoundRow) -> int:
        """Updates committed so far in an open round, counted in a closed one."""
        if row.participants is not None:
            return row.participants
        return sum(1 for _ in self.store.first.log.judged(row.generation, row.round))

    def refusals(self) -> dict[str, int]:
        """What was refused, by reason; written when the process stops and now and then."""
        return dict(self.store.refusals.all())


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


@contextmanager
def serving(home: Path, folder: Path) -> Iterator[RunningAggregator]:
    """`tessera-aggregator serve` until the block ends; its log goes to ``folder``."""
    child = Child.start(
        "aggregator",
        [*_program(), "serve", "--home", str(home), "--plain"],
        folder,
        leash=True,
    )
    store = AggregatorHome(home).open_store()
    try:
        yield RunningAggregator(child, store)
    finally:
        child.stop()
        store.database.close()


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


def _program() -> Sequence[str]:
    """The installed command, else (as in a bare checkout) the module behind it."""
    installed = Path(sys.executable).with_name("tessera-aggregator")
    return [str(installed)] if installed.exists() else [sys.executable, "-m", "aggregator.cli"]


def aggregator_command(*arguments: str) -> str:
    """Run `tessera-aggregator` with these arguments; what it printed. Raises FleetError."""
    done = subprocess.run(
        [*_program(), *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=_COMMAND_SECONDS,
        check=False,
        # An interrupt is the driver's to handle, here too.
        start_new_session=sys.platform != "win32",
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise FleetError(f"tessera-aggregator {arguments[0]} failed: {said}")
    return done.stdout
