"""State that two onnxruntimes have trained: the same bits, where they are of the same kernels."""

from __future__ import annotations

import pytest

from examples.javascript.compare import difference

MOST_BY_VERSIONS = 1e-6
"""What another release may compute otherwise: npm's is not always as new as Python's."""


def same_bits(ours: bytes, theirs: bytes) -> None:
    """Two files of state are equal; where kernels differ they are all but equal, and it skips."""
    apart = difference(ours, theirs)
    assert apart <= MOST_BY_VERSIONS
    if apart:
        pytest.skip(f"here the two releases of onnxruntime compute otherwise, by {apart:.1e}")
