"""``tessera-aggregator simulate``: a task tried out on virtual devices, before there is a fleet."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import re
import shlex
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aggregator.errors import AggregatorError
from device_sdk.system.clock import Clock, MonotonicClock
from device_sdk.system.command_line import (
    INTERRUPTED,
    natural,
    positive_float,
    positive_int,
)
from device_sdk.system.printable import printable
from device_sdk.tables.options import add_reading

_ITEMS = 400
_TASK = """\
# A fleet that learns to recommend. `serve` reads such a file too; `tessera-aggregator init` writes
# one with every key explained.

[task]
name = "films"
method = "scatter"          # each device trains as many of the factors' columns as it can
catalogue = "catalogue.tsv"  # one item a line

[round]
share = 0.5                 # of the devices in each round
quorum = 5
deadline_seconds = 300

[scatter]
columns = 32

[evaluation]                # each user's latest film is held back: where does it rank?
metrics = ["hr10_all", "ndcg10_all"]
"""
_DATA = '''\
"""Made-up tastes: what each virtual device learns from. Put your own data in their place."""

import numpy as np

ITEMS = 400


def devices(count, rng):
    """For each device the films of its user, oldest first, as rows of the catalogue.

    A generator: a device's data is made when it is asked for, and need not be in a list.
    """
    genres = rng.dirichlet(np.full(ITEMS, 0.1), size=6)
    for _ in range(count):
        likes = 0.9 * genres[rng.integers(len(genres))] + 0.1 / ITEMS
        yield rng.choice(ITEMS, size=30, replace=False, p=likes / likes.sum())
'''


def write_example(folder: Path) -> str:
    """Write ``task.toml``, ``catalogue.tsv`` and ``data.py`` into a new or empty folder; the
    command that runs them.

    Raises AggregatorError where there is something in the folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AggregatorError(f"{folder} is there, and not empty: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"film-{row}\tFilm {row}\n" for row in range(_ITEMS))
    (folder / "catalogue.tsv").write_text("".join(lines), encoding="utf-8")
    (folder / "task.toml").write_text(_TASK, encoding="utf-8")
    (folder / "data.py").write_text(_DATA, encoding="utf-8")
    task, data = str(folder / "task.toml"), f"{folder / 'data.py'}:devices"
    return shlex.join(["tessera-aggregator", "simulate", task, "--data", data, "--devices", "300"])


if TYPE_CHECKING:
    from aggregator.operate.runs import SimulationRecord
    from aggregator.simulate.run import Simulated

DESCRIPTION = """\
Runs a task file's rounds over virtual devices on this machine: the methods and learners of the
product, sampling, deadline and quorum in virtual time, evaluation on what each device holds back.
No broker, no keys, no home. It prints a table and writes runs/NAME.json, and runs/NAME.png where
matplotlib is installed; tessera-aggregator runs lists and compares them. No record is
replaced: where NAME is taken, a number follows it. Ctrl-C keeps the rounds that were played.

--data names a function of yours, function(devices, rng), that returns the data of each device: for
a method on arrays a device_sdk.LocalData, for a method with a catalogue the items of the device's
user, oldest first; or a table of interactions, of whose users each has a device. The same seed
gives the same model, bit for bit.

--set changes a setting of the task for the run, by its name in the file: TABLE.KEY=VALUE, as TOML
has it or a text without quotes; KEY= leaves it out. --run NAME KEY=VALUE... is one of several runs
in one call, with settings and options (dropout=0.2) of its own; they end in one table. A task that
recommends is shown beside what the most popular items alone reach.

--sweep KEY=V1,V2 is a run for each value, with commas between as in k:4,8,16; a value that is a
list itself has its brackets: evaluation.metrics=["hr10_all"],["ndcg10_all"]. --jobs plays several
runs and seeds at once, to the same bits; --resume goes on where such a call was ended, also with
more --seeds. It refuses a record of other settings or versions; it cannot tell whether what --data
names returns something else by now."""
EXAMPLES = """\
examples:
  tessera-aggregator simulate --example films     write films/ with a task and made-up data
  tessera-aggregator simulate films/task.toml --data films/data.py:devices --devices 500
  tessera-aggregator simulate films/task.toml --data films/data.py:devices --devices 500 \\
      --rounds 50 --seeds 5 --speeds k:4,8,16 --dropout 0.2 --name weak
  tessera-aggregator simulate films/task.toml --data ratings.csv --devices 600
  tessera-aggregator runs compare films weak
  tessera-aggregator simulate films/task.toml --data films/data.py:devices --seeds 3 \\
      --set round.share=0.3 --csv all.csv --run narrow scatter.columns=8 \\
      --run wide scatter.columns=64 --run away dropout=0.3
  tessera-aggregator simulate films/task.toml --data films/data.py:devices --seeds 5 --jobs 4 \\
      --sweep scatter.columns=8,16,32 --sweep dropout=0,0.3 --resume

a file of classes for --speeds:
  [[class]]
  name = "sensor"       # for people
  share = 3             # of the fleet, relative to the other classes
  speed = 0.05          # times a device of speed 1, which decides k or the artifact
  k = 8                 # or say the columns (scatter), or the artifact = "small", yourself
  dropout = 0.3         # at least so many of them are away in a round"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def chance(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 0 to 1 (0.2 is 20 %)")
    return value


def run_name(text: str) -> str:
    """A name that is a file's."""
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text[:70]!r} is no name: a-z A-Z 0-9 . _ -")
    return text


