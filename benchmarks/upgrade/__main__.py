"""Which devices of the first release learn from this aggregator, and the other way round."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.aggregator.broker import running_mosquitto
from benchmarks.harness import StoredRuns, add_store_options, suite_parser
from benchmarks.upgrade.release import FIRST, NotHere, Release, built, this

_DESCRIPTION = f"""\
For each method: two devices of release {FIRST} at the aggregator of this checkout, and two of this
checkout at {FIRST}'s aggregator, until an update is counted or the devices say why not. {FIRST} is
its wheel, built of the repository's history; the artifact is of the aggregator's release. Needs
Mosquitto and torch. What was run is stored, and run again with --again."""

HERE = Path(__file__).parent
DEVICES = 2
_ROUND = """
[round]
quorum = 2
wait_for_devices = 2
deadline_seconds = 600.0
least_deadline_seconds = 600.0
pause_seconds = 1.0
"""
METHODS: Mapping[str, tuple[str, str]] = {
    "fedavg": ("fedavg", ""),
    "prototypes": ("prototypes", "training.classes = 10\ntraining.width = 6"),
    "teacher_logits": ("teacher_logits", "training.classes = 10"),
    "mutual": ("mutual", "training.classes = 10"),
    "scatter, BPR": ("scatter", 'columns = 8\nloss = "bpr"'),
    "scatter, least squares": ("scatter", "columns = 8"),
    "attention": ("attention", ""),
}
"""By what the table calls it: the method, and the lines of its table in the task file."""
DIRECTIONS = {
    f"devices of {FIRST}, this aggregator": (FIRST, "this"),
    f"these devices, aggregator of {FIRST}": ("this", FIRST),
}


@dataclass(frozen=True)
class Run:
    """Of ``METHODS``; whose devices, and whose aggregator."""

    method: str
    devices: str
    aggregator: str


@dataclass(frozen=True)
class Said:
    """What kept a device from taking part; empty where its update was counted."""

    why: str


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 where a run could not be made."""
    parser = suite_parser("upgrade", _DESCRIPTION, "")
    add_store_options(parser)
    parser.add_argument("--again", action="store_true", help="run what is stored, too")
    options = parser.parse_args(arguments)
    stored = StoredRuns[Run, Said](options.results, "upgrade", Said)
    runs = [Run(method, *ends) for method in METHODS for ends in DIRECTIONS.values()]
    if not options.table_only:
        try:
            _fill(stored, runs, options)
        except (NotHere, RuntimeError, subprocess.CalledProcessError) as error:
            print(error, file=sys.stderr)
            return 1
    print(table({run: said for run in runs if (said := stored.load(run)) is not None}))
    return 0


def _fill(stored: StoredRuns[Run, Said], runs: Iterable[Run], options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        first = built(FIRST, Path(scratch) / "site")
        releases = {FIRST: first, "this": this()}
        for run in runs:
            if stored.load(run) is None or options.again:
                said = outcome(run, releases, Path(scratch))
                print(f"{run.method}, {run.devices} at {run.aggregator}: {said.why or 'counted'}")
                stored.save(run, said)


def table(outcomes: Mapping[Run, Said]) -> str:
    """A row a method, a column a direction, in Markdown; then what the devices said."""
    lines = ["| " + " | ".join(["method", *DIRECTIONS]) + " |", "|---|---|---|"]
    said = []
    for method in METHODS:
        cells = []
        for direction, ends in DIRECTIONS.items():
            found = outcomes.get(Run(method, *ends))
            cells.append("not run" if found is None else "no" if found.why else "yes")
            if found is not None and found.why:
                said.append(f"* {method}, {direction}: `{found.why}`")
        lines.append("| " + " | ".join([method, *cells]) + " |")
    return "\n".join([*lines, "", *said])


def outcome(run: Run, releases: Mapping[str, Release], scratch: Path) -> Said:
    """Play it. Raises RuntimeError where the devices do not say the same, or nothing."""
    method, lines = METHODS[run.method]
    aggregator, devices = releases[run.aggregator], releases[run.devices]
    with (
        tempfile.TemporaryDirectory(dir=scratch) as made,
        running_mosquitto(folder := Path(made)) as broker,
    ):
        home = made_home(aggregator, folder / "home", method, lines, broker.url())
        codes = aggregator.aggregator("invite", home, "--count", str(DEVICES)).split()
        log = folder / "log"
        with served(aggregator, home, log):
            printed = took_part(
                [
                    started(devices, broker.url(), code, folder / f"d{number}", method, number)
                    for number, code in enumerate(codes)
                ]
            )
        if len(set(printed)) != 1:
            raise RuntimeError(f"{run}: {printed}\n{log.read_text()[-2000:]}")
        return Said(printed[0])


@contextmanager
def served(release: Release, home: Path, log: Path) -> Iterator[None]:
    """The release's ``serve`` in the home, until the block ends."""
    serve = release.start(log, "-m", "aggregator.cli", "serve", "--home", home)
    try:
        yield
    finally:
        serve.terminate()
        serve.wait()


def started(
    release: Release, url: str, code: str, home: Path, method: str, number: int
) -> subprocess.Popen[str]:
    """A device of the release, for :func:`took_part`."""
    return subprocess.Popen(
        release.command(HERE / "device.py", url, code, home, method, str(number)),
        env=release.environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def took_part(devices: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What kept each device from taking part; empty for one whose update was counted."""
    printed = [each.communicate()[0] for each in devices]
    return [json.loads(said) if said else "it ended with an error" for said in printed]


def made_home(release: Release, home: Path, method: str, lines: str, url: str) -> Path:
    """A home of the release with a task of the method."""
    release.aggregator("init", home)
    if method == "scatter":
        task = 'catalogue = "items.tsv"'
        (home / "items.tsv").write_text("".join(f"item-{row}\n" for row in range(40)))
    else:
        task = 'artifact = "model"'
        release.run(HERE / "artifact.py", method, home / "model")
    (home / "task.toml").write_text(
        f'[task]\nmethod = "{method}"\n{task}\n[broker]\nurl = "{url}"\n{_ROUND}\n'
        f"[{method}]\n{lines}\n"
    )
    return home


if __name__ == "__main__":
    sys.exit(main())
