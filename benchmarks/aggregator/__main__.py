"""`make bench-aggregator`: updates and session opens a second, and memory, on this machine.

Updates are 100 rows x 16 columns of 3,706 x 64 in int8. Commits are on disk before receipts leave.
With ``--rtt`` only what goes through the broker is measured, with so many milliseconds of round
trip between it and the aggregator; nothing is written down.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from pathlib import Path

# One BLAS thread: before numpy is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tabulate import tabulate

from benchmarks.aggregator.broker import MOSQUITTO, SETTINGS
from benchmarks.aggregator.function_level import measure_downlink, measure_ingest, measure_opens
from benchmarks.aggregator.serving import measure_through_broker
from benchmarks.harness import RESULTS, write_lines


def main() -> int:
    """Print the table; write the figures to benchmarks/results/aggregator.jsonl."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aggregator", description=__doc__)
    parser.add_argument("--updates", type=int, default=100_000, help="function level (100000)")
    parser.add_argument("--opens", type=int, default=3000, help="session opens (3000)")
    parser.add_argument("--devices", type=int, default=500, help="connected at once (500)")
    parser.add_argument("--rounds", type=int, default=12, help="through the broker (12)")
    parser.add_argument("--rtt", type=float, metavar="MS", help="see above")
    parser.add_argument(
        "--broker", choices=list(SETTINGS), default="recommended", help="Mosquitto's settings"
    )
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.rtt is not None:
        return _print_with_latency(
            arguments.rtt, arguments.broker, arguments.devices, arguments.rounds
        )
    rows: list[tuple[str, str, str]] = []
    result: dict[str, object] = {"load_average": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ingest = measure_ingest(arguments.updates, folder / "ingest")
        rate = ingest.updates / ingest.seconds
        grown = ingest.resident_mb_late - ingest.resident_mb_early
        rows.append(("updates a second, function level", f"{rate:,.0f}", "at least 10,000"))
        told = measure_ingest(arguments.updates // 5, folder / "reports", reports=True)
        for label, each in (("", ingest), (" with a report", told)):
            micros = each.cpu_seconds / each.updates * 1e6
            rows.append((f"  processor time an update{label}, us", f"{micros:.0f}", ""))
            result[f"function_level_cpu_micros{label.replace(' ', '_')}"] = micros
        rows.append(
            (
                f"memory from 1,000 to {ingest.updates:,} updates, MB",
                f"{ingest.resident_mb_early:.0f} to {ingest.resident_mb_late:.0f}",
                "flat",
            )
        )
        opens = measure_opens(arguments.opens, folder / "opens")
        rows.append(("session opens a second, one core", f"{opens:,.0f}", "at least 1,500"))
        result |= {"updates_a_second": rate, "grown_mb": grown, "opens_a_second": opens}
        if MOSQUITTO is None:
            rows.append(("through Mosquitto", "not installed", "at least 3,000"))
        else:
            broker_folder = folder / "broker"
            broker_folder.mkdir()
            through = measure_through_broker(
                arguments.devices, arguments.rounds, broker_folder, settings=arguments.broker
            )
            rate = through.updates / through.seconds
            label = f"updates a second through Mosquitto, {through.devices} devices, receipts"
            rows.append((label, f"{rate:,.0f}", "at least 1,500"))
            micros = through.cpu_seconds / through.updates * 1e6
            rows.append(("  the aggregator's CPU an update, us", f"{micros:.0f}", ""))
            rows.append(("  sent again for want of a receipt", str(through.resent), "0"))
            result |= {"through_broker_a_second": rate, "cpu_micros_an_update": micros}
    downlink = measure_downlink()
    for name, what in (
        ("float16", "reported; the default"),
        ("int8", 'reported; broadcast_codec = "int8"'),
        ("int4", 'reported; broadcast_codec = "int4"'),
    ):
        label = f"downlink bytes a device a round, ML-1M at K = 64, {name}"
        rows.append((label, f"{downlink[name]:,}", what))
    result["downlink_bytes"] = downlink
    print(tabulate(rows, headers=("", "measured", "target"), disable_numparse=True))
    print(f"\nload average at the start: {result['load_average']:.1f}")
    write_lines(RESULTS / "aggregator.jsonl", [result])
    return 0


def _print_with_latency(rtt_ms: float, settings: str, devices: int, rounds: int) -> int:
    with tempfile.TemporaryDirectory() as name:
        through = measure_through_broker(
            devices, rounds, Path(name), settings=settings, rtt_ms=rtt_ms
        )
    rows = (
        ("updates a second, with receipts", f"{through.updates / through.seconds:,.0f}"),
        ("session opens a second", f"{devices / through.open_seconds:,.0f}"),
        ("updates sent again for want of a receipt", f"{through.resent:,}"),
    )
    head = f"{rtt_ms:g} ms of round trip, {devices} devices, Mosquitto's {settings} settings"
    print(tabulate(rows, headers=(head, ""), disable_numparse=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
