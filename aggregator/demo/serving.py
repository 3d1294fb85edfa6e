"""The demo's aggregator: `tessera-aggregator` as an operator would run it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aggregator.demo.child import ROOT, Child, FleetError
from aggregator.home import AggregatorHome
from aggregator.store import Store
from aggregator.store.rows import RoundRow

_COMMAND_SECONDS = 300.0


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


def _program() -> Sequence[str]:
    """The installed command, else (as in a bare checkout) the module behind it."""
    installed = Path(sys.executable).with_name("tessera-aggregator")
    return [str(installed)] if installed.exists() else [sys.executable, "-m", "aggregator.cli"]


def aggregator_command(*arguments: str) -> str:
    """Run `tessera-aggregator` with these arguments; what it printed. Raises FleetError."""
    done = subprocess.run(
        [*_program(), *arguments],
        cwd=ROOT,
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
