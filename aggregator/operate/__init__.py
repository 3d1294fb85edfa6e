"""What an operator sees of a fleet, and does with it."""
