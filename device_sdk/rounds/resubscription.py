"""When a device subscribes again to what it waits for."""

from __future__ import annotations

import math

from device_sdk.system.clock import Backoff
from device_sdk.world import DeviceWorld


class Resubscription:
    """A granted subscription may have missed what was published while it settled.

    A broker of several nodes grants it at one of them, and the others, and what is retained, come
    to know of it one after the other. To subscribe again makes any broker send what it retains.

    That is due ``fetch_seconds`` and a random wait of up to as much after each connection; further
    ones after waits that grow to ``most_seconds``. They run by this device's connection and chance,
    and by nothing that is published: no fleet asks at once.
    """

    def __init__(self, world: DeviceWorld) -> None:
        pace = world.pace
        self._clock, self._first_seconds = world.clock, pace.fetch_seconds
        (rng,) = world.rng.spawn(1)
        self._backoff = Backoff(
            rng, first_seconds=pace.fetch_seconds, most_seconds=pace.most_seconds
        )
        self._next_seconds = math.inf

    def connected(self, value: bool) -> None:
        """The broker's connection came, and with it each subscription anew, or went."""
        self._backoff.reset()
        self._next_seconds = math.inf
        if value:
            self._wait()

    def due(self) -> bool:
        """Whether to subscribe again now; then the next time is later."""
        if self._clock() < self._next_seconds:
            return False
        self._wait()
        return True

    def next_seconds(self) -> float:
        """The monotonic time at which :meth:`due` comes true; infinite without a connection."""
        return self._next_seconds

    def _wait(self) -> None:
        self._next_seconds = self._clock() + self._first_seconds + self._backoff.next_seconds()
