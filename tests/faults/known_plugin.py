"""Known updates as a method that the product's own commands find: the oracle's method, and the
run's counters in each process that imports it as a worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Self

from aggregator.methods.scatter import ScatterTable
from aggregator.tables import TomlTable
from tests.faults.aggregator_process import count_arrivals
from tests.faults.counters import Counters
from tests.faults.known import KnownBinding, KnownBodies, KnownSums
from tests.faults.taken_in import TakenIn, taken_by

COUNTERS = "TESSERA_TEST_COUNTERS"
SUMS, BODIES = "known_sums", "known_bodies"


class KnownSumsBinding(KnownBinding):
    """Rounds that add up."""

    @classmethod
    def read(cls, method_name: str, table: TomlTable) -> Self:
        """Whatever the table says: these settings are the oracle's."""
        table.read(ScatterTable)
        return cls()


class KnownBodiesBinding(KnownSumsBinding):
    """Rounds that keep bodies."""

    method_class: ClassVar[type[KnownSums]] = KnownBodies


def write_plugin(folder: Path) -> None:
    """What ``pip install`` would leave of a package with these methods, in ``folder``."""
    info = folder / "tessera_known-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tessera-known\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[tessera.methods]\n{SUMS} = {__name__}:{KnownSumsBinding.__name__}\n"
        f"{BODIES} = {__name__}:{KnownBodiesBinding.__name__}\n"
    )


def _watch() -> None:
    counters = Path(os.environ[COUNTERS])
    shared = Counters(taken_by(counters, os.getpid()))
    count_arrivals(shared)
    TakenIn(shared).watch()


if COUNTERS in os.environ:
    _watch()
