"""Ways to the same result that save torch time or memory, left out.

Gradients of tables without their zeros, logits of many classes by pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch.nn.functional as functional

from export.rewrites import Equals


def _without(own: Callable[..., Any], argument: str) -> Callable[..., Any]:
    def plain(*args: Any, **kwargs: Any) -> Any:
        given = signature(own).bind(*args, **kwargs)
        given.arguments.pop(argument, None)
        return own(**given.arguments)

    return plain


EQUALS: Equals = {
    own: _without(own, argument)
    for own, argument in (
        (functional.embedding, "sparse"),
        (functional.embedding_bag, "sparse"),
        # Since torch 2.13.
        (getattr(functional, "linear_cross_entropy", None), "options"),
    )
    if own is not None
}
