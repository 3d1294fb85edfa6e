"""What a capability measurement times."""

from __future__ import annotations

from typing import Protocol


class Workload(Protocol):
    """Work whose cost grows with the latent dimension k."""

    def prepare(self, k: int, share: float = 1.0) -> None:
        """Get ready to run at `k`; do only a `share` (0 to 1] of the work in each run."""

    def run(self) -> object:
        """Do the work once, at the k and share prepared last; what it returns is ignored."""
