"""What lies between a virtual device and the aggregator."""

from __future__ import annotations

from typing import Protocol

from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update


class Channel(Protocol):
    """Carries messages, as exactly as its encoding does. May count what it carries."""

    def down(self, broadcast: Broadcast) -> Broadcast:
        """What every device of the round receives."""

    def fetch(self, device: int, attachment: Attachment) -> Attachment:
        """What a device that asked for an attachment receives."""

    def up(self, update: Update) -> Update:
        """What the aggregator receives."""


class DirectChannel:
    """Hands everything over as it is."""

    def down(self, broadcast: Broadcast) -> Broadcast:
        """The broadcast itself."""
        return broadcast

    def fetch(self, device: int, attachment: Attachment) -> Attachment:
        """The attachment itself."""
        return attachment

    def up(self, update: Update) -> Update:
        """The update itself."""
        return update
