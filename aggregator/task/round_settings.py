"""How a task's rounds open and close."""

from __future__ import annotations

from dataclasses import dataclass

from aggregator.tables import TomlTable

__all__ = ["RoundSettings"]


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """Raises TaskError, naming the key, through :meth:`read`.

    Attributes:
        share: expected share of the devices that a round selects, 0 < share <= 1.
        quorum: updates that make a version; fewer are carried into the next round.
        wait_for_devices: no round opens before so many devices are enrolled.
        deadline_seconds: a round collects no longer than this.
        adaptive_deadline: end rounds earlier, after the p90 of the last rounds' arrival times
            multiplied by ``deadline_margin``, but not before ``least_deadline_seconds``.
        resume_grace_seconds: after a restart a round stays open at least this long.
        pause_seconds: between the end of a round and the next one.
        most_rounds: no round beyond this number; 0 for no end.
        train_seconds: what devices are told that their local training should fit into.
    """

    share: float
    quorum: int
    wait_for_devices: int
    deadline_seconds: float
    adaptive_deadline: bool
    deadline_margin: float
    least_deadline_seconds: float
    resume_grace_seconds: float
    pause_seconds: float
    most_rounds: int
    train_seconds: float

    @classmethod
    def read(cls, table: TomlTable) -> RoundSettings:
        """The table ``[round]``."""
        quorum = table.integer("quorum", 1, least=1)
        deadline_seconds = table.number("deadline_seconds", 300.0, above=0.0, most=30 * 86_400)
        settings = cls(
            share=table.number("share", 1.0, above=0.0, most=1.0),
            quorum=quorum,
            wait_for_devices=table.integer("wait_for_devices", quorum, least=1),
            deadline_seconds=deadline_seconds,
            adaptive_deadline=table.boolean("adaptive_deadline", False),
            deadline_margin=table.number("deadline_margin", 1.5, least=1.0, most=100.0),
            least_deadline_seconds=table.number(
                "least_deadline_seconds", min(5.0, deadline_seconds), above=0.0
            ),
            resume_grace_seconds=table.number(
                "resume_grace_seconds", min(30.0, deadline_seconds), least=0.0
            ),
            pause_seconds=table.number("pause_seconds", 0.0, least=0.0),
            most_rounds=table.integer("most_rounds", 0, least=0),
            train_seconds=table.number("train_seconds", deadline_seconds / 2, above=0.0),
        )
        if settings.least_deadline_seconds > deadline_seconds:
            raise table.error("least_deadline_seconds", "lies above round.deadline_seconds")
        table.finish()
        return settings
