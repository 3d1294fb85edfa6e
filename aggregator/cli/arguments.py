"""What the commands' arguments share."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Mapping
from pathlib import Path

from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.keys.folder import USUAL_LIVES, Lives
from aggregator.operate.devices import require_device_name
from aggregator.operate.fleet import Fleet
from device_sdk.wire.publish.task_messages import require_labels

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([0-9]{1,6})([smhd])")


def add_home(parser: argparse.ArgumentParser) -> None:
    """The option ``--home``."""
    parser.add_argument(
        "--home",
        type=Path,
        default=Path("aggregator-home"),
        metavar="DIR",
        help="the aggregator's folder (default: aggregator-home)",
    )


def home_of(arguments: argparse.Namespace) -> AggregatorHome:
    """The home, with its store where it is."""
    return AggregatorHome.found(arguments.home)


def opened(arguments: argparse.Namespace) -> Fleet:
    """The fleet, for who runs the command. Raises AggregatorError."""
    return Fleet.open(arguments.home, clock=time.time)


def elsewhere(home: AggregatorHome) -> str:
    """What to tell of a task file that names a database while the store is a file; else empty."""
    if home.store_url is not None or home.named_store() is None:
        return ""
    return (
        f"{home.task_file} names a database as store under [cluster], and the store is "
        f"{home.database}: tessera-aggregator store --move moves it there; or leave that line out"
    )


def add_task(
    parser: argparse.ArgumentParser, help: str = "of this task (default: the home's only one)"
) -> None:
    """The option ``--task``."""
    parser.add_argument("--task", metavar="NAME", help=help)


def duration_seconds(text: str) -> int:
    """Seconds of "90s", "30m", "24h" or "7d"."""
    match = _DURATION.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration such as 90s, 30m, 24h or 7d")
    return int(match[1]) * _UNITS[match[2]]


# Names and labels of devices.


def device_name(text: str) -> str:
    """A device's name: any printable text of 1 to 64 bytes."""
    try:
        require_device_name(text)
    except AggregatorError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def label(text: str) -> tuple[str, str]:
    """Name and value of "site=north". The value may be empty: no such label."""
    name, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError(f"{text[:70]!r} is no label such as site=north")
        require_labels({name: value or "none"})
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name, value


def add_labels(parser: argparse.ArgumentParser, what: str) -> None:
    """The option ``--label``, which may be given several times."""
    parser.add_argument(
        "--label",
        type=label,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"a label {what}, such as site=north; may be repeated",
    )


def labels_told(labels: Mapping[str, str]) -> str:
    """Such as "line=b site=north"."""
    return " ".join(f"{name}={value}" for name, value in sorted(labels.items()))


# How long descriptors and delegations hold.


def add_lives(parser: argparse.ArgumentParser) -> None:
    """The options ``--descriptor-expires`` and ``--delegation-expires``."""
    parser.add_argument(
        "--descriptor-expires",
        type=duration_seconds,
        metavar="DURATION",
        help="how long the descriptor that is made now holds; serve renews it in time, for "
        "keys.descriptor_days of the task file "
        f"(default: {USUAL_LIVES.descriptor_seconds // _UNITS['d']}d)",
    )
    parser.add_argument(
        "--delegation-expires",
        type=duration_seconds,
        metavar="DURATION",
        help="how long descriptors can be renewed without the root key: rotate keys before this "
        f"passes (default: {USUAL_LIVES.delegation_seconds // _UNITS['d']}d)",
    )


def lives_of(arguments: argparse.Namespace, grace_seconds: int | None = None) -> Lives:
    """What was chosen. Raises AggregatorError for what does not go together."""
    return Lives(
        arguments.descriptor_expires or USUAL_LIVES.descriptor_seconds,
        arguments.delegation_expires or USUAL_LIVES.delegation_seconds,
        grace_seconds or USUAL_LIVES.grace_seconds,
    )
