"""What `bench` found on a device: kept as JSON, shown as a table, laid over other devices'."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from device_sdk.capability.machine import Machine
from device_sdk.fields import Declared, Misfit, Within, plain, read
from device_sdk.system.printable import printable, size, text_table

_FORMAT = "tessera_bench"
_VERSION = 1
_MOST_BYTES = 16 << 20

_Seconds = Annotated[float, Within(0)]
_Count = Annotated[int, Within(0)]


class NoResult(ValueError):
    """A file holds no result of `bench`; the message says which, and why."""


@dataclass(frozen=True)
class BenchRow(Declared):
    """One option: a rung of a ladder, an artifact, or a k.

    Attributes:
        option: its name.
        numbers: how many it trains.
        runs: of the work that were timed, all of them warm.
        p50_seconds, p90_seconds: of a run; None where none ended by the limit.
        cold_seconds: of the first run, which the others leave out; None of a k.
        samples_a_second: by the median.
        peak_memory_bytes: the most that a process which trains it took beyond Python, NumPy and
            onnxruntime.
        once_bytes: of its graphs and its manifest, which a device fetches once.
        down_bytes, up_bytes: of a round's broadcast and update, in the task's codecs.
        joules: of the whole machine in a run.
    """

    option: str
    runs: _Count
    cold_seconds: _Seconds | None = None
    p50_seconds: _Seconds | None = None
    p90_seconds: _Seconds | None = None
    numbers: _Count | None = None
    samples_a_second: _Seconds | None = None
    peak_memory_bytes: _Count | None = None
    once_bytes: _Count | None = None
    down_bytes: _Count | None = None
    up_bytes: _Count | None = None
    joules: _Seconds | None = None


@dataclass(frozen=True)
class BenchChoice(Declared):
    """What the device would take of them.

    Attributes:
        round: its work in words, such as "32 steps".
        deadline_seconds, limit_seconds: for a round, and what its p90 may be of that.
        fits: an option keeps the limit. Where none does, `option` is the smallest, or None where
            the device declines.
        confirmed: measured again after the choice, it kept the deadline.
        round_seconds: the chosen one's p90.
    """

    round: str
    deadline_seconds: _Seconds
    limit_seconds: _Seconds
    fits: bool
    confirmed: bool
    reason: str
    option: str | None = None
    round_seconds: _Seconds | None = None


@dataclass(frozen=True)
class BenchResult(Declared):
    """All of it, for one device.

    Attributes:
        kind: what the options are: "rung", "artifact" or "k".
        work: what a run is, in words.
        slowdown: by which a slower device was emulated; every duration is that device's.
        elapsed_seconds: that the measurement took.
        energy: what told of it ("rapl", "battery"); empty where nothing did.
        codecs: of broadcast and update.
    """

    kind: str
    work: str
    machine: Machine
    rows: tuple[BenchRow, ...]
    slowdown: Annotated[float, Within(1)]
    elapsed_seconds: _Seconds
    energy: str = ""
    codecs: tuple[str, ...] = ()
    choice: BenchChoice | None = None

    def to_json(self) -> str:
        """As :meth:`read` takes it."""
        chosen = None if self.choice is None else self.choice.option
        return json.dumps({_FORMAT: _VERSION, "chosen": chosen, **plain(self)}, indent=2)

    @classmethod
    def read(cls, path: Path) -> BenchResult:
        """Raises NoResult for anything else than what :meth:`to_json` wrote."""
        try:
            with path.open(encoding="utf-8") as file:
                found = json.loads(file.read(_MOST_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or "it is no JSON"
            raise NoResult(f"{path} is no result of tessera-device bench: {why}") from None
        if not isinstance(found, dict) or found.get(_FORMAT) != _VERSION:
            raise NoResult(
                f"{path} is no result of tessera-device bench: it has no {_FORMAT!r}: {_VERSION}; "
                "bench --out DIR writes bench.json"
            )
        try:
            return read(cls, {k: v for k, v in found.items() if k not in (_FORMAT, "chosen")})
        except Misfit as misfit:
            raise NoResult(f"{path} is no result of tessera-device bench: {misfit}") from None


# For people.


def shown(result: BenchResult) -> str:
    """The machine, a line an option, and the choice with its reason."""
    parts = [_machine_lines(result.machine)]
    if result.slowdown > 1.0:
        parts.append(
            f"EMULATED: every duration is {result.slowdown:g} times as long, as on a device that "
            "much slower than this one."
        )
    if result.rows:
        parts.append(f"A run is {result.work}.")
        parts.append(_rows_table(result))
    notes = []
    if any(row.down_bytes is not None for row in result.rows):
        down, up = result.codecs
        notes.append(
            "memory: the most that training took beyond Python, NumPy and onnxruntime. once: its "
            f"graphs, fetched once. down, up: of a round, as {down} and {up}."
        )
    if result.energy:
        notes.append(f"energy: of the whole machine, as its {result.energy} tells.")
    parts += ["\n".join(notes)] if notes else []
    if result.choice is not None:
        parts.append(_choice_line(result))
    parts.append(f"Measured for {result.elapsed_seconds:.1f} s.")
    return "\n\n".join(parts)


def _choice_line(result: BenchResult) -> str:
    choice = result.choice
    assert choice is not None
    if choice.option is None:
        return f"The device declines. {choice.reason}"
    name = f"k = {choice.option}" if result.kind == "k" else choice.option
    return f"Chosen: {name}. {choice.reason}"


def _rows_table(result: BenchResult) -> str:
    choice = result.choice
    cells: dict[str, list[str]] = {result.kind: []}
    for row in result.rows:
        star = " *" if choice is not None and row.option == choice.option else ""
        for name, cell in _cells(row, choice if result.kind == "k" else None).items():
            cells.setdefault(name, []).append(cell)
        cells[result.kind].append(printable(row.option, 40) + star)
    told = {name: found for name, found in cells.items() if set(found) != {"-"}}
    table = text_table([*zip(*told.values(), strict=True)], [*told], "l" + "r" * (len(told) - 1))
    return table + ("\n* the device would take it" if "*" in table else "")


def _cells(row: BenchRow, limit: BenchChoice | None) -> dict[str, str]:
    found = {
        "trains": "-" if row.numbers is None else f"{row.numbers:,}",
        "p50 ms": _milliseconds(row.p50_seconds),
        "p90 ms": _milliseconds(row.p90_seconds),
        "first ms": _milliseconds(row.cold_seconds),
        "runs": str(row.runs),
        "samples/s": "-" if row.samples_a_second is None else f"{row.samples_a_second:,.0f}",
        "memory": _bytes(row.peak_memory_bytes),
        "once": _bytes(row.once_bytes),
        "down": _bytes(row.down_bytes),
        "up": _bytes(row.up_bytes),
        "energy mJ": "-" if row.joules is None else f"{row.joules * 1e3:.3g}",
    }
    if limit is not None:
        found["of the limit"] = (
            "-" if row.p90_seconds is None else f"{row.p90_seconds / limit.limit_seconds:.0%}"
        )
    return found


def _machine_lines(machine: Machine) -> str:
    memory = (
        f"{_gibibytes(machine.memory_total_bytes)} total, "
        f"{_gibibytes(machine.memory_available_bytes)} available"
    )
    cores = f"{machine.cores:g} usable"
    if machine.affinity is not None:
        cores += f" (affinity: {_ranges(machine.affinity)})"
    if machine.quota is not None:
        cores += f" (a container's quota of {machine.quota:g})"
    rows = [
        ("processor", f"{machine.cpu_model} ({machine.architecture})"),
        ("cores", f"{cores}, {machine.threads} thread(s) in use"),
        ("provider", machine.provider),
        ("memory", memory),
        ("versions", ", ".join(f"{name} {each}" for name, each in machine.versions.items())),
    ]
    return text_table([(name, printable(each)) for name, each in rows])


def _ranges(numbers: Sequence[int]) -> str:
    """Such as "0-3, 6"."""
    spans: list[list[int]] = []
    for each in numbers:
        if spans and each == spans[-1][1] + 1:
            spans[-1][1] = each
        else:
            spans.append([each, each])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    found = seconds * 1e3
    return f"{found:.{max(0, 2 - math.floor(math.log10(max(found, 1e-3))))}f}"


def _bytes(count: int | None) -> str:
    return "-" if count is None else size(count)


def _gibibytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"


# Beside each other.


def device_names(paths: Sequence[Path]) -> list[str]:
    """What results are called by their files: the folder's name where they are called as
    ``bench --out`` calls them, or all alike."""
    stems = [path.stem for path in paths]
    if len(set(stems)) < len(stems) or set(stems) == {"bench"}:
        stems = [path.resolve().parent.name for path in paths]
    return [
        f"{stem} ({place})" if stems.count(stem) > 1 else stem
        for place, stem in enumerate(stems, 1)
    ]


def compared(results: Sequence[BenchResult], names: Sequence[str]) -> str:
    """One table: a line an option, two columns a device."""
    options = list(dict.fromkeys(row.option for each in results for row in each.rows))
    headers = [results[0].kind]
    columns = [[printable(each, 40) for each in options]]
    for result, name in zip(results, names, strict=True):
        by_option = {row.option: row for row in result.rows}
        found = [by_option.get(each) for each in options]
        taken = None if result.choice is None else result.choice.option
        headers += [f"{printable(name, 30)}: p90 ms", "samples/s"]
        columns.append(
            [
                "-" if row is None else _milliseconds(row.p90_seconds) + " *" * (each == taken)
                for each, row in zip(options, found, strict=True)
            ]
        )
        columns.append(["-" if row is None else _cells(row, None)["samples/s"] for row in found])
    machines = [
        (
            printable(name, 30),
            f"{each.machine.cpu_model}, {each.machine.cores:g} cores, {each.machine.threads} "
            f"thread(s), {each.machine.provider}, onnxruntime "
            f"{each.machine.versions.get('onnxruntime', 'unknown')}"
            + (f", EMULATED {each.slowdown:g} times slower" if each.slowdown > 1 else ""),
        )
        for name, each in zip(names, results, strict=True)
    ]
    table = text_table([*zip(*columns, strict=True)], headers, "l" + "r" * (len(columns) - 1))
    notes = ["* the device would take it"] if "*" in table else []
    works = dict.fromkeys(each.work for each in results)
    if len(works) > 1:
        notes.append(f"These are not of the same work: {'; '.join(works)}.")
    machine_table = text_table([(name, printable(each)) for name, each in machines])
    return "\n\n".join([machine_table, "\n".join([table, *notes])])


def to_csv(results: Sequence[BenchResult], names: Sequence[str]) -> str:
    """A line an option and device, SI units, what is not known left empty."""
    keys = [each.name for each in fields(BenchRow)]
    file = io.StringIO()
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(["device", "kind", *keys, "chosen", "slowdown"])
    for result, name in zip(results, names, strict=True):
        taken = None if result.choice is None else result.choice.option
        for row in result.rows:
            values = [getattr(row, key) for key in keys]
            chosen = int(row.option == taken)
            lines.writerow([name, result.kind, *values, chosen, result.slowdown])
    return file.getvalue()
