"""A task tried out on virtual devices: the product's own halves of a method, in one process.

Here alone an aggregator's file may import what trains on a device. Nothing that serves imports it.
"""
