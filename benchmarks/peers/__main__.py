"""``python -m benchmarks.peers``: the same rounds in Tessera's simulation and in other ones."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness import (
    Answering,
    StoredRuns,
    add_store_options,
    chosen,
    data_folder,
    environment,
    markdown_table,
    progress_line,
    suite_parser,
)
from benchmarks.peers.record import record
from benchmarks.recommendation.split import load_split

_ROOT = Path(__file__).resolve().parents[2]


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
        lines = (_PINS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        # Every package is pinned, so that nothing is left to choose.
        environment(environments / f".venv-{name}", pins, "--no-cache-dir", "--no-deps")


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


ROWS = (
    Row("Tessera, each device alone", "tessera_rounds", ("numpy",)),
    Row("Tessera, devices in one call", "tessera_rounds", ("numpy", "512")),
    Row("Tessera, each alone, by the train graph", "tessera_rounds", ("graph",)),
    Row("pfl, whole matrices", "pfl_rounds", ("dense",), "pfl"),
    Row("pfl, touched rows", "pfl_rounds", ("rows",), "pfl"),
    Row("FedJAX", "fedjax_rounds", (), "fedjax"),
    Row("JAX by hand, all devices at once", "jax_rounds", (), "fedjax"),
    Row("Flower", "flower_rounds", ("{temporary}",), "flower", by_turns=False),
)
_WHOLE = 6040

_DESCRIPTION = """\
Runs the same rounds of scatter aggregation in each simulator: MovieLens 1M, a device a user, the
same triples from the same seed, the same k, one step a device. Tessera's learners draw the triples
and compute the result that all others must reach. Processor time is that of a process and all that
it started, by turns; first rounds, with what is compiled or prepared once, are told apart. The
environments (pfl 260 MB, FedJAX 670 MB, Flower 530 MB) are kept for the next time.
"""
_EPILOG = """\
Flower needs minutes for the whole fleet, so that smaller ones are measured and a line is drawn
through them; --flower-whole measures all 6,040 devices too (4 GB).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, measure, print; returns 1 where a framework came to another result."""
    options = _parse(arguments)
    rows = chosen(options.rows, ROWS)
    store = StoredRuns[Comparison, Measured](options.results, "peers", Measured)
    found = []
    for comparison in _comparisons(rows, options):
        make = None if options.table_only else partial(_measure, comparison, rows, options)
        measured = store.found_or_made(comparison, make)
        if measured is not None:
            found.append((comparison, measured))
    print(table(found, options.devices))
    costs = [one for _, measured in found for one in measured.costs.values()]
    versions = {name: text for one in costs for name, text in one.versions.items()}
    print()
    print(", ".join(f"{name} {text}" for name, text in sorted(versions.items())))
    for machine in dict.fromkeys(measured.machine for _, measured in found):
        print(machine)
    return 0 if all(one.agrees for one in costs) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = suite_parser("peers", _DESCRIPTION, _EPILOG)
    parser.add_argument("--rows", help="names of rows, with semicolons (default: all)")
    add_store_options(parser)
    parser.add_argument("--devices", type=int, default=_WHOLE, help="(default: all 6,040 users)")
    parser.add_argument("--k", type=int, default=32, help="columns of all devices (default: 32)")
    parser.add_argument("--turns", type=int, default=5, help="rounds after the first (default: 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--flower-devices",
        type=int,
        nargs="+",
        default=[200, 600],
        help="fleets for Flower (default: 200 600)",
    )
    parser.add_argument("--flower-whole", action="store_true", help="Flower with --devices too")
    parser.add_argument(
        "--environments",
        type=Path,
        default=_ROOT,
        help="where .venv-pfl, .venv-fedjax and .venv-flower are made (default: the repository)",
    )
    return parser.parse_args(arguments)


def _comparisons(rows: Sequence[Row], options: argparse.Namespace) -> list[Comparison]:
    """All that rest between their turns together, then each other row by itself."""
    settings = {"k": options.k, "seed": options.seed}
    together = tuple(row.name for row in rows if row.by_turns)
    asked = []
    if together:
        asked.append(Comparison(together, options.devices, turns=options.turns, **settings))
    sizes = [*options.flower_devices, *([options.devices] if options.flower_whole else [])]
    for row in rows:
        if not row.by_turns:
            asked += [Comparison((row.name,), size, turns=3, **settings) for size in sizes]
    return asked


def _measure(comparison: Comparison, rows: Sequence[Row], options: argparse.Namespace) -> Measured:
    compared = [row for row in rows if row.name in comparison.rows]
    install(compared, options.environments)
    split = load_split(data_folder(options.root, "ml-1m"), "ml-1m")
    with tempfile.TemporaryDirectory(prefix="peers-") as folder, ExitStack() as stack:
        path = Path(folder) / "workload.npz"
        rounds = comparison.turns + 1
        users = split.train[: comparison.devices]
        record(users, split.items, comparison.k, rounds, comparison.seed).save(path)
        show = stack.enter_context(progress_line(f"{comparison.devices:,} devices"))
        peers: dict[str, Peer] = {}
        for row in compared:
            show(f"starting {row.name}")
            peers[row.name] = stack.enter_context(started(row, path, options.environments))
        for number in range(rounds):
            # Nobody always follows the same one.
            for name in list(peers)[:: 1 if number % 2 else -1]:
                show(f"round {number + 1} of {rounds}: {name}")
                peers[name].round()
        costs = {name: peer.end() for name, peer in peers.items()}
        show("done")
    return Measured(_machine(), costs)


def _machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"


if __name__ == "__main__":
    raise SystemExit(main())
