"""``tessera-aggregator broker``: move the fleet to another broker."""

from __future__ import annotations

import argparse
import time

from aggregator.cli.arguments import add_home, duration_seconds, home_of
from aggregator.errors import AggregatorError
from aggregator.home import is_served
from aggregator.operate.health import move_lines
from aggregator.serve.successor import (
    ask_for_move,
    call_off,
    find_move,
    next_move,
    require_movable,
    where_serve_is,
)
from aggregator.store import Store
from aggregator.task.file import read_task
from device_sdk.link.broker_url import WAY_PARTS, BrokerWay, parse_broker_url

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
    home = home_of(arguments)
    task = read_task(home.task_file)
    named, cluster = task.fleet.broker.way, task.fleet.cluster
    store = home.open_store()
    try:
        if arguments.action != "show":
            require_movable(cluster)
            act = _move if arguments.action == "move" else _stay
            with store.database.transaction():  # another operator may be at it, too
                act(store, named, arguments)
        _show(store, named)
        if arguments.action != "show" and not (is_served(home) or store.lease.is_held()):
            print("serve does not run: it is announced when it does")
    finally:
        store.database.close()
    return 0


def _move(store: Store, named: BrokerWay, arguments: argparse.Namespace) -> None:
    if not arguments.url:
        raise AggregatorError("say where to: broker move URL")
    now = time.time()
    here, *_ = where_serve_is(find_move(store), named, now)
    try:
        told = parse_broker_url(arguments.url)
        if told.user is not None:
            raise ValueError(
                "devices have users of their own: leave it out of the URL, and give --user"
            )
        own = parse_broker_url(arguments.own or arguments.url)
        way = named if own.address == named.url.address else here.at(own)
        new = way.changed(**{name: getattr(arguments, name) for name in WAY_PARTS})
        new.read()
    except ValueError as error:
        raise AggregatorError(str(error)) from None
    if new.url.address == here.url.address:
        raise AggregatorError(f"serve is at {here} already")
    move = next_move(store, named, told.address, new, int(now) + arguments.grace, now)
    ask_for_move(store, move)


def _stay(store: Store, named: BrokerWay, arguments: argparse.Namespace) -> None:
    move, now = find_move(store), time.time()
    if move is None or move.is_called_off:
        raise AggregatorError("no move is under way")
    if move.is_over(now):
        raise AggregatorError(
            f"the fleet has moved to {move.new}: to go back, move to the old broker's URL"
        )
    ask_for_move(store, call_off(store, move, now))


def _show(store: Store, named: BrokerWay) -> None:
    now = time.time()
    ways = where_serve_is(find_move(store), named, now)
    print(f"broker       {', '.join(map(str, ways))}")
    for line in move_lines(store, named, now):
        print(line)
