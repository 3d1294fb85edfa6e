"""What a fuzzer feeds, and the only errors that may come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One decoder.

    Attributes:
        run: decodes; raises AssertionError where what it accepted is not what it should accept.
        seeds: well-formed inputs to start from.
        refusals: the project's own errors, by which bad input is refused.
        most_bytes: longest input worth trying.
    """

    name: str
    run: Callable[[bytes], object]
    seeds: Callable[[], Sequence[bytes]]
    refusals: tuple[type[Exception], ...]
    most_bytes: int = 4096

    def __call__(self, data: bytes) -> bool:
        """Whether ``data`` was accepted; any error but the refusals escapes."""
        try:
            self.run(data)
        except self.refusals:
            return False
        return True
