"""Bad input, counted by reason and logged once per reason."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from device_sdk.wire.codec.errors import WireError

__all__ = ["Refusals"]

_log = logging.getLogger("tessera.device")


class Refusals:
    """Counts what was refused since the process started."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, what: str, error: WireError) -> None:
        """Count a refused message; ``what`` says which kind it was."""
        if self._counts[error.reason] == 0:
            # Once per reason: whoever can publish could otherwise fill the disk.
            _log.warning("refused a %s: %s (further ones are only counted)", what, error)
        self._counts[error.reason] += 1

    def counts(self) -> Mapping[str, int]:
        """By reason; a copy."""
        return dict(self._counts)
