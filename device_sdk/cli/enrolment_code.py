"""Where `tessera-device join` takes the enrolment code from."""

from __future__ import annotations

import argparse
from getpass import getpass
from pathlib import Path
from typing import TextIO

from device_sdk.cli.arguments import CommandError

# Far above any code's length: a file of another kind is not read to its end.
_MOST_CHARACTERS = 1024
_VISIBLE = (
    "tessera-device: the code stood on the command line, where every user of this machine can read "
    "it (ps) and the shell keeps it; leave it out to be asked, or give --code-file"
)


def add_code(parser: argparse.ArgumentParser) -> None:
    """Add ``CODE``, which may stand behind the options too, and ``--code-file``."""
    parser.set_defaults(spare="code")
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
            with path.open(encoding="utf-8") as file:
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
