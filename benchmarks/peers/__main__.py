"""``python -m benchmarks.peers``: the same rounds in Tessera's simulation and in other ones."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.harness import (
    StoredRuns,
    add_store_options,
    chosen,
    data_folder,
    progress_line,
    suite_parser,
)
from benchmarks.peers.compare import Comparison, Measured, Peer, Row, install, started, table
from benchmarks.peers.record import record
from benchmarks.recommendation.split import load_split

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
_ROOT = Path(__file__).resolve().parents[2]
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
