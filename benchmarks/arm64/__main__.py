"""`make arm64`: the device's install on an emulated aarch64, and its train steps beside ours."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks import device_wheels
from benchmarks.arm64 import steps
from benchmarks.arm64.emulated import PYTHONS, SHARED, CannotEmulate, Emulated, prepared
from benchmarks.device.timing import exported
from benchmarks.device.workloads import Workload, small_workloads
from benchmarks.device_install import ROOT, InstallError, build_wheel
from benchmarks.harness import RESULTS, StoredRuns, markdown_table, suite_parser
from device_sdk.artifact.safetensors import Array
from device_sdk.capability.rungs import first_step
from device_sdk.factorisation import packaged_artifact, packaged_artifacts
from device_sdk.runtime.providers import TOLERANCE, compare

_DESCRIPTION = """\
Unpacks an arm64 Debian and qemu into build/arm64 (250 MB, kept for the next run), installs this
checkout's wheel there by pip, from wheels for Linux aarch64, runs `tessera-device bench`, and
trains artifacts for three steps there and here: how far apart is their state? The exit status is 1
where that is more than rounding does here, and 2 where nothing could be run."""
_EPILOG = """\
It takes Linux 6.7, apt and the network, but no root rights. Times under emulation say nothing."""
CORES = ("cortex-a72", "cortex-a76")
"""Raspberry Pi 4's, and 5's, which has half precision and dot products beside."""
TRAINED = {
    "CTR": "click model, self-attention",
    "BatchNorm": "MLP, batch norm",
    "GRU": "GRU, two layers",
    "LeNet": "CNN",
}
"""Of bench-device's small models, by the first word of their names there."""
_INSTALLED = "/opt/tessera"
_BENCH = "bench --deadline 0.5 --items 300 --interactions 100 --max-k 8 --time-box 4"


@dataclass(frozen=True)
class Row:
    """What was trained, and on what."""

    suite: str
    core: str
    artifact: str


@dataclass(frozen=True)
class Outcome:
    """The largest difference of one of the state's numbers, and whether rounding makes as much."""

    numbers: int
    apart: float
    holds: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where both train alike, 1 where they do not, 2 where nothing could be run."""
    parser = suite_parser("arm64", _DESCRIPTION, _EPILOG)
    parser.add_argument("--suite", choices=PYTHONS, default="bookworm", help="Debian's release")
    parser.add_argument("--cores", nargs="+", default=CORES, help="as qemu calls them")
    parser.add_argument("--mirror", metavar="URL", help="of Debian (default: this machine's apt's)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where rows are stored")
    parser.add_argument("--table-only", action="store_true", help="print stored rows, run none")
    options = parser.parse_args(arguments)
    stored = StoredRuns[Row, Outcome](options.results, "arm64", Outcome)
    try:
        if not options.table_only:
            _run(options, stored)
    except (CannotEmulate, InstallError, device_wheels.Missing) as error:
        print(f"arm64: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"arm64: {' '.join(error.cmd[-3:])}: failed there, as said above", file=sys.stderr)
        return 2
    lines, holds = [], True
    for name in (*_shipped(), *_exported()):
        found = [stored.load(Row(options.suite, core, name)) for core in options.cores]
        numbers = next((f"{each.numbers:,}" for each in found if each), "-")
        lines.append([name, numbers, *map(_cell, found)])
        holds &= all(each is None or each.holds for each in found)
    print(markdown_table(lines, ["artifact", "numbers in its state", *options.cores]))
    return int(not holds)


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    apart = f"{outcome.apart:.1e}" if outcome.apart else "same bits"
    return apart if outcome.holds else f"{apart}, more than rounding"


def _run(options: argparse.Namespace, stored: StoredRuns[Row, Outcome]) -> None:
    place = ROOT / "build" / "arm64"
    machine = prepared(place, options.suite, options.mirror)
    with TemporaryDirectory(dir=place) as scratch:
        shared = Path(scratch)
        _install(machine, options.suite, shared)
        for core in options.cores:
            print(f"== tessera-device {_BENCH}  # {core}", flush=True)
            bench = [f"{_INSTALLED}/bin/tessera-device", *_BENCH.split()]
            print(machine.run(bench, core=core, shared=shared), flush=True)
        artifacts = _export(shared / "artifacts")
        shutil.copy(steps.__file__, shared)
        script = [f"{_INSTALLED}/bin/python", f"{SHARED}/steps.py", f"{SHARED}/artifacts"]
        for core in options.cores:
            machine.run(script, core=core, shared=shared)
            for name, folder in artifacts.items():
                stored.save(Row(options.suite, core, name), _compared(folder))


def _install(machine: Emulated, suite: str, shared: Path) -> None:
    """The wheel and what it requires, by the other machine's own pip from the files alone."""
    wheel = build_wheel(shared / "wheels")
    (aarch64,) = (each for each in device_wheels.PLATFORMS if each.name == "Linux aarch64")
    device_wheels.download(aarch64, PYTHONS[suite], shared / "wheels")
    pip = [f"{_INSTALLED}/bin/pip", "install", "--quiet", "--no-index"]
    pip += ["--disable-pip-version-check", "--find-links", f"{SHARED}/wheels"]
    for command in (
        ["/usr/bin/python3", "-m", "venv", _INSTALLED],
        [*pip, *device_wheels.device_requirements()],
        [*pip, "--no-deps", "--force-reinstall", f"{SHARED}/wheels/{wheel.name}"],
    ):
        print("==", *command, flush=True)
        machine.run(command, core=CORES[0], shared=shared)


def _shipped() -> dict[str, Path]:
    below = packaged_artifact().parent
    return {f"shipped:{each.relative_to(below).as_posix()}": each for each in packaged_artifacts()}


def _exported() -> dict[str, Workload]:
    known = {re.split(r"\W", each.name)[0]: each for each in small_workloads()}
    return {title: known[word] for word, title in TRAINED.items()}


def _export(into: Path) -> dict[str, Path]:
    """Artifacts by their names, each with a batch that is made up for it."""
    below = packaged_artifact().parent
    shutil.copytree(below, into / "shipped")
    found = {name: into / "shipped" / each.relative_to(below) for name, each in _shipped().items()}
    for name, work in _exported().items():
        found[name] = into / re.sub(r"[^a-z0-9]+", "-", name.lower())
        torch.manual_seed(0)
        exported(work, work.model(), work.batch(), found[name], verify=False)
    for folder in found.values():
        batch = first_step(steps.opened(folder), 8, np.random.default_rng(0))
        np.savez(steps.batch_of(folder), allow_pickle=False, **batch)
    return found


def _compared(artifact: Path) -> Outcome:
    ours, theirs = steps.opened(artifact), steps.opened(artifact)
    start = ours.state
    steps.walked(ours, artifact)
    theirs.restore(steps.state_of(artifact))
    wanted, found = ours.state, theirs.state

    def walk(state: Mapping[str, Array]) -> Mapping[str, Array]:
        theirs.set_state(state)
        return steps.walked(theirs, artifact)

    holds = compare(start, found, wanted, TOLERANCE, walk).holds
    apart = max(float(np.abs(found[n] - wanted[n].astype(float)).max(initial=0)) for n in wanted)
    return Outcome(sum(each.size for each in wanted.values()), apart, holds)


if __name__ == "__main__":
    sys.exit(main())
