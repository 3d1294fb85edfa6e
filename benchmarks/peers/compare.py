"""What was measured of each framework, and the table that holds them against each other."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.harness import Answering, markdown_table

TOLERANCE = 1e-4
"""Of a framework's result, as a share of how far the values moved. Sums of float32 in another order
come to a fifth of it in six rounds; a rate that is wrong by a thousandth is above it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Frameworks that are measured by turns on one workload: ``rows`` are their names."""

    rows: tuple[str, ...]
    devices: int
    k: int
    turns: int
    seed: int


@dataclass(frozen=True, slots=True)
class Round:
    """What one round took."""

    wall_seconds: float
    processor_seconds: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one framework.

    Attributes:
        versions: of its packages and of Python.
        rounds: the first one is the warm-up; what is compiled or prepared once is in it.
        errors: see :meth:`~benchmarks.peers.workload.Workload.errors`.
        peak_bytes: the most memory at once, the workload's arrays included.
    """

    versions: dict[str, str]
    rounds: tuple[Round, ...]
    errors: dict[str, float]
    peak_bytes: int

    @property
    def agrees(self) -> bool:
        """Whether the result is Tessera's, within :data:`TOLERANCE`."""
        return "items" in self.errors and max(self.errors.values()) <= TOLERANCE

    def processor(self) -> list[float]:
        """Processor seconds of the rounds after the warm-up."""
        return [one.processor_seconds for one in self.rounds[1:]]

    def wall(self) -> list[float]:
        """Wall-clock seconds of the rounds after the warm-up."""
        return [one.wall_seconds for one in self.rounds[1:]]


@dataclass(frozen=True, slots=True)
class Measured:
    """``machine``, in words, and what each row of the comparison cost."""

    machine: str
    costs: dict[str, Costs]


def extrapolated(medians: Mapping[int, float], devices: int) -> float:
    """What ``devices`` devices would take by the straight line through the fewest and the most.

    Args:
        medians: seconds by number of devices, two numbers or more.
        devices: of the whole fleet.

    Raises ValueError for fewer than two numbers.
    """
    if len(medians) < 2:
        raise ValueError("a line needs rounds of two sizes")
    few, many = min(medians), max(medians)
    slope = (medians[many] - medians[few]) / (many - few)
    return medians[few] + slope * (devices - few)


_HEADERS = (
    "simulator",
    "devices",
    "processor s a round: least, median, most",
    "wall s",
    "first round, processor s",
    "peak MB",
    "largest difference",
)


def table(found: Sequence[tuple[Comparison, Measured]], whole: int) -> str:
    """A line for each row of each comparison; ``whole``: devices to extrapolate Flower's to.

    A framework whose result is another's has no times: they would mean nothing.
    """
    lines = [
        # A stored outcome has lost its order.
        _line(name, comparison.devices, measured.costs[name])
        for comparison, measured in found
        for name in comparison.rows
    ]
    for name, by_devices in _sizes(found).items():
        if len(by_devices) > 1 and whole not in by_devices:
            processor, wall = (
                extrapolated({n: median(read(c)) for n, c in by_devices.items()}, whole)
                for read in (Costs.processor, Costs.wall)
            )
            said = f"{name}, by a line through the rows above"
            lines.append((said, f"{whole:,}", f"about {processor:.0f}", f"about {wall:.0f}"))
    return markdown_table(lines, _HEADERS)


def _sizes(found: Sequence[tuple[Comparison, Measured]]) -> dict[str, dict[int, Costs]]:
    sizes: dict[str, dict[int, Costs]] = {}
    for comparison, measured in found:
        for name, costs in measured.costs.items():
            if costs.agrees:
                sizes.setdefault(name, {})[comparison.devices] = costs
    return sizes


