"""Which version of MQTT to try next: 5 where the broker speaks it, else 3.1.1."""

from __future__ import annotations

from enum import Enum


class MqttVersion(Enum):
    """The versions that a link speaks."""

    V5 = "5"
    V311 = "3.1.1"


class VersionChoice:
    """Finds the broker's version by trying, 5 first.

    A broker that speaks only 3.1.1 may refuse a version-5 connect, close the connection, or answer
    nothing: all three look like a broker that just broke. So a version that has worked is given up
    only after several failures in a row, and after 3.1.1 failed as well the choice is 5 again.
    """

    _PATIENCE = 3

    def __init__(self) -> None:
        self.current = MqttVersion.V5
        self._proven = False
        self._failures = 0

    @property
    def probing(self) -> bool:
        """Whether it is not yet known that the broker speaks version 5, which is tried now."""
        return self.current is MqttVersion.V5 and not self._proven

    def accepted(self) -> None:
        """The broker accepted a connection of the current version."""
        self._proven = True
        self._failures = 0

    def rejected(self) -> bool:
        """The broker was reached, but sent no CONNACK (or one that refuses the version).

        Returns whether to try the new choice at once, without back-off.
        """
        self._failures += 1
        if self._proven and self._failures < self._PATIENCE:
            return False
        downgrade = self.current is MqttVersion.V5
        self.current = MqttVersion.V311 if downgrade else MqttVersion.V5
        self._proven = False
        self._failures = 0
        return downgrade
