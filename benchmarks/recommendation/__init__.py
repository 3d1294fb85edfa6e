"""Leave-one-out evaluation of recommendation, without leaks."""
