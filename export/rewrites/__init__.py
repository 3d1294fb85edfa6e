"""Equals of the few torch functions that cannot be recorded as they are."""
