"""An app that learns with a fleet, in twenty lines.

    python -m examples.embed URL CODE ITEM [ITEM ...]

URL and CODE are what the fleet's operator gives (`tessera-aggregator invite`; docs/aggregator.md
sets a whole fleet up on one machine). ITEMs are ids of the task's catalogue that the user likes.
User and password stand in the URL, mqtts://USER:PASSWORD@HOST; where the broker's certificate is
from an authority of your own, set SSL_CERT_FILE to its PEM file.
"""

from __future__ import annotations

import sys
import time

from device_sdk import AlreadyEnrolled, Device, DeviceError

HOME = "tessera-home"


def main(url: str, code: str, *items: str) -> None:
    """Join, record, learn one round, recommend."""
    try:
        device = Device.enrol(url, code, home=HOME)  # the first time
    except AlreadyEnrolled:
        device = Device.open(HOME)  # afterwards
    with device:
        device.record_all((item, "default") for item in items)  # stays on this device
        device.start()  # takes part in rounds in the background
        print("in the fleet; the first round will teach this device", file=sys.stderr)
        while device.status().version is None:
            time.sleep(1)  # the app does its own things meanwhile
        for item, score in device.recommend(5):
            print(f"{score:6.3f}  {item}  {device.title(item)}".rstrip())


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except DeviceError as error:
        sys.exit(f"embed: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
