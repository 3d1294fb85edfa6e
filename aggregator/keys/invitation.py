"""Enrolment codes that bind what is in force when they are made."""

from __future__ import annotations

from aggregator.keys.folder import current_descriptor
from aggregator.store import Store
from device_sdk.wire.seal.enrolment_code import EnrolmentCode, new_code
from device_sdk.wire.seal.keys import RandomBytes

__all__ = ["make_codes"]


def make_codes(
    store: Store, count: int, now_unix_seconds: int, random_bytes: RandomBytes
) -> list[EnrolmentCode]:
    """Codes of now; whoever commits them hands them out. Raises AggregatorError."""
    descriptor = current_descriptor(store)
    root, serial = descriptor.root_fingerprint, descriptor.serial
    return [new_code(root, serial, now_unix_seconds, random_bytes) for _ in range(count)]
