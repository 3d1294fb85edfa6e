"""Bytes without meaning: what is read back is what was written, or an error."""
