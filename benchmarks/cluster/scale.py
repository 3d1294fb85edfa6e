"""`python -m benchmarks.cluster.scale`: a fleet of millions on paper, from stored measurements.

Multiplies what `make bench-cluster` measured by what `benchmarks/cluster/scale.toml` assumes;
`--write` puts it into docs/scale.md.
"""

from __future__ import annotations

import math
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from benchmarks.cluster.__main__ import (
    CONNECTIONS,
    MANY,
    runs_of,
    stored_connections,
    stored_runs,
)
from benchmarks.cluster.connections import ConnectionFigures
from benchmarks.cluster.experiment import ClusterOutcome, Setup
from benchmarks.harness import RESULTS, markdown_table, suite_parser

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
ASSUMED = Path(__file__).parent / "scale.toml"
FLEETS = (1_000_000, 10_000_000)
_DAY_SECONDS = 86_400.0
_MONTH_DAYS = 30.0
_SUMS_BYTES_A_SECOND = 4e6
"""Of a worker, at most: see docs/cluster.md."""

Assumed = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Measured:
    """Unit costs: processor time in us, memory and traffic in bytes.

    Attributes:
        worker_update, worker_open: a worker's.
        store_update, store_open: PostgreSQL's.
        broker_update, broker_open: the broker's, of the messages alone.
        coordinator_device: the coordinator's, for each device of a round.
        broker_connect, broker_connection: a connection's, in us and in bytes, without TLS.
        broker_download: the broker's us for a megabyte that a device downloads.
        row_bytes: of PostgreSQL's log for each update, sums apart.
        registry_device: a worker's memory for each device that is enrolled and has no session: it
            holds nothing of it, and this shows it.
        session: a worker's memory for each session, with its device's row.
        coordinator_memory: for each device that is enrolled.
        worker_base, coordinator_base: memory without devices.
        manifest, download: what a device gets in a round.
    """

    worker_update: float
    worker_open: float
    store_update: float
    store_open: float
    broker_update: float
    broker_open: float
    coordinator_device: float
    broker_connect: float
    broker_connection: float
    broker_download: float
    row_bytes: float
    registry_device: float
    session: float
    coordinator_memory: float
    worker_base: float
    coordinator_base: float
    manifest: float
    download: float


def measured(
    rows: Sequence[ClusterOutcome],
    workers: int,
    devices: int,
    many: ClusterOutcome,
    many_workers: int,
    many_devices: int,
    connections: ConnectionFigures,
) -> Measured:
    """From runs of ``devices`` with ``workers``, of which medians are taken, and from one of many.

    Raises ValueError where there are no runs.
    """
    if not rows:
        raise ValueError("no run of this row is stored: make bench-cluster first")

    def median(of: Callable[[ClusterOutcome], float]) -> float:
        return statistics.median(of(each) for each in rows)

    base = median(lambda each: each.megabytes[0]["worker"]) / workers
    loaded = many.megabytes[0]["worker"] / many_workers
    coordinator = median(lambda each: each.megabytes[-1]["aggregator"])
    return Measured(
        worker_update=median(lambda each: each.update_micros["worker"]),
        worker_open=median(lambda each: each.open_micros["worker"]),
        store_update=median(lambda each: each.update_micros["postgres"]),
        store_open=median(lambda each: each.open_micros["postgres"]),
        broker_update=median(lambda each: each.update_micros["broker"]),
        broker_open=median(lambda each: each.open_micros["broker"]),
        coordinator_device=many.update_micros["aggregator"],
        broker_connect=connections.connect_micros,
        broker_connection=connections.broker_bytes,
        broker_download=connections.download_micros / (connections.chunk_bytes / 1e6),
        row_bytes=many.log_bytes,
        registry_device=max(0.0, loaded - base) * 1e6 / (many_devices - devices),
        session=(many.megabytes[1]["worker"] - many.megabytes[0]["worker"]) * 1e6 / many_devices,
        coordinator_memory=(many.megabytes[-1]["aggregator"] - coordinator)
        * 1e6
        / (many_devices - devices),
        worker_base=base * 1e6,
        coordinator_base=coordinator * 1e6,
        manifest=median(lambda each: each.manifest_bytes),
        download=median(lambda each: each.chunk_bytes),
    )


