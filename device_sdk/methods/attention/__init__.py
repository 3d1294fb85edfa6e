"""Attention-enhanced meta-learning: the contract and the device's half; no I/O."""
