"""Federated averaging: the aggregator's half, pure arithmetic."""
