"""What the suites share: command line, data, progress, stored runs, processes, rows, tables.

A suite declares its rows, each with the run of a seed; :func:`finished` finds or makes their
outcomes, and :func:`table_of` prints them. Runs are kept in ``results/<suite>.jsonl``, a line a
run, so that a suite that was stopped continues where it was and its tables can be printed again
without running anything.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import math
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import Field, asdict, dataclass, is_dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_args, get_origin, get_type_hints

RESULTS = Path(__file__).resolve().parent / "results"
"""Where runs are stored unless told otherwise."""

# The command line.


def suite_parser(suite: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Of ``python -m benchmarks.<suite>``; both texts keep their lines."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{suite}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_rows(parser: argparse.ArgumentParser) -> None:
    """The option ``--rows``; ``named`` reads it."""
    parser.add_argument("--rows", help="names of rows, separated by semicolons (default: all)")


def add_run_options(
    parser: argparse.ArgumentParser, *, seeds: int | None = 3, said: str = ""
) -> None:
    """``--seeds``, ``--first-seed``, and the options of :func:`add_store_options`.

    Args:
        parser: takes the options.
        seeds: how many unless told otherwise; None where the benchmark knows.
        said: what the help says of that default; ``seeds`` if empty.
    """
    parser.add_argument(
        "--seeds", type=int, default=seeds, help=f"number of seeds (default: {said or seeds})"
    )
    parser.add_argument("--first-seed", type=int, default=0)
    add_store_options(parser)


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """``--root``, ``--results`` and ``--table-only``."""
    parser.add_argument("--root", type=Path, help="data folder (default: TESSERA_DATA)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where runs are stored")
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


# The data folder.


def default_data_folder() -> Path:
    """The folder that TESSERA_DATA names, else ``../shared/data``; it may be missing."""
    return Path(os.environ.get("TESSERA_DATA") or "../shared/data")


def data_folder(given: Path | None, holds: str) -> Path:
    """``given``, else the default one.

    Ends the program with status 2, saying what the folder must hold, where there is none.
    """
    root = given or default_data_folder()
    if not root.is_dir():
        print(
            f"no data folder {root}: set TESSERA_DATA (or --root) to the folder that holds {holds}",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return root


# Progress.


@contextmanager
def progress_line(label: str) -> Iterator[Callable[[str], None]]:
    """One line on standard error, rewritten on a terminal; elsewhere a line at the end."""
    live = sys.stderr.isatty()
    last = ""

    def show(text: str) -> None:
        nonlocal last
        last = text
        if live:
            print(f"\r\033[K{label}: {text}", end="", file=sys.stderr, flush=True)

    yield show
    print(f"\r\033[K{label}: {last}" if live else f"{label}: {last}", file=sys.stderr, flush=True)


# Stored runs.


class _Record(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


class Run(_Record, Protocol):
    """A measured run as data, whose key changes with every setting."""

    @property
    def key(self) -> str: ...


RunT = TypeVar("RunT", bound=Run)
OutcomeT = TypeVar("OutcomeT", bound=_Record)


def key_of(described: object) -> str:
    """Names what JSON-like data describe: 20 hex digits of a hash over them."""
    canonical = json.dumps(described, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:20]


class StoredRuns(Generic[RunT, OutcomeT]):
    """Outcomes by the key of their run, a line each in ``folder/<suite>.jsonl``.

    Lines stand in the order of what was run, whatever the order of running. Several processes may
    write one file: each outcome is added to what the file holds then.

    Args:
        folder: made when needed.
        suite: names the file.
        outcome: the class of outcomes, whose annotations say how they are read back.
    """

    def __init__(self, folder: Path, suite: str, outcome: type[OutcomeT]) -> None:
        self.file = folder / f"{suite}.jsonl"
        self._outcome = outcome
        self._read: tuple[tuple[int, int] | None, dict[str, Any]] = (None, {})

    def load(self, run: RunT) -> OutcomeT | None:
        """The stored outcome, or None where there is none under the run's key."""
        line = self._lines().get(run.key)
        if line is None:
            return None
        outcome: OutcomeT = _rebuilt(self._outcome, line["outcome"])
        return outcome

    def save(self, run: RunT, outcome: OutcomeT) -> None:
        """Add the outcome, and what was run: the file is replaced whole or not at all."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.file.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            line = {"key": run.key, "run": asdict(run), "outcome": asdict(outcome)}
            # Through JSON, so that a line that was just made sorts as one that was read.
            lines = {**self._lines(), run.key: json.loads(json.dumps(line))}
            ordered = sorted(
                lines.values(), key=lambda one: (json.dumps(one["run"], sort_keys=True), one["key"])
            )
            write_lines(self.file, ordered)
        finally:
            os.close(folder)

    def found_or_made(self, run: RunT, make: Callable[[], OutcomeT] | None) -> OutcomeT | None:
        """The stored outcome; where there is none, that of ``make``, which is then stored.

        None where nothing is stored and ``make`` is None: nothing may be run.
        """
        outcome = self.load(run)
        if outcome is None and make is not None:
            outcome = make()
            self.save(run, outcome)
        return outcome

    def _lines(self) -> dict[str, Any]:
        """By key; read again only where the file was replaced since."""
        if not self.file.exists():
            return {}
        found = self.file.stat()
        stamp = (found.st_ino, found.st_mtime_ns)
        if stamp != self._read[0]:
            lines = map(json.loads, self.file.read_text(encoding="utf-8").splitlines())
            self._read = (stamp, {line["key"]: line for line in lines})
        return self._read[1]


def write_lines(file: Path, lines: Iterable[object]) -> None:
    """Replace a file by one line of JSON each, whole or not at all; its folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    text = "".join(f"{json.dumps(line, sort_keys=True)}\n" for line in lines)
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def _rebuilt(kind: Any, value: Any) -> Any:
    """What JSON made of an object of the annotated type ``kind``, as that type again."""
    if is_dataclass(kind):
        of = get_type_hints(kind)
        make: Any = kind
        return make(**{name: _rebuilt(of[name], one) for name, one in value.items()})
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (list, tuple):
        return origin(_rebuilt(parts[0], one) for one in value)
    if origin in (dict, Mapping):
        return {name: _rebuilt(parts[1], one) for name, one in value.items()}
    return value


