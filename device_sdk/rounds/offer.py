"""What a round's terms offer to one device: attachments that it may read, and the keys to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from device_sdk.home.membership import Membership
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.manifest import Manifest
from device_sdk.wire.publish.terms import OfferedAttachment, TaskTerms
from device_sdk.wire.seal.cohort_key import unwrap_cohort_key

__all__ = ["Offer", "read_offer"]


@dataclass(frozen=True, slots=True)
class Offer:
    """``readable`` by name; ``keys`` by cohort, of the cohorts that this device belongs to."""

    readable: Mapping[str, OfferedAttachment]
    keys: Mapping[str, bytes]

    @property
    def sizes(self) -> dict[str, int]:
        """By name, the bytes to fetch."""
        return {name: each.size for name, each in self.readable.items()}

    def content_ids(self) -> set[bytes]:
        """Of all that is readable."""
        return {each.content_id for each in self.readable.values()}


def read_offer(terms: TaskTerms, manifest: Manifest, membership: Membership) -> Offer:
    """The attachments that this device may read. Raises ``WireError``: ``bad-tag``, ``bad-field``.

    ``bad-field`` for a content that two attachments name with different sizes or readers.
    """
    keys = {}
    for cohort, wrapped in terms.cohort_keys.items():
        key = unwrap_cohort_key(
            wrapped, membership.grant.admission_key, manifest.task, cohort, manifest.broadcast_id
        )
        if key is not None:
            keys[cohort] = key
    seen: dict[bytes, OfferedAttachment] = {}
    for each in terms.attachments:
        other = seen.setdefault(each.content_id, each)
        if (other.size, other.cohort) != (each.size, each.cohort):
            raise WireError("bad-field", "two attachments disagree on one content")
    readable = {
        each.name: each for each in terms.attachments if not each.cohort or each.cohort in keys
    }
    return Offer(readable, keys)
