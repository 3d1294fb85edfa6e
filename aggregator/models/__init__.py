"""A version's model leaves as a standard file, or not at all: what cannot be checked is refused."""
