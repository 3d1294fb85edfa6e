"""Small artifacts whose train graphs are written node by node, so that tests need no exporter."""

from tests.fakes.handmade.factors import factor_artifact, factor_parts
from tests.fakes.handmade.linear import (
    FEATURES,
    TARGETS,
    frozen_artifact,
    frozen_manifest,
    linear_artifact,
    linear_parts,
)
from tests.fakes.handmade.writing import onnx_bytes, write_artifact

__all__ = [
    "FEATURES",
    "TARGETS",
    "factor_artifact",
    "factor_parts",
    "frozen_artifact",
    "frozen_manifest",
    "linear_artifact",
    "linear_parts",
    "onnx_bytes",
    "write_artifact",
]
