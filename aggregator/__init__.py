"""The server: registry, rounds, aggregation methods, durable store, operator's command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aggregator.operate.fleet import Fleet

__all__ = ["Fleet"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'aggregator' has no attribute {name!r}")
    from aggregator.operate.fleet import Fleet

    return Fleet


def __dir__() -> list[str]:
    return sorted(__all__)
