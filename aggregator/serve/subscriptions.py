"""Which of its subscriptions the broker grants the aggregator."""

from __future__ import annotations

import logging
from collections import Counter

from aggregator.errors import AggregatorError
from device_sdk.link.events import Subscribed, SubscribeRefused

__all__ = ["Listening"]

_LOG = logging.getLogger(__name__)
_MOST_REFUSALS_AT_THE_START = 3


class Listening:
    """Follows grants and refusals; the link asks again for what was refused, with growing waits.

    A subscription that was granted once is waited for as long as it takes: the broker's rules may
    be mended, and a refusal may be a damaged packet's. One that never was, and is refused three
    times in a row, is most likely forbidden to this user, whom nobody but the operator can help.
    """

    def __init__(self) -> None:
        self._granted: set[str] = set()
        self._refusals: Counter[str] = Counter()

    @property
    def refused(self) -> tuple[str, ...]:
        """The topic filters that the broker refuses at present."""
        return tuple(sorted(self._refusals))

    def granted(self, event: Subscribed) -> None:
        """The broker granted a subscription."""
        self._granted.add(event.topic_filter)
        if self._refusals.pop(event.topic_filter, 0):
            _LOG.info("the broker has granted the subscription to %s", event.topic_filter)

    def was_refused(self, event: SubscribeRefused) -> None:
        """The broker refused one. Raises AggregatorError where asking again is of no use."""
        topic_filter = event.topic_filter
        self._refusals[topic_filter] += 1
        times = self._refusals[topic_filter]
        if topic_filter not in self._granted and times >= _MOST_REFUSALS_AT_THE_START:
            raise AggregatorError(
                f"the broker refused the subscription to {topic_filter} {times} times "
                f"({event.detail}): give this user the rights of aggregator/acl.template"
            )
        _LOG.warning(
            "the broker refused the subscription to %s (%s); next try in %.1f s",
            topic_filter,
            event.detail,
            event.retry_seconds,
        )
