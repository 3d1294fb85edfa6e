"""An app that learns with a fleet, in twenty lines.

    python -m examples.embed URL ITEM [ITEM ...]

URL is what the fleet's operator gives, with a code that is asked for the first time, or read from
standard input (`tessera-aggregator invite`; docs/aggregator.md sets a whole fleet up on one
machine). Afterwards the folder tessera-home knows the fleet, and URL is not used. ITEMs are ids of
the task's catalogue that the user likes.
User and password stand in the URL, mqtts://USER:PASSWORD@HOST; where the broker's certificate is
from an authority of your own, set SSL_CERT_FILE to its PEM file.
"""

from __future__ import annotations

import sys
from getpass import getpass

from device_sdk import Device, DeviceError, NotEnrolled
from device_sdk.system.command_line import print_any_text

HOME = "tessera-home"


def main(url: str, *items: str) -> None:
    """Join, record, learn one round, recommend."""
    try:
        device = Device.open(HOME)
        broker = device.status().broker
        print(f"{HOME} has joined the fleet at {broker} before: URL is not used", file=sys.stderr)
    except NotEnrolled:  # the first time
        device = Device.enrol(url, asked_code(), home=HOME)
    with device:
        device.record_all((item, "default") for item in items)  # stays on this device
        device.start()  # takes part in rounds in the background
        print("in the fleet; the first round will teach this device", file=sys.stderr)
        device.wait_for_model()  # the app does its own things meanwhile
        for item, score in device.recommend(5):
            print(f"{score:6.3f}  {item}  {device.title(item)}".rstrip())


def asked_code() -> str:
    """The enrolment code; not as an argument, which every user of a machine can read."""
    if sys.stdin.isatty():
        return getpass("enrolment code (not shown): ")
    return sys.stdin.readline()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    print_any_text()
    try:
        main(*sys.argv[1:])
    except DeviceError as error:
        sys.exit(f"embed: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
