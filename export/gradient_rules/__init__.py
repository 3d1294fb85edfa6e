"""What becomes of a step's gradients before the optimizer sees them."""

from export.gradient_rules.base import Direction, GradientRule
from export.gradient_rules.conflict import ConflictProjection
from export.gradient_rules.weight_penalty import WeightPenalty

__all__ = ["ConflictProjection", "Direction", "GradientRule", "WeightPenalty"]
