"""The training settings that a broadcast of federated averaging carries, known to both ends."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.manifest import Manifest
from device_sdk.artifact.parts import is_under
from device_sdk.fields import Within
from device_sdk.wire.arrays.exchange import TrainingSettings

Weighting = Literal["samples", "uniform"]


@dataclass(frozen=True, slots=True)
class FedAvgTraining(TrainingSettings):
    """How every device trains in a round of federated averaging.

    FedAvg (McMahan et al. 2017, algorithm 1) is the default. FedSGD is ``batch_size`` 0 and one
    epoch: one gradient step on all local samples. FedProx (Li et al. 2020, eq. 2) is
    ``proximal_mu`` above 0. FedPer (Arivazhagan et al. 2019) is ``personal``.

    Attributes:
        epochs: passes over the local samples in a round; 0 for one, and where that is less than 30
            steps, for as many as 30 steps take.
        batch_size: samples a step; 0 for all at once.
        most_steps: at most so many steps a round; 0 for no limit.
        learning_rate: 0 for the artifact's own.
        proximal_mu: weight of half the squared distance to the broadcast's parameters.
        personal: torch's names of what stays on the device, separated by commas: ``classifier`` or
            ``classifier.4,norm``. A name stands for all parameters and buffers below it.
        weighting: ``samples`` weights devices by their number of training samples, which they then
            send; with ``uniform`` all count the same and none is sent.
        optimizer_state: ``fresh`` starts the device's optimizer anew in each round, as its
            parameters do; ``kept`` carries momenta over.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    epochs: Annotated[int, Within(0)] = 0
    batch_size: Annotated[int, Within(0)] = 32
    most_steps: Annotated[int, Within(0)] = 0
    learning_rate: Annotated[float, Within(0, 1e3)] = 0.0
    proximal_mu: Annotated[float, Within(0, 1e3)] = 0.0
    personal: str = ""
    weighting: Weighting = "samples"
    optimizer_state: Literal["fresh", "kept"] = "fresh"

    def check(self) -> None:
        """Raises ValueError where ``personal`` holds an empty name."""
        if "" in self.personal.split(",")[1:]:
            raise ValueError(
                f"personal is {self.personal!r}; expected names separated by commas, such as "
                "'classifier,norm', or nothing"
            )

    @property
    def personal_names(self) -> tuple[str, ...]:
        """``personal``, taken apart."""
        return tuple(name.strip() for name in self.personal.split(",") if name.strip())


# A model's parameters and buffers as a method's messages name and shape them.
#
# Torch's names may hold capitals and begin with digits; an array's name on the wire may not.
# And rows along the last axis share a scale in int8: a convolution's weights [o, i, h, w]
# travel as [o, i * h * w], or scales would be half of them.

_OTHER = re.compile(r"[^a-z0-9_.]")
_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """One float32 tensor of a model that a method shares.

    Attributes:
        name: torch's.
        wire_name: in messages: ``w.`` (parameters) or ``b.`` (buffers) and torch's name in lower
            case, other characters as ``_``.
        shape: in the model.
        kind: ``buffer`` for float buffers such as batch norm's statistics.
    """

    name: str
    wire_name: str
    shape: tuple[int, ...]
    kind: Literal["parameter", "buffer"]

    @property
    def wire_shape(self) -> tuple[int, ...]:
        """In messages: of at most two axes."""
        if len(self.shape) <= 2:
            return self.shape
        size = 1
        for length in self.shape[1:]:
            size *= length
        return (self.shape[0], size)

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for length in self.shape:
            size *= length
        return size


