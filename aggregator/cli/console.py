"""``tessera-aggregator console``: pages of the fleet for browsers, and who may see them."""

from __future__ import annotations

import argparse
import getpass
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from aggregator.cli.arguments import add_home, home_of
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.operate.audit import DONE, AuditEntry, AuditLog, system_user
from aggregator.serve.beside import READY
from aggregator.task.file import read_console
from device_sdk.system.printable import PrintableFormatter, printable

if TYPE_CHECKING:
    from aggregator.console.users import ConsoleUsers

DESCRIPTION = """\
Pages for browsers: what the fleet does now, what it learns, its devices and models; and what its
operator does with it, each noted in the audit log with who did it.

console                    answer browsers until told to stop; also while no serve runs
console user add NAME      somebody who may log in: as a viewer, who looks, or as an operator, who
                           does what the commands do. The password is asked for, or read from a file
console user password NAME another password; all who are logged in by the old one are logged out
console user role NAME     another role, with --role
console user remove NAME   he is logged out, too
console user list          who there is

serve starts the pages by itself, in a process of their own, where the task file has

    [console]
    address = "127.0.0.1:8443"

and goes on serving whatever becomes of them. At an address that other machines reach it needs
certificate and key there, or a reverse proxy with TLS, named as trusted_proxy. See
docs/operating/console.md."""

