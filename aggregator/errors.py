"""What the operator can put right."""

from __future__ import annotations


class AggregatorError(Exception):
    """The aggregator cannot do what it was asked; the message says why and what would help."""


class TaskError(AggregatorError):
    """A task file is not usable; the message names the file and the key."""
