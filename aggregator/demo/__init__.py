"""A fleet on this machine: what ``tessera-aggregator demo`` and the examples over a broker run."""
