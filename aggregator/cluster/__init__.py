"""One aggregator in several processes: whatever one of them says is in the store before, under a
right to write that no other process has at the same time."""
