"""Attentive federated distillation: the aggregator's half, pure arithmetic."""
