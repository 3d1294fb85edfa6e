"""The training settings that a broadcast of mutual learning carries, known to both ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from device_sdk.methods.mutual.public_samples import SampleForm
from device_sdk.methods.mutual.soft_labels import LabelForm
from device_sdk.methods.settings import (
    TrainingSettings,
    require_choice,
    require_flags,
    require_number,
    require_whole,
)

__all__ = ["Combine", "MutualTraining", "Schedule"]

Combine = Literal["own", "mean"]
Schedule = Literal["alternate", "joint", "in_turn"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "combine": get_args(Combine),
    "schedule": get_args(Schedule),
    "label_form": get_args(LabelForm),
    "sample_form": get_args(SampleForm),
}
_COUNTS = {
    "classes": (2, 65_536),
    "local_steps": (1, 1_000_000),
    "public_steps": (0, 1_000_000),
    "batch_size": (1, 65_536),
    "public_batch": (1, 65_536),
    "top_classes": (0, 65_535),
}
_NUMBERS = {
    "learning_rate": (0.0, 1e3),
    "public_rate": (0.0, 1e3),
    "weight_kl": (0.0, 1e3),
    "weight_ce": (0.0, 1e3),
    "least_confidence": (0.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class MutualTraining(TrainingSettings):
    """How every device learns from the others in a round.

    MAFML (papers/mafml) is the default. FedMD (Li and Wang 2019) is ``combine="mean"``,
    ``schedule="in_turn"``, ``weight_ce=0``, ``project=False`` and ``use_confidence=False``.

    Attributes:
        classes: number of classes.
        combine: ``own``: a device's soft labels are about its own public samples, and all learn
            from each other's; ``mean``: all label all public samples, and learn from the mean.
        schedule: ``alternate``: each local step is followed by a public one, as in algorithm 1;
            ``joint``: one step along the sum of both, which costs one pass over the local batch
            less; ``in_turn``: all public steps, then all local ones.
        local_steps: a round's.
        public_steps: a round's with ``in_turn``; 0 for as many as local ones.
        batch_size: local samples a step.
        public_batch: public samples a step and owner (fewer where an owner shares fewer).
        learning_rate, public_rate: of local and of public steps (beta and eta of algorithm 1); 0
            for the artifact's own, or for the local one's. ``joint`` uses the first alone.
        weight_kl, weight_ce: of the two parts of equation 6. Where nobody's soft labels are known
            yet, the labels' weight is 1.
        project: take out of the public gradient what opposes the local one (equation 7).
        per_teacher: a public step for each owner, as algorithm 1 is printed; else one for all, the
            mean over owners (equations 3 and 5).
        use_confidence: weight an owner's soft labels by how many of its samples they get right (A
            of equation 3).
        least_confidence: soft labels of owners below it are not used.
        top_classes: of a soft label only so many largest probabilities travel; 0 for all.
        label_form: how a probability travels.
        sample_form: how public samples' float arrays travel, once (``public_samples.py``).
        target: name of the batch entry that holds the class.
        output: name of the artifact's prediction that holds the probabilities.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    classes: int
    combine: Combine = "own"
    schedule: Schedule = "alternate"
    local_steps: int = 20
    public_steps: int = 0
    batch_size: int = 32
    public_batch: int = 16
    learning_rate: float = 0.0
    public_rate: float = 0.0
    weight_kl: float = 1.0
    weight_ce: float = 1.0
    project: bool = True
    per_teacher: bool = False
    use_confidence: bool = True
    least_confidence: float = 0.0
    top_classes: int = 0
    label_form: LabelForm = "float16"
    sample_form: SampleForm = "uint8"
    target: str = "y"
    output: str = "probabilities"

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            require_choice(name, getattr(self, name), known)
        for name, (least, most) in _COUNTS.items():
            require_whole(name, getattr(self, name), least, most)
        for name, (low, high) in _NUMBERS.items():
            require_number(name, getattr(self, name), low, high)
        require_flags(self, ("project", "per_teacher", "use_confidence"))
        for name in ("target", "output"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a name")
        if self.top_classes >= self.classes:
            raise ValueError(
                f"top_classes is {self.top_classes} of {self.classes} classes; expected fewer, or "
                "0 for all"
            )
        if self.combine == "mean" and self.top_classes:
            raise ValueError("top_classes needs combine='own': a mean takes all probabilities")
        if self.schedule == "joint" and self.per_teacher:
            raise ValueError("per_teacher needs a public step of its own: not schedule='joint'")
