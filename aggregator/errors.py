"""What the operator can put right."""

from __future__ import annotations

import traceback

from device_sdk.system.printable import in_words

_MOST_SAID = 300


class AggregatorError(Exception):
    """The aggregator cannot do what it was asked; the message says why and what would help."""


class TaskError(AggregatorError):
    """A task file is not usable; the message names the file and the key."""


class StateMismatch(AggregatorError):
    """What the store has of a method does not fit it, with the settings that it has now."""

    @classmethod
    def of(cls, error: Exception) -> StateMismatch:
        """What a method said of its state, and what to do."""
        return cls(
            f"the stored state does not fit the task file's settings: {error}. Change them back, "
            "or start the task afresh with tessera-aggregator task replace"
        )


class PacketsTooSmall(AggregatorError):
    """What is to be published does not fit the broker's largest packet, however it is cut."""


class StoreError(Exception):
    """The store cannot be reached, or would not do what it was asked. What was not committed is
    rolled back."""


class StoreAway(StoreError):
    """The store is gone, starts, fails over or has no room at present. Whoever serves waits for it,
    and begins again with what it has then."""


class StoreUnreached(AggregatorError):
    """The same, before it was ever reached."""


class StoreOutdated(AggregatorError):
    """The store was made by an earlier release, and whoever opened it may change nothing."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where} is of an earlier release; serve brings it up to date")


class OutcomeUnknown(StoreAway):
    """The connection was lost in the midst of a commit, and nobody can tell what became of it: all
    of the transaction is kept, or nothing. Whoever asked for it has to look."""


class MethodFault(Exception):
    """A method's code raised what it may not, or returned what it may not; the message says which
    call, what and where. Its cause is the error, with the traceback."""

    def __init__(self, call: str, error: BaseException) -> None:
        self.call = call
        self.__cause__ = error
        what = " ".join(in_words(error).split())[:_MOST_SAID]
        super().__init__(f"the method's {call} raised {what}{_place(error)}")

    def __reduce__(self) -> tuple[type[RuntimeError], tuple[str]]:
        # In another process the words are enough.
        return (RuntimeError, (str(self),))


class CallOverdue(MethodFault):
    """Raised inside a method's code that did not return in time."""

    def __init__(self) -> None:
        self.call = ""
        Exception.__init__(self, "it did not return in time")


def _place(error: BaseException) -> str:
    """Where it was raised, in words: the innermost line of Python."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
