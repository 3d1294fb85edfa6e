"""The only place with a loop: one thread decides, the links' threads carry."""
