"""The one error of a bad artifact."""

from __future__ import annotations


class ArtifactError(ValueError):
    """An artifact is malformed, was changed, or asks for something that is not allowed."""
