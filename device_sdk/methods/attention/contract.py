"""The settings that an attention broadcast carries, known to both ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from device_sdk.artifact.flat_layout import FlatLayout, flat_layout
from device_sdk.methods.settings import (
    TrainingSettings,
    require_choice,
    require_flags,
    require_number,
    require_whole,
)

__all__ = ["AttentionTraining", "Layers", "layouts_from_text", "layouts_to_text"]

Layers = Literal["both", "first", "second"]
_MOST_TEXT = 1 << 20
_COUNTS = {
    "warm_up_rounds": 0,
    "neighbours": 0,
    "folds": 2,
    "base_steps": 1,
    "batch_size": 1,
    "meta_every": 1,
    "meta_batch_size": 1,
}
"""Whole numbers, and the least of each."""


@dataclass(frozen=True, slots=True)
class AttentionTraining(TrainingSettings):
    """How every device trains in a round of attention-based aggregation.

    Attributes:
        warm_up_rounds: p of papers/fedamn: in rounds 1 to p devices start from the global model.
        base_steps, batch_size, learning_rate: of the base network, each round.
        proximal: pulls each base step towards the round's start (FedAMP's and FedProx's term);
            0 for none.
        personal: start from the own last parameters and let ``proximal`` pull towards the mixture,
            instead of starting from the mixture (FedAMP's order of things).
        mix: attention takes part after the warm-up; off, devices go on from the global model.
        keeps: without ``mix`` only: parameter groups that stay the device's own, separated by
            commas (FedPer's personal layers, such as ``head``).
        aggregator_mixes: devices take the mixture from the aggregator, whatever their own choice.
        layers: which layers of the meta-network take part.
        own_weight: in layer 1 the own parameters weigh as much as so many favourite neighbours: at
            1 as much as the favourite, at 0 nothing. Nothing learned changes that, and meta-steps
            do without them.
        include_self: the own parameters are one of the neighbours, and attention is free to weigh
            them.
        neighbours: fetch at most so many neighbours' vectors, those that attention favours; 0 for
            the whole cluster.
        folds: the local samples' parts. Each round one of them is for the meta-steps, the others
            for the base steps (those after the last meta-step take from all).
        meta_every: a meta-step comes before every so many base steps; 1 is full alternation.
        meta_batch_size, meta_learning_rate: of the meta-steps.
        sketch_rows, sketch_seed: see :func:`device_sdk.methods.attention.sketch.sketches`.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    warm_up_rounds: int = 4
    base_steps: int = 30
    batch_size: int = 32
    learning_rate: float = 0.1
    proximal: float = 0.0
    personal: bool = False
    mix: bool = True
    keeps: str = ""
    aggregator_mixes: bool = False
    layers: Layers = "both"
    own_weight: float = 0.0
    include_self: bool = False
    neighbours: int = 0
    folds: int = 5
    meta_every: int = 10
    meta_batch_size: int = 32
    meta_learning_rate: float = 0.02
    sketch_rows: int = 64
    sketch_seed: int = 0

    def __post_init__(self) -> None:
        require_flags(self, ("personal", "mix", "aggregator_mixes", "include_self"))
        require_choice("layers", self.layers, get_args(Layers))
        for name, least in _COUNTS.items():
            require_whole(name, getattr(self, name), least, 2**31)
        require_whole("sketch_rows", self.sketch_rows, 8, 4096)
        if self.sketch_rows % 8:
            raise ValueError(f"sketch_rows is {self.sketch_rows}; expected a multiple of 8")
        require_whole("sketch_seed", self.sketch_seed, 0, 2**63 - 1)
        require_number("learning_rate", self.learning_rate, 0, 1e6, above=True)
        require_number("meta_learning_rate", self.meta_learning_rate, 0, 1e6)
        require_number("proximal", self.proximal, 0, 1e6)
        require_number("own_weight", self.own_weight, 0, 1e3)
        if self.include_self and self.own_weight > 0:
            raise ValueError("own_weight and include_self exclude each other: give one")
        if not isinstance(self.keeps, str) or (self.keeps and self.mix):
            raise ValueError(f"keeps is {self.keeps!r}; expected group names, with mix=False only")
        if self.personal and self.proximal == 0:
            raise ValueError("personal needs a proximal pull above 0: nothing else would be shared")


def layouts_to_text(layouts: Sequence[FlatLayout]) -> str:
    """Layouts as one setting: JSON of the parameters' shapes, in the order given."""
    shapes = [{entry.name: entry.shape for entry in layout.entries} for layout in layouts]
    return json.dumps(shapes, separators=(",", ":"), sort_keys=True)


def layouts_from_text(text: object) -> tuple[FlatLayout, ...]:
    """What :func:`layouts_to_text` wrote; raises ValueError for anything else."""
    if not isinstance(text, str) or len(text) > _MOST_TEXT:
        raise ValueError("the layouts are no text, or far too long")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the layouts are no JSON: {error}") from error
    if not isinstance(found, list) or not found:
        raise ValueError("the layouts must be a list of at least one model's shapes")
    return tuple(flat_layout(_shapes(one)) for one in found)


def _shapes(found: object) -> dict[str, list[int]]:
    if not isinstance(found, dict):
        raise ValueError("a layout must be an object of shapes by name")
    for name, shape in found.items():
        whole = isinstance(shape, list) and all(type(size) is int for size in shape)
        if not whole or len(shape) > 8 or not all(0 < size < 2**31 for size in shape):
            raise ValueError(f"the shape of {str(name)[:80]!r} must be a list of positive integers")
    return found
