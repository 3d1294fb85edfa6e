"""`tessera-device broker`: the way of an enrolled device to its fleet's broker."""

from __future__ import annotations

import argparse

from device_sdk.cli.arguments import CommandError, add_broker, add_home
from device_sdk.home.home import Home
from device_sdk.home.membership import Membership
from device_sdk.link.broker_url import WAY_PARTS, TlsFiles

DESCRIPTION = """\
Shows how this device reaches its fleet's broker, and where else it looks for the fleet: every place
in turn, and why. Or changes the way: broker set URL. What is not given stays as it is; an empty
text ('') takes an option away. Identity, data and updates that wait stay. A device that runs
meanwhile goes by it within a minute. The home keeps where certificates and password lie, and no
copy: they are read again at each connection, so that renewed ones need no command."""

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
        if arguments.action == "set":
            given = {name: getattr(arguments, name) for name in WAY_PARTS}
            way = membership.way.changed(arguments.url, **given)
            way.read()
            home.membership.give_way(way, insists=True)
            membership = home.membership.load() or membership
    except ValueError as error:
        raise CommandError(str(error)) from error
    finally:
        home.close()
    for line in _lines(membership):
        print(line)
    return 0


def _lines(membership: Membership) -> list[str]:
    way = membership.way
    tls = way.tls or TlsFiles()
    password = "in the home" if way.url.password is not None else None
    rows = {
        "broker": str(way),
        "user": way.url.user,
        "password": password if way.password_file is None else way.password_file,
        "authorities": tls.ca_file or ("the system's" if way.url.tls else None),
        "certificate": tls.certificate_file,
        "its key": tls.key_file,
        "client ids": f"begin with {way.client_id_prefix}" if way.client_id_prefix else None,
    }
    lines = [f"{name:<12} {value}" for name, value in rows.items() if value is not None]
    places = membership.tried
    if len(places) > 1:
        lines += [
            f"{name:<12} {membership.broker(place)}: {membership.why(place)}"
            for name, place in zip(["tried first", *["then"] * len(places)], places, strict=False)
        ]
    return lines
