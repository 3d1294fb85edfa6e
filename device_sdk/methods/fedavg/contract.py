"""The training settings that a broadcast of federated averaging carries, known to both ends."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.manifest import Manifest
from device_sdk.artifact.parts import is_under
from device_sdk.fields import Within
from device_sdk.wire.arrays.exchange import TrainingSettings

Weighting = Literal["samples", "uniform"]
Personalise = Literal["fine-tuned", "ditto", "ala", "apfl"]


@dataclass(frozen=True, slots=True)
class FedAvgTraining(TrainingSettings):
    """How every device trains in a round of federated averaging.

    FedAvg (McMahan et al. 2017, algorithm 1) is the default. FedSGD is ``batch_size`` 0 and one
    epoch: one gradient step on all local samples. FedProx (Li et al. 2020, eq. 2) is
    ``proximal_mu`` above 0. FedPer (Arivazhagan et al. 2019) is ``personal``. A model for each
    device is ``personalise`` (:mod:`device_sdk.methods.fedavg.personal` has the formulas).

    Attributes:
        epochs: passes over the local samples in a round.
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
        personalise: what a device's own model is, which it predicts with. ``fine-tuned``: the
            broadcast's, trained on. ``ditto``: one of its own, trained beside and pulled towards
            the broadcast's (Li et al. 2021). ``ala``: trained on from an element-wise mixture of
            its last one and the broadcast's (Zhang et al. 2023). ``apfl``: a mixture of one of its
            own and the one that it trains for all (Deng et al. 2020).
        own_pull: lambda of Ditto: weight of half the own model's squared distance to the
            broadcast's.
        mixed: of ALA, torch's names of what is mixed, as in ``personal``; the rest is the
            broadcast's. Nothing for all.
        mixing_rate, mixing_samples: of ALA: the rate at which the mixture's weights are learnt, and
            the share of the samples that they are learnt on each round.
        own_share: alpha of APFL: what share of the mixture is the device's own, to begin with.
        own_share_adapts: each device learns its ``own_share``.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    epochs: Annotated[int, Within(1)] = 1
    batch_size: Annotated[int, Within(0)] = 32
    most_steps: Annotated[int, Within(0)] = 0
    learning_rate: Annotated[float, Within(0, 1e3)] = 0.0
    proximal_mu: Annotated[float, Within(0, 1e3)] = 0.0
    personal: str = ""
    weighting: Weighting = "samples"
    optimizer_state: Literal["fresh", "kept"] = "fresh"
    personalise: Personalise = "fine-tuned"
    own_pull: Annotated[float, Within(0, 1e3)] = 0.1
    mixed: str = ""
    mixing_rate: Annotated[float, Within(0, 1e6, above=True)] = 1.0
    mixing_samples: Annotated[float, Within(0, 1, above=True)] = 0.8
    own_share: Annotated[float, Within(0, 1)] = 0.5
    own_share_adapts: bool = True

    LATER: ClassVar[frozenset[str]] = frozenset(
        {"personalise", "own_pull", "mixed", "mixing_rate", "mixing_samples", "own_share"}
        | {"own_share_adapts"}
    )

    def check(self) -> None:
        """Raises ValueError where a list holds an empty name, or settings do not go together."""
        for setting in ("personal", "mixed"):
            if "" in getattr(self, setting).split(",")[1:]:
                raise ValueError(
                    f"{setting} is {getattr(self, setting)!r}; expected names separated by commas, "
                    "such as 'classifier,norm', or nothing"
                )
        if self.personalise == "fine-tuned":
            return
        where = f"personalise is {self.personalise!r}"
        if self.personal:
            raise ValueError(
                f"{where}, which gives each device a whole model of its own, and personal keeps "
                f"{self.personal!r} on it: give one of the two"
            )
        if self.optimizer_state == "kept":
            raise ValueError(
                f"{where}, and devices keep momenta, which would be of another model than a round "
                "begins with: set optimizer_state to 'fresh'"
            )
        if self.proximal_mu and self.personalise != "ditto":
            raise ValueError(
                f"{where}, whose steps no proximal term may pull: set proximal_mu to 0"
            )

    @property
    def personal_names(self) -> tuple[str, ...]:
        """``personal``, taken apart."""
        return _names(self.personal)

    @property
    def mixed_names(self) -> tuple[str, ...]:
        """``mixed``, taken apart."""
        return _names(self.mixed)


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",") if name.strip())


def personal_obstacle(training: FedAvgTraining, manifest: Manifest) -> str:
    """Why devices cannot personalise this artifact as the task says; empty where they can."""
    choice = training.personalise
    if choice == "fine-tuned":
        return ""
    rates = {port.of for port in manifest.graphs["train"].select("hyper")}
    if choice in ("ala", "apfl") and any(each.kind == "optimizer" for each in manifest.state):
        return (
            f"personalise is {choice!r}, which reads gradients off single steps, and a step of "
            f"{manifest.name!r} depends on those before it ({manifest.optimizer.name}): export it "
            "with export.Sgd, without momentum, or set personalise to 'ditto' or 'fine-tuned'"
        )
    if choice == "ala" and "lr" not in rates:
        return (
            f"personalise is 'ala', which reads gradients off steps at a rate of its own, and "
            f"{manifest.name!r} has no input 'lr': export it with export.Sgd"
        )
    part = manifest.submodel
    if choice != "ala" or (part is not None and part.rung < part.rungs):
        return ""  # a smaller rung may lack layers
    names = [member.name for _, member in manifest.members()]
    unused = [each for each in training.mixed_names if not any(is_under(n, [each]) for n in names)]
    if unused:
        return f"mixed is {unused[0]!r}, which names no parameter of {manifest.name!r}"
    return ""


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