_FATES = {
    "dropout": "it is away",
    "crash": "it dies in its training",
    "late": "its update comes after the deadline",
    "nan": "its update holds NaN",
}
_RUN_OPTIONS: dict[str, Callable[[str], Any]] = {
    "data": str,
    "devices": positive_int,
    "rounds": positive_int,
    "speeds": str,
    "pace": positive_float,
    **dict.fromkeys(_FATES, chance),
}
"""Options that a run of several may have for itself, and what reads them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("task", nargs="?", type=Path, metavar="TASK.toml", help="as serve reads it")
    parser.add_argument("--example", type=Path, metavar="DIR", help="write one, and run nothing")
    parser.add_argument(
        "--data",
        metavar="MODULE:FUNCTION",
        help="what the devices have, or FILE.py:FUNCTION, or the FILE of a table of interactions",
    )
    parser.add_argument(
        "--devices", type=positive_int, default=100, metavar="N", help="how many (default: 100)"
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=20, metavar="R", help="how many (default: 20)"
    )
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="S", help="of the (first) run (default: 0)"
    )
    parser.add_argument(
        "--seeds", type=positive_int, default=1, metavar="N", help="runs, of seeds S, S+1, ..."
    )
    virtual = parser.add_argument_group("the virtual devices")
    virtual.add_argument(
        "--speeds",
        default="",
        metavar="SAID",
        help="lognormal:0.5 (the spread of the logarithm), k:8,16,32,64 (equal classes that train "
        "so many columns), or a file of classes (default: all of speed 1)",
    )
    virtual.add_argument(
        "--pace",
        type=positive_float,
        default=1.0,
        metavar="SECONDS",
        help="virtual seconds for 1,000 samples of the whole model at speed 1 (default: 1)",
    )
    for name, does in _FATES.items():
        virtual.add_argument(
            f"--{name}", type=chance, default=0.0, metavar="P", help=f"how likely in a round {does}"
        )
    parser.add_argument(
        "--name",
        type=run_name,
        help="of the run (default: the task's), and a number where it is taken",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another value for a setting of the task, such as round.share=0.2; may be repeated",
    )
    parser.add_argument(
        "--run",
        dest="runs",
        action="append",
        default=[],
        nargs="+",
        metavar=("NAME", "KEY=VALUE"),
        help="one of several runs, and what is its own: settings as with --set, and "
        f"{', '.join(_RUN_OPTIONS)}; may be repeated",
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=V1,V2",
        help="a run for each of these values of a setting or option, named after it; may be "
        "repeated: then one for each combination",
    )
    parser.add_argument(
        "--jobs",
        type=positive_int,
        default=1,
        metavar="N",
        help="so many runs at once, of one seed each, in processes of their own (default: 1)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the records of these names in --out: what is over is not played again",
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="also a line for each round of each run and seed"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs"), metavar="DIR", help="for files (default: runs)"
    )
    parser.add_argument(
        "--cluster",
        metavar="ray[:ADDRESS]",
        help="spread the devices over Ray's workers: of a Ray of its own on this machine, or of "
        "the cluster at ADDRESS; its processes must find --data too",
    )
    parser.add_argument(
        "--workers", type=positive_int, metavar="N", help="with --cluster (default: its CPU cores)"
    )

    parser.add_argument(
        "--sink",
        dest="sinks",
        action="append",
        default=[],
        metavar="NAME",
        help="tell runs to tensorboard or mlflow too, or to a sink of a package of yours, as they "
        "are played; may be repeated",
    )
    virtual.add_argument(
        "--providers",
        default="auto",
        metavar="NAME",
        help="what runs artifacts: cpu, cuda, webgpu, openvino or, as on a device, auto: the "
        "quickest of them that trains as the CPU does (default: auto)",
    )
    add_reading(parser, "a table of --data")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.example is not None:
        command = write_example(arguments.example)
        print(f"wrote {printable(str(arguments.example))}; now try\n\n  {printable(command)}\n")
        return 0
    _take_task(arguments)
    for name, wanted in (("TASK.toml", arguments.task), ("--data", arguments.data)):
        if wanted is None:
            raise AggregatorError(
                f"simulate needs {name}; simulate --example DIR writes something to begin with"
            )
    if importlib.util.find_spec("onnxruntime") is None:
        raise AggregatorError(
            "onnxruntime is not installed, which devices train with: pip install tessera-edge"
        )
    # It needs what trains on a device, which no other command loads.
    from aggregator.simulate.jobs import Unit, play
    from aggregator.simulate.run import Event, prepare
    from aggregator.simulate.shown import (
        differences,
        parts_table,
        rounds_table,
        runs_table,
        write_csv,
    )
    from aggregator.simulate.sinks import Sinks

    if arguments.csv is not None:
        arguments.csv.parent.mkdir(parents=True, exist_ok=True)
        if arguments.csv.is_dir():
            raise AggregatorError(f"--csv: {arguments.csv} is a folder; expected a file to write")
    clock = MonotonicClock()
    # All of them are looked at before the first is played.
    simulations = [_prepared(prepare, each, clock) for each in _runs(arguments)]
    units = [Unit(each, seed) for each in simulations for seed in each.recorder.left]
    failed: dict[Unit, str] = {}
    interrupted = False
    with _progress() as show:

        def say(text: str) -> None:
            show("")
            print(printable(text), file=sys.stderr)

        def take(simulated: Simulated, seed: int, event: Event) -> None:
            simulated.take(seed, event)
            sinks.take(simulated, seed, event)

        sinks = Sinks(dict.fromkeys(arguments.sinks), say)
        try:
            failed = play(units, arguments.jobs, take, show)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sinks.close()
            written = [(each, each.recorder.write()) for each in simulations]
    played = [(simulated, path) for simulated, path in written if path is not None]
    faults = "; ".join(
        f"{unit.simulated.recorder.name}, seed {unit.seed}: {why}" if len(units) > 1 else why
        for unit, why in failed.items()
    )
    if not played and interrupted:
        print("interrupted before a round was over: nothing is recorded", file=sys.stderr)
        return INTERRUPTED
    if not played:
        raise AggregatorError(faults)
    records = [simulated.recorder.made() for simulated, _ in played]
    if len(simulations) == 1:
        print(f"{rounds_table(records[0])}\n")
        if parts := parts_table(records[0]):
            print(f"{parts}\n")
    print(runs_table(records))
    if len(records) > 1:
        print(f"\n{differences(records)}")
    for simulated, _ in played:
        for line in simulated.remarks():
            about = f"{simulated.recorder.name}: " if len(simulations) > 1 else ""
            print(f"\n{about}{printable(line)}", end="")
    if arguments.csv is not None:
        write_csv(arguments.csv, records)
        print(f"\n{printable(str(arguments.csv))} holds each round as a line", end="")
    print(f"\n{_recorded(records, [path for _, path in played])}")
    if faults:
        raise AggregatorError(faults)
    return INTERRUPTED if interrupted else 0


def _take_task(arguments: argparse.Namespace) -> None:
    """What stands behind a ``--run`` without a value is the task's file."""
    words = [each for _, *said in arguments.runs for each in said if "=" not in each]
    words += [] if arguments.task is None else [str(arguments.task)]
    if len(words) > 1:
        raise AggregatorError(f"{words[0]!r} is no KEY=VALUE, such as round.share=0.2")
    arguments.task = Path(words[0]) if words else None
    arguments.runs = [
        [each for each in run if "=" in each or each == run[0]] for run in arguments.runs
    ]