@dataclass(frozen=True)
class Plan:
    """What a fleet of ``devices`` takes; cores at the peak, bytes in memory, dollars a month."""

    devices: int
    updates_a_second: float
    updates_at_peak: float
    opens_a_second: float
    worker_cores: float
    workers: int
    worker_memory: float
    coordinator_round_seconds: float
    coordinator_memory: float
    store_cores: float
    store_bytes_a_second: float
    connections: float
    broker_cores: float
    brokers: int
    broker_memory: float
    broker_egress_month: float
    http_egress_month: float
    ingress_month: float
    lost_worker_seconds: float
    lost_broker_seconds: float
    costs: Mapping[str, float]

    @property
    def dollars(self) -> float:
        """A month."""
        return sum(self.costs.values())


def plan(devices: int, unit: Measured, assumed: Assumed) -> Plan:
    """``unit`` costs times what is ``assumed``."""
    fleet, tls, prices, limits = (assumed[each] for each in ("fleet", "tls", "prices", "limits"))
    participants = devices * fleet["share"]
    updates = participants * fleet["rounds_a_day"] / _DAY_SECONDS
    opens = devices * fleet["opens_a_day"] / _DAY_SECONDS
    connects = devices * fleet["connects_a_day"] / _DAY_SECONDS
    connected = devices * fleet["connected"]
    rounds_month = fleet["rounds_a_day"] * _MONTH_DAYS
    over_http = bool(fleet["chunks_over_http"])
    at_peak = participants / fleet["arrive_seconds"]
    opens_at_peak, connects_at_peak = fleet["peak"] * opens, fleet["peak"] * connects
    planned = 1e-6 / fleet["busy"]  # cores for a microsecond in each second

    worker_cores = planned * (at_peak * unit.worker_update + opens_at_peak * unit.worker_open)
    # When one is lost, its devices of a round open sessions with its successor in time.
    opening = unit.worker_open / 1e6 / fleet["opens_share"]
    room = limits["worker_memory_gigabytes"] * 1e9 - unit.worker_base
    workers = max(
        2,
        math.ceil(worker_cores),
        math.ceil(participants * opening / fleet["arrive_seconds"]),
        math.ceil(devices * unit.session / room),
    )
    store_cores = planned * (at_peak * unit.store_update + opens_at_peak * unit.store_open)
    downloads = participants * rounds_month * unit.download
    told = connected * rounds_month * unit.manifest
    receipts = participants * rounds_month * fleet["receipt_bytes"]
    broker_egress = told + receipts + (0.0 if over_http else downloads)
    sent = broker_egress / rounds_month / fleet["arrive_seconds"]
    broker_cores = planned * (
        at_peak * unit.broker_update
        + opens_at_peak * unit.broker_open
        + connects_at_peak * (unit.broker_connect + tls["handshake_micros"])
        + sent / 1e6 * unit.broker_download
    )
    broker_memory = connected * (unit.broker_connection + tls["connection_bytes"])
    brokers = max(
        math.ceil(connected / limits["broker_connections"]),
        math.ceil(broker_memory / limits["broker_memory_gigabytes"] / 1e9),
        math.ceil(broker_cores),  # a Mosquitto has one thread
    )
    coordinator = participants * unit.coordinator_device / 1e6
    coordinator_memory = unit.coordinator_base + devices * unit.coordinator_memory
    worker_memory = unit.worker_base + devices * unit.session / workers
    store_bytes = at_peak * unit.row_bytes + workers * fleet["busy"] * _SUMS_BYTES_A_SECOND
    cores = {
        "workers": float(workers),
        "coordinator and its standby": 2.0,
        "store and its standby": 2.0 * max(2, math.ceil(store_cores)),
        "brokers": float(brokers),
    }
    memory = {
        "workers": workers * worker_memory,
        "coordinator and its standby": 2 * coordinator_memory,
        "store and its standby": 2e9 * fleet["store_memory_gigabytes"],
        "brokers": broker_memory,
    }
    costs = {
        name: count * prices["core_month"] + memory[name] / 1e9 * prices["gigabyte_memory_month"]
        for name, count in cores.items()
    }
    http_egress = downloads if over_http else 0.0
    costs["egress of brokers"] = broker_egress / 1e9 * prices["gigabyte_broker_egress"]
    costs["egress over HTTP"] = http_egress / 1e9 * prices["gigabyte_http_egress"]
    disks = 2 * devices * fleet["store_device_bytes"]
    costs["disks"] = disks / 1e9 * prices["gigabyte_store_month"]
    return Plan(
        devices,
        updates,
        at_peak,
        opens,
        worker_cores,
        workers,
        worker_memory,
        coordinator,
        coordinator_memory,
        store_cores,
        store_bytes,
        connected,
        broker_cores,
        brokers,
        broker_memory,
        broker_egress,
        http_egress,
        participants * rounds_month * fleet["update_bytes"],
        participants / workers * opening,
        connected / brokers * tls["handshake_micros"] / 1e6,
        costs,
    )


