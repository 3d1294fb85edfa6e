"""Attention-enhanced meta-learning: the aggregator's half, pure arithmetic."""
