"""Capacity-adaptive scatter factorisation: the contract and the device's half; no I/O."""