# Processes.


class AnswerError(SystemExit):
    """A process ended, or did not answer in time; the message has the end of what it said."""


class Answering:
    """A process that says a line of JSON when it is ready, and one to each line that it is given.

    Args:
        name: in errors.
        command: whose input's end tells it to end.
        environment: of the process.
        cwd: where it starts.
        limit_seconds: of each answer; None waits.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        cwd: Path,
        limit_seconds: float | None = None,
    ) -> None:
        self._name, self._limit = name, limit_seconds
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=cwd,
            env=environment,
        )
        try:
            self.first = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, line: str) -> dict[str, Any]:
        """What it answers to a line. Raises :class:`AnswerError`."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            print(line, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End it: by itself, or after a minute."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], self._limit)
        line = self._process.stdout.readline() if ready else ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        if not ready:
            self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        why = self._errors.read()[-3000:] if ready else f"no answer in {self._limit:.0f} s"
        raise AnswerError(f"{self._name} failed:\n{why}")


_END_SECONDS = 60.0


# Rows.


@dataclass(frozen=True, slots=True)
class Row(Generic[RunT]):
    """A line of a table: its name, what it shows, and its run of a seed; ``table`` where a suite
    has several."""

    name: str
    shows: str
    make: Callable[[int], RunT]
    table: str = ""


class _Named(Protocol):
    """Any row."""

    @property
    def name(self) -> str: ...


RowT = TypeVar("RowT", bound=_Named)
NameT = TypeVar("NameT", bound=Hashable)


def chosen(given: str | None, rows: Sequence[RowT]) -> list[RowT]:
    """The rows that ``--rows`` names, in their order; see :func:`named`."""
    names = named(given, [row.name for row in rows])
    return [row for row in rows if row.name in names]


def listed(rows: Iterable[Row[Any]]) -> str:
    """What ``--help`` says of the rows."""
    return "\nrows:\n" + "\n".join(f"  {row.name:27} {row.shows}" for row in rows)


