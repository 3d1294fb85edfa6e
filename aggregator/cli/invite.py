"""``tessera-aggregator invite``: enrolment codes."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from aggregator.cli.arguments import (
    add_home,
    add_labels,
    device_name,
    device_of,
    duration_seconds,
    labels_of,
    opened,
)
from aggregator.clock import moment_of
from aggregator.errors import AggregatorError
from aggregator.keys.enrolment import make_codes
from aggregator.keys.folder import current_descriptor
from aggregator.keys.registry import revoke
from aggregator.store import Store
from device_sdk.system.command_line import add_out, positive_int
from device_sdk.system.files import flush_file, flush_folder

DESCRIPTION = """\
Prints enrolment codes, one a line, or writes them with --out to a new file that only its owner can
read. Each lets one device join, once. Whoever holds a code can use it, so hand it over as you would
a password; it is shown only here.

--replaces ID is for a device that lost its identity: ID is revoked now, and whoever joins with the
code takes its place from the next round on."""
_DAY_SECONDS = 86_400

EXAMPLES = """\
examples:
  tessera-aggregator invite --home fleet --count 3 --expires 24h
  tessera-aggregator invite --home fleet --count 100 --out codes.txt
  tessera-aggregator invite --home fleet --name hall-3 --label site=north --label line=b
                                             named and labelled in devices and status
  tessera-aggregator invite --home fleet --replaces 3f2a
                                             for the device whose id begins with 3f2a

The device then: tessera-device join URL, which asks for the code.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    parser.add_argument(
        "--count", type=positive_int, default=1, metavar="N", help="how many (default: 1)"
    )
    parser.add_argument(
        "--expires",
        type=duration_seconds,
        default=_DAY_SECONDS,
        metavar="DURATION",
        help="usable for this long: 90s, 30m, 24h, 7d (default: 24h)",
    )
    add_out(parser, metavar="FILE", help="a new file, mode 0600, for them")
    parser.add_argument(
        "--replaces",
        metavar="ID",
        help="revoke this device in exchange: its name, or the first digits of its id",
    )
    parser.add_argument(
        "--name", type=device_name, metavar="NAME", help="what to call the device that joins"
    )
    add_labels(parser, "of the device that joins")


def run(arguments: argparse.Namespace) -> int:
    if arguments.replaces is not None and arguments.count != 1:
        raise AggregatorError("--replaces goes with one code: leave out --count")
    if arguments.name is not None and arguments.count != 1:
        raise AggregatorError("--name goes with one code: leave out --count, or use --label")
    labels = labels_of(arguments.label, {})
    with opened(arguments) as (_, store):
        text = _invite(arguments, store, labels)
    if arguments.out is None:
        print(text, end="")
    return 0


def _invite(arguments: argparse.Namespace, store: Store, labels: dict[str, str]) -> str:
    """The codes, a line each, which are in the store then."""
    now = int(time.time())
    _require_keys_of(now, store)
    replaced = None
    if arguments.replaces is not None:
        replaced = device_of(store, arguments.replaces).device_id
    codes = make_codes(store, arguments.count, now, os.urandom)
    text = "".join(f"{code.to_text()}\n" for code in codes)
    out: Path | None = arguments.out
    # The codes are on the disk before anything is revoked or can be used, or neither happens.
    if out is not None:
        _write_new(out, text)
    try:
        with store.database.transaction():
            if replaced is not None:
                revoke(store, replaced, now)
            for code in codes:
                until = now + arguments.expires
                store.tokens.add(code, now, until, replaced, arguments.name, labels)
    except BaseException:
        if out is not None:
            out.unlink()
        raise
    return text


def _require_keys_of(now_unix_seconds: int, store: Store) -> None:
    """Whoever is told by a code that it is so late believes no keys that have ended before."""
    ends = current_descriptor(store).expires_unix_seconds
    if now_unix_seconds >= ends:
        raise AggregatorError(
            f"this machine's clock says {moment_of(now_unix_seconds)}, and the keys in force ended "
            f"at {moment_of(ends)}: set the clock right or, if it is right, start serve first, "
            "which renews them"
        )


def _write_new(path: Path, text: str) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise AggregatorError(
            f"--out: {path} exists, and the codes in it may still be needed: name a new file"
        ) from None
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        flush_file(file.fileno())
    flush_folder(path.parent)
