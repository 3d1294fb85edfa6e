"""``tessera-aggregator broker``: move the fleet to another broker."""

from __future__ import annotations

import argparse

from aggregator.cli.arguments import add_home, duration_seconds, opened
from aggregator.errors import AggregatorError
from device_sdk.link.broker_url import WAY_PARTS

DESCRIPTION = """\
Shows where the fleet's broker is, or moves the fleet to another one: broker move URL. Serve, which
may run meanwhile, announces URL to all devices, signed, and is at both brokers until the grace is
over and a device has been at the new one. Devices go there by themselves, with the user, password,
certificates and client id prefix that they have; one that cannot reach it comes back, and tries
again. What was sent and not answered is sent again: nothing is lost or counted twice. Then serve is
at the new one alone, whatever the task file says: write the new URL there when you like. A device
that slept all the while needs the old broker for a moment, or tessera-device broker set.

broker stay calls it off: devices come back to the broker before, and serve is there alone once the
grace is over and a device has been there. A move may follow another, and lead back, at any time:
serve is wherever devices may be still."""

EXAMPLES = """\
examples:
  tessera-aggregator broker --home fleet
  tessera-aggregator broker move mqtts://new.example:8883 --grace 7d --home fleet
  tessera-aggregator broker move mqtts://new.example --own mqtt://127.0.0.1 --home fleet
                                             which this machine itself reaches by another URL
  tessera-aggregator broker stay --home fleet
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("show", "move", "stay"), default="show")
    parser.add_argument(
        "url", metavar="URL", nargs="?", default="", help="of move: as devices see it"
    )
    add_home(parser)
    parser.add_argument(
        "--grace",
        type=duration_seconds,
        default=7 * 86_400,
        metavar="DURATION",
        help="how long both brokers are served: 30m, 24h, 7d (default: 7d)",
    )
    own = parser.add_argument_group("how serve itself reaches it, where not as the broker before")
    own.add_argument("--own", metavar="URL", help="(default: URL)")
    own.add_argument("--user")
    own.add_argument("--password-file", metavar="FILE")
    own.add_argument("--ca", "--ca-file", dest="ca_file", metavar="PEM")
    own.add_argument("--certificate-file", metavar="PEM")
    own.add_argument("--key-file", metavar="PEM")
    own.add_argument("--client-id-prefix", metavar="TEXT")


def run(arguments: argparse.Namespace) -> int:
    with opened(arguments) as fleet:
        if arguments.action == "move":
            if not arguments.url:
                raise AggregatorError("say where to: broker move URL")
            parts = {name: getattr(arguments, name) for name in WAY_PARTS}
            fleet.move_broker(arguments.url, arguments.grace, own=arguments.own, **parts)
        elif arguments.action == "stay":
            fleet.stay_at_broker()
        found = fleet.broker()
        print(f"broker       {', '.join(map(str, found.ways))}")
        for line in found.said:
            print(line)
        if arguments.action != "show" and not fleet.health().serves:
            print("serve does not run: it is announced when it does")
    return 0
