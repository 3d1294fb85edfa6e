"""A life that outlasts its processes: what was granted in it is in the store before it is told."""

from __future__ import annotations

from collections.abc import Sequence

from aggregator.store import Store
from aggregator.store.cluster import GrantedCounters
from device_sdk.wire.seal.announcement import Presence, new_presence
from device_sdk.wire.seal.freshness import Freshness, FreshnessMarks
from device_sdk.wire.seal.keys import RandomBytes


class StoredMarks(FreshnessMarks):
    """Marks that other processes see: :meth:`save` comes before any answer leaves."""

    def __init__(self, incarnation: bytes, granted: GrantedCounters) -> None:
        super().__init__(incarnation)
        self._granted = granted
        self._unsaved: dict[bytes, int] = {}

    def learn(self, senders: Sequence[bytes]) -> None:
        """Read at once what is known of senders who are about to ask."""
        unknown = [each for each in senders if each not in self._highest]
        known = self._granted.of_each(unknown)
        for sender in unknown:
            self._highest[sender] = known.get(sender, 0)

    def is_new(self, sender: bytes, freshness: Freshness) -> bool:
        """Whether no process has answered this counter, or a higher one, as far as is known: a
        grant of this moment elsewhere is found by :meth:`save`."""
        if sender not in self._highest and (known := self._granted.of(sender)):
            self._highest[sender] = known
        return super().is_new(sender, freshness)

    def raise_to(self, sender: bytes, freshness: Freshness) -> None:
        super().raise_to(sender, freshness)
        self._unsaved[sender] = freshness.counter

    def forget(self, sender: bytes) -> None:
        super().forget(sender)
        self._unsaved.pop(sender, None)

    def save(self) -> set[bytes]:
        """Write down what was granted, in a transaction; the senders whom another process answered
        first: they must get no answer from this one."""
        refused = self._granted.grant(dict(sorted(self._unsaved.items())))
        self._granted.when_kept(self._unsaved.clear)
        for sender in refused:
            self._highest.pop(sender, None)
        return refused


def life_of_cluster(store: Store, now_unix_seconds: int, random_bytes: RandomBytes) -> Presence:
    """The life that the cluster's processes go on with, or a new one where the home was served
    otherwise, or restored, since; in a transaction."""
    facts = store.facts
    last, incarnation = facts.started_unix_seconds, facts.cluster_life
    if incarnation is not None and last is not None and facts.cluster_started == last:
        return Presence(incarnation, last)
    started = now_unix_seconds if last is None else max(now_unix_seconds, last + 1)
    presence = new_presence(started, random_bytes)
    facts.started_unix_seconds = facts.cluster_started = started
    facts.cluster_life = presence.incarnation
    store.granted.clear()
    return presence
