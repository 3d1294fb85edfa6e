"""What the aggregator tells everybody at all times: descriptor, tasks and presence, and where the
fleet moves to."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from device_sdk.wire.publish.topics import (
    DescriptorTopic,
    PresenceTopic,
    SuccessorTopic,
    TasksTopic,
    Topics,
)
from device_sdk.wire.seal.announcement import Presence, ServedTasks, Successor, announce
from device_sdk.wire.seal.keyring import ServingKeys


class Announcements:
    """``names`` gives task and cohort of each task that is served, ``keys`` the serving keys of the
    descriptor in force; ``successor``: the broker that the fleet moves to, if any."""

    def __init__(
        self,
        topics: Topics,
        life: Presence,
        names: Callable[[], Iterable[tuple[str, str]]],
        keys: Callable[[], ServingKeys],
        successor: Successor | None = None,
    ) -> None:
        self._topics = topics
        self._life = life
        self._names = names
        self._keys = keys
        self._successor = successor
        self._served = ServedTasks(life.incarnation, 0, tuple(sorted(names())))

    def standing(self) -> list[tuple[str, bytes]]:
        """Topics and messages of all of them."""
        descriptor = self._keys().descriptor.message
        found = [(self._topics.write(DescriptorTopic()), descriptor), self.tasks(), self.presence()]
        if self._successor is not None:
            found.append(self._word_of_successor(self._successor))
        return found

    def _word_of_successor(self, successor: Successor) -> tuple[str, bytes]:
        keys = self._keys()
        message = announce(successor, keys.descriptor, keys.signing)
        return self._topics.write(SuccessorTopic()), message

    def tasks(self) -> tuple[str, bytes]:
        """Topic and message of the tasks served: sent before the presence, on which devices act."""
        self.names_changed()
        keys = self._keys()
        message = announce(self._served, keys.descriptor, keys.signing)
        return self._topics.write(TasksTopic()), message

    def names_changed(self) -> bool:
        """Look again which tasks are served; whether they are others."""
        names = tuple(sorted(self._names()))
        if names == self._served.names:
            return False
        before = self._served
        self._served = ServedTasks(before.incarnation, before.revision + 1, names)
        return True

    def presence(self) -> tuple[str, bytes]:
        keys = self._keys()
        message = announce(self._life, keys.descriptor, keys.signing)
        return self._topics.write(PresenceTopic()), message
