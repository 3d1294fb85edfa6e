"""Attentive federated distillation: the contract and the device's half; no I/O."""
