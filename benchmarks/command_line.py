"""What the command lines of benchmarks with stored runs share.

See also ``benchmarks.outcomes``, where the runs are kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def add_rows(parser: argparse.ArgumentParser) -> None:
    """The option ``--rows``; ``named`` reads it."""
    parser.add_argument("--rows", help="names of rows, separated by semicolons (default: all)")


def add_run_options(
    parser: argparse.ArgumentParser, results: Path, *, seeds: int | None = 3, said: str = ""
) -> None:
    """``--seeds``, ``--first-seed``, ``--root``, ``--results`` and ``--table-only``.

    Args:
        parser: takes the options.
        results: where runs are stored unless told otherwise.
        seeds: how many unless told otherwise; None where the benchmark knows.
        said: what the help says of that default; ``seeds`` if empty.
    """
    parser.add_argument(
        "--seeds", type=int, default=seeds, help=f"number of seeds (default: {said or seeds})"
    )
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--root", type=Path, help="data folder (default: TESSERA_DATA)")
    parser.add_argument("--results", type=Path, default=results, help="where runs are stored")
    parser.add_argument("--table-only", action="store_true", help="print stored runs, run none")


def seeds_of(options: argparse.Namespace, otherwise: int = 3) -> range:
    """The seeds that the command line names; ``otherwise`` so many where it names no number."""
    count = otherwise if options.seeds is None else options.seeds
    return range(options.first_seed, options.first_seed + count)


def named(given: str | None, known: Sequence[str], flag: str = "--rows") -> list[str]:
    """Those of ``known``, in its order, that ``given`` names between semicolons; all for None.

    Ends the program with status 2, listing what is known, where a name is not among it.
    """
    if given is None:
        return list(known)
    names = {name.strip() for name in given.split(";")}
    unknown = sorted(names.difference(known))
    if unknown:
        told = "; ".join(dict.fromkeys(known))
        print(f"{flag}: unknown name {unknown[0]!r}; known are: {told}", file=sys.stderr)
        raise SystemExit(2)
    return [name for name in known if name in names]
