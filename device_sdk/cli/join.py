"""`tessera-device join`: enrol this device with a code."""

from __future__ import annotations

import argparse
import sys

from device_sdk.cli.arguments import (
    CommandError,
    add_broker,
    add_code,
    add_home,
    add_proxy,
    code_of,
    link_settings,
    log_to_stderr,
)
from device_sdk.device import Device
from device_sdk.link.broker_url import TlsFiles
from device_sdk.link.proxy import parse_proxy_url
from device_sdk.system.command_line import positive_float

DESCRIPTION = """\
Enrols this device with a fleet's aggregator, through the fleet's MQTT broker. The identity is made
here and never leaves the home folder. The code is asked for, without showing it, or read from the
first line of standard input. A code works once; a call that failed for want of an answer may be
made again with the same code and home. The home keeps where certificates and password lie, and no
copy: they are read again at each connection."""

EXAMPLES = """\
examples:
  tessera-device join mqtt://127.0.0.1 --home ./device-1          (asks for the code)
  tessera-device join mqtts://broker.example:8883 --code-file code.txt --home /var/lib/tessera \\
      --ca-file ca.pem --user edge --password-file password.txt
  tessera-device join wss://broker.example/mqtt --proxy http://proxy.example:3128

The operator makes codes with `tessera-aggregator invite`, and says there which --task, --cohort and
--prefix to give where they are not the usual ones.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "url",
        metavar="URL",
        help="mqtt://host[:1883], mqtts://host[:8883] (TLS), or MQTT in a WebSocket: "
        "ws://host[:80][/mqtt], wss://host[:443][/mqtt] (TLS)",
    )
    add_code(parser)
    add_home(parser)
    broker = parser.add_argument_group("the broker")
    add_broker(broker)
    add_proxy(broker)
    fleet = parser.add_argument_group("the fleet")
    fleet.add_argument("--prefix", default="tessera", help="topic prefix (default: tessera)")
    fleet.add_argument("--task", help="take part in this task alone (default: in all)")
    fleet.add_argument("--cohort", help="cohort of that task (default: whichever it has)")
    parser.add_argument(
        "--timeout",
        type=positive_float,
        default=30.0,
        metavar="SECONDS",
        help="how long to wait for an answer (default: 30)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Enrol, and say what is next."""
    log_to_stderr()
    files = (arguments.ca_file, arguments.certificate_file, arguments.key_file)
    try:
        device = Device.enrol(
            arguments.url,
            code_of(arguments, sys.stdin, sys.stderr),
            arguments.home,
            user=arguments.user,
            password_file=arguments.password_file,
            tls=TlsFiles(*files) if any(files) else None,
            client_id_prefix=arguments.client_id_prefix or "",
            prefix=arguments.prefix,
            task=arguments.task,
            cohort=arguments.cohort,
            timeout_seconds=arguments.timeout,
            link_settings=link_settings(arguments),
        )
    except ValueError as error:
        raise CommandError(str(error)) from error
    with device:
        print(f"joined as device {device.device_id}; home: {device.home}")
        print(f"next: tessera-device run --home {arguments.home}{_way(arguments.proxy)}")
    return 0


def _way(proxy: str | None) -> str:
    """The option that takes the same way again, without its password."""
    if proxy is None:
        return ""
    if not proxy:
        return " --proxy ''"
    known = parse_proxy_url(proxy)
    login = "" if known.user is None else " (and its user and password)"
    return f" --proxy {known}{login}"
