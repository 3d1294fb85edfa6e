"""`tessera-device broker`: the way of an enrolled device to its fleet's broker."""

from __future__ import annotations

import argparse
from dataclasses import replace

from device_sdk.cli.arguments import CommandError, add_broker, add_home
from device_sdk.home.home import Home
from device_sdk.home.membership import KnownSuccessor
from device_sdk.link.broker_url import BrokerWay, TlsFiles, parse_broker_url

DESCRIPTION = """\
Shows how this device reaches its fleet's broker, or changes that: broker set URL. What is not given
stays as it is; an empty text ('') takes an option away. Identity, data and updates that wait stay.
A device that runs meanwhile goes by it within a minute. The home keeps where certificates and
password lie, and no copy: they are read again at each connection, so that renewed ones need no
command."""

EXAMPLES = """\
examples:
  tessera-device broker --home ./device-1
  tessera-device broker set mqtts://new.example:8883 --home ./device-1
  tessera-device broker set --user edge --password-file password.txt --ca ca.pem --home ./device-1
  tessera-device broker set --client-id-prefix edge- --home ./device-1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("action", choices=("show", "set"), nargs="?", default="show")
    parser.add_argument(
        "url", metavar="URL", nargs="?", default="", help="of set: where the broker is, as for join"
    )
    add_home(parser)
    add_broker(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show it, or store it."""
    home = Home(arguments.home.expanduser(), beside=True)
    try:
        membership = home.membership.load()
        if membership is None:
            raise CommandError(f"the device of {home.folder} has not joined a fleet: join it")
        way, successor = membership.way, membership.successor
        if arguments.action == "set":
            way = _changed(way, arguments)
            way.read()
            home.membership.give_way(way, insists=True)
    except ValueError as error:
        raise CommandError(str(error)) from error
    finally:
        home.close()
    for line in _lines(way, successor):
        print(line)
    return 0


def _changed(way: BrokerWay, arguments: argparse.Namespace) -> BrokerWay:
    """Raises ValueError for what does not go together."""
    url = way.url
    if arguments.url:
        url = way.at(parse_broker_url(arguments.url)).url
    user, password_file = arguments.user, arguments.password_file
    if user is not None:
        url = replace(url, user=user or None, password=None)
    if password_file:
        url = replace(url, password=None)
    known = way.tls or TlsFiles()
    files = [
        getattr(known, name) if getattr(arguments, name) is None else getattr(arguments, name)
        for name in ("ca_file", "certificate_file", "key_file")
    ]
    given = any(getattr(arguments, name) for name in ("ca_file", "certificate_file", "key_file"))
    tls = TlsFiles(*(each or None for each in files)) if any(files) else None
    prefix = arguments.client_id_prefix
    kept_file = way.password_file if url.user is not None else None
    return BrokerWay.parse(
        url.text,
        password_file=kept_file if password_file is None else password_file or None,
        tls=tls if given or url.tls else None,
        client_id_prefix=way.client_id_prefix if prefix is None else prefix,
    )


def _lines(way: BrokerWay, successor: KnownSuccessor | None) -> list[str]:
    tls = way.tls or TlsFiles()
    password = "in the home" if way.url.password is not None else None
    rows = {
        "broker": str(way),
        "announced": None if successor is None else _announced(successor),
        "user": way.url.user,
        "password": password if way.password_file is None else way.password_file,
        "authorities": tls.ca_file or ("the system's" if way.url.tls else None),
        "certificate": tls.certificate_file,
        "its key": tls.key_file,
        "client ids": f"begin with {way.client_id_prefix}" if way.client_id_prefix else None,
    }
    return [f"{name:<12} {value}" for name, value in rows.items() if value is not None]


def _announced(successor: KnownSuccessor) -> str:
    found = "this device found it there" if successor.reached else "not found there yet"
    return f"{successor.announced.url}: the fleet is there, or goes there; {found}"
