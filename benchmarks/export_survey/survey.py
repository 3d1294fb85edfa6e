"""One subject measured: exported in a process of its own, then trained by turns with torch.

Every contender (the artifact, torch, another checkout's artifact) is a fresh process, so that its
peak memory and its opening are its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.export_survey.subject import Subject
from benchmarks.harness import AnswerError, Answering

ROOT = Path(__file__).resolve().parents[2]
OURS, TORCH, BEFORE = "ours", "torch", "before"
TURNS = 7


@dataclass(frozen=True)
class Settings:
    """How subjects are measured.

    ``limit_seconds`` is each export's, and each contender's for any one answer. ``against`` is
    another checkout. Without ``timed``, subjects are exported and compared only. Without
    ``verified`` an export goes unverified, and only the five steps after it judge it.
    """

    limit_seconds: float = 900.0
    timed: bool = True
    against: Path | None = None
    verified: bool = True
    turn_seconds: float = 0.3
    """About, of each contender's each turn."""

    @property
    def checkouts(self) -> dict[str, Path]:
        """Whose ``export`` and ``device_sdk`` are measured."""
        return {OURS: ROOT} | ({BEFORE: self.against} if self.against else {})


@dataclass(frozen=True)
class Run:
    """What is stored once: the newest outcome of a subject, timed and not."""

    subject: str
    kind: str
    timed: bool
    compared: bool
    """With another checkout."""
    verified: bool = True


@dataclass(frozen=True)
class Exporting:
    """``verdict``: right, wrong, refused, failed, over time, not written; ``said``: in full."""

    verdict: str
    said: str
    seconds: float
    nodes: int


@dataclass(frozen=True)
class Training:
    """``turns``: seconds a step of each turn; ``opening_seconds`` holds the first step."""

    opening_seconds: float
    peak_mib: float
    turns: list[float]


@dataclass(frozen=True)
class Outcome:
    """What was found, by contender. ``sources``: a digest of all that it was found with."""

    sources: str
    exporting: dict[str, Exporting] = field(default_factory=dict)
    training: dict[str, Training] = field(default_factory=dict)
    said: str = ""
    """Why a contender's training was not timed."""

    def ratios(self, contender: str = OURS, against: str = TORCH) -> list[float]:
        """How many times faster the contender was, turn by turn; empty where not both were."""
        if not {contender, against} <= self.training.keys():
            return []
        both = zip(self.training[contender].turns, self.training[against].turns, strict=True)
        return [theirs / ours for ours, theirs in both]


def sources(subject: Subject, settings: Settings) -> str:
    """Names the code that an outcome depends on: the products' and the subject's own file."""
    files = [Path(sys.modules[subject.write.__module__].__file__ or "")]
    for checkout in settings.checkouts.values():
        for package in ("export", "device_sdk"):
            files += sorted((checkout / package).rglob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def measure(subject: Subject, settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Export, compare and time one subject; ``say`` takes a line of progress."""
    exported: dict[str, Exporting] = {}
    training: dict[str, Training] = {}
    said = ""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as processes:
        folders = {name: Path(temporary) / name for name in settings.checkouts}
        for name, checkout in settings.checkouts.items():
            folders[name].mkdir()
            say(f"exporting ({name})")
            exported[name] = _export(subject, checkout, folders[name], settings)
        if settings.timed:
            said, training = _trained(subject, settings, exported, folders, say, processes)
    say(", ".join(f"{name}: {one.verdict}" for name, one in exported.items()))
    return Outcome(sources(subject, settings), exported, training, said)


def _export(subject: Subject, checkout: Path, folder: Path, settings: Settings) -> Exporting:
    limit = settings.limit_seconds
    verified = "verified" if settings.verified else "unverified"
    with _environment(checkout) as environment:
        try:
            done = subprocess.run(
                [*_PYTHON, "benchmarks.export_survey.exporting", subject.name,
                 str(folder / "artifact"), verified],
                capture_output=True, text=True, timeout=limit, env=environment, cwd=folder,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Exporting("over time", f"not exported in {limit:.0f} s", limit, 0)
    if done.returncode or not done.stdout:
        said = f"the process ended with {done.returncode}\n{done.stderr[-4000:]}"
        return Exporting("failed", said, 0.0, 0)
    return Exporting(**json.loads(done.stdout.splitlines()[-1]))


_PYTHON = (sys.executable, "-m")


@contextmanager
def _environment(checkout: Path) -> Iterator[dict[str, str]]:
    """One thread, and the checkout's packages; the benchmarks are always this checkout's."""
    with tempfile.TemporaryDirectory() as path:
        for package in ("export", "device_sdk"):
            (Path(path) / package).symlink_to(checkout.resolve() / package)
        yield {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((path, str(ROOT))),
            "OMP_NUM_THREADS": "1",
            "ORT_DISABLE_TELEMETRY": "1",
        }


def _trained(
    subject: Subject,
    settings: Settings,
    exported: Mapping[str, Exporting],
    folders: Mapping[str, Path],
    say: Callable[[str], None],
    processes: ExitStack,
) -> tuple[str, dict[str, Training]]:
    """Torch and every artifact there is, by turns; why not, where there is none."""
    contenders = {}
    for name, checkout in settings.checkouts.items():
        if exported[name].verdict in ("right", "wrong"):
            batch = folders[name] / "batch.npz"
            arguments = ("artifact", str(folders[name] / "artifact"), str(batch))
            contenders[name] = (checkout, arguments)
    if not contenders:
        return "", {}
    contenders[TORCH] = (ROOT, ("torch", subject.name))
    say("timing")
    try:
        opened = {}
        for name, (checkout, arguments) in contenders.items():
            environment = processes.enter_context(_environment(checkout))
            contender = Contender(arguments, environment, settings.limit_seconds)
            opened[name] = processes.enter_context(closing(contender))
        return "", by_turns(opened, settings.turn_seconds)
    except AnswerError as error:
        return str(error), {}


class Contender:
    """A process of :mod:`contender`."""

    def __init__(
        self, arguments: tuple[str, ...], environment: Mapping[str, str], limit_seconds: float
    ) -> None:
        self._process = Answering(
            " ".join(arguments[:2]),
            [*_PYTHON, "benchmarks.export_survey.contender", *arguments],
            environment=environment,
            cwd=Path(tempfile.gettempdir()),
            limit_seconds=limit_seconds,
        )
        self.first: float = self._process.first["seconds"]
        """Seconds of opening and the first step."""
        self.peak_mib = 0.0
        self.close = self._process.close

    def seconds(self, steps: int) -> float:
        """Train so many steps; returns the seconds that they took. Raises AnswerError."""
        answer = self._process.ask(str(steps))
        self.peak_mib = float(answer["peak_bytes"]) / 2**20
        return float(answer["seconds"])


def by_turns(contenders: Mapping[str, Contender], turn_seconds: float) -> dict[str, Training]:
    """Each in blocks of about ``turn_seconds``, one after the other, :data:`TURNS` times."""
    steps = {}
    for name, contender in contenders.items():
        contender.seconds(1)
        once = statistics.mean([contender.seconds(1), contender.seconds(1)])
        steps[name] = max(1, min(1000, round(turn_seconds / max(once, 1e-6))))
    turns: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(TURNS):
        for name, contender in contenders.items():
            turns[name].append(contender.seconds(steps[name]) / steps[name])
    return {
        name: Training(contender.first, contender.peak_mib, turns[name])
        for name, contender in contenders.items()
    }
