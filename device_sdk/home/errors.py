"""What can go wrong with a device's home folder and its membership in a fleet."""

from __future__ import annotations

from device_sdk.errors import DeviceError

__all__ = [
    "AlreadyEnrolled",
    "EnrolmentFailed",
    "EnrolmentRefused",
    "HomeBroken",
    "HomeError",
    "HomeLocked",
    "NotEnrolled",
    "NothingLearnt",
    "UnknownUser",
]


class HomeError(DeviceError):
    """Base of the errors below."""


class HomeLocked(HomeError):
    """Another process (or another Device of this one) has the home folder open."""


class HomeBroken(HomeError):
    """The home folder cannot be used: damaged, of a newer format, or readable by others."""


class AlreadyEnrolled(HomeError):
    """The home folder belongs to a device that is enrolled; its identity is never replaced."""


class NotEnrolled(HomeError):
    """The home folder does not exist or its device never joined a fleet."""


class EnrolmentRefused(HomeError, ValueError):
    """The code cannot be used: mistyped, used, expired, revoked, or of another fleet.

    ``reason`` is the wire's slug: ``bad-code``, ``old-code``, ``code-used``, ``code-expired``,
    ``revoked``; for a root to be trusted also ``serial-fell`` and ``time-fell``.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[EnrolmentRefused], tuple[str, str]]:
        return EnrolmentRefused, (self.reason, str(self))


class EnrolmentFailed(HomeError, RuntimeError):
    """No answer came in time. The code is not lost: the same home and code may try again."""


class NothingLearnt(HomeError):
    """There is nothing to recommend from yet: no round has ended here, or none with this user."""


class UnknownUser(HomeError, KeyError):
    """No interaction of this local user was ever recorded."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the message in quotes