def _runs(arguments: argparse.Namespace) -> list[argparse.Namespace]:
    """The arguments of each run: one, or as many as there are ``--run``, times the values of each
    ``--sweep``."""
    bases = [arguments]
    if arguments.runs:
        if arguments.name is not None:
            raise AggregatorError("--name is for one run; each --run has a name of its own")
        names = [name for name, *_ in arguments.runs]
        if len(set(names)) < len(names):
            raise AggregatorError(f"--run: two runs are named {max(names, key=names.count)!r}")
        bases = [
            _run(arguments, f"--run {name}", said, name=name) for name, *said in arguments.runs
        ]
    points = list(product(*map(_swept, arguments.sweep)))
    for base in bases:
        base.swept = ""
    if not arguments.sweep:
        return bases
    return [
        _run(base, "--sweep", said, swept="-".join(names))
        for base in bases
        for names, said in (zip(*point, strict=True) for point in points)
    ]


def _swept(said: str) -> list[tuple[str, str]]:
    """``KEY=V1,V2``: for each value what the run is called by it, and ``KEY=VALUE``."""
    key, equals, text = said.partition("=")
    key = key.strip()
    spell: Callable[[Any], str] = str
    try:
        found: list[Any] = tomllib.loads(f"values = [{text}]")["values"]
        spell = _as_toml
    except (ValueError, RecursionError):
        found = [each.strip() for each in text.split(",")]
    if not equals or not key or not found or "" in found:
        raise AggregatorError(f"--sweep {said!r} is no KEY=V1,V2, such as round.share=0.2,0.5")
    if len(found) == 1 and isinstance(found[0], list):
        raise AggregatorError(
            f"--sweep {said} has one value, which is a list: write its members without the "
            "brackets, with commas between"
        )
    spelt = [each if isinstance(each, str) else _as_toml(each) for each in found]
    if len(set(spelt)) < len(spelt):
        raise AggregatorError(f"--sweep {said}: {max(spelt, key=spelt.count)} stands there twice")
    last = key.rpartition(".")[2]
    called = [each if _NAME.fullmatch(each) else f"no{n}" for n, each in enumerate(spelt, 1)]
    values = spelt if key in _RUN_OPTIONS else list(map(spell, found))
    return [
        (f"{last}-{name}", f"{key}={value}") for name, value in zip(called, values, strict=True)
    ]


