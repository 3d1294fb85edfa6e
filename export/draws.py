"""Random numbers of Python and numpy in a step: a graph would hold those of its recording for ever.

Some models draw them for nothing (a layer dropped with probability 0), so it is tried whether they
matter.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from export.errors import ExportError

TRIES = 16


def drawn_so_far() -> tuple[Any, ...]:
    """Differs from what it was where numbers were drawn since."""
    _, words, *places = np.random.get_state()
    return random.getstate(), np.asarray(words).tobytes(), *places


def refuse_draws(losses: Callable[[], Mapping[str, Tensor]]) -> None:
    """Raise ExportError where ``losses()`` changes with what is drawn; warn where it was not seen.

    Called where they do draw.
    """
    first = losses()
    for _ in range(TRIES):
        again = losses()
        if any(not torch.equal(again[name], loss) for name, loss in first.items()):
            raise ExportError(
                "the loss draws numbers from Python's random or numpy.random, of which the "
                "exported step would hold one draw for ever",
                instead="torch.rand and its kind, which a device draws anew at each step; or "
                "numbers drawn before the step, given as a batch entry",
            )
    warnings.warn(
        "the loss draws numbers from Python's random or numpy.random, which changed nothing in "
        f"{TRIES} runs; the exported step holds one draw for ever",
        stacklevel=2,
    )
