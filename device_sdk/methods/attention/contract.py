"""The settings that an attention broadcast carries, known to both ends."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.flat_layout import FlatLadder, FlatLayout, flat_layout
from device_sdk.fields import Within
from device_sdk.wire.arrays.exchange import TrainingSettings

VECTOR = "vector."
"""Before a sender: the attachment that holds its parameters, for its neighbours to mix."""
MIXTURE = "mixture."
"""Before a sender: the attachment with what the aggregator mixed for it."""

Layers = Literal["both", "first", "second"]
_MOST_TEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class AttentionTraining(TrainingSettings):
    """How every device trains in a round of attention-based aggregation.

    Attributes:
        warm_up_rounds: p of papers/fedamn: in rounds 1 to p devices start from the global model.
        base_steps, batch_size, learning_rate: of the base network, each round; a rate of 0 is the
            artifact's own.
        proximal: pulls each base step towards the round's start (FedAMP's and FedProx's term);
            0 for none.
        personal: start from the own last parameters and let ``proximal`` pull towards the mixture,
            instead of starting from the mixture (FedAMP's order of things).
        mix: attention takes part after the warm-up; off, devices go on from the global model.
        keeps: without ``mix`` only: parameter groups that stay the device's own, separated by
            commas (FedPer's personal layers, such as ``head``).
        aggregator_mixes: devices take the mixture from the aggregator, whatever their own choice;
            off, those that can mix by themselves, with the task's meta-networks (``companions``).
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
        sketch_rows, sketch_seed: see :func:`device_sdk.methods.attention.contract.sketches`.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    warm_up_rounds: Annotated[int, Within(0, 2**31)] = 4
    base_steps: Annotated[int, Within(1, 2**31)] = 30
    batch_size: Annotated[int, Within(1, 2**31)] = 32
    learning_rate: Annotated[float, Within(0, 1e6)] = 0.0
    proximal: Annotated[float, Within(0, 1e6)] = 0.0
    personal: bool = False
    mix: bool = True
    keeps: str = ""
    aggregator_mixes: bool = True
    layers: Layers = "both"
    own_weight: Annotated[float, Within(0, 1e3)] = 0.0
    include_self: bool = False
    neighbours: Annotated[int, Within(0, 2**31)] = 0
    folds: Annotated[int, Within(2, 2**31)] = 5
    meta_every: Annotated[int, Within(1, 2**31)] = 10
    meta_batch_size: Annotated[int, Within(1, 2**31)] = 32
    meta_learning_rate: Annotated[float, Within(0, 1e6)] = 0.02
    sketch_rows: Annotated[int, Within(8, 4096)] = 64
    sketch_seed: Annotated[int, Within(0, 2**63 - 1)] = 0

    def check(self) -> None:
        """Raises ValueError for settings that do not go together."""
        if self.sketch_rows % 8:
            raise ValueError(f"sketch_rows is {self.sketch_rows}; expected a multiple of 8")
        if self.include_self and self.own_weight > 0:
            raise ValueError("own_weight and include_self exclude each other: give one")
        if self.keeps and self.mix:
            raise ValueError(f"keeps is {self.keeps!r}; expected group names, with mix=False only")
        if self.personal and self.proximal == 0:
            raise ValueError("personal needs a proximal pull above 0: nothing else would be shared")


def ladder_to_text(ladder: FlatLadder) -> str:
    """A ladder as one setting: JSON of its rungs' shapes, in their order, and of its blocks."""
    rungs = [{entry.name: entry.shape for entry in each.entries} for each in ladder.layouts]
    told = {"rungs": rungs, "blocks": dict(ladder.blocks)}
    return json.dumps(told, separators=(",", ":"), sort_keys=True)


def ladder_from_text(text: object) -> FlatLadder:
    """What :func:`ladder_to_text` wrote; raises ValueError for anything else."""
    if not isinstance(text, str) or len(text) > _MOST_TEXT:
        raise ValueError("the ladder is no text, or far too long")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the ladder is no JSON: {error}") from error
    rungs = found.get("rungs") if isinstance(found, dict) and len(found) == 2 else None
    if not isinstance(rungs, list) or not rungs:
        raise ValueError("the ladder must have 'rungs', a list of at least one model's shapes")
    layouts = tuple(flat_layout(_sizes(one)) for one in rungs)
    return FlatLadder(layouts, _sizes(found.get("blocks")))


def _sizes(found: object) -> dict[str, tuple[int, ...]]:
    if not isinstance(found, dict):
        raise ValueError("shapes and blocks must be objects of sizes by name")
    for name, sizes in found.items():
        whole = isinstance(sizes, list) and all(type(size) is int for size in sizes)
        if not whole or len(sizes) > 8 or not all(0 < size < 2**31 for size in sizes):
            raise ValueError(f"the sizes of {str(name)[:80]!r} must be a list of positive integers")
    return {name: tuple(sizes) for name, sizes in found.items()}


# Sketches: 64 numbers that stand for thousands, keeping lengths and angles nearly as they are.
#
# s = P d / sqrt(rows) with P of +1 and -1 (Johnson and Lindenstrauss; Achlioptas 2003, theorem
# 1.1). Both ends draw the same P from a seed that the task publishes.

Floats = NDArray[np.float32]

# So many columns of P are in memory at once.
_COLUMNS = 4096


def sketches(vectors: NDArray[Any], layout: FlatLayout, seed: int, rows: int = 64) -> Floats:
    """One sketch for each parameter group of each vector.

    Args:
        vectors: [n, p] in ``layout``'s order; differences from a common point, as a rule.
        layout: where the groups lie.
        seed: of P, 0 to 2^63 - 1; the same for all who compare sketches.
        rows: numbers in a sketch, a multiple of 8.

    Returns float32 [n, groups, rows]. The expected squared length of a sketch is that of the
    group's part of the vector, with a relative deviation of sqrt(2 / rows). Raises ValueError for
    vectors of another length, or a seed or ``rows`` outside its range.
    """
    if vectors.ndim != 2 or vectors.shape[1] != layout.size:
        raise ValueError(f"the vectors are {vectors.shape}; expected [n, {layout.size}]")
    if rows < 8 or rows % 8:
        raise ValueError(f"rows is {rows}; expected a multiple of 8")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}; expected 0 to 2^63 - 1")
    found = np.empty((len(vectors), len(layout.groups), rows), dtype=np.float32)
    for group, (start, end) in enumerate(layout.spans):
        total = np.zeros((len(vectors), rows), dtype=np.float64)
        for first, signs in _signs(seed, layout.groups[group], end - start, rows):
            part = vectors[:, start + first : start + first + len(signs)].astype(np.float64)
            total += part @ signs
        found[:, group] = total / math.sqrt(rows)
    return found


def _signs(seed: int, group: str, size: int, rows: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """P transposed, in blocks: the first column's number and +1 or -1, float64 [columns, rows].

    Bits of SHAKE-256, not of a numpy generator, whose streams may change between versions.
    """
    for block, first in enumerate(range(0, size, _COLUMNS)):
        columns = min(_COLUMNS, size - first)
        label = f"tessera sketch {seed} {group} {block}".encode()
        stream = hashlib.shake_256(label).digest(columns * rows // 8)
        bits = np.unpackbits(np.frombuffer(stream, dtype=np.uint8)).reshape(columns, rows)
        yield first, bits.astype(np.float64) * 2 - 1
