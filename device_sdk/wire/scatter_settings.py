"""The training settings that a scatter broadcast carries, known to both ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal, get_args

from device_sdk.wire.exchange import Scalar

__all__ = ["ScatterTraining", "Scores"]

Scores = Literal["residual", "columns"]


@dataclass(frozen=True, slots=True)
class ScatterTraining:
    """How every device trains in a round of scatter aggregation.

    Attributes:
        scores: ``columns`` scores a triple by the drawn columns alone (the patent's); ``residual``
            adds the score of the left-out columns as a constant, so that every device descends the
            same full objective on its own block of coordinates.
        user_learning_rate: a local user's vector moves by this rate times its gradient, summed
            over its triples and divided by the square root of their total weight.
        user_l2, item_l2: weights of half the squared norms in the loss, once per triple.
        user_spread: standard deviation of a new user's vector.
        most_triples: at most so many triples a device and round, drawn at random; 0 for all.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    scores: Scores = "residual"
    user_learning_rate: float = 0.7
    user_l2: float = 0.01
    item_l2: float = 0.001
    user_spread: float = 0.01
    most_triples: int = 0

    def __post_init__(self) -> None:
        if self.scores not in get_args(Scores):
            raise ValueError(
                f"scores is {self.scores!r}; expected one of {', '.join(get_args(Scores))}"
            )
        _require_number("user_learning_rate", self.user_learning_rate, above=0.0, most=1e3)
        _require_number("user_l2", self.user_l2, least=0.0, most=1e3)
        _require_number("item_l2", self.item_l2, least=0.0, most=1e3)
        _require_number("user_spread", self.user_spread, above=0.0, most=10.0)
        whole = isinstance(self.most_triples, int) and not isinstance(self.most_triples, bool)
        if not whole or self.most_triples < 0:
            raise ValueError(
                f"most_triples is {self.most_triples!r}; expected an integer: 0 (all) or more"
            )

    def as_scalars(self) -> dict[str, Scalar]:
        """The settings as a broadcast carries them."""
        return dict(asdict(self))

    @classmethod
    def from_scalars(cls, values: Mapping[str, Scalar]) -> ScatterTraining:
        """Read a broadcast's settings; names of other parts are ignored, missing ones refused."""
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in values]
        if missing:
            raise ValueError(f"the broadcast lacks the training settings {', '.join(missing)}")
        return cls(**{name: values[name] for name in names})  # type: ignore[arg-type]


def _require_number(
    name: str, value: float, *, most: float, above: float | None = None, least: float | None = None
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; expected a finite number")
    if (above is not None and value <= above) or (least is not None and value < least):
        bound = f"above {above}" if above is not None else f"at least {least}"
        raise ValueError(f"{name} is {value}; expected {bound}")
    if value > most:
        raise ValueError(f"{name} is {value}; expected at most {most}")
