"""Devices whose data differ: what a model of each one's own is worth beside one for all."""
