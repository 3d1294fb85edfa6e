"""What an operator sees while ``serve`` runs: a live view on a terminal, else log lines."""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from aggregator.evaluation import in_a_line, what_it_brings, what_serves
from aggregator.events import LogEvent, about
from aggregator.logs import LogForm, LogSettings
from aggregator.rounds.machine import RoundClosed, RoundEvent, RoundHeld, RoundOpened
from aggregator.serve.metrics import Snapshot, TaskSnapshot
from aggregator.serve.service import Service
from aggregator.store.rows import RoundRow
from device_sdk.system.printable import printable, size, span

_REFRESH_SECONDS = 0.5
_PLAIN_SECONDS = 30.0
_ROUNDS_OF_EACH = 3
_SHOWN_REFUSED = 4
_SHOWN_IN_VAIN = 3
_DIGITS = 12


class View(ABC):
    """Shows a service and its log. A context manager around the time that it runs."""

    def __init__(
        self,
        settings: LogSettings,
        handler: logging.Handler,
        line: str,
        clock: Callable[[], float],
        every_seconds: float,
        first_seconds: float,
    ) -> None:
        self._settings, self._handler, self._line = settings, handler, line
        self._clock = clock
        self._every_seconds = every_seconds
        self._next_seconds = first_seconds

    def __enter__(self) -> Self:
        self._settings.start(self._handler, self._line)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return

    def show(self, service: Service) -> None:
        now = self._clock()
        if now >= self._next_seconds:
            self._next_seconds = now + self._every_seconds
            self._draw(service.snapshot())

    @abstractmethod
    def _draw(self, seen: Snapshot) -> None: ...


class PlainView(View):
    """Log lines on standard error: one for each event, and one now and then in a long round."""

    def __init__(self, settings: LogSettings, clock: Callable[[], float]) -> None:
        line = "%(asctime)s %(levelname)-7s %(task)s%(message)s"
        handler = logging.StreamHandler(sys.stderr)
        first_seconds = clock() + _PLAIN_SECONDS
        super().__init__(settings, handler, line, clock, _PLAIN_SECONDS, first_seconds)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # As text the command says it.
        if isinstance(error, Exception) and self._settings.form is LogForm.JSON:
            LogEvent.FAILED.log(problem=error)

    def _draw(self, seen: Snapshot) -> None:
        for task in seen.tasks:
            if task.current is not None:
                with about(task.name if len(seen.tasks) > 1 else ""):
                    LogEvent.ROUND_WAITS.log(
                        round=task.current.round,
                        arrived=task.arrived,
                        expected=task.current.expected,
                        waits_for=task.waits_for,
                        seconds_left=task.seconds_left or 0.0,
                    )


class LiveView(View):
    """A picture that is drawn anew twice a second, with the log above it."""

    def __init__(self, settings: LogSettings) -> None:
        console = Console()
        handler = RichHandler(console=console, show_path=False)
        line = "%(task)s%(message)s"
        super().__init__(settings, handler, line, console.get_time, _REFRESH_SECONDS, 0.0)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        self._live.stop()

    def _draw(self, seen: Snapshot) -> None:
        self._live.update(render(seen), refresh=True)


def log_round(event: RoundEvent) -> None:
    """A line about a round."""
    row = event.row
    match event:
        case RoundOpened() if row.threshold == 0:
            LogEvent.ROUND_RESTS.log(round=row.round, version=row.version)
        case RoundOpened():
            LogEvent.ROUND_OPENED.log(
                round=row.round,
                version=row.version,
                expected=row.expected,
                seconds=row.deadline_unix_seconds - row.opened_unix_seconds,
                carried=event.carried,
            )
        case RoundClosed() if event.next_version is None:
            LogEvent.ROUND_WITHOUT_QUORUM.log(
                round=row.round,
                participants=event.summary.participants,
                in_vain=_last(event.in_vain),
                more_in_vain=max(0, len(event.in_vain) - _SHOWN_IN_VAIN),
            )
        case RoundClosed():
            LogEvent.ROUND_CLOSED.log(
                round=row.round,
                participants=event.summary.participants,
                version=event.next_version,
                metrics=event.summary.metrics,
                in_vain=_last(event.in_vain),
                more_in_vain=max(0, len(event.in_vain) - _SHOWN_IN_VAIN),
            )
        case RoundHeld():
            LogEvent.RELEASE_AWAITED.log(round=row.round, why=event.why)


def _last(in_vain: Sequence[bytes]) -> list[str]:
    """For whom a round lasted longer than it had to."""
    return [each.hex()[:_DIGITS] for each in in_vain[: -_SHOWN_IN_VAIN - 1 : -1]]


