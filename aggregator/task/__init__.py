"""A task from its file: read once, checked whole, typed from then on."""
