"""Federated prototypes: the contract and the device's half; no I/O."""
