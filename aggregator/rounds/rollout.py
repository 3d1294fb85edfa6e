"""Does what a task sends out do harm? Then no further round opens before somebody looked.

As a rollout of IoT jobs is aborted: by the share of the devices that took it and failed, once there
are so many that a share says something.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from aggregator.store import TaskStore
from aggregator.store.rounds import RoundRow
from aggregator.task.file import RoundSettings
from device_sdk.wire.publish.report import Reason

HARM = frozenset(
    each.value
    for each in (
        Reason.STEP_TOO_LONG,
        Reason.CRASHED,
        Reason.OUT_OF_MEMORY,
        Reason.NOT_FINITE,
        Reason.DOES_NOT_FIT,
        Reason.BAD_CONTENT,
    )
)
"""What says something of the artifact, the version or the settings: of the device, its data, its
network or its owner speak the others."""
_WATCHED_ROUNDS = 2
_BEFORE_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Rollout:
    """How a round went: ``took`` devices were heard of, or fell silent; ``failed`` by reason."""

    took: int
    failed: dict[str, int]
    silent: int = 0

    def why_to_stop(self, settings: RoundSettings) -> str | None:
        """In words, for the operator; None where rounds may go on."""
        bad = self.silent + sum(self.failed.values())
        least = settings.abort_devices
        if not least or self.took < least or bad < settings.abort_share * self.took:
            return None
        said = [f"{count} failed ({reason})" for reason, count in sorted(self.failed.items())]
        said += [f"{self.silent} fell silent"] if self.silent else []
        return (
            f"of {self.took} devices that took it {', '.join(said)}: {settings.abort_share:.0%} or "
            "more of them (round.abort_share). Devices keep a harmful artifact out by themselves; "
            "see status and devices for who failed. Have the task replaced by one that is right "
            "(task replace), or go back to a good version (rollback) and release it"
        )


def rollout_of(store: TaskStore, row: RoundRow, missing: Collection[bytes]) -> Rollout:
    """Of a round that was just closed; ``missing``: selected devices that were not heard of.

    A device that is not heard of may sleep. Only where the task was replaced, and in its first
    rounds after that, those who took part until then and were not heard of since are counted.
    Numbers that are not finite may come of a device's own data: where another's training came
    right, they say nothing of the task.
    """
    failed = store.reports.reasons(row.generation, row.round)
    harm = {reason: count for reason, count in failed.items() if reason in HARM}
    if store.log.counted(row.generation, row.round):
        harm.pop(Reason.NOT_FINITE.value, None)
    silent = _fell_silent(store, row, missing)
    return Rollout(store.log.heard(row.generation, row.round) + silent, harm, silent)


def _fell_silent(store: TaskStore, row: RoundRow, missing: Collection[bytes]) -> int:
    recent = store.rounds.latest(_WATCHED_ROUNDS + _BEFORE_ROUNDS)
    since = [each for each in recent if each.generation == row.generation and each.threshold]
    before = [each for each in recent if each.generation < row.generation and each.threshold]
    # In one round a device may be between two sessions.
    if len(since) != _WATCHED_ROUNDS or not before:
        return 0
    gone = {device for each in before for device in store.log.judged(each.generation, each.round)}
    gone &= set(missing)
    for each in since:
        gone -= set(store.log.judged(each.generation, each.round))
    return len(gone)
