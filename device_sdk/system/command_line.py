"""What the three commands share: one main, ``--version``, ``-o/--out`` and types of arguments."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from device_sdk.system.printable import printable, printable_lines

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held_signals() -> Iterator[Callable[[], bool]]:
    """What asks the process to end waits until the block is over, and then comes to whom it came
    to before, whatever handlers a library has put in their place. The block gets a function that
    says whether something waits.

    Threads that are started inside never get such signals: those of libraries have no use for
    them. Nothing is held on Windows, nor outside of the main thread, which handles signals alone.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield lambda: bool(signal.sigpending() & set(_ENDING))
    finally:
        for each in _ENDING:
            handler = signal.getsignal(each)
            if handler is not None:
                signal.signal(each, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells count it."""
PIPE_CLOSED = 141
"""Likewise where nobody reads any more what is printed."""


@dataclass(frozen=True)
class Program:
    """A program of several commands, each a module of ``package``; calling it runs one.

    A command's module has ``DESCRIPTION``, ``add_arguments(parser)`` and ``run(arguments)``, which
    returns the exit status; ``EXAMPLES``, if any, end its help. It is imported when it is used, so
    ``--help`` and ``--version`` work without the libraries that a command needs, and fast.

    Attributes:
        name: as it is called.
        description, examples: for ``--help``.
        package: where the commands' modules are.
        commands: their names, which are their modules', and what each does in a few words.
        errors: what a command raises for people, and the sentence that is then printed, in which
            ``{error}`` is its message. The first that fits is taken.
        extra: the extra of the distribution that installs ``needs``; empty where the base does.
        needs: libraries without which no command works.
        interrupted: what Ctrl-C prints.
        many_lines: whether errors may have several. Not where they quote what others sent.
    """

    name: str
    description: str
    examples: str
    package: str
    commands: Mapping[str, str]
    errors: Mapping[type[Exception], str] = field(default_factory=dict)
    extra: str = ""
    needs: Sequence[str] = ()
    interrupted: str = "interrupted"
    many_lines: bool = False

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run one command; 0 on success, 1 where it failed, 2 for a wrong command line.

        ``argv``: without the program's name; ``sys.argv`` when None. ``--help``, ``--version`` and
        a wrong command line raise SystemExit, as argparse does.
        """
        print_any_text()
        given = sys.argv[1:] if argv is None else argv
        try:
            try:
                arguments = self.parsed(given)
                return int(arguments.run(arguments))
            finally:
                # Here, and not when Python ends, where nobody could catch what it raises.
                print(end="", flush=True)
        except BrokenPipeError:
            # Who read what we print has read enough, as ``head`` does.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return PIPE_CLOSED
        except MemoryError:
            return self._failed("out of memory; try smaller sizes")
        except KeyboardInterrupt:
            return self._failed(self.interrupted, INTERRUPTED)
        except tuple(self.errors) as error:
            said = next(text for kind, text in self.errors.items() if isinstance(error, kind))
            return self._failed(said.format(error=error))

    def _failed(self, why: str, status: int = 1) -> int:
        said = printable_lines(why) if self.many_lines else printable(why)
        print(f"{self.name}: {said}", file=sys.stderr)
        return status

    def parsed(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments of one command, whose options may stand anywhere behind its name.

        Raises SystemExit as calling it does.
        """
        whole = argparse.ArgumentParser(
            prog=self.name,
            description=self.description,
            epilog="\n".join(filter(None, (self.examples, self._lack()))),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        whole.add_argument("--version", action=_Version, help="show the version and exit")
        commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
        parsers = {
            name: commands.add_parser(
                name, help=does, formatter_class=argparse.RawDescriptionHelpFormatter
            )
            for name, does in self.commands.items()
        }
        if not argv or argv[0] not in parsers:
            early = argv[0] if argv and argv[0].startswith("-") else "--help"
            if early not in ("-h", "--help", "--version") and not parsers.keys().isdisjoint(argv):
                whole.error(f"options stand behind the COMMAND: {self.name} COMMAND {early} ...")
            return whole.parse_args(argv)  # which says what there is
        chosen, parser = argv[0], parsers[argv[0]]
        self._fill(parser, chosen)
        # Plain parse_args takes what stands behind an option for one argument too many.
        return parser.parse_intermixed_args(argv[1:], argparse.Namespace(command=chosen))

    def _fill(self, parser: argparse.ArgumentParser, name: str) -> None:
        try:
            with held_signals():  # what libraries start threads for is arithmetic
                module: Any = importlib.import_module(f"{self.package}.{name}")
        except (ImportError, AttributeError) as error:
            how = how_to_mend(error, self.package, self.extra, self.needs) if self.extra else ""
            if not how:
                raise
            raise SystemExit(f"{self.name}: {how}") from error
        parser.description = module.DESCRIPTION
        parser.epilog = getattr(module, "EXAMPLES", None)
        module.add_arguments(parser)
        parser.set_defaults(run=module.run)

    def _lack(self) -> str:
        for library in self.needs:
            if not _is_here(library):
                return _how_to_install(library, self.extra)
        return ""


def print_any_text() -> None:
    """From now on a character that standard output or error cannot encode is written as an escape,
    such as ``\\xe9``: where a terminal is not UTF-8, and for names of files that are no text."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not what an app or a test has put there
            stream.reconfigure(errors="backslashreplace")


def how_to_mend(
    error: ImportError | AttributeError, package: str, extra: str, needs: Sequence[str]
) -> str:
    """What to install where a module of ``package`` met ``error`` while it was imported.

    Either a library of the extra is missing, or one of ``needs`` is of a release that lacks what is
    taken of it. Empty where the missing module is the package's own.
    """
    absent = _top(error.name or "") if isinstance(error, ImportError) else ""
    if absent == _top(package):
        return ""
    if absent and not _is_here(absent):
        return _how_to_install(absent, extra)
    return (
        f"{error}: not what this release was run with ({', '.join(_releases(needs))}); "
        f"pip install --upgrade 'tessera-edge[{extra}]' installs what was"
    )


def _top(module: str) -> str:
    return module.partition(".")[0]


def _is_here(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ImportError:
        return False


def _how_to_install(library: str, extra: str) -> str:
    return (
        f"{library} is not installed, which a device does without: "
        f"pip install 'tessera-edge[{extra}]'"
    )


def _releases(libraries: Sequence[str]) -> Iterator[str]:
    from importlib import metadata  # takes a while, which every command would wait for

    for library in libraries:
        with suppress(metadata.PackageNotFoundError):  # some distributions bear another name
            yield f"{library} {metadata.version(library)}"


class _Version(argparse.Action):
    """``--version``; argparse's own would look the version up for every command."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        from device_sdk.system.version import __version__

        print(f"{parser.prog} {__version__}")
        parser.exit()


def add_out(
    parser: argparse.ArgumentParser, *, metavar: str, help: str, required: bool = False
) -> None:
    """The option ``-o``/``--out``: where to write; None in ``arguments.out`` without it.

    ``--output``, as some commands called it, means the same and is not shown.
    """
    both = parser.add_mutually_exclusive_group(required=required)
    both.add_argument("-o", "--out", type=Path, metavar=metavar, help=help)
    both.add_argument(
        "--output", dest="out", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


# Types of command line arguments; argparse reports what they refuse.


def positive_int(text: str) -> int:
    """An integer of 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return value


def natural(text: str) -> int:
    """An integer of 0 or more."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return value


def positive_float(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if not (math.isfinite(value) and value > 0.0):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number above 0")
    return value


def not_negative_float(text: str) -> float:
    """A finite number of 0 or more."""
    value = _number(text)
    if not (math.isfinite(value) and value >= 0.0):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number of 0 or more")
    return value


def slowdown(text: str) -> float:
    """A finite factor of 1 or more."""
    value = _number(text)
    if not (math.isfinite(value) and value >= 1.0):
        raise argparse.ArgumentTypeError(f"{text!r} is no factor of 1 or more")
    return value


def fraction(text: str) -> float:
    """A number from 0 up to, not including, 1."""
    value = _number(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not in 0 <= x < 1 (0.2 is 20 %)")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