def shared_tensors(
    parameters: Mapping[str, NDArray[Any]],
    buffers: Mapping[str, NDArray[Any]],
    kept: Sequence[str] = (),
    frozen: Collection[str] = (),
) -> tuple[SharedTensor, ...]:
    """What a method shares of a model: the float32 tensors that training moves, but for those under
    a name in ``kept``.

    Parameters come before buffers, each in the given order. Integer buffers are a device's own (a
    count of batches, say). ``frozen``: names of what no step moves (``Manifest.frozen_members``),
    which came with the artifact. Raises ValueError where nothing is left, a name in ``kept`` fits
    nothing, or two tensors would have one name on the wire.
    """
    names = (*parameters, *buffers)
    unused = [prefix for prefix in kept if not any(is_under(n, [prefix]) for n in names)]
    if unused:
        raise ValueError(
            f"{unused[0]!r} names no parameter; expected the start of one of "
            f"{', '.join(sorted(parameters))}"
        )
    found: dict[str, SharedTensor] = {}
    sides: tuple[tuple[Literal["parameter", "buffer"], str, Mapping[str, NDArray[Any]]], ...] = (
        ("parameter", "w", parameters),
        ("buffer", "b", buffers),
    )
    for kind, prefix, tensors in sides:
        for name, array in tensors.items():
            if array.dtype != np.float32 or name in frozen or is_under(name, kept):
                continue
            wire_name = f"{prefix}.{_OTHER.sub('_', name.lower())}"
            if not _NAME.fullmatch(wire_name) or len(wire_name) > 255:
                raise ValueError(f"{name!r} has no name on the wire; rename the model's attribute")
            if wire_name in found:
                raise ValueError(
                    f"{name!r} and {found[wire_name].name!r} would have one name on the wire, "
                    f"{wire_name!r}: rename one of the model's attributes"
                )
            found[wire_name] = SharedTensor(name, wire_name, array.shape, kind)
    if not any(one.kind == "parameter" for one in found.values()):
        raise ValueError("no float32 parameter is left to share")
    return tuple(found.values())


def tensors_of(
    manifest: Manifest,
    parameters: Mapping[str, NDArray[Any]],
    buffers: Mapping[str, NDArray[Any]],
    kept: Sequence[str] = (),
) -> tuple[tuple[SharedTensor, ...], tuple[SharedTensor, ...]]:
    """What of an artifact's model travels both ways, and what comes down alone (a submodel's
    tensors that it holds). Raises ValueError as :func:`shared_tensors` does, but that a submodel
    may lack the layers of a name in ``kept``."""
    if manifest.submodel is not None:
        kept = [e for e in kept if any(is_under(name, [e]) for name in (*parameters, *buffers))]
    moved = shared_tensors(parameters, buffers, kept, manifest.frozen_members)
    names = {one.name for one in moved}
    told = shared_tensors(parameters, buffers, kept, manifest.fixed)
    return moved, tuple(one for one in told if one.name not in names)


def rung_name(rung: int, deal: int | None = None) -> str:
    """Of the attachment that holds a submodel, by its rung (from 1); where its slices are dealt,
    of one of the several (from 0) that devices of the rung train in a round."""
    return f"rung{rung}" if deal is None else f"rung{rung}.{deal}"


def deal_of(round_id: int, sender: str, deals: int) -> int:
    """Which of so many slices a device trains in a round: by its name, whatever data it has."""
    mark = hashlib.sha256(f"{round_id} {sender}".encode()).digest()
    return int.from_bytes(mark[:8], "big") % deals


def own_rung(names: Iterable[str], rung: int, round_id: int, sender: str) -> str | None:
    """Which of these attachments a device that trains the rung takes; None where it is in none."""
    one, several = rung_name(rung), f"{rung_name(rung)}."
    found = sorted(
        {n for n in names if n == one or n.startswith(several)}, key=lambda n: (len(n), n)
    )
    return found[deal_of(round_id, sender, len(found))] if found else None


def own_name(rung: int) -> str:
    """Of the attachment with the first values of a submodel's personal layers."""
    return f"own{rung}"


def first_name(rung: int) -> str:
    """Of the attachment with all first values of a submodel, for devices that train one alone."""
    return f"first{rung}"


def exact_names(layout: Sequence[SharedTensor]) -> frozenset[str]:
    """What no codec is to round: statistics, of whose size a rounding error may exceed what they
    tell apart (a mean of 101,325 Pa that moves by 10). They are few beside the parameters."""
    return frozenset(one.wire_name for one in layout if one.kind == "buffer")
