"""What can go wrong with the demo's fleet."""

from __future__ import annotations


class FleetError(Exception):
    """A part of the fleet did not start, or ended; the message says which, and what it said."""
