"""The training settings that a scatter broadcast carries, known to both ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from device_sdk.methods.settings import (
    TrainingSettings,
    require_choice,
    require_number,
    require_whole,
)

__all__ = ["ScatterTraining", "Scores"]

Scores = Literal["residual", "columns"]


@dataclass(frozen=True, slots=True)
class ScatterTraining(TrainingSettings):
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
        require_choice("scores", self.scores, get_args(Scores))
        require_number("user_learning_rate", self.user_learning_rate, 0, 1e3, above=True)
        require_number("user_l2", self.user_l2, 0, 1e3)
        require_number("item_l2", self.item_l2, 0, 1e3)
        require_number("user_spread", self.user_spread, 0, 10, above=True)
        require_whole("most_triples", self.most_triples, 0)