def finished(
    asked: Iterable[tuple[NameT, int, RunT | None]],
    store: StoredRuns[RunT, OutcomeT],
    carry_out: Callable[[RunT, Callable[[str], None]], OutcomeT] | None,
    suite: str = "",
) -> dict[NameT, dict[int, OutcomeT]]:
    """Outcomes by row's name and seed, in the order of ``asked``: what is stored, and what is not
    stored is made.

    Args:
        asked: names, seeds and runs; None for a run that cannot be known yet. With the seeds
            outside and the rows inside, what is stopped early has all rows on the first seeds.
        store: takes what is made.
        carry_out: makes an outcome, telling of its progress; None where nothing may be run.
        suite: stands before the progress on standard error.
    """
    outcomes: dict[NameT, dict[int, OutcomeT]] = {}
    for name, seed, run in asked:
        found = outcomes.setdefault(name, {})
        outcome = None if run is None else store.load(run)
        if outcome is None and run is not None and carry_out is not None:
            label = ", ".join(filter(None, (suite, f"seed {seed}", str(name))))
            with progress_line(label) as progress:
                outcome = carry_out(run, progress)
            store.save(run, outcome)
        if outcome is not None:
            found[seed] = outcome
    return outcomes


# Tables.

BySeed = Mapping[int, OutcomeT]
Cell = Callable[[str, BySeed[OutcomeT]], str]
"""Of a row's name and its outcomes, at least one."""
Read = Callable[[OutcomeT], float]


def table_of(
    outcomes: Mapping[str, BySeed[OutcomeT]],
    columns: Mapping[str, Cell[OutcomeT]],
    *,
    more: Iterable[Sequence[object]] = (),
    seeds: bool = True,
) -> str:
    """A line for each row that has an outcome: its name, the number of seeds, its cells.

    Args:
        outcomes: by row's name, by seed.
        columns: cells by heading; the first may be about the names: "" or a text without a cell.
        more: lines below, of as many cells as there are columns.
        seeds: whether the number of seeds is shown.
    """
    headings = list(columns)
    lines = [
        (name, *([len(found)] if seeds else []), *(cell(name, found) for cell in columns.values()))
        for name, found in outcomes.items()
        if found
    ]
    return markdown_table([*lines, *more], ("", *(["seeds"] if seeds else []), *headings))


def mean_of(read: Read[OutcomeT], form: str = ".4f") -> Cell[OutcomeT]:
    """The mean over seeds."""
    return lambda name, found: format(fmean(map(read, found.values())), form)


def spread_of(read: Read[OutcomeT], digits: int = 4) -> Cell[OutcomeT]:
    """Mean ± standard deviation over seeds."""
    return lambda name, found: spread_text([*map(read, found.values())], digits)


def spread_text(values: Sequence[float], digits: int = 4) -> str:
    """Mean ± standard deviation; the value where there is one."""
    from aggregator.simulate.shown import spread

    over = spread(values)
    more = "" if math.isnan(over.deviation) else f" ± {over.deviation:.{digits}f}"
    return f"{over.mean:.{digits}f}{more}"


def against(
    base: BySeed[OutcomeT],
    read: Read[OutcomeT],
    digits: int = 4,
    *,
    ahead: bool = False,
    relative: bool = False,
) -> Cell[OutcomeT]:
    """The difference from ``base`` with its 95 % interval, over the seeds that both have; nothing
    of ``base`` itself. ``ahead``: how far base is ahead; ``relative``: per cent of it, too."""
    return lambda name, found: _difference(found, base, read, digits, ahead, relative)


def _difference(
    found: BySeed[OutcomeT],
    base: BySeed[OutcomeT],
    read: Read[OutcomeT],
    digits: int,
    ahead: bool,
    relative: bool,
) -> str:
    from aggregator.simulate.shown import paired_difference

    shared = sorted(set(found) & set(base))
    if found is base or not shared:
        return ""
    ours, theirs = ([read(one[seed]) for seed in shared] for one in (found, base))
    change = paired_difference(theirs, ours) if ahead else paired_difference(ours, theirs)
    text = f"{change.mean:+.{digits}f}"
    if not math.isnan(change.half_width):
        low, high = change.mean - change.half_width, change.mean + change.half_width
        text += f" [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"{text} ({100 * change.mean / fmean(theirs):+.1f} %)" if relative else text


def markdown_table(lines: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """Cells as they are given, under their headers."""
    from tabulate import tabulate  # examples that find data by this module have no use for it

    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)
