"""Where runs go beside their records: TensorBoard, MLflow, or a sink of an installed package.

An entry point of the group ``tessera.run_sinks`` names a :class:`RunSink`. What one raises costs no
run: it is said once, and that sink is left out from there on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aggregator.errors import AggregatorError
from aggregator.evaluation import FLEET, Figure, figure_name
from aggregator.operate.runs import INTERRUPTED
from aggregator.simulate.run import Ended, Event, Simulated
from aggregator.simulate.task_rounds import PlayedRound
from device_sdk.methods.registry import MethodError, load_method
from device_sdk.system.printable import in_words

SINKS = "tessera.run_sinks"
_Of = tuple[Simulated, int]
"""A run, by what is simulated and its seed."""


@dataclass(frozen=True, slots=True)
class SinkRun:
    """A run of one seed that begins.

    Attributes:
        task: of the file.
        name, seed: of the run.
        folder: of the records (``--out``); what a sink writes lies below it.
        settings: in force, by name, as JSON has them; options and versions among them.
    """

    task: str
    name: str
    seed: int
    folder: Path
    settings: Mapping[str, Any]


class RunSink(ABC):
    """Takes one run of one seed, from the process that records it. It is made without arguments;
    with ``--jobs`` there are several at a time, each called by turns.

    Values are by name: figures as tables have them (``hr10_all``, ``personal.accuracy``), and
    ``devices/counted``, ``bytes/up`` and their like. None of them is infinite or NaN.
    """

    @abstractmethod
    def begin(self, run: SinkRun) -> None:
        """The run begins."""

    @abstractmethod
    def round(self, number: int, values: Mapping[str, float]) -> None:
        """A round was played, from 1 on; figures are of the version that it began with. Again for a
        round of before, with figures alone, where these came late."""

    @abstractmethod
    def end(self, state: str, number: int, values: Mapping[str, float]) -> None:
        """The run is over: ``finished``, ``stopped early`` or ``interrupted``. Figures are of the
        newest version, with which round ``number`` would begin."""


class Sinks:
    """The sinks of a command.

    Args:
        names: of entry points.
        say: is told, once each, of a sink that failed.

    Raises AggregatorError where one is not installed, or what it needs is not.
    """

    def __init__(self, names: Iterable[str], say: Callable[[str], None]) -> None:
        self._say = say
        self._kinds: dict[str, type[RunSink]] = {}
        for name in names:
            try:
                self._kinds[name] = load_method(SINKS, name, RunSink, noun="sink")
            except MethodError as error:
                raise AggregatorError(f"--sink {name}: {error}") from None
        self._open: dict[_Of, dict[str, RunSink]] = {}
        self._next: dict[_Of, int] = {}

    def take(self, simulated: Simulated, seed: int, event: Event) -> None:
        """Tell all of them what became of the run of a seed, once it is recorded."""
        of = simulated, seed
        if isinstance(event, PlayedRound):
            if of not in self._open:  # from the first round on the record has its name
                self._begin(of)
            self._next[of] = event.number + 1
            self._each(of, "round", event.number, _values(event))
            for number, figures in event.earlier.items():
                self._each(of, "round", number, _figures(figures))
        elif isinstance(event, Ended) and of in self._open:
            self._end(of, event.state, _figures(event.figures))

    def close(self) -> None:
        """Runs that are not over were interrupted."""
        for of in list(self._open):
            self._end(of, INTERRUPTED, {})

    def _begin(self, of: _Of) -> None:
        simulated, seed = of
        recorder = simulated.recorder
        settings = recorder.made().settings
        run = SinkRun(simulated.task.name, recorder.name, seed, recorder.folder, settings)
        self._open[of] = {}
        for name, kind in list(self._kinds.items()):
            self._guarded(name, self._made, of, name, kind, run)

    def _made(self, of: _Of, name: str, kind: type[RunSink], run: SinkRun) -> None:
        sink = kind()
        sink.begin(run)
        self._open[of][name] = sink

    def _end(self, of: _Of, state: str, values: Mapping[str, float]) -> None:
        self._each(of, "end", state, self._next[of], values)
        del self._open[of]

    def _each(self, of: _Of, does: str, *told: object) -> None:
        for name, sink in self._open[of].items():
            self._guarded(name, getattr(sink, does), *told)

    def _guarded(self, name: str, call: Callable[..., None], *told: object) -> None:
        if name not in self._kinds:
            return
        try:
            call(*told)
        except (Exception, SystemExit) as error:  # somebody else's code
            del self._kinds[name]
            self._say(f"--sink {name} is left out from here on, the runs go on: {in_words(error)}")


def _figures(figures: Sequence[Figure]) -> dict[str, float]:
    found = {figure_name(each.stage, each.metric): each for each in figures if each.part == FLEET}
    return {name: each.value for name, each in found.items() if math.isfinite(each.value)}


def _values(played: PlayedRound) -> dict[str, float]:
    counts = {
        "devices/selected": played.selected,
        "devices/counted": played.counted,
        "devices/late": played.late,
        "devices/away": played.silent + played.crashed,
        "devices/failed": sum(played.failed.values()) + sum(played.refused.values()),
        "bytes/down": played.down_bytes,
        "bytes/up": played.up_bytes,
        "seconds": played.began_seconds + played.seconds,
    }
    own = {f"method/{name}": value for name, value in played.metrics.items()}
    values = {name: float(value) for name, value in (counts | own).items()}
    return {name: value for name, value in values.items() if math.isfinite(value)} | _figures(
        played.figures
    )