EXAMPLES = """\
examples:
  tessera-aggregator console user add anna --role operator --home fleet
  tessera-aggregator console user add screen --role viewer --password-file screen.txt --home fleet
  tessera-aggregator console --home fleet
  tessera-aggregator console --address 127.0.0.1:9000 --home fleet
"""
_USUAL_ADDRESS = "127.0.0.1:8443"
_WITH_ARTICLE = {"viewer": "a viewer", "operator": "an operator"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    parser.add_argument("what", nargs="?", choices=("user",), metavar="user", help="see above")
    parser.add_argument("action", nargs="?", choices=tuple(_ACTIONS), metavar="ACTION")
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the user")
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="at which to answer (default: that of the task file, or " + _USUAL_ADDRESS + ")",
    )
    parser.add_argument(
        "--task", type=Path, metavar="FILE", help="the task file (default: task.toml in the home)"
    )
    parser.add_argument(
        "--role",
        choices=("viewer", "operator"),
        help="of user add (default: viewer) and user role",
    )
    parser.add_argument(
        "--password-file",
        type=Path,
        metavar="FILE",
        help="of user add and user password: its first line is the password",
    )
    parser.add_argument(
        "--no-password",
        action="store_true",
        help="of user add: only a reverse proxy lets the user in, by [console] proxy_user_header",
    )
    # For serve, which starts it so.
    parser.add_argument("--until-closed", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    try:
        return _run(arguments)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library == "aggregator":
            raise
        raise AggregatorError(
            f"{library} is not installed, which only the console needs: "
            "pip install 'tessera-edge[console]'"
        ) from error


def _run(arguments: argparse.Namespace) -> int:
    home = home_of(arguments)
    if arguments.what is None:
        return _serve(home, arguments)
    action: str | None = arguments.action
    if action is None or (arguments.name is None) != (action == "list"):
        raise AggregatorError(
            f"console user needs one of {', '.join(_ACTIONS)}, and all but list a NAME"
        )
    if not home.is_made:
        raise AggregatorError(
            f"{home.folder} holds no aggregator: tessera-aggregator init --home {home.folder}"
        )
    return _ACTIONS[action](home, arguments)


def _serve(home: AggregatorHome, arguments: argparse.Namespace) -> int:
    from aggregator.console.serving import serve_console

    settings = read_console(arguments.task or home.task_file)
    settings = replace(settings, address=arguments.address or settings.address or _USUAL_ADDRESS)
    handler = logging.StreamHandler(sys.stderr)
    line = "%(message)s" if arguments.until_closed else "%(asctime)s %(levelname)-7s %(message)s"
    handler.setFormatter(PrintableFormatter(line))
    handler.addFilter(_Seldom())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    if arguments.until_closed and hasattr(os, "nice"):
        os.nice(_NICE)

    def tell(url: str) -> None:
        print(f"{READY}{url}", flush=True)
        if not _users(home).all():
            print(
                "nobody can log in yet: tessera-aggregator console user add NAME --role operator "
                f"--home {home.folder}",
                flush=True,
            )

    serve_console(home, settings, tell, until_closed=arguments.until_closed)
    return 0


_SAID_AGAIN_SECONDS = 60.0


class _Seldom(logging.Filter):
    """The same once a minute: whoever sends nonsense does not fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        place = (record.pathname, record.lineno)
        if record.created - self._said.get(place, 0.0) < _SAID_AGAIN_SECONDS:
            return False
        self._said[place] = record.created
        return True


_NICE = 10
"""What devices send comes before what somebody looks at."""


def _users(home: AggregatorHome) -> ConsoleUsers:
    from aggregator.console.users import ConsoleUsers

    return ConsoleUsers(home.console_file)


def _add(home: AggregatorHome, arguments: argparse.Namespace) -> int:
    from aggregator.console.users import ConsoleUser, Role, hashed

    if arguments.no_password and arguments.password_file is not None:
        raise AggregatorError("--password-file and --no-password exclude each other")
    users, name, role = _users(home), arguments.name, Role(arguments.role or "viewer")
    users.require_new(name)
    password = None if arguments.no_password else hashed(_password(arguments))
    users.add(ConsoleUser(name, role, password))
    _note(home, "add console user", user=name, role=role)
    print(f"{name} may log in, as {_WITH_ARTICLE[role]}")
    return 0


def _change_password(home: AggregatorHome, arguments: argparse.Namespace) -> int:
    from aggregator.console.users import hashed

    users, name = _users(home), arguments.name
    users.require(name)
    password = hashed(_password(arguments))
    users.change(name, lambda user: replace(user, password=password))
    _note(home, "change console password", user=name)
    print(f"{name} has another password; who was logged in by the old one is so no more")
    return 0


def _change_role(home: AggregatorHome, arguments: argparse.Namespace) -> int:
    from aggregator.console.users import Role

    if arguments.role is None:
        raise AggregatorError("console user role needs --role viewer or --role operator")
    role = Role(arguments.role)
    _users(home).change(arguments.name, lambda user: replace(user, role=role))
    _note(home, "change console role", user=arguments.name, role=role)
    print(f"{arguments.name} is {_WITH_ARTICLE[role]}")
    return 0


def _remove(home: AggregatorHome, arguments: argparse.Namespace) -> int:
    _users(home).remove(arguments.name)
    _note(home, "remove console user", user=arguments.name)
    print(f"{arguments.name} cannot log in any more")
    return 0


def _list(home: AggregatorHome, arguments: argparse.Namespace) -> int:
    users = _users(home).all()
    if not users:
        print("no user: tessera-aggregator console user add NAME --role operator")
    for name, user in sorted(users.items()):
        how = "" if user.password is not None else ", by a reverse proxy alone"
        print(printable(f"{name}: {user.role}{how}"))
    return 0


_ACTIONS: dict[str, Callable[[AggregatorHome, argparse.Namespace], int]] = {
    "add": _add,
    "password": _change_password,
    "role": _change_role,
    "remove": _remove,
    "list": _list,
}


def _note(home: AggregatorHome, action: str, **said: str) -> None:
    AuditLog(home.audit_file).add(AuditEntry(time.time(), system_user(), action, said, DONE))


def _password(arguments: argparse.Namespace) -> str:
    """From a file, or whoever sits there; never an argument, which others of the machine see."""
    if arguments.password_file is not None:
        try:
            lines = arguments.password_file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise AggregatorError(
                f"--password-file {arguments.password_file} cannot be read: {error}"
            ) from None
        return str(lines[0]) if lines else ""
    if not sys.stdin.isatty():
        raise AggregatorError("there is no terminal to ask at: name a --password-file")
    password = getpass.getpass(f"password of {arguments.name}: ")
    if getpass.getpass("again: ") != password:
        raise AggregatorError("the two are not the same; nothing was changed")
    return password
