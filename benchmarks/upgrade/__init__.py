"""The first release beside this checkout: its devices, its aggregator, its home."""
