"""Mutual learning: the aggregator's half, pure arithmetic."""
