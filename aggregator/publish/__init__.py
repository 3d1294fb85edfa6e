"""What the aggregator says: sealed before it is sent, and stored before either."""
