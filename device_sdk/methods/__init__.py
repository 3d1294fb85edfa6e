"""A folder a method: the contract that both ends keep, and the device's half; no I/O in either."""