def _line(name: str, devices: int, costs: Costs) -> tuple[str, ...]:
    if not costs.agrees:
        differs = ", ".join(f"{what} by {by:.1g}" for what, by in costs.errors.items())
        return (name, f"{devices:,}", f"another result: {differs or 'none'}")
    processor = costs.processor()
    return (
        name,
        f"{devices:,}",
        ", ".join(f"{one:.2f}" for one in (min(processor), median(processor), max(processor))),
        f"{median(costs.wall()):.2f}",
        f"{costs.rounds[0].processor_seconds:.2f}",
        f"{costs.peak_bytes / 1e6:,.0f}",
        f"{max(costs.errors.values()):.0e}",
    )


_ROOT = Path(__file__).resolve().parents[2]
_PINS = Path(__file__).with_name("requirements")


@dataclass(frozen=True, slots=True)
class Row:
    """One framework's way of running rounds.

    Attributes:
        name: in the table.
        module: of this package; takes the workload's path and then ``arguments``.
        arguments: ``{temporary}`` in one stands for a folder that is removed afterwards.
        environment: names the file of pins and the environment; empty for Tessera's own.
        by_turns: whether it rests while others have their turn. One that does not is measured by
            itself.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    environment: str = ""
    by_turns: bool = True


class Peer:
    """The row's process; it has read the workload."""

    def __init__(self, row: Row, workload: Path, environments: Path, temporary: Path) -> None:
        python = _python(row.environment, environments)
        arguments = [one.format(temporary=temporary) for one in row.arguments]
        command = [str(python), "-m", f"benchmarks.peers.{row.module}", str(workload), *arguments]
        self._process = Answering(row.name, command, environment=_environment(temporary), cwd=_ROOT)
        told = self._process.first
        self._versions = {**told["versions"], "python": told["python"]}
        self._rounds: list[Round] = []
        self.close = self._process.close

    def round(self) -> Round:
        """Run the next round. Raises SystemExit with what the process said when it fails."""
        self._rounds.append(Round(**self._process.ask("round")))
        return self._rounds[-1]

    def end(self) -> Costs:
        """What all of them cost; the process then ends by itself."""
        found = self._process.ask("end")
        return Costs(self._versions, tuple(self._rounds), found["errors"], found["peak_bytes"])


@contextlib.contextmanager
def started(row: Row, workload: Path, environments: Path) -> Iterator[Peer]:
    """The row's process, ended with the block, and what it wrote removed."""
    # Ray makes sockets below it, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as folder:
        peer = Peer(row, workload, environments, Path(folder))
        try:
            yield peer
        finally:
            peer.close()


def install(rows: Sequence[Row], environments: Path) -> None:
    """Make the environments that the rows need, or make them anew where pins have changed."""
    for name in dict.fromkeys(row.environment for row in rows if row.environment):
        pins = _PINS / f"{name}.txt"
        python = _python(name, environments)
        stamp = environments / f".venv-{name}" / ".installed"
        if stamp.exists() and stamp.read_text(encoding="utf-8") == pins.read_text(encoding="utf-8"):
            continue
        print(f"installing {pins} into {stamp.parent}", file=sys.stderr, flush=True)
        venv.create(stamp.parent, with_pip=True, clear=True)
        # Every package is pinned, so that nothing is left to choose.
        command = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-cache-dir",
            "--no-deps",
            "-r",
            str(pins),
        ]
        kept = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
        subprocess.run(command, check=True, env=kept)
        stamp.write_text(pins.read_text(encoding="utf-8"), encoding="utf-8")


def _python(environment: str, environments: Path) -> Path:
    if not environment:
        return Path(sys.executable)
    folder = environments / f".venv-{environment}"
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _environment(temporary: Path) -> dict[str, str]:
    home = temporary / "home"
    home.mkdir(exist_ok=True)
    return {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        # One thread for NumPy everywhere; JAX and Ray take the cores that they find.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "ORT_DISABLE_TELEMETRY": "1",
        "HOME": str(home),
        "FLWR_HOME": str(home / "flower"),
    }
