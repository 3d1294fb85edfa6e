"""Which broker to be at: that of the device's cell, the announced successor, one that was announced
before, or the one that it enrolled at."""

from __future__ import annotations

import math
from dataclasses import replace

from device_sdk.home.membership import SUCCESSOR, Membership
from device_sdk.rounds.session import SessionKeeper
from device_sdk.system.clock import Backoff
from device_sdk.wire.seal.announcement import Successor
from device_sdk.wire.seal.placement import Placement
from device_sdk.world import DeviceWorld

_SHORT_ANSWERS = 3
_MOST_RETURN = 12


class CellChoice:
    """A device is in its cell. Where no session is to be had there, it looks elsewhere by turns.

    * Without a session in its cell for ``cell_seconds`` and up to twice that, not counting a wait
      that the aggregator told it, it goes to the broker that it enrolled at, and back after a few
      answers' time if it has none there either: then it is the network that is away, and not the
      cell.
    * With a session there it forgets the cell, which may be gone for good. It has one again where
      it is told so. To the one that it has fled from it returns after a wait that grows from
      ``cell_seconds`` to twelve times as much, and stays only for a few answers' time if there is
      still no session to be had; to another, at once.
    * Moves that it is told soon after each other come after waits that grow as much: the tables of
      two workers may differ.
    * A successor that the aggregator announced is tried by each device at a moment of its own,
      within a quarter of the grace. Without a session there it comes back, and tries again after
      waits that grow. With one it stays, and comes back by turns as from a cell. The brokers of
      before, the one that it enrolled at and all announced ones where it had a session, are tried
      by turns, and forgotten once the grace is over and a session at the successor was had under a
      newer descriptor than the one that announced it: whichever is gone, and whichever never comes,
      the aggregator is at one of them.
    * What was sent and not answered is sent again wherever it is: sessions end with the move.
    """

    def __init__(self, world: DeviceWorld, sessions: SessionKeeper) -> None:
        self._clock, self._rng, self._pace = world.clock, world.rng, world.pace
        self._sessions = sessions
        self._store = world.home.membership
        self._know(world.membership)
        self.here = world.membership.first_place
        """Where the device is connected, or tries to be; empty: where it enrolled."""
        self._connected = False
        self._fled = ""
        self._most_seconds = _MOST_RETURN * self._pace.cell_seconds
        self._returns = self._new_backoff(self._pace.cell_seconds)
        self._moves = self._new_backoff(self._pace.answer_seconds)
        self._moved_seconds = -math.inf  # when it was last told to
        self._leave_seconds = math.inf  # if there is no session until then
        self._move_seconds = math.inf  # even with one
        self._tries = self._new_backoff(self._pace.cell_seconds)

    def connected(self, value: bool) -> None:
        """The broker's connection came or went."""
        self._connected = value

    def session_opened(self) -> None:
        """There is a session here."""
        placement = self._sessions.placement
        if self.here == SUCCESSOR:
            self._reached_successor()
        elif self.here and not self.here.startswith(SUCCESSOR):
            self._fled = ""
            self._returns.reset()
        elif placement.cell:
            self._fled = placement.cell
            self._sessions.place(replace(placement, cell=""))
        elif self.here != self._places[0]:
            if self.here:
                self._store.reached(self.here.removeprefix(SUCCESSOR))
                self._look()
            wait_seconds, left_seconds = self._tries.next_seconds(), self._grace_left_seconds()
            if left_seconds > 0:
                wait_seconds = min(wait_seconds, max(self._pace.answer_seconds, left_seconds / 8))
            self._move_seconds = self._clock() + wait_seconds

    def announced(self, successor: Successor, serial: int) -> None:
        """The aggregator announced where the fleet moves to, signed under the descriptor of this
        serial. Raises ``sqlite3.Error``."""
        before = self._announced
        if not self._store.announced(successor, serial):
            return
        self._look()
        self._tries.reset()
        soon = 0.0
        if self.here == SUCCESSOR:
            self.here += before.url  # the name is another's now
        else:
            most = max(0.0, min(self._pace.cell_seconds, self._grace_left_seconds() / 4))
            soon = float(self._rng.uniform(0.0, most))
        self._move_seconds = self._clock() + soon
        # Who has no session here has less to wait for than in a cell that is away.
        leaves_seconds = self._clock() + max(soon, self._short_stay_seconds())
        self._leave_seconds = min(self._leave_seconds, leaves_seconds)

    def way_given(self) -> None:
        """The device's owner said how the fleet's broker is reached now."""
        self._look()
        if self.here.startswith(SUCCESSOR) and self.here not in self._places:
            self.here = ""

    def _look(self) -> None:
        now = self._store.load()
        if now is not None:
            self._know(now)

    def _know(self, membership: Membership) -> None:
        self._announced, self._announced_places = membership.moves, membership.places

    def _reached_successor(self) -> None:
        known, descriptor = self._announced, self._sessions.descriptor
        if not known.url or descriptor is None:
            return
        if self._grace_left_seconds() <= 0 and descriptor.serial > known.serial:
            self._store.moved()
            self.here = ""
        elif not known.reached:
            self._store.reached(known.url)
        self._look()

    def _grace_left_seconds(self) -> float:
        now = self._sessions.time.now()
        if not self._announced.url or now is None:
            return math.inf
        return self._announced.until_unix_seconds - now

    def told(self, placement: Placement) -> None:
        """The aggregator said where this device belongs. Raises ``sqlite3.Error``."""
        before = self._sessions.placement
        if placement == before:
            return
        self._sessions.place(placement)
        if placement.cell == before.cell == "":
            return
        self._move_seconds = math.inf
        if placement.cell != self.here:
            returns = placement.cell and placement.cell == self._fled
            wait_seconds = self._returns.next_seconds() if returns else self._stays_seconds()
            self._move_seconds = self._moved_seconds = self._clock() + wait_seconds

    def tick(self) -> bool:
        """Do what is due; whether the device goes to another broker, ``here``, now."""
        now, places = self._clock(), self._places
        if self._is_served():
            self._leave_seconds = math.inf
            return now >= self._move_seconds and self._go(places[0])
        if not self._has_choice():
            return False
        if self._leave_seconds == math.inf:
            self._leave_seconds = now + self._stay_seconds()
        turn = places.index(self.here) + 1 if self.here in places else 0
        return now >= self._leave_seconds and self._go(places[turn % len(places)])

    def next_seconds(self) -> float:
        """The monotonic time at which :meth:`tick` has something to do; infinite for never."""
        if self._is_served():
            return self._move_seconds
        if self._leave_seconds == math.inf and self._has_choice():
            return self._clock()  # the time begins to run
        return self._leave_seconds

    def _is_served(self) -> bool:
        return self._connected and (self._sessions.is_settled or self._sessions.waits_as_told)

    def _has_choice(self) -> bool:
        return self._places != (self.here,)

    @property
    def _places(self) -> tuple[str, ...]:
        """Where it may be: first where it is to be, then the others in their turn."""
        cell = self._sessions.placement.cell
        return (cell, *self._announced_places) if cell else self._announced_places

    def _stay_seconds(self) -> float:
        is_away = self.here in ("", self._fled, *self._places[1:])
        if self.here == SUCCESSOR and not self._announced.reached:
            most = max(self._pace.answer_seconds, self._grace_left_seconds() / 4)
            most = min(most, _SHORT_ANSWERS * self._pace.answer_seconds)
            return float(most / 2 * self._rng.uniform(1.0, 2.0))
        if is_away:
            return self._short_stay_seconds()
        return float(self._pace.cell_seconds * self._rng.uniform(1.0, 2.0))

    def _short_stay_seconds(self) -> float:
        return float(_SHORT_ANSWERS * self._pace.answer_seconds * self._rng.uniform(1.0, 2.0))

    def _stays_seconds(self) -> float:
        """How long it stays where it was told to be before the next move that it is told."""
        if self._clock() - self._moved_seconds <= self._most_seconds:
            return self._moves.next_seconds()
        self._moves.reset()
        return 0.0

    def _new_backoff(self, first_seconds: float) -> Backoff:
        return Backoff(self._rng, first_seconds=first_seconds, most_seconds=self._most_seconds)

    def _go(self, cell: str) -> bool:
        self.here, self._connected = cell, False
        self._leave_seconds = self._move_seconds = math.inf
        self._sessions.start_anew()
        return True
