"""What the suites share: command line, data, progress, stored runs, processes, rows, tables.

A :class:`Suite` declares its rows, each with the run of a seed, how a run is carried out, and its
tables; :meth:`Suite.main` is its command. Runs are kept in ``results/<suite>.jsonl``, a line a run,
so that a suite that was stopped continues where it was and its tables can be printed again without
running anything.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import math
import os
import select
import shutil
import subprocess
import sys
import tempfile
import venv
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import Field, asdict, dataclass, fields, is_dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_args, get_origin, get_type_hints

from device_sdk.fields import default_of

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


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """``--root``, ``--results`` and ``--table-only``."""
    parser.add_argument("--root", type=Path, help="data folder (default: TESSERA_DATA)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where runs are stored")
    parser.add_argument("--table-only", action="store_true", help="print stored runs, run none")


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


RunT = TypeVar("RunT", bound=_Record)
OutcomeT = TypeVar("OutcomeT", bound=_Record)


def key_of(described: object) -> str:
    """Names what JSON-like data describe: 20 hex digits of a hash over them."""
    return hashlib.sha256(_text_of(described).encode()).hexdigest()[:20]


def _text_of(described: object) -> str:
    return json.dumps(described, sort_keys=True)


class StoredRuns(Generic[RunT, OutcomeT]):
    """Outcomes by their run, every setting of it, a line each in ``folder/<suite>.jsonl``. A line
    from before a setting was added is of runs with that one's default.

    Lines stand in the order of what was run, whatever the order of running. Several processes may
    write one file: each outcome is added to what the file holds then. Whoever changes what the same
    settings come to takes the lines that no longer hold out of the file.

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
        """The stored outcome, or None where there is none of the run."""
        line = self._lines().get(_text_of(asdict(run)))
        if line is None:
            line = next((each for each in self._lines().values() if is_of(each["run"], run)), None)
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
            line = {"run": asdict(run), "outcome": asdict(outcome)}
            lines = {**self._lines(), _text_of(line["run"]): line}
            write_lines(self.file, [lines[text] for text in sorted(lines)])
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
        """By the run's text; read again only where the file was replaced since."""
        if not self.file.exists():
            return {}
        found = self.file.stat()
        stamp = (found.st_ino, found.st_mtime_ns)
        if stamp != self._read[0]:
            lines = map(json.loads, self.file.read_text(encoding="utf-8").splitlines())
            self._read = (stamp, {_text_of(line["run"]): line for line in lines})
        return self._read[1]


def is_of(stored: Any, asked: Any) -> bool:
    """Whether JSON is what a dataclass's object comes to, where it may lack fields at their
    defaults."""
    if is_dataclass(asked) and not isinstance(asked, type):
        if not isinstance(stored, dict) or stored.keys() - {each.name for each in fields(asked)}:
            return False
        return all(
            is_of(stored[each.name], getattr(asked, each.name))
            if each.name in stored
            else getattr(asked, each.name) == default_of(each)
            for each in fields(asked)
        )
    if isinstance(asked, Mapping):
        same = isinstance(stored, dict) and stored.keys() == asked.keys()
        return same and all(is_of(stored[name], asked[name]) for name in asked)
    if isinstance(asked, (list, tuple)):
        same = isinstance(stored, list) and len(stored) == len(asked)
        return same and all(map(is_of, stored, asked))
    return bool(stored == asked)


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


# Environments.


