"""What a run found, and how it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.outcomes import OutcomeFolder
from benchmarks.privacy.experiment import Run
from benchmarks.privacy.judgement import Judgement


@dataclass(frozen=True, slots=True)
class Outcome:
    """Accuracy at the end, and what the attacks found.

    Attributes:
        hit_ratio: HR@10 on validation items.
        update_rows: mean number of rows of an update.
        first_by_size, first, last, every: the cut by size on each device's first update; the
            learned attack on the first, on the last one, and on all together.
        joined_by_size, joined: both attacks on the first update that is sent by a device which
            joins the trained fleet, by the number of rounds (as text: keys of JSON) that it trained
            before without sending anything. Empty for devices of several users.
    """

    hit_ratio: float
    update_rows: float
    first_by_size: Judgement
    first: Judgement
    last: Judgement
    every: Judgement
    joined_by_size: dict[str, Judgement]
    joined: dict[str, Judgement]


class OutcomeStore(OutcomeFolder[Run, Outcome]):
    """Outcomes of this benchmark."""

    def prefix(self, run: Run) -> str:
        """The data set."""
        return run.experiment.data

    def decoded(self, fields: dict[str, Any]) -> Outcome:
        """The outcome with its judgements."""
        for name in ("first_by_size", "first", "last", "every"):
            fields[name] = Judgement(**fields[name])
        for name in ("joined_by_size", "joined"):
            fields[name] = {key: Judgement(**one) for key, one in fields[name].items()}
        return Outcome(**fields)
