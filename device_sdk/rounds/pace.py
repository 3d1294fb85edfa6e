"""How long a device waits for what."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Pace:
    """Waits in seconds; each repeated one grows (full jitter) up to ``most_seconds``.

    Attributes:
        answer_seconds: an open or an update without an answer for so long is sent again.
        repeat_seconds: an update that fits one message is sent again for the first time after this
            and up to half as much more: a broker that is flooded drops messages that it
            acknowledged. At most once, so that a slow way costs one message more; never for an
            update in parts, which may still be on its way out.
        fetch_seconds: chunks that did not come for so long are asked for again.
        reopen_seconds: a new session because of a new presence, an unknown key epoch or silence is
            opened after a random wait of up to this, so that a fleet does not come at once.
        most_seconds: the longest wait.
        unanswered_sends: after so many sends without a receipt the session is opened anew.

    Raises ValueError, naming the field.
    """

    answer_seconds: float = 10.0
    repeat_seconds: float = 2.0
    fetch_seconds: float = 15.0
    reopen_seconds: float = 10.0
    most_seconds: float = 600.0
    unanswered_sends: int = 3

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{field.name} is {value!r}; expected a number above 0")
        if self.most_seconds < max(self.answer_seconds, self.fetch_seconds, self.reopen_seconds):
            raise ValueError(f"most_seconds is {self.most_seconds}, below one of the first waits")