@dataclass(frozen=True)
class Limit:
    """``devices``: how many reach it; ``what`` it is."""

    what: str
    devices: float


def limits_of(unit: Measured, assumed: Assumed) -> list[Limit]:
    """Where there is one of a thing, the fleet that is too large for it: the smallest first."""
    given = assumed["limits"]

    def reached(of: Callable[[Plan], float], limit: float) -> float:
        low, high = 1e3, 1e12
        if of(plan(int(high), unit, assumed)) < limit:
            return math.inf
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            if of(plan(int(middle), unit, assumed)) < limit:
                low = middle
            else:
                high = middle
        return high

    found = [
        Limit(what.format(given[name]), reached(attrgetter(of), given[name] * times))
        for of, name, times, what in _LIMITS
    ]
    return sorted(found, key=lambda each: each.devices)


_LIMITS = (
    ("coordinator_round_seconds", "coordinator_seconds_of_a_round", 1.0,
     "one coordinator closes a round ({:g} s for it)"),
    ("coordinator_memory", "coordinator_memory_gigabytes", 1e9,
     "one coordinator holds the registry ({:g} GB)"),
    ("store_bytes_a_second", "store_megabytes_a_second", 1e6,
     "one PostgreSQL ({:g} MB of log a second)"),
    ("store_cores", "store_cores", 1.0, "one PostgreSQL ({:g} cores)"),
    ("workers", "workers", 1.0, "{:g} workers"),
)  # fmt: skip
"""What of a plan, by which assumed limit, in which unit."""


def doubled(devices: int, unit: Measured, assumed: Assumed) -> list[tuple[str, float, float]]:
    """By assumption of the fleet: what the month costs, and how many worker cores it takes, when it
    is twice as much; times what it was before, the dearest first."""
    before = plan(devices, unit, assumed)
    found = []
    for name, value in assumed["fleet"].items():
        if not isinstance(value, bool):
            changed = {**assumed, "fleet": {**assumed["fleet"], name: 2 * value}}
            after = plan(devices, unit, changed)
            found.append(
                (name, after.dollars / before.dollars, after.worker_cores / before.worker_cores)
            )
    return sorted(found, key=lambda each: -each[1])


def page(unit: Measured, assumed: Assumed) -> str:
    """docs/scale.md."""
    return "\n\n".join(_sections(unit, assumed)) + "\n"


