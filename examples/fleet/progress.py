"""What the demo shows while it runs: how far it is, and how long it still takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from aggregator.look.page import factor, span

_PLAIN_EVERY_SECONDS = 5.0
_MOST_BAR = 40


@dataclass(frozen=True, slots=True)
class Stage:
    """``units`` of work; ``unit_seconds`` is what one is expected to take before any was seen."""

    name: str
    units: int
    unit_seconds: float


class TimeLeft:
    """Estimates from what the current stage's units took so far, and from guesses for the rest."""

    def __init__(self, stages: tuple[Stage, ...], clock: Callable[[], float]) -> None:
        self._stages = stages
        self._clock = clock
        self._place = 0
        self._done = 0
        self._began = clock()

    @property
    def stage(self) -> Stage:
        """The one that is going on."""
        return self._stages[self._place]

    @property
    def done(self) -> int:
        """Units of it that are done."""
        return self._done

    def update(self, name: str, done: int) -> None:
        """``done`` units of a stage, counted from its start. Stages only go forward."""
        place = next(n for n, stage in enumerate(self._stages) if stage.name == name)
        if place > self._place:
            self._place, self._began, self._done = place, self._clock(), 0
        if place == self._place:
            self._done = max(self._done, min(done, self.stage.units))

    def seconds(self) -> float:
        """What is left, in seconds."""
        taken = self._clock() - self._began
        stage = self.stage
        expected = stage.units * stage.unit_seconds
        # The guess counts as much as two units of experience, and fades.
        unit = (2 * stage.unit_seconds + taken) / (2 + self._done)
        left = (stage.units - self._done) * unit if self._done else max(0.0, expected - taken)
        later = self._stages[self._place + 1 :]
        return left + sum(each.units * each.unit_seconds for each in later)

    def share(self) -> float:
        """Done of everything, 0 to 1, by expected time."""
        costs = [stage.units * stage.unit_seconds for stage in self._stages]
        here = costs[self._place] * self._done / max(1, self.stage.units)
        return (sum(costs[: self._place]) + here) / max(1e-9, sum(costs))


@dataclass(frozen=True, slots=True)
class ClassLine:
    """One capacity class in the live view."""

    devices: int
    slowdown: float | None = None
    ks: tuple[int, ...] = ()
    hit_ratio: float | None = None
    ndcg: float | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """One look at the fleet."""

    stage: str
    done: int
    units: int
    share: float
    seconds_left: float
    detail: str = ""
    round: int = 0
    hit_ratio: float | None = None
    ndcg: float | None = None
    classes: Mapping[str, ClassLine] = field(default_factory=dict)


Show = Callable[[Progress], None]


@contextmanager
def live_view(console: Console, clock: Callable[[], float]) -> Iterator[Show]:
    """A view that redraws itself on a terminal, a plain line now and then elsewhere."""
    if not console.is_terminal:
        yield _plain(console, clock)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield lambda progress: live.update(_drawn(progress, console.width))


def _plain(console: Console, clock: Callable[[], float]) -> Show:
    last: list[tuple[str, float]] = []

    def show(progress: Progress) -> None:
        now = clock()
        if last and last[-1][0] == progress.stage and now - last[-1][1] < _PLAIN_EVERY_SECONDS:
            return
        last[:] = [(progress.stage, now)]
        console.print(_headline(progress), highlight=False, markup=False, soft_wrap=True)

    return show


def _headline(progress: Progress) -> str:
    found = (
        ""
        if progress.hit_ratio is None
        else f", HR@10 {progress.hit_ratio:.3f}, NDCG@10 {progress.ndcg:.3f}"
    )
    detail = f" ({progress.detail})" if progress.detail else ""
    return (
        f"{progress.stage} {progress.done} of {progress.units}{detail}{found}, "
        f"about {span(progress.seconds_left)} left"
    )


def _drawn(progress: Progress, width: int) -> RenderableType:
    bar = ProgressBar(total=1.0, completed=progress.share, width=min(_MOST_BAR, width - 10))
    line = Table.grid(padding=(0, 1))
    line.add_row(bar, f"{progress.share:.0%}")
    table = Table("class", "devices", "slowed down", "k picked", "HR@10", "NDCG@10", box=None)
    for name, each in progress.classes.items():
        table.add_row(
            name,
            str(each.devices),
            factor(each.slowdown),
            k_range(each.ks),
            "-" if each.hit_ratio is None else f"{each.hit_ratio:.3f}",
            "-" if each.ndcg is None else f"{each.ndcg:.3f}",
        )
    return Group(line, Text(_headline(progress)), Text(""), table)


def k_range(ks: tuple[int, ...]) -> str:
    """As in "12 to 18, median 15"; "-" for none."""
    if not ks:
        return "-"
    low, high, middle = min(ks), max(ks), sorted(ks)[len(ks) // 2]
    return f"{low}" if low == high else f"{low} to {high}, median {middle}"
