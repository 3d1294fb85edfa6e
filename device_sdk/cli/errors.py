"""How a command fails."""

from __future__ import annotations


class CommandError(Exception):
    """A command cannot do what it was asked; the message says why and what would help."""