def _sections(unit: Measured, assumed: Assumed) -> Iterator[str]:
    plans = [plan(each, unit, assumed) for each in FLEETS]
    limits = limits_of(unit, assumed)
    first = limits[0]
    yield "# A fleet of millions, on paper"
    yield (
        "Nobody has run this many devices. What one device, update, session and connection cost "
        "was [measured](figures/fleets.md#a-cluster) on a machine with 2 shared cores; the rest is "
        "multiplication by the assumptions below, which stand in `benchmarks/cluster/scale.toml`. "
        "`python -m benchmarks.cluster.scale --write` makes this page."
    )
    yield "## What was measured"
    yield markdown_table(
        [
            ("an update: a worker's processor time", f"{unit.worker_update:,.0f} us"),
            ("an update: PostgreSQL's", f"{unit.store_update:,.0f} us"),
            ("an update: the broker's", f"{unit.broker_update:,.0f} us"),
            ("a session's open: a worker's", f"{unit.worker_open:,.0f} us"),
            ("a session's open: PostgreSQL's", f"{unit.store_open:,.0f} us"),
            ("a device in a round: the coordinator's", f"{unit.coordinator_device:,.1f} us"),
            (
                "an enrolled device without a session: memory of each worker",
                f"{unit.registry_device:,.0f} bytes",
            ),
            ("an enrolled device: of the coordinator", f"{unit.coordinator_memory:,.0f} bytes"),
            ("a session: memory of its worker", f"{unit.session:,.0f} bytes"),
            ("a worker, a coordinator: memory without devices", _both(unit)),
            ("an update: PostgreSQL's log, sums apart", f"{unit.row_bytes:,.0f} bytes"),
            (
                "a connection without TLS: the broker's memory",
                f"{unit.broker_connection:,.0f} bytes",
            ),
            ("  its processor time", f"{unit.broker_connect:,.0f} us"),
            ("a download of 1 MB: the broker's processor time", f"{unit.broker_download:,.0f} us"),
            ("a round's manifest; its chunks (3,706 x 64 in float16)", _down(unit)),
        ],
        ("what", "measured"),
    )
    yield "## What is assumed"
    yield markdown_table(
        [
            (f"{table}.{name}", _shown(value))
            for table, values in assumed.items()
            for name, value in values.items()
        ],
        ("assumption", "value"),
    )
    yield "## What it comes to"
    yield markdown_table(
        [(name, *(of(each) for each in plans)) for name, of in _LINES],
        ("", *(f"{each:,} devices" for each in FLEETS)),
    )
    yield "A month, in US dollars:"
    yield markdown_table(
        [
            *((name, *(f"{each.costs[name]:,.0f}" for each in plans)) for name in plans[0].costs),
            ("all", *(f"{each.dollars:,.0f}" for each in plans)),
            ("a device", *(f"{each.dollars / each.devices:.5f}" for each in plans)),
        ],
        ("", *(f"{each:,} devices" for each in FLEETS)),
    )
    yield "## What breaks first"
    yield (
        "Most of a cluster grows by adding workers and brokers. What there is one of, or what each "
        f"has the whole of, does not. The first to give way, at {_rounded(first.devices)} devices: "
        f"{first.what}."
    )
    yield markdown_table(
        [(each.what, _rounded(each.devices)) for each in limits], ("what", "devices")
    )
    yield (
        "And what moves the bill: each assumption about the fleet doubled, at "
        f"{FLEETS[-1]:,} devices."
    )
    yield markdown_table(
        [
            (f"fleet.{name}", f"{bill:.2f}", f"{cores:.2f}")
            for name, bill, cores in doubled(FLEETS[-1], unit, assumed)
        ],
        ("twice the", "times the bill", "times the workers' cores"),
    )
    yield (
        "Processor time was measured on a machine that others used too, and one update at a time "
        "costs more than many at once: both err to the dear side. A worker's memory is that of all "
        "its devices' sessions, as if every device had one; workers are as many as their processor "
        "time asks for, or their memory, or the sessions that a round's devices open anew when one "
        "of them is lost. Not in the measurement: TLS at the brokers (assumed above), the kernel's "
        "memory for sockets, and networks that lose what is sent."
    )


