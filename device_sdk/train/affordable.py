"""Which of a task's artifacts a device takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from device_sdk.train.job import Declined
from device_sdk.wire.publish.terms import OfferedArtifact

_FEWEST_DIGITS = 8


@dataclass(frozen=True, slots=True)
class ArtifactWishes:
    """``name``: only this one (its name, or 8 or more first digits of its id); None: any.

    ``most_bytes``: for all of them together.
    """

    name: str | None = None
    most_bytes: int = 64 << 20

    def pick(self, offered: Sequence[OfferedArtifact]) -> tuple[OfferedArtifact, ...]:
        """The named one, or the smallest ones that fit; at least one. Raises :class:`Declined`."""
        if self.name is not None:
            found = tuple(each for each in offered if self._is_named(each))
            if len(found) != 1:
                names = ", ".join(each.name for each in offered)
                raise Declined(
                    f"the task offers {len(found)} artifacts named {self.name!r}; it offers {names}"
                )
            return found
        taken: list[OfferedArtifact] = []
        total = 0
        for each in offered:
            total += each.total_size
            if total > self.most_bytes:
                break
            taken.append(each)
        if not taken:
            raise Declined(
                f"the task's smallest artifact has {offered[0].total_size} bytes, this device "
                f"takes {self.most_bytes} (TrainingOptions.most_artifact_bytes)"
            )
        return tuple(taken)

    def _is_named(self, artifact: OfferedArtifact) -> bool:
        by_id = len(self.name or "") >= _FEWEST_DIGITS and artifact.artifact_id.hex().startswith(
            self.name or ""
        )
        return artifact.name == self.name or by_id
