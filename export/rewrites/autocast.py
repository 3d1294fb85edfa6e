"""Autocast left out: a device's step is float32 throughout."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from export.rewrites import Replacement


def _enter(self: torch.autocast) -> torch.autocast:
    return self


def _enter_and_say(self: torch.autocast) -> torch.autocast:
    if self._enabled:
        warnings.warn(
            "autocast is left out of the exported step, which computes in float32 throughout",
            stacklevel=2,
        )
    return self


def _leave(self: torch.autocast, *error: Any) -> None:
    """Nothing was entered."""


QUIETLY: list[Replacement] = [
    (torch.autocast, "__enter__", _enter),
    (torch.autocast, "__exit__", _leave),
]
# With a warning for who asked for it.
REPLACED: list[Replacement] = [(torch.autocast, "__enter__", _enter_and_say), QUIETLY[1]]
