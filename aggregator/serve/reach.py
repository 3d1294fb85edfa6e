"""What a serving process reaches: its broker and its store, and since when. For ``status``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from aggregator.errors import StoreUnreached
from aggregator.events import LogEvent
from aggregator.serve.receipt_times import ReceiptTimes
from device_sdk.system.lock import LiveFile, read_live_file
from device_sdk.system.printable import span

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.25, 2.0
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Reach:
    """All times are Unix seconds by the machine's clock.

    Attributes:
        broker: which it is, for people.
        connected, broker_since_unix_seconds: whether it is reached, and since when that is so.
        broker_problem: why not; empty where it is.
        store_problem, store_since_unix_seconds: why the store is waited for, and since when; empty
            where it answers.
        process: the process's number.
        refused_topics: topic filters that the broker refuses at present.
        broker_losses: messages to ourselves that the broker acknowledged and did not deliver.
        console_problem: why the console does not answer, which is to; empty where it does.
        receipt_half_seconds, receipt_nine_tenths_seconds: within how long half of the updates, and
            nine tenths, had their receipts; see ``aggregator.serve.receipt_times``.
    """

    broker: str = ""
    connected: bool = False
    broker_since_unix_seconds: int = 0
    broker_problem: str = ""
    store_problem: str = ""
    store_since_unix_seconds: int = 0
    process: int = 0
    refused_topics: tuple[str, ...] = ()
    broker_losses: int = 0
    console_problem: str = ""
    receipt_half_seconds: float | None = None
    receipt_nine_tenths_seconds: float | None = None

    def words(self, now_unix_seconds: float) -> str:
        """What it is connected to, for people; what it is not, and why, is a problem."""
        since = span(max(0.0, now_unix_seconds - self.broker_since_unix_seconds))
        if not self.broker:
            return "runs"
        said = "connected to" if self.connected else "not connected to its broker"
        return f"runs, {said} {self.broker} for {since}"

    @property
    def receipts(self) -> str:
        """How long updates wait for their receipts, for people; empty where nothing is known."""
        shares = {
            "half": self.receipt_half_seconds,
            "nine tenths": self.receipt_nine_tenths_seconds,
        }
        said = [f"{of} within {some:g} s" for of, some in shares.items() if some is not None]
        return f"{', '.join(said)} of an update's arrival" if said else ""


class HasBroker(Protocol):
    """See :class:`~aggregator.serve.broker_links.BrokerLinks`."""

    @property
    def broker(self) -> str: ...
    @property
    def connected(self) -> bool: ...
    @property
    def problem(self) -> str: ...
    @property
    def lost(self) -> int: ...


class Reaching:
    """Tells it, in the home's file, whenever it changes; and waits for a store that is away.

    ``unix_clock``: Unix seconds; ``stopping``: whether the process is asked to end;
    ``console_problem``: as of :class:`Reach`.
    """

    def __init__(
        self,
        path: Path,
        unix_clock: Callable[[], float],
        sleep: Callable[[float], None],
        stopping: Callable[[], bool],
        console_problem: Callable[[], str] = str,
    ) -> None:
        self._console_problem = console_problem
        self._file, self._unix_clock = LiveFile(path), unix_clock
        self._sleep, self._stopping = sleep, stopping
        self._said = Reach()
        self._link: HasBroker | None = None
        self._refused: Callable[[], tuple[str, ...]] = tuple
        self._times: Callable[[], ReceiptTimes] = ReceiptTimes
        self._file.tell(asdict(self._said))

    def serve(
        self,
        link: HasBroker,
        refused: Callable[[], tuple[str, ...]],
        times: Callable[[], ReceiptTimes],
    ) -> None:
        """These are the connections from now on, the topic filters that they are refused, and how
        long updates waited."""
        self._link, self._refused, self._times = link, refused, times

    def look(self) -> None:
        """To be called often, after the store has answered."""
        said = self._said
        if said.store_problem:
            since = max(0.0, self._unix_clock() - said.store_since_unix_seconds)
            LogEvent.STORE_BACK.log(seconds=since)
        self._tell(store_problem="", store_since_unix_seconds=0)

    def waits(self, problem: str) -> bool:
        """The store is away: whether to wait on. See ``Database.waits``."""
        said = self._said
        since = said.store_since_unix_seconds or int(self._unix_clock())
        if not said.store_problem:
            LogEvent.STORE_AWAY.log(problem=problem)
        self._tell(store_problem=problem, store_since_unix_seconds=since)
        return not self._stopping()

    def await_store(self, open_store: Callable[[], Answer]) -> Answer | None:
        """The store, once it can be opened; None where we were asked to end before."""
        wait_seconds = _FIRST_WAIT_SECONDS
        while True:
            try:
                return open_store()
            except StoreUnreached as error:
                if not self.waits(str(error)):
                    return None
            self._sleep(wait_seconds)
            wait_seconds = min(2 * wait_seconds, _LONGEST_WAIT_SECONDS)

    def close(self) -> None:
        """The process ends."""
        self._file.close()

    def _tell(self, **changed: Any) -> None:
        said, link = replace(self._said, **changed), self._link
        if link is not None:
            connected, times = link.connected, self._times()
            since = said.broker_since_unix_seconds
            if not since or connected != said.connected:
                since = int(self._unix_clock())
            said = replace(
                said,
                broker=link.broker,
                connected=connected,
                broker_since_unix_seconds=since,
                broker_problem="" if connected else link.problem,
                refused_topics=self._refused(),
                broker_losses=link.lost,
                receipt_half_seconds=times.within(0.5),
                receipt_nine_tenths_seconds=times.within(0.9),
            )
        said = replace(said, console_problem=self._console_problem())
        if said != self._said:
            self._said = said
            self._file.tell(asdict(said))


def read_reach(path: Path) -> Reach | None:
    """What a serve that runs on the file's home says; None where none does."""
    try:
        values = json.loads(read_live_file(path))
        said = Reach(**{each.name: values[each.name] for each in fields(Reach)})
        return replace(said, refused_topics=tuple(said.refused_topics))
    except (ValueError, KeyError, TypeError):
        return None