def render(seen: Snapshot) -> Panel:
    """The picture of one moment."""
    parts: list[RenderableType] = [_state(seen)]
    for task in seen.tasks:
        if len(seen.tasks) > 1:
            text = f"{printable(task.name)}, version {task.version}, for {task.eligible} devices"
            parts.append(Text(f"\n{text}{', paused' if task.paused else ''}", style="bold"))
        parts.append(_round(task))
        if task.evaluated is not None:
            found = in_a_line(task.evaluated.figures)
            parts.append(Text(f"version {task.evaluated.version}: {found}", style="cyan"))
            for say in (partial(what_it_brings, asked=task.control), what_serves):
                if sentence := say(task.evaluated.figures, task.metric):
                    parts.append(Text(sentence, style="cyan"))
        if task.finished:
            most = len(task.finished) if len(seen.tasks) == 1 else _ROUNDS_OF_EACH
            parts.append(_rounds(task.finished[:most]))
    if seen.refusals:
        refused = ", ".join(
            f"{printable(why)} {count}" for why, count in sorted(seen.refusals.items())
        )
        parts.append(Text(f"refused  {refused}", style="yellow"))
    title = f"tessera-aggregator: {len(seen.tasks)} tasks"
    if len(seen.tasks) == 1:
        title = (
            f"tessera-aggregator: {printable(seen.tasks[0].name)}, version {seen.tasks[0].version}"
        )
    return Panel(Group(*parts), title=Text(title), title_align="left")


def _state(seen: Snapshot) -> Text:
    text = Text()
    text.append(
        "connected" if seen.connected else "no connection",
        style="green" if seen.connected else "bold red",
    )
    text.append(
        f" to {printable(seen.broker)}   {seen.devices} devices, {seen.sessions} sessions   "
        f"in {size(seen.bytes_received)}, out {size(seen.bytes_sent)}   "
        f"{sum(task.counted for task in seen.tasks)} updates counted"
    )
    for topic_filter in seen.refused_subscriptions[:_SHOWN_REFUSED]:
        text.append(
            f"\nthe broker refuses the subscription to {printable(topic_filter)}", style="bold red"
        )
    if (more := len(seen.refused_subscriptions) - _SHOWN_REFUSED) > 0:
        text.append(f"\n... and {more} more", style="bold red")
    if seen.broker_losses:
        text.append(
            "\nthe broker drops what it acknowledges: raise max_queued_messages", style="bold red"
        )
    return text


def _round(seen: TaskSnapshot) -> Group | Text:
    row = seen.current
    if seen.unpublished is not None:
        return Text(f"the next round is held: {printable(seen.unpublished)}", style="bold red")
    if row is None:
        if seen.paused:
            return Text("paused")
        if seen.eligible < seen.wait_for_devices:
            return Text(f"no round opens: {seen.eligible} of {seen.wait_for_devices} devices")
        return Text("between two rounds")
    if row.threshold == 0 and seen.stopped:
        return Text("early stopping: no version was better for long, the best one is published")
    if row.threshold == 0:
        return Text("all rounds are done: the last version stays published")
    if row.held is not None:
        return Text(f"round {row.round} is held: {printable(row.held)}", style="bold red")
    length = max(1e-9, row.deadline_unix_seconds - row.opened_unix_seconds)
    left = max(0.0, seen.seconds_left or 0.0)
    bars = Table.grid(padding=(0, 1))
    bars.add_row(
        f"round {row.round}",
        ProgressBar(total=max(1, row.expected), completed=seen.arrived, width=40),
        f"{seen.arrived} of {row.expected} arrived, quorum {seen.participants}/{seen.quorum}",
    )
    bars.add_row(
        "closes",
        ProgressBar(total=length, completed=length - left, width=40, complete_style="blue"),
        f"in {span(left)}, waits for {seen.waits_for}",
    )
    trained = seen.parts.counts(seen.widths)
    told = ", ".join(f"{printable(part)}: {count}" for part, count in trained.items())
    return Group(bars, Text(f"trained  {told}")) if trained else Group(bars)


def _rounds(finished: Sequence[RoundRow]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("round", "updates", "took", "result", "metrics"):
        table.add_column(name)
    for row in finished:
        result = "no quorum" if row.next_version is None else f"version {row.next_version}"
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in (row.metrics or {}).items())
        took = span(row.took_seconds or 0.0)
        table.add_row(str(row.round), str(row.participants), took, result, metrics)
    return table
