"""What a task file may choose about attention."""

from __future__ import annotations

from dataclasses import dataclass, field

from aggregator.methods.attention.clustering import ClusterSettings
from aggregator.methods.attention.mixtures import MixtureSettings
from aggregator.methods.falling_rate import require_decay
from device_sdk.methods.attention.contract import AttentionTraining
from device_sdk.methods.settings import require_whole

__all__ = ["AttentionSettings"]


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Settings of an attention task.

    Attributes:
        training: what the broadcast tells the devices.
        clusters: how devices are grouped.
        mixture: how the aggregator mixes for devices that do not.
        keep_rounds: a device's last model takes part for so many rounds after it came.
        most_samples: a device that claims more samples weighs as much as one with so many; 0 for no
            limit.
        half: vectors and mixtures are handed on as float16.
        rate_decay: the devices' learning rate falls by this factor a round; personal models are
            used as they are after the last steps, which should be quiet ones.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    training: AttentionTraining = field(default_factory=AttentionTraining)
    clusters: ClusterSettings = field(default_factory=ClusterSettings)
    mixture: MixtureSettings = field(default_factory=MixtureSettings)
    keep_rounds: int = 10
    most_samples: int = 0
    half: bool = True
    rate_decay: float = 1.0

    def __post_init__(self) -> None:
        require_whole("keep_rounds", self.keep_rounds, 1)
        require_whole("most_samples", self.most_samples, 0)
        require_decay(self.rate_decay)
        if self.mixture.rule == "fedamp" and not self.training.aggregator_mixes:
            raise ValueError("the rule 'fedamp' needs training with aggregator_mixes=True")
