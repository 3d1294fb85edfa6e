"""Why a round ended without an update, as one of a few slugs.

What an error says may quote the app's data, and stays on the device.
"""

from __future__ import annotations

import sqlite3

from device_sdk.artifact.errors import ArtifactError
from device_sdk.errors import (
    BatchError,
    CallEnded,
    GraphRunError,
    NonFiniteStep,
    ProviderError,
    RuntimeMissing,
    StateError,
)
from device_sdk.methods.learner import Declined, LearnerError
from device_sdk.wire.arrays.tensors import BeyondWire
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.report import Reason

_BY_CLASS: tuple[tuple[type[BaseException], Reason], ...] = (
    (CallEnded, Reason.STEP_TOO_LONG),
    (NonFiniteStep, Reason.NOT_FINITE),
    (BeyondWire, Reason.NOT_FINITE),
    (BatchError, Reason.BAD_DATA),
    (MemoryError, Reason.OUT_OF_MEMORY),
    (RuntimeMissing, Reason.NO_RUNTIME),
    (ProviderError, Reason.NO_RUNTIME),
    (ArtifactError, Reason.DOES_NOT_FIT),
    (StateError, Reason.DOES_NOT_FIT),
    (WireError, Reason.BAD_CONTENT),
    (sqlite3.Error, Reason.DISK),
)
# What onnxruntime calls a failed allocation.
_ALLOCATIONS = ("bad_alloc", "allocate memory", "out of memory")


def reason_of(error: BaseException) -> Reason:
    """Of the error that says most: of several that caused each other, the innermost that is known.

    What an app's or a method's own code raised otherwise is ``error``.
    """
    found: Reason | None = None
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        found = _own(link) or found
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return found or Reason.ERROR


def _own(error: BaseException) -> Reason | None:
    if isinstance(error, (Declined, LearnerError)):
        return error.reason
    if isinstance(error, GraphRunError):
        told = str(error).lower()
        memory = any(each in told for each in _ALLOCATIONS)
        return Reason.OUT_OF_MEMORY if memory else Reason.BAD_DATA
    return next((reason for kind, reason in _BY_CLASS if isinstance(error, kind)), None)
