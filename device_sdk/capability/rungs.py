"""Artifacts side by side: the real train step of each, timed on batches made up from its ports,
what a round with it costs, and which of them a device would take.

Run as a module it trains one artifact, and prints how much memory that took.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.load import read_manifest, rung_folders
from device_sdk.artifact.manifest import INITIAL_FILE, MANIFEST_FILE, Manifest
from device_sdk.capability.energy import EnergyMeter
from device_sdk.capability.fit import Fit, Request, WorkDone, affordable, choose, confirmed
from device_sdk.capability.machine import describe_machine
from device_sdk.capability.report import BenchChoice, BenchResult, BenchRow
from device_sdk.errors import GraphRunError, NonFiniteStep
from device_sdk.fields import Declared, OneOf, Within
from device_sdk.methods.fedavg.contract import exact_names, tensors_of
from device_sdk.rehearsal import made_up_batches, rows_of_example
from device_sdk.system.clock import Clock, MonotonicClock
from device_sdk.trial import can_try, where_modules_are
from device_sdk.wire.arrays.tensors import encode_tensors
from device_sdk.wire.publish.task_messages import BROADCAST_CODECS

if TYPE_CHECKING:
    from device_sdk.runtime.providers import Providers
    from device_sdk.trainer import Trainer

_PASSES: Final = 3
"""Turns in which each is timed, so that a slow spell of the machine meets all of them."""
_FEWEST, _MOST = 3, 500
"""Steps in a turn."""
_MEMORY_STEPS: Final = 3
_MEMORY_SECONDS: Final = 120.0
_Positive = Annotated[int, Within(1)]
_Codec = Annotated[str, OneOf(tuple(BROADCAST_CODECS))]


@dataclass(frozen=True)
class RungRequest(Declared):
    """What is asked of artifacts, smallest first.

    Attributes:
        batch: samples in a step; None: as many as in the export's example.
        samples, epochs: of a device's round.
        deadline_seconds: a round has to end within it; None: nothing is chosen.
        time_box_seconds: for the timed steps, and as long again for the choice.
        slowdown: so many times slower a device is emulated.
        most_memory_bytes, most_bytes: what takes more of memory, or down and up in a round, is not
            chosen.
        broadcast_codec, update_codec: the task's.
    """

    batch: _Positive | None = None
    samples: _Positive = 1000
    epochs: _Positive = 1
    deadline_seconds: Annotated[float, Within(0, above=True)] | None = None
    headroom: Annotated[float, Within(0, 1, below=True)] = 0.2
    time_box_seconds: Annotated[float, Within(0, above=True)] = 5.0
    slowdown: Annotated[float, Within(1)] = 1.0
    most_memory_bytes: _Positive | None = None
    most_bytes: _Positive | None = None
    broadcast_codec: _Codec = "float16"
    update_codec: _Codec = "int8"
    threads: _Positive = 1


@dataclass(slots=True, eq=False)
class OpenArtifact:
    """An artifact ready to step."""

    name: str
    folder: Path
    trainer: Trainer
    batch: Mapping[str, NDArray[Any]]
    cold_seconds: float
    rows: int
    steps: list[float] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)

    @property
    def manifest(self) -> Manifest:
        return self.trainer.artifact

    def step(self) -> None:
        """One train step."""
        try:
            self.trainer.step(self.batch)
        except NonFiniteStep:
            self.trainer.reset()  # labels made up follow from nothing; the step took its time


@dataclass(frozen=True, slots=True)
class RoundOfSteps:
    """A round of so many steps; an :class:`~device_sdk.capability.fit.Option`."""

    rung: OpenArtifact
    steps: int
    clock: Clock

    @property
    def name(self) -> str:
        return self.rung.name

    @property
    def size(self) -> float:
        return float(self.rung.manifest.moved_numbers)

    def run(self, most_seconds: float) -> WorkDone:
        """Do it once, at least one step of it."""
        start, done = self.clock.now(), 0
        while done < self.steps and (not done or self.clock.now() - start < most_seconds):
            self.rung.step()
            done += 1
        return WorkDone(self.clock.now() - start, done, done == self.steps)


def bench_artifacts(
    folders: Sequence[Path],
    request: RungRequest | None = None,
    *,
    providers: Providers = "auto",
    clock: Clock | None = None,
    rng: np.random.Generator | None = None,
    progress: Callable[[str], None] = lambda text: None,
    memory_of: Callable[[Path, int | None, Providers, int], int | None] | None = None,
) -> BenchResult:
    """Time the artifacts of these folders, each of which may be a ladder's with all its rungs.

    The choice is the one that a device makes in a round (:func:`choose`), of rounds of
    ``samples`` x ``epochs`` in such steps. ``progress`` is told what is being done; ``memory_of``:
    :func:`peak_memory`, where None.

    Raises ArtifactError for what is no artifact, BatchError for a batch size that one does not
    take, GraphRunError where none of the batches that were made up trains it.
    """
    request = RungRequest() if request is None else request
    clock = MonotonicClock() if clock is None else clock
    rng = np.random.default_rng(0) if rng is None else rng
    measure = peak_memory if memory_of is None else memory_of
    start = clock.now()
    with ExitStack() as stack:
        rungs = open_artifacts(folders, request, providers, clock, rng, stack, progress)
        memory = {}
        for rung in rungs:
            progress(f"measuring the memory of {rung.name}")
            memory[rung.name] = measure(rung.folder, request.batch, providers, request.threads)
        meter = EnergyMeter(clock)
        _time(rungs, request.time_box_seconds, clock, meter, progress)
        measured = tuple(_measured(rung, memory[rung.name], request, rng) for rung in rungs)
        progress("choosing")
        choice = _choice(rungs, measured, request, clock)
        first = rungs[0].trainer
        rows = {rung.rows for rung in rungs}
        of = f" of {rows.pop()} samples" if len(rows) == 1 else ""
        return BenchResult(
            kind="rung" if rungs[0].manifest.submodel is not None else "artifact",
            work=f"a train step{of}",
            machine=describe_machine(threads=first.threads, provider=first.providers[0]),
            rows=measured,
            slowdown=request.slowdown,
            elapsed_seconds=clock.now() - start,
            energy=meter.source,
            codecs=(request.broadcast_codec, request.update_codec),
            choice=choice,
        )


def found_artifacts(folders: Sequence[Path]) -> dict[str, Path]:
    """Artifacts by the names that they are told apart by, smallest first."""
    found = [each for folder in folders for each in rung_folders(folder)]
    found.sort(key=lambda folder: read_manifest(folder).moved_numbers)
    for named in (
        [read_manifest(folder).name for folder in found],
        [folder.resolve().name for folder in found],
        [f"{folder.resolve().parent.name}/{folder.resolve().name}" for folder in found],
    ):
        if len(set(named)) == len(found):
            return dict(zip(named, found, strict=True))
    return {str(folder): folder for folder in found}


def open_artifacts(
    folders: Sequence[Path],
    request: RungRequest,
    providers: Providers,
    clock: Clock,
    rng: np.random.Generator,
    stack: ExitStack,
    progress: Callable[[str], None] = lambda text: None,
) -> list[OpenArtifact]:
    """All of :func:`found_artifacts`, each after its first step; ``stack`` ends with their files.

    Raises as :func:`bench_artifacts` does.
    """
    found = []
    for name, folder in found_artifacts(folders).items():
        progress(f"opening {name}")
        own = _as_on_a_device(folder, stack)
        found.append(_opened(name, own, request, providers, clock, rng))
    return found


def _as_on_a_device(folder: Path, stack: ExitStack) -> Path:
    """A submodel without the full model's values beside it: a device never has them, and takes its
    memory and time without."""
    manifest = read_manifest(folder)
    if manifest.submodel is None:
        return folder
    beside = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tessera-bench-")))
    own = beside / "rung"
    own.mkdir()
    files = dict.fromkeys((MANIFEST_FILE, *manifest.files), own)
    for name, place in {**files, manifest.shared_file: beside}.items():
        found = (folder if place is own else folder.resolve().parent) / name
        if name and found.is_file():  # what is missing is named by whoever loads it
            shutil.copyfile(found, place / name)
    return own


def _opened(
    name: str,
    folder: Path,
    request: RungRequest,
    providers: Providers,
    clock: Clock,
    rng: np.random.Generator,
) -> OpenArtifact:
    from device_sdk.trainer import Trainer  # onnxruntime is for those who measure with it

    trainer = Trainer(folder, providers=providers, threads=request.threads, clock=clock)
    rows = rows_of_example(trainer.artifact) if request.batch is None else request.batch
    start = clock.now()
    batch = first_step(trainer, rows, rng)
    return OpenArtifact(name, folder, trainer, batch, clock.now() - start, rows)


def first_step(trainer: Trainer, rows: int, rng: np.random.Generator) -> Mapping[str, NDArray[Any]]:
    """Take a step on a made-up batch, and give the first such batch that trains; one whose loss is
    not finite where none does better. Raises GraphRunError where the graph takes none of them."""
    failed: GraphRunError | None = None
    usable: list[Mapping[str, NDArray[Any]]] = []
    for draw in made_up_batches(trainer.artifact, rng):
        batch = draw(rows)
        try:
            trainer.step(batch)
        except NonFiniteStep:
            usable.append(batch)
        except GraphRunError as error:
            failed = error
        else:
            return batch
    if usable:
        return usable[0]
    assert failed is not None
    raise failed


def _time(
    rungs: Sequence[OpenArtifact],
    seconds: float,
    clock: Clock,
    meter: EnergyMeter,
    progress: Callable[[str], None],
) -> None:
    share = seconds / len(rungs) / _PASSES
    for _ in range(_PASSES):
        for rung in rungs:
            progress(f"timing {rung.name}")
            rung.step()  # after another's turn the caches are cold
            began, taken = clock.now(), 0
            meter.start()
            while taken < _FEWEST or (taken < _MOST and clock.now() - began < share):
                start = clock.now()
                rung.step()
                rung.steps.append(clock.now() - start)
                taken += 1
            joules = meter.joules()
            if joules is not None:
                rung.joules.append(joules / taken)


def _measured(
    rung: OpenArtifact, memory: int | None, request: RungRequest, rng: np.random.Generator
) -> BenchRow:
    p50, p90 = (float(each) for each in np.quantile(rung.steps, (0.5, 0.9)))
    manifest = rung.manifest
    down, up = round_bytes(rung.trainer, request.broadcast_codec, request.update_codec, rng)
    files = sum(entry.size for name, entry in manifest.files.items() if name != INITIAL_FILE)
    files += 0 if manifest.shared is None else manifest.shared.size
    return BenchRow(
        option=rung.name,
        runs=len(rung.steps),
        cold_seconds=rung.cold_seconds * request.slowdown,
        p50_seconds=p50 * request.slowdown,
        p90_seconds=p90 * request.slowdown,
        numbers=manifest.moved_numbers,
        samples_a_second=rung.rows / (p50 * request.slowdown),
        peak_memory_bytes=memory,
        once_bytes=files + len(manifest.to_json()),
        down_bytes=down,
        up_bytes=up,
        joules=float(np.median(rung.joules)) if rung.joules else None,
    )


def round_bytes(trainer: Trainer, down: str, up: str, rng: np.random.Generator) -> tuple[int, int]:
    """Bytes of a broadcast's and of an update's arrays, in these codecs, of a method that shares
    all that a step moves; the envelopes around them add less than 1 kB."""
    moved, held = tensors_of(trainer.artifact, trainer.parameters, trainer.buffers)
    sizes = []
    for codec, layout in ((down, (*moved, *held)), (up, moved)):
        # As large as weights are: codecs widen for values that they do not hold.
        arrays = {
            one.wire_name: 0.1 * rng.standard_normal(one.wire_shape, dtype=np.float32)
            for one in layout
        }
        found = encode_tensors(arrays, BROADCAST_CODECS[codec], rng, exact=exact_names(moved))
        sizes.append(len(found))
    return sizes[0], sizes[1]


# What a device would take.


def _choice(
    rungs: Sequence[OpenArtifact],
    rows: Sequence[BenchRow],
    request: RungRequest,
    clock: Clock,
) -> BenchChoice | None:
    if request.deadline_seconds is None:
        return None
    asked = Request(
        request.deadline_seconds,
        headroom=request.headroom,
        time_box_seconds=request.time_box_seconds,
        slowdown=request.slowdown,
    )
    by_name = {row.option: row for row in rows}

    def memory(rung: OpenArtifact) -> int | None:
        return by_name[rung.name].peak_memory_bytes

    def transfer(rung: OpenArtifact) -> int:
        return (by_name[rung.name].down_bytes or 0) + (by_name[rung.name].up_bytes or 0)

    small, too_large = affordable(rungs, memory, request.most_memory_bytes, "of memory")
    small, too_many = affordable(small, transfer, request.most_bytes, "a round")
    steps = {each.name: request.epochs * math.ceil(request.samples / each.rows) for each in rungs}
    works = [RoundOfSteps(rung, steps[rung.name], clock) for rung in small]
    fit = Fit(None, None, "None is small enough.")
    if works:
        fit = choose(works, asked, clock)
    work = None if fit.place is None else works[fit.place]
    kept, told = (False, "") if work is None else confirmed(work, asked, clock)
    return BenchChoice(
        round=f"{steps[rungs[0].name]:,} steps ({request.samples:,} samples x {request.epochs})",
        deadline_seconds=asked.deadline_seconds,
        limit_seconds=asked.limit_seconds,
        fits=work is not None,
        confirmed=kept,
        reason=f"{fit.reason}{too_large}{too_many}{told}",
        option=None if work is None else work.name,
        round_seconds=fit.p90_seconds,
    )


# Memory, in a process of its own.


def peak_memory(folder: Path, batch: int | None, providers: Providers, threads: int) -> int | None:
    """The most bytes that a process which trains the artifact takes beyond what it has before;
    None where no process is to be had, or the system does not tell."""
    if not can_try() or not isinstance(providers, str):
        return None
    own = [os.path.abspath(folder), str(batch or 0), providers, str(threads)]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "device_sdk.capability.rungs", *own],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(where_modules_are())},
            capture_output=True,
            text=True,
            timeout=_MEMORY_SECONDS,
            check=True,
        )
        return int(done.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _most_resident_bytes() -> int:
    """The most that this process ever had in memory. Not Linux's ru_maxrss, which a process takes
    over from the one that starts it."""
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Train the artifact of a folder for a few steps, and print the bytes that it took."""
    folder, batch, providers, threads = sys.argv[1:]
    from device_sdk.trainer import Trainer

    with contextlib.suppress(OSError):  # what importing took for a moment, Linux forgets
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _most_resident_bytes()
    trainer = Trainer(folder, providers=providers, threads=int(threads))
    rows = int(batch) or rows_of_example(trainer.artifact)
    made = first_step(trainer, rows, np.random.default_rng(0))
    for _ in range(_MEMORY_STEPS):
        try:
            trainer.step(made)
        except NonFiniteStep:
            trainer.reset()
    print(_most_resident_bytes() - before)


if __name__ == "__main__":
    main()
