"""What the commands share: their home, errors, progress and the enrolment code."""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from getpass import getpass
from pathlib import Path
from typing import TextIO

from device_sdk.interactions import Interactions, InteractionsError, read_interactions
from device_sdk.link.settings import LinkSettings
from device_sdk.system.clock import MonotonicClock
from device_sdk.system.printable import PrintableFormatter
from device_sdk.tables.options import reading_of, shown_progress
from device_sdk.world import PROVIDER_NAMES


def read_file(
    arguments: argparse.Namespace, option: str, *, quiet_seconds: float = 2.0
) -> Interactions:
    """The file's interactions; prints what was understood of it. Raises CommandError.

    ``quiet_seconds``: after which it says that a pipe is waited for.
    """
    path: Path = getattr(arguments, option.lstrip("-"))
    line = ProgressLine(sys.stderr)
    progress = shown_progress(path.name, line.show, MonotonicClock().now)
    try:
        with _told_of_a_pipe(path, quiet_seconds):
            found = read_interactions(path, reading_of(arguments), progress)
    except InteractionsError as error:
        raise CommandError(f"{option}: {error}") from None
    except OSError as error:
        why = error.strerror or error
        raise CommandError(f"{option}: {path} cannot be read: {why}") from None
    finally:
        line.clear()
    print("\n  ".join(found.understood), flush=True)
    return found


@contextmanager
def _told_of_a_pipe(path: Path, quiet_seconds: float) -> Iterator[None]:
    """A pipe that nobody writes into is waited for as long as that lasts."""
    if not path.is_fifo():
        yield
        return
    said = f"{path} is a pipe: waiting until a program has written into it, and closed it ..."
    timer = threading.Timer(quiet_seconds, print, (said,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# How a command fails.


class CommandError(Exception):
    """A command cannot do what it was asked; the message says why and what would help."""


# The option that says which device is meant.

DEFAULT_HOME = "~/.tessera"


def add_home(parser: argparse.ArgumentParser) -> None:
    """Add ``--home``."""
    parser.add_argument(
        "--home",
        type=Path,
        default=Path(DEFAULT_HOME),
        metavar="DIR",
        help=f"the device's own folder (default: {DEFAULT_HOME})",
    )


# What trains.


def add_providers(parser: argparse._ActionsContainer) -> None:
    """Add ``--providers``."""
    parser.add_argument(
        "--providers",
        choices=PROVIDER_NAMES,
        default="auto",
        help="what runs the graphs; auto is the fastest that is here and trains as the CPU does "
        "(default: auto)",
    )


# The way to the broker.


def add_broker(parser: argparse._ActionsContainer) -> None:
    """Add what says who a device is to the broker, and whom it trusts there."""
    parser.add_argument(
        "--ca",
        "--ca-file",
        dest="ca_file",
        metavar="PEM",
        help="trust the authorities in this file (default: the system's)",
    )
    parser.add_argument(
        "--certificate-file", metavar="PEM", help="client certificate, if asked for"
    )
    parser.add_argument("--key-file", metavar="PEM", help="its private key")
    parser.add_argument("--user", help="user name at the broker")
    parser.add_argument("--password-file", metavar="FILE", help="file with the password, one line")
    parser.add_argument(
        "--client-id-prefix",
        metavar="TEXT",
        help="what client ids begin with, where the broker asks for that",
    )


def add_proxy(parser: argparse._ActionsContainer) -> None:
    """Add ``--proxy``."""
    parser.add_argument(
        "--proxy",
        metavar="URL",
        help="reach the broker through this HTTP proxy: http://[user:password@]host:port, or '' "
        "for none (default: ws:// and wss:// through the environment's HTTPS_PROXY or ALL_PROXY). "
        "It is not kept in the home: give it to each command that reaches the broker",
    )


def link_settings(arguments: argparse.Namespace) -> LinkSettings:
    """What ``--proxy`` asks for. Raises CommandError."""
    try:
        return LinkSettings(proxy=arguments.proxy)
    except ValueError as error:
        raise CommandError(f"--proxy: {error}") from error


# What the library has to say while a command works.


def log_to_stderr() -> None:
    """Print warnings as lines of their own."""
    log = logging.StreamHandler(sys.stderr)
    log.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[log])


# One line of progress, on terminals only.


class ProgressLine:
    """Rewrites one line of `stream`; silent where that is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._width = 0

    def show(self, text: str) -> None:
        """Replace the line by `text`."""
        if self._live:
            self._stream.write("\r" + text.ljust(self._width))
            self._stream.flush()
            self._width = len(text)

    def clear(self) -> None:
        """Leave an empty line."""
        if self._live and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0


# Where the enrolment code comes from.

# Far above any code's length: a file of another kind is not read to its end.
_MOST_CHARACTERS = 1024
_VISIBLE = (
    "tessera-device: the code stood on the command line, where every user of this machine can read "
    "it (ps) and the shell keeps it; leave it out to be asked, or give --code-file"
)


def add_code(parser: argparse.ArgumentParser) -> None:
    """Add ``CODE`` and ``--code-file``."""
    parser.add_argument(
        "code",
        metavar="CODE",
        nargs="?",
        default="-",
        help="enrolment code; left out, or -: asked for, or the first line of standard input. "
        "Given here, others on this machine can see it",
    )
    parser.add_argument(
        "--code-file", type=Path, metavar="FILE", help="file with the code, one line"
    )


def code_of(arguments: argparse.Namespace, stdin: TextIO, stderr: TextIO) -> str:
    """The code as text, not yet checked, from where the command line says.

    A process's arguments can be read by every user of a machine, its input and files cannot. So a
    code among the arguments is used, and ``stderr`` told. Raises CommandError where there is none.
    """
    code: str = arguments.code
    path: Path | None = arguments.code_file
    if path is not None:
        if code != "-":
            raise CommandError("the code is given twice: leave out CODE, or --code-file")
        try:
            with path.open(encoding="utf-8-sig") as file:
                return _first_line(file, f"--code-file {path}")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise CommandError(f"--code-file {path} cannot be read: {why}") from error
    if code != "-":
        print(_VISIBLE, file=stderr)
        return code
    if not stdin.isatty():
        return _first_line(stdin, "standard input")
    try:
        return getpass("enrolment code (not shown): ", stderr)
    except EOFError:
        raise CommandError("no enrolment code was given") from None


def _first_line(file: TextIO, name: str) -> str:
    line = file.readline(_MOST_CHARACTERS).strip()
    if not line:
        raise CommandError(f"{name} holds no enrolment code in its first line")
    return line
