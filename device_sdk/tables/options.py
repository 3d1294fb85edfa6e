"""The options of a command that takes a table of interactions, and what it says of one."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from device_sdk.tables.columns import parse_columns
from device_sdk.tables.text import SEPARATORS, Progress, Reading, TableError

_QUIET_SECONDS = 2.0


def add_reading(parser: argparse.ArgumentParser, option: str) -> None:
    """What a file does not say itself; ``option`` is the one that names the file."""
    group = parser.add_argument_group(
        f"how {option} is read",
        "By itself: separators, quotes, gzip and encoding are found, a header's names tell the\n"
        "columns (user_id, movieId, timestamp, ...), and what was understood is printed. A file\n"
        "that may mean several things is refused, with the option that decides.",
    )
    group.add_argument(
        "--columns",
        type=_columns,
        metavar="user=U,item=I,time=T",
        help="names of the header, or numbers from 1 where there is none; time=none takes the rows "
        "in the order of the file",
    )
    group.add_argument(
        "--separator", default="", metavar="S", help=f"{', '.join(SEPARATORS)}, or a character"
    )
    group.add_argument("--encoding", default="", metavar="NAME", help="such as utf-8 or cp1252")
    group.add_argument(
        "--time-format", default="", metavar="F", help="of the times, such as '%%d/%%m/%%Y %%H:%%M'"
    )


def reading_of(arguments: argparse.Namespace) -> Reading:
    """What the options say."""
    return Reading(
        arguments.columns or {},
        arguments.separator,
        arguments.encoding,
        arguments.time_format,
    )


def shown_progress(what: str, show: Callable[[str], None], clock: Callable[[], float]) -> Progress:
    """Shows how far a file was read, once that has taken two seconds. ``clock``: seconds."""
    start = clock()

    def progress(share: float) -> None:
        if clock() - start > _QUIET_SECONDS:
            show(f"reading {what} ... {share:.0%}")

    return progress


def _columns(text: str) -> dict[str, str]:
    try:
        return parse_columns(text)
    except TableError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
