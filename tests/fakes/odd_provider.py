"""A provider that is the CPU's session, with results that a function spoils."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from device_sdk import trainer
from device_sdk.artifact.load import CheckedGraph
from device_sdk.runtime.providers import CPU, Provider
from device_sdk.runtime.session import Calls, SessionSettings, make_session

ODD = Provider("odd", "OddExecutionProvider")
Spoil = Callable[[np.ndarray], None]


class OddSession:
    """onnxruntime's session on the CPU; ``spoil`` gets each bound output after a run."""

    def __init__(self, session: ort.InferenceSession, spoil: Spoil) -> None:
        self._session = session
        self._spoil = spoil

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: ort.IOBinding, options: ort.RunOptions) -> None:
        self._session.run_with_iobinding(binding, options)
        for value in binding.get_outputs():
            self._spoil(value.numpy())


def offer_odd_provider(patch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    """Trainers get it, but where they ask for the CPU."""

    def opened(
        graph: CheckedGraph, file: str, providers: object, threads: int, calls: Calls, **_: object
    ) -> Any:
        session = make_session(graph, file, SessionSettings(CPU, 1), calls)
        if providers in ("cpu", CPU):
            return session, SessionSettings(CPU, 1)
        return OddSession(session, spoil), SessionSettings(ODD, 1)

    patch.setattr(trainer, "open_session", opened)
