"""Sizes of the handmade linear model, for processes that train it and need not load onnx."""

from __future__ import annotations

FEATURES, TARGETS = 4, 3
