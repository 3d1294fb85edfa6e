"""What was measured of each framework, and the table that holds them against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.harness import key_of, markdown_table

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

    @property
    def key(self) -> str:
        """Changes with every setting."""
        return key_of(asdict(self))


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
