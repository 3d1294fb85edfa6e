"""What can go wrong on the device, one class per thing that a caller would handle differently."""

from __future__ import annotations

import math


class DeviceError(Exception):
    """Base of the errors below."""


class BatchError(DeviceError, ValueError):
    """A batch or hyper-parameter is not what the artifact expects; the message says what is."""


class StateError(DeviceError, ValueError):
    """A parameter or state tensor that was given does not fit the artifact."""


class NonFiniteStep(DeviceError, ArithmeticError):
    """A step met NaN or infinity. The trainer is as it was before the step."""

    def __init__(self, loss: float, guard: float) -> None:
        refused = (
            ". Where the loss is finite, the batch may also be one that the step refuses: it takes "
            "a way that the export warned of"
        )
        super().__init__(
            f"the step's loss is {loss} and the sum of its new state is {guard}: one of them is "
            "not finite, so the step was dropped and the parameters are as before. Look for NaN "
            "and for labels that are no class (0 to classes - 1) and indices below 0 in the batch, "
            f"or lower the learning rate{refused if math.isfinite(loss) else ''}"
        )
        self.loss = loss
        self.guard = guard

    def __reduce__(self) -> tuple[type[NonFiniteStep], tuple[float, float]]:
        # Without this, unpickling (in a pool of processes) would call __init__ with the message.
        return NonFiniteStep, (self.loss, self.guard)


class GraphRunError(DeviceError, RuntimeError):
    """onnxruntime failed inside the graph (an index out of range, say); nothing has changed."""


class CallEnded(DeviceError, RuntimeError):
    """A step of an artifact, or the opening of its graphs, was ended before it came back: it took
    too long, or the device was stopped."""


class ProviderError(DeviceError, RuntimeError):
    """No onnxruntime session could be made with the execution providers that were asked for."""


class RuntimeMissing(DeviceError, ImportError):
    """onnxruntime, which runs artifacts, is not installed here or cannot be loaded."""


class CheckpointError(DeviceError, ValueError):
    """A checkpoint is corrupt or belongs to another artifact. The trainer is unchanged."""


# What can go wrong with a device's home folder and its membership in a fleet.


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

    ``reason`` is the wire's slug: ``bad-code``, ``code-used``, ``code-expired``,
    ``revoked``; for a root to be trusted also ``serial-fell`` and ``time-fell``.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[EnrolmentRefused], tuple[str, str]]:
        return EnrolmentRefused, (self.reason, str(self))


class EnrolmentFailed(HomeError, RuntimeError):
    """No answer came in time. The code is not lost: the same home and code may try again."""


class LeaveUnanswered(HomeError, RuntimeError):
    """The aggregator did not answer in time that it heard this device leave; call again."""


class NothingLearnt(HomeError):
    """There is nothing to recommend from yet: no round has ended here, or none with this user."""


class UnknownUser(HomeError, KeyError):
    """No interaction of this local user was ever recorded."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the message in quotes