def _both(unit: Measured) -> str:
    return f"{unit.worker_base / 1e6:,.0f} MB, {unit.coordinator_base / 1e6:,.0f} MB"


def _down(unit: Measured) -> str:
    return f"{unit.manifest:,.0f} and {unit.download:,.0f} bytes"


def _shown(value: float) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:,}"


def _rounded(devices: float) -> str:
    if not math.isfinite(devices):
        return "more than 10^12"
    digits = 10 ** (math.floor(math.log10(devices)) - 1)
    return f"{round(devices / digits) * digits:,.0f}"


_LINES: tuple[tuple[str, Callable[[Plan], str]], ...] = tuple(
    (name, lambda each, of=of, unit=unit, form=form: format(getattr(each, of) / unit, form))
    for name, of, unit, form in (
        ("updates a second, mean", "updates_a_second", 1, ",.0f"),
        ("updates a second, while a round's come in", "updates_at_peak", 1, ",.0f"),
        ("session opens a second, mean", "opens_a_second", 1, ",.0f"),
        ("workers' cores at the peak", "worker_cores", 1, ",.1f"),
        ("workers", "workers", 1, ",.0f"),
        ("memory of each worker, GB", "worker_memory", 1e9, ",.1f"),
        ("coordinator, processor seconds a round", "coordinator_round_seconds", 1, ",.1f"),
        ("memory of the coordinator, GB", "coordinator_memory", 1e9, ",.1f"),
        ("PostgreSQL's cores at the peak", "store_cores", 1, ",.1f"),
        ("PostgreSQL's log, MB a second, at most", "store_bytes_a_second", 1e6, ",.1f"),
        ("connections at a time", "connections", 1, ",.0f"),
        ("brokers", "brokers", 1, ",.0f"),
        ("brokers' cores at the peak", "broker_cores", 1, ",.1f"),
        ("brokers' memory, GB", "broker_memory", 1e9, ",.1f"),
        ("into the brokers, TB a month", "ingress_month", 1e12, ",.2f"),
        ("out of the brokers, TB a month", "broker_egress_month", 1e12, ",.2f"),
        ("a worker is lost: s for its successor to open the sessions of a round's devices",
         "lost_worker_seconds", 1, ",.0f"),
        ("a broker is lost: s of its processor for all TLS handshakes",
         "lost_broker_seconds", 1, ",.0f"),
        ("over HTTP, TB a month", "http_egress_month", 1e12, ",.2f"),
    )
)  # fmt: skip


def from_stored(folder: Path) -> Measured:
    """Raises ValueError where a measurement is missing."""
    runs = [each for each in runs_of() if each.setup == _SETUP]
    store = stored_runs(folder)
    found = [store.load(run) for run in runs]
    many = store.load(MANY)
    connections = stored_connections(folder).load(CONNECTIONS)
    if many is None or connections is None:
        raise ValueError("nothing is stored: make bench-cluster ARGS='--postgres URL --many' first")
    return measured(
        [each for each in found if each is not None],
        _SETUP.workers,
        runs[0].devices,
        many,
        MANY.setup.workers,
        MANY.devices,
        connections,
    )


_SETUP = Setup(2, "postgres")


def read_assumed() -> Assumed:
    return tomllib.loads(ASSUMED.read_text(encoding="utf-8"))


def main() -> int:
    """Print the page, or write it."""
    parser = suite_parser("cluster.scale", __doc__ or "", "")
    parser.add_argument("--write", action="store_true", help="docs/scale.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where runs are stored")
    options = parser.parse_args()
    text = page(from_stored(options.results), read_assumed())
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
