"""Capacity-adaptive scatter factorisation: the aggregator's half, pure arithmetic."""
