"""What a broker's largest packet makes of a task's messages, asked before any round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from aggregator.errors import AggregatorError
from aggregator.publish.publisher import LEAST_PACKET_BYTES, Room
from device_sdk.link import LinkSettings
from device_sdk.link.broker_url import BrokerWay
from device_sdk.link.events import Connected, ConnectRefused, Disconnected
from device_sdk.link.link import Link
from device_sdk.wire.seal.session import MAX_MESSAGE_BYTES

_NAME_BYTES = 34
"""Of a chunk, in what names all of them."""
_BESIDE_NAMES_BYTES = 640
_ANOTHER_TRY = ("no-connack", "version")
"""Why a connection ended that is made again at once, as one of an older MQTT."""


class Unasked(AggregatorError):
    """A broker that cannot be asked; it says why."""


def largest_packet(
    way: BrokerWay,
    proxy: str | None,
    rng: np.random.Generator,
    clock: Callable[[], float],
    seconds: float = 3.0,
) -> int | None:
    """What the broker says when it accepts a connection; None: it names no limit.

    ``clock``: monotonic seconds. Raises Unasked where it cannot be asked within so many
    ``seconds``.
    """
    settings = replace(LinkSettings(), proxy=proxy, connect_timeout_seconds=seconds)
    try:
        link = Link(way, rng=rng, clock=clock, settings=settings)
    except ValueError as error:
        raise Unasked(str(error)) from None
    until, problem = clock() + seconds, f"no answer within {seconds:g} s"
    link.start()
    try:
        while (left := until - clock()) > 0:
            for event in link.events(timeout_seconds=left):
                if isinstance(event, Connected):
                    return event.limits.maximum_packet_bytes
                if isinstance(event, ConnectRefused):
                    raise Unasked(event.detail)
                if isinstance(event, Disconnected):
                    problem = event.detail
                    if event.reason not in _ANOTHER_TRY:
                        raise Unasked(problem)
        raise Unasked(problem)
    finally:
        link.stop()


def packet_words(packet_bytes: int | None, sizes: Mapping[str, int]) -> str:
    """How a task's messages go through a broker that takes such packets; None: any of ours.

    ``sizes``: in bytes, of ``broadcast`` and ``update`` and of what else is published. Raises
    PacketsTooSmall where one of them cannot.
    """
    room = Room(packet_bytes)
    chunk = room.chunk_bytes
    for what, size in sizes.items():
        if what != "update":
            names = -(-size // chunk) * _NAME_BYTES + _BESIDE_NAMES_BYTES
            room.require(f"the task's {what}", [("", bytes(names))])
    most = MAX_MESSAGE_BYTES if packet_bytes is None else min(packet_bytes, MAX_MESSAGE_BYTES)
    down, up = sizes.get("broadcast", 0), sizes.get("update", 0)
    takes = (
        "names no largest packet"
        if packet_bytes is None
        else f"takes packets of at most {packet_bytes:,} bytes"
    )
    told = [f"contents go down in chunks of at most {chunk:,} bytes"]
    told += [f"a round's {down:,} in {_count(down, chunk, 'chunk')}"] if down else []
    told += [f"an update's {up:,} up in {_count(up, most, 'message')}"] if up else []
    return f"{takes}: {', '.join(told)}"


def _count(size: int, most: int, what: str) -> str:
    count = -(-size // most)
    return f"{count:,} {what}{'s' * (count != 1)}"


def packet_lines(
    ways: Sequence[BrokerWay],
    sizes: Mapping[str, int],
    ask: Callable[[BrokerWay], int | None],
    known: int | None,
) -> list[str]:
    """For people, of each broker that devices may be at. ``known``: what serve has found.

    Raises PacketsTooSmall as :func:`packet_words` does.
    """
    lines = []
    for way in ways:
        try:
            lines.append(f"the broker {way} {packet_words(ask(way), sizes)}")
        except Unasked as error:
            found = "" if known is None else f"; as serve found it, it {packet_words(known, sizes)}"
            lines.append(
                f"not checked: the largest packet that the broker {way} takes ({error}); it must "
                f"be {LEAST_PACKET_BYTES:,} bytes at least{found}"
            )
    return lines
