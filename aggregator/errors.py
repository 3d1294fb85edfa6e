"""What the operator can put right."""

from __future__ import annotations


class AggregatorError(Exception):
    """The aggregator cannot do what it was asked; the message says why and what would help."""


class TaskError(AggregatorError):
    """A task file is not usable; the message names the file and the key."""


class StoreError(Exception):
    """The store cannot be reached, or would not do what it was asked. What was not committed is
    rolled back."""


class OutcomeUnknown(StoreError):
    """The connection was lost in the midst of a commit, and nobody can tell what became of it: all
    of the transaction is kept, or nothing. Whoever asked for it has to look."""
