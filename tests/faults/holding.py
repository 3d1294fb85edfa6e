"""What the death of a worker costs, read where one is killed and at moments between; and whether
anything kept that worker from committing."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from aggregator.store import STORE_FAILURES, Store
from tests.faults.counters import Counters
from tests.faults.taken_in import oldest_seconds, taken_by

_LOOK_SECONDS = 0.25
_SLOW_SECONDS = 1.0
_RECOVERY_SECONDS = 5.0
"""After which whoever was kept from the store is to be back: TCP waits up to as long again as a
cable was out."""
_KEPT = 400


@dataclass(frozen=True)
class KillCost:
    """What a worker had taken in and not committed when it was killed, or would have been.

    Attributes:
        oldest_seconds: since when it had the oldest such update; 0 where it had none.
        waited_seconds: how long one of its threads waited for a processor meanwhile.
        undisturbed: whether nothing kept it from its store since then, nor shortly before.
        commit_seconds: the longest that a commit of one row took a bystander meanwhile; 0 where
            there was none.
    """

    oldest_seconds: float
    waited_seconds: float
    undisturbed: bool
    commit_seconds: float = 0.0


class Bystander:
    """Commits to the store as a worker does, again and again. It waits as long as everybody has to:
    for a store that is away, and for a process that holds a lock and is frozen, or cut off."""

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self._open = open_store
        self._asked_seconds = self._slow_seconds = 0.0
        self._commits: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # end, duration; seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._commit, daemon=True)
        self._thread.start()

    def served_since(self, now: float) -> float:
        """When the last commit was done that took long; ``now`` while one does."""
        asked = self._asked_seconds
        return now if asked and now - asked > _SLOW_SECONDS else self._slow_seconds

    def longest_since(self, since_seconds: float) -> float:
        """Of the commits that ended since then, seconds."""
        return max((took for end, took in list(self._commits) if end >= since_seconds), default=0.0)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _commit(self) -> None:
        with closing(self._open().database) as database:
            while not self._ended.wait(_LOOK_SECONDS):
                self._asked_seconds = asked = time.monotonic()
                done = False
                with suppress(*STORE_FAILURES), database.transaction(shared=True):
                    done = True
                now = time.monotonic()
                self._commits.append((now, now - asked))
                if not done or now - asked > _SLOW_SECONDS:
                    self._slow_seconds = now
                self._asked_seconds = 0.0


class Watch:
    """Looks at all workers that write down what they hold, beside ``counters``.

    ``reaches_since``: since when a process reaches its store, as far as its own way there and its
    own disk go; infinity while it does not. Times are the monotonic clock's.
    """

    def __init__(
        self,
        counters: Path,
        open_store: Callable[[], Store],
        reaches_since: Callable[[int], float],
    ) -> None:
        self._counters, self._reaches_since = counters, reaches_since
        self._bystander = Bystander(open_store)
        self._pages: dict[int, Counters] = {}
        self._waits: dict[int, deque[tuple[float, dict[str, float]]]] = {}
        self._stopped_seconds: dict[int, float] = {}
        self.moments: list[KillCost] = []
        """What kills would have cost."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """May be called twice."""
        self._ended.set()
        self._thread.join()
        self._bystander.end()

    def cost(self, process: int, at_seconds: float) -> KillCost | None:
        """Of a worker's death; None where it was none's, or had not begun yet."""
        if process not in self._pages:
            path = taken_by(self._counters, process)
            if not path.exists():
                return None
            self._pages[process] = Counters(path)
        age = oldest_seconds(self._pages[process], at_seconds) or 0.0
        well_since = max(
            self._reaches_since(process),
            self._bystander.served_since(at_seconds),
            self._stopped_seconds.get(process, 0.0),
        )
        undisturbed = at_seconds - age > well_since + _RECOVERY_SECONDS
        since = at_seconds - age
        waited, longest = self._waited(process, since), self._bystander.longest_since(since)
        return KillCost(age, waited, undisturbed, longest)

    def _waited(self, process: int, since_seconds: float) -> float:
        readings = self._waits.get(process)
        if not readings:
            return 0.0
        earlier = [each for at, each in readings if at <= since_seconds]
        first, last = earlier[-1] if earlier else readings[0][1], readings[-1][1]
        return max((last[each] - first.get(each, 0.0) for each in last), default=0.0)

    def _look(self) -> None:
        prefix = taken_by(self._counters, 0).name.removesuffix("0")
        while not self._ended.wait(_LOOK_SECONDS):
            for path in list(self._counters.parent.glob(f"{prefix}*")):
                process = int(path.name.removeprefix(prefix))
                now = time.monotonic()
                with suppress(OSError):  # it is gone
                    state = _state(process)
                    if state in "ZX":
                        continue
                    if state == "T":
                        self._stopped_seconds[process] = now
                        continue
                    readings = self._waits.setdefault(process, deque(maxlen=_KEPT))
                    readings.append((now, _waits(process)))
                    cost = self.cost(process, now)
                    if cost is not None:
                        self.moments.append(cost)


def _state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def _waits(process: int) -> dict[str, float]:
    """Seconds that its threads were ready to run and did not."""
    found = {}
    for each in Path(f"/proc/{process}/task").iterdir():
        with suppress(OSError):
            found[each.name] = int((each / "schedstat").read_text().split()[1]) / 1e9
    return found
