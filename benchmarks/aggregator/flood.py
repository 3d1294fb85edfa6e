"""A process that floods a broker: ``python -m benchmarks.aggregator.flood PLAN``."""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.aggregator.mqtt_client import connect_packet, publish_packet

_BATCH_SECONDS = 0.01


@dataclass(frozen=True)
class FloodPlan:
    """``topics`` and ``payloads`` (hexadecimal) are gone through in turn, side by side.

    ``account``: user and password, None to come without. ``count_file``: has the messages sent, and
    the seconds in which they were.
    """

    port: int
    client_id: str
    account: tuple[str, str] | None
    rate: float
    topics: list[str]
    payloads: list[str]
    count_file: str

    def write(self, path: Path) -> None:
        """For the process to read."""
        path.write_text(json.dumps(asdict(self)))


def main() -> int:
    """Flood until killed, or until the broker ends the connection."""
    plan = FloodPlan(**json.loads(Path(sys.argv[1]).read_text()))
    link = socket.create_connection(("127.0.0.1", plan.port))
    link.sendall(connect_packet(plan.client_id, plan.account))
    if link.recv(4)[3:] != b"\x00":
        raise ConnectionError("the broker refused the connection")
    count = max(len(plan.topics), len(plan.payloads))
    packets = [
        publish_packet(
            plan.topics[place % len(plan.topics)],
            bytes.fromhex(plan.payloads[place % len(plan.payloads)]),
        )
        for place in range(count)
    ]
    sent, began = 0, time.perf_counter()
    note = Path(plan.count_file + ".new")
    next_note = began
    while True:
        now = time.perf_counter()
        due = int((now - began) * plan.rate) - sent
        if due > 0:
            link.sendall(b"".join(packets[(sent + n) % count] for n in range(due)))
            sent += due
        if now >= next_note:
            next_note = now + 0.1
            note.write_text(f"{sent} {now - began}")
            note.replace(plan.count_file)  # whole, whenever it is read
        time.sleep(_BATCH_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