def _as_toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)  # of scalars and lists the same


def _run(
    arguments: argparse.Namespace, option: str, said: Sequence[str], **more: str
) -> argparse.Namespace:
    """A run with settings and options of its own, which ``option`` said."""
    own = argparse.Namespace(**{**vars(arguments), **more, "set": [*arguments.set]})
    try:
        run_name(own.name or "run")
        for each in said:
            key, _, value = each.partition("=")
            if key in _RUN_OPTIONS:
                setattr(own, key, _RUN_OPTIONS[key](value))
            elif "." not in key and (near := difflib.get_close_matches(key, _RUN_OPTIONS, 1)):
                raise argparse.ArgumentTypeError(f"no option {key}; did you mean {near[0]}?")
            else:
                own.set.append(each)
    except argparse.ArgumentTypeError as error:
        raise AggregatorError(f"{option}: {error}") from None
    return own


def _prepared(
    prepare: Callable[[argparse.Namespace, Clock, Callable[[], float]], Simulated],
    arguments: argparse.Namespace,
    clock: Clock,
) -> Simulated:
    for each in arguments.set:
        if (key := each.partition("=")[0]) in _RUN_OPTIONS:
            raise AggregatorError(f"--set is for settings of the task; {key} is an option: --{key}")
    try:
        return prepare(arguments, clock, time.time)
    except AggregatorError as error:
        about = [f"--run {arguments.name}"] if arguments.runs else []
        about += [f"--sweep {arguments.swept}"] if arguments.swept else []
        raise AggregatorError(": ".join([*about, str(error)])) from None


def _recorded(records: Sequence[SimulationRecord], paths: Sequence[Path]) -> str:
    """Where the records lie, and their picture, which is drawn here."""
    from aggregator.simulate.shown import draw

    one = len(paths) == 1
    picture = paths[0].with_suffix(".png") if one else paths[0].with_name("compared.png")
    held = f"{printable(' '.join(map(str, paths)))} {'holds the run' if one else 'hold the runs'}"
    try:
        draw(records, picture)
    except ImportError:
        return f"{held}. {NO_PICTURE}"
    return f"{held}, {printable(picture.name)} shows {'it' if one else 'them'}"


NO_PICTURE = (
    "For a picture install matplotlib: pip install 'tessera-edge[aggregator,simulate]', and see "
    "tessera-aggregator runs --help"
)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """One line on standard error, rewritten on a terminal; nothing elsewhere."""
    live = sys.stderr.isatty()

    def show(text: str) -> None:
        if live:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("")
