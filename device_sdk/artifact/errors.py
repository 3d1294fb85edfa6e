"""The one error of a bad artifact."""

from __future__ import annotations

from device_sdk.fields import Misfit


class ArtifactError(ValueError):
    """An artifact is malformed, was changed, or asks for something that is not allowed."""


class ArtifactMisfit(Misfit, ArtifactError):
    """A value that the declaration of a manifest's part does not allow."""
