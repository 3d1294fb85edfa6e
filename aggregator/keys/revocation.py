"""Revoking a device: from the registry, and from what is published next."""

from __future__ import annotations

from aggregator.store import Store

__all__ = ["revoke"]


def revoke(store: Store, device_id: bytes, now_unix_seconds: int) -> bool:
    """Revoke inside a transaction; whether the device was there and not revoked before.

    The group key, which the device knows, is replaced before the next publication.
    """
    if not store.devices.revoke(device_id, now_unix_seconds):
        return False
    store.facts.rotation_due = True
    return True
