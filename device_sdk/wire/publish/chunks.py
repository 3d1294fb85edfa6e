"""Messages too large for one: cut into parts, and put together again within fixed memory.

Each part travels in an envelope of its own, whose fragment header (message id, index, total,
length) belongs to the associated data. All parts but the last are equally long: ``PART_BYTES``, or
what the broker's largest message has room for. So each part shows how long the others are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Annotated

from device_sdk.fields import Declared, Within
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.session import MAX_PAYLOAD_BYTES, Fragment

PART_BYTES = MAX_PAYLOAD_BYTES
LEAST_PART_BYTES = 512
"""Smaller ones would take more memory than they hold."""


def split(
    message: bytes, message_id: bytes, part_bytes: int = PART_BYTES
) -> list[tuple[Fragment, bytes]]:
    """The parts of a message longer than ``part_bytes``; ``message_id``: 8 random bytes.

    Raises ValueError for a message that fits one envelope: it must not be cut, so that there is one
    way to send it. Likewise for parts that nobody would take.
    """
    if not LEAST_PART_BYTES <= part_bytes <= PART_BYTES:
        raise ValueError(f"parts of {part_bytes} bytes; expected {LEAST_PART_BYTES} or more")
    if len(message) <= part_bytes:
        raise ValueError(f"{len(message)} bytes fit one envelope: send them in one")
    total = -(-len(message) // part_bytes)
    return [
        (
            Fragment(message_id, index, total, len(message)),
            message[index * part_bytes : (index + 1) * part_bytes],
        )
        for index in range(total)
    ]


def _part_bytes(fragment: Fragment, part: bytes) -> int:
    """How long all parts but the last one are. Raises ``WireError("bad-fragment")``."""
    others = fragment.total - 1
    size, rest = len(part), 0
    if others and fragment.index == others:
        size, rest = divmod(fragment.length - len(part), others)
    last = fragment.length - others * size
    if others and not rest and LEAST_PART_BYTES <= size <= PART_BYTES and 0 < last <= size:
        return size
    raise WireError(
        "bad-fragment",
        f"{fragment.length} bytes do not travel in {fragment.total} parts, of which part "
        f"{fragment.index + 1} has {len(part)} bytes",
    )


_Positive = Annotated[int, Within(1)]


@dataclass(frozen=True, slots=True)
class ReassemblyLimits(Declared):
    """Bounds of partial messages. Raises ValueError for numbers below 1."""

    most_message_bytes: _Positive = 32 << 20
    most_messages_a_sender: _Positive = 2
    most_bytes_a_sender: _Positive = 32 << 20
    most_bytes: _Positive = 256 << 20
    """Of all senders together."""
    idle_seconds: Annotated[float, Within(1)] = 120.0
    """A partial message that got no new part for so long is forgotten."""


@dataclass(slots=True)
class _Partial:
    total: int
    length: int
    part_bytes: int
    touched_seconds: float
    parts: dict[int, bytes] = field(default_factory=dict)
    held_bytes: int = 0


class Reassembler:
    """Puts the parts of many senders' messages together, in any order of arrival.

    Memory is that of the parts received, never of the length announced. Where a bound would be
    passed, the partial messages that were touched longest ago go first: the sender's own for its
    bounds, anyone's for the bound over all. ``clock`` gives monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float], limits: ReassemblyLimits | None = None) -> None:
        self._clock = clock
        self._limits = limits if limits is not None else ReassemblyLimits()
        # Ordered by the last touch, oldest first.
        self._partials: dict[tuple[Hashable, int, bytes], _Partial] = {}
        self._bytes = 0
        self.evicted = 0
        """Partial messages given up for room or for age."""

    @property
    def held_bytes(self) -> int:
        """Bytes of all parts held."""
        return self._bytes

    def add(
        self, sender: Hashable, message_type: int, fragment: Fragment, part: bytes
    ) -> bytes | None:
        """Take a part from an opened envelope; the whole message when it was the last one missing.

        A part that is held already is ignored. Raises ``WireError``: ``too-large``, or
        ``bad-fragment`` for numbers or lengths that do not fit or a part that differs from one with
        the same index; the message is then forgotten.
        """
        key = (sender, message_type, fragment.message_id)
        self.expire()
        try:
            part_bytes = self._check(fragment, part, self._partials.get(key))
        except WireError:
            self._forget(key)
            raise
        partial = self._partials.get(key)
        if partial is None:
            partial = _Partial(fragment.total, fragment.length, part_bytes, 0.0)
        elif fragment.index in partial.parts:
            return None  # a repeated part does not keep a message alive
        self._partials.pop(key, None)
        partial.touched_seconds = self._clock()
        partial.parts[fragment.index] = part
        partial.held_bytes += len(part)
        self._bytes += len(part)
        self._partials[key] = partial
        if len(partial.parts) == partial.total:
            self._forget(key)
            return b"".join(partial.parts[index] for index in range(partial.total))
        self._make_room(sender)
        return None

    def expire(self) -> None:
        """Forget partial messages that got no new part for ``idle_seconds``."""
        now = self._clock()
        while self._partials:
            key, partial = next(iter(self._partials.items()))
            if now - partial.touched_seconds < self._limits.idle_seconds:
                return
            self._evict(key)

    def _check(self, fragment: Fragment, part: bytes, partial: _Partial | None) -> int:
        if fragment.length > self._limits.most_message_bytes:
            raise WireError(
                "too-large",
                f"a message of {fragment.length} bytes, "
                f"at most {self._limits.most_message_bytes} allowed",
            )
        part_bytes = _part_bytes(fragment, part)
        if partial is None:
            return part_bytes
        known = (partial.total, partial.length, partial.part_bytes)
        if known != (fragment.total, fragment.length, part_bytes):
            raise WireError("bad-fragment", "the parts of a message disagree about its length")
        held = partial.parts.get(fragment.index)
        if held is not None and held != part:
            raise WireError("bad-fragment", "two different parts with the same index")
        return part_bytes

    def _of(self, sender: Hashable) -> list[tuple[Hashable, int, bytes]]:
        return [key for key in self._partials if key[0] == sender]

    def _make_room(self, sender: Hashable) -> None:
        limits = self._limits
        own = self._of(sender)
        held = sum(self._partials[key].held_bytes for key in own)
        while own and (
            len(own) > limits.most_messages_a_sender or held > limits.most_bytes_a_sender
        ):
            held -= self._partials[own[0]].held_bytes
            self._evict(own.pop(0))
        while self._bytes > limits.most_bytes:
            self._evict(next(iter(self._partials)))

    def _evict(self, key: tuple[Hashable, int, bytes]) -> None:
        self._forget(key)
        self.evicted += 1

    def _forget(self, key: tuple[Hashable, int, bytes]) -> None:
        partial = self._partials.pop(key, None)
        if partial is not None:
            self._bytes -= partial.held_bytes