def environment(folder: Path, pins: Sequence[str], *options: str) -> Path:
    """The Python of a virtual environment that holds what is pinned; made anew where that changed.

    ``options`` are pip's. Raises subprocess.CalledProcessError where something is not to be had.
    """
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = "\n".join(pins)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        print(f"installing into {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        kept = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
        pip = [str(python), "-m", "pip", "install", "--quiet", *options]
        subprocess.run([*pip, *pins], check=True, env=kept)
        stamp.write_text(wanted, encoding="utf-8")
    return python


# Artifacts.


class Artifacts:
    """Artifacts in ``folder``, exported when they are first asked for; a change of the exporter
    makes new ones."""

    def __init__(self, folder: Path) -> None:
        import export

        digest = hashlib.sha256()
        root = Path(export.__file__).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
        self._folder = folder / digest.hexdigest()[:12]

    def path(self, described: object, write: Callable[[Path], object]) -> Path:
        """Of the artifact that JSON-like data describe; ``write`` exports it into a new folder."""
        path = self._folder / key_of(described)
        if not path.exists():
            partial = path.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            write(partial)
            partial.rename(path)
        return path


# Suites.


@dataclass(frozen=True, slots=True)
class Row(Generic[RunT]):
    """A line of a table: its name, what it shows, and its run of a seed; ``table`` where a suite
    has several."""

    name: Any
    shows: str
    make: Callable[..., RunT]
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


class Suite(ABC, Generic[RunT, OutcomeT]):
    """Rows that are run once a seed, and their tables. A suite says what is its own of them.

    Attributes:
        name: of ``python -m benchmarks.<name>``, and of the file of its runs.
        description: above the options in ``--help``.
        examples: below them.
        outcome: the class of what a run finds.
        rows: all there are.
        tables: what each table of the rows is of, in the order of printing; options stand in it in
            braces.
        choice: the option that names a table, where there are several.
        seeds: how many unless told otherwise; by table where they differ.
        exports: whether runs export artifacts, which are kept.
    """

    name: str
    description: str
    examples: str = ""
    outcome: type[OutcomeT]
    rows: Sequence[Any] = ()
    tables: Mapping[str, str]
    choice = "--table"
    seeds: int | Mapping[str, int] = 3
    exports = False

    @abstractmethod
    def execute(
        self, run: RunT, options: argparse.Namespace, progress: Callable[[str], None]
    ) -> OutcomeT:
        """Carry out a run, telling of its progress."""

    @abstractmethod
    def shown(
        self, table: str, outcomes: Mapping[Any, BySeed[OutcomeT]], options: argparse.Namespace
    ) -> Iterable[str]:
        """What is printed of a table's outcomes, by row's name and seed."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """What the suite asks beside what all ask."""

    def contradiction(self, options: argparse.Namespace) -> str:
        """Why the options do not go with each other; empty where they do."""
        return ""

    def asked(self, options: argparse.Namespace) -> Sequence[Any]:
        """The rows that the options ask for."""
        tables = self.asked_tables(options)
        return chosen(options.rows, [row for row in self.rows if row.table in tables])

    def asked_tables(self, options: argparse.Namespace) -> list[str]:
        """Those that the options ask for."""
        given = getattr(options, self.choice.strip("-"), "all")
        return list(self.tables) if given == "all" else [given]

    def run_of(self, row: Any, seed: int, options: argparse.Namespace) -> RunT | None:
        """The row's run of a seed; None where it cannot be known yet."""
        run: RunT = row.make(seed)
        return run

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run what is asked for and not stored, print the tables; returns the exit status."""
        parser = self._parser()
        options = parser.parse_args(arguments)
        if why := self.contradiction(options):
            parser.error(why)
        options.store = StoredRuns[RunT, OutcomeT](options.results, self.name, self.outcome)
        try:
            found = self.found(options)
        except FileNotFoundError as error:
            print(error, file=sys.stderr)
            return 2
        for table in self.tables:
            if any(found.get(table, {}).values()):
                print(f"\n{self.tables[table].format_map(vars(options))}\n")
                print("\n\n".join(self.shown(table, found[table], options)))
        self.finish(options, found)
        return 0

    def finish(self, options: argparse.Namespace, found: Found[OutcomeT]) -> None:
        """What is done after the tables are printed."""

    def found(self, options: argparse.Namespace) -> Found[OutcomeT]:
        """Outcomes by table, row's name and seed. Seeds outside, rows inside: what is stopped early
        has all rows on the first seeds."""
        found: Found[OutcomeT] = {}
        rows = self.asked(options)
        counts = {row.table: self._seeds(row.table, options) for row in rows}
        for number, row in product(range(max(counts.values(), default=0)), rows):
            if number < counts[row.table]:
                seed = options.first_seed + number
                by_seed = found.setdefault(row.table, {}).setdefault(row.name, {})
                outcome = self.outcome_of(row, seed, options)
                if outcome is not None:
                    by_seed[seed] = outcome
        return found

    def outcome_of(self, row: Any, seed: int, options: argparse.Namespace) -> OutcomeT | None:
        """What is stored of the row's run of a seed; what is not is run, unless none may be."""
        run = self.run_of(row, seed, options)
        return None if run is None else self.carried_out(run, row, seed, options)

    def carried_out(
        self, run: RunT, row: Any, seed: int, options: argparse.Namespace
    ) -> OutcomeT | None:
        """What is stored of a run, which is told of as the row's; as :meth:`outcome_of`."""

        def make() -> OutcomeT:
            several = row.table if len(self.tables) > 1 else ""
            label = ", ".join(filter(None, (f"seed {seed}", several, str(row.name))))
            with progress_line(label) as progress:
                return self.execute(run, options, progress)

        found: OutcomeT | None = options.store.found_or_made(
            run, None if options.table_only else make
        )
        return found

    def _seeds(self, table: str, options: argparse.Namespace) -> int:
        if options.seeds is not None:
            return int(options.seeds)
        return self.seeds if isinstance(self.seeds, int) else self.seeds[table]

    def _parser(self) -> argparse.ArgumentParser:
        shown = {row.name: row.shows for row in self.rows}
        listed = {"tables": self.tables if len(self.tables) > 1 else {}, "rows": shown}
        more = [
            "\n".join((f"{what}:", *(f"  {name:27} {text}" for name, text in texts.items())))
            for what, texts in listed.items()
            if texts
        ]
        epilog = "\n\n".join((*([self.examples] if self.examples else []), *more))
        parser = suite_parser(self.name, self.description, epilog)
        if len(self.tables) > 1:
            parser.add_argument(self.choice, choices=(*self.tables, "all"), default="all")
        if self.rows:
            parser.add_argument("--rows", help="names of rows, with semicolons (default: all)")
        counts = [self.seeds] if isinstance(self.seeds, int) else self.seeds.values()
        default = " and ".join(map(str, counts))
        parser.add_argument("--seeds", type=int, help=f"number of seeds (default: {default})")
        parser.add_argument("--first-seed", type=int, default=0)
        add_store_options(parser)
        if self.exports:
            folder = RESULTS.parents[1] / "out" / "artifacts"
            parser.add_argument(
                "--artifacts", type=Path, default=folder, help="where exports are kept"
            )
        self.add_options(parser)
        return parser


class TunedSuite(Suite[RunT, OutcomeT]):
    """A suite whose rows try settings, of which validation data picks one on seed 0. A row's
    ``tried(seed)`` has its runs of a seed by setting."""

    @abstractmethod
    def judged_by(self, row: Any, outcome: OutcomeT) -> float:
        """What the settings are compared by, of validation data alone: more is better."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--settings", action="store_true", help="what was tried, on validation data alone"
        )

    def run_of(self, row: Any, seed: int, options: argparse.Namespace) -> RunT | None:
        """With the best of the row's settings; None where one was not tried yet."""
        best = self.best(row, options)
        return None if best is None else row.tried(seed)[best]

    def best(self, row: Any, options: argparse.Namespace) -> Any:
        """The row's setting; None where one was not tried yet."""
        settings = [*row.tried(0)]
        if len(settings) == 1:
            return settings[0]
        tried = self.tried(row, options)
        return max(tried, key=lambda one: tried[one]) if len(tried) == len(settings) else None

    def tried(self, row: Any, options: argparse.Namespace) -> dict[Any, float]:
        """What its settings came to on seed 0; without those that were not tried yet."""
        found = {
            setting: self.carried_out(run, row, 0, options) for setting, run in row.tried(0).items()
        }
        return {
            setting: self.judged_by(row, outcome)
            for setting, outcome in found.items()
            if outcome is not None
        }

    def settings_table(self, rows: Iterable[Any], options: argparse.Namespace) -> str:
        """What ``--settings`` asks for."""
        lines = [
            (row.name, str(setting), f"{value:.4f}")
            for row in rows
            for setting, value in self.tried(row, options).items()
        ]
        return markdown_table(lines, ("", "setting", "validation"))


# Tables.

BySeed = Mapping[int, OutcomeT]
Cell = Callable[[str, BySeed[OutcomeT]], str]
"""Of a row's name and its outcomes, at least one."""
Read = Callable[[OutcomeT], float]
Found = dict[str, dict[Any, dict[int, OutcomeT]]]
"""By table, row's name and seed."""


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
    from aggregator.intervals import spread

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
    from aggregator.intervals import paired_difference

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
