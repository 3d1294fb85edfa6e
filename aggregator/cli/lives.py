"""The options that say how long descriptors and delegations hold."""

from __future__ import annotations

import argparse

from aggregator.cli.arguments import duration_seconds
from aggregator.keys.folder import Lives

_USUAL = Lives()
_DAY_SECONDS = 86_400


def add_lives(parser: argparse.ArgumentParser) -> None:
    """The options ``--descriptor-expires`` and ``--delegation-expires``."""
    parser.add_argument(
        "--descriptor-expires",
        type=duration_seconds,
        metavar="DURATION",
        help="how long the descriptor that is made now holds; serve renews it in time, for "
        "keys.descriptor_days of the task file "
        f"(default: {_USUAL.descriptor_seconds // _DAY_SECONDS}d)",
    )
    parser.add_argument(
        "--delegation-expires",
        type=duration_seconds,
        metavar="DURATION",
        help="how long descriptors can be renewed without the root key: rotate keys before this "
        f"passes (default: {_USUAL.delegation_seconds // _DAY_SECONDS}d)",
    )


def lives_of(arguments: argparse.Namespace, grace_seconds: int | None = None) -> Lives:
    """What was chosen. Raises AggregatorError for what does not go together."""
    descriptor: int | None = arguments.descriptor_expires
    delegation: int | None = arguments.delegation_expires
    return Lives(
        _USUAL.descriptor_seconds if descriptor is None else descriptor,
        _USUAL.delegation_seconds if delegation is None else delegation,
        _USUAL.grace_seconds if grace_seconds is None else grace_seconds,
    )
