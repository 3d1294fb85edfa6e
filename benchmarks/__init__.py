"""Measured comparisons that print tables. Each is run as ``python -m benchmarks.<name>``."""
