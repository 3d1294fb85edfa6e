"""What the aggregator tells everybody at all times: descriptor and presence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from device_sdk.wire.publish.topics import DescriptorTopic, PresenceTopic, Topics
from device_sdk.wire.seal.keyring import ServingKeys
from device_sdk.wire.seal.presence import Presence, sign_presence


@dataclass(frozen=True)
class Announcements:
    """``keys`` gives the serving keys of the descriptor in force."""

    topics: Topics
    life: Presence
    keys: Callable[[], ServingKeys]

    def standing(self) -> list[tuple[str, bytes]]:
        """Topics and messages of descriptor and presence."""
        descriptor = self.keys().descriptor.message
        return [(self.topics.write(DescriptorTopic()), descriptor), self.presence()]

    def presence(self) -> tuple[str, bytes]:
        """Topic and message of the presence."""
        keys = self.keys()
        message = sign_presence(self.life, keys.descriptor, keys.signing)
        return self.topics.write(PresenceTopic()), message
