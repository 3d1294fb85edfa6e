"""The only place that touches keys: nothing leaves it unsealed that has to be sealed."""
