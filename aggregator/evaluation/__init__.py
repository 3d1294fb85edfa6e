"""What a fleet's devices found out about a model, added up."""
