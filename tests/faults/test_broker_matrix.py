"""A fleet's whole life with each broker at its defaults: all of the table is `make brokers`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.fakes.waiting import PATIENCE_SECONDS
from tests.faults.fault_proxy import FaultProxy
from tests.faults.journey import JourneySettings, missing, travel


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("broker", "millis"), [("mosquitto", 50), ("amqtt", 0), ("nats", 0)])
def test_from_init_to_the_last_device_that_leaves(broker: str, millis: int, tmp_path: Path) -> None:
    if why := missing(broker):
        pytest.skip(why)
    # A cluster that is short of processor time would drown in tries that come ten times a second.
    brisk = broker != "nats"
    result = travel(JourneySettings(broker, millis / 1000, brisk=brisk), tmp_path)
    judged = result.judgement
    assert judged.lost == judged.twice == result.waiting == 0
    assert set(judged.receipted) <= {"counted", "late", "refused"}
    assert judged.receipted.get("refused", 0) <= 1  # what the revoked device had under way
    assert judged.rounds == 11
    # The five rounds up to the death last until all have come. Of those after it a busy machine
    # may end one without its quorum: its updates are carried into the next one.
    assert judged.versions >= 5
    assert judged.receipted["counted"] >= 29
    # A manifest, its chunk, an update, a receipt: each goes to the broker and away from it.
    assert result.round_seconds > 2 * millis / 1000


def test_the_proxy_makes_every_answer_late_and_holds_nothing_up() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1024):
            writer.write(data)
        writer.close()

    async def talk() -> tuple[float, float]:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        proxy = FaultProxy(server.sockets[0].getsockname()[1], 1, round_trip_seconds=0.5)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            began = time.monotonic()
            packet = b"\xc0\x02ab"
            for _ in range(300):
                writer.write(packet)
                await asyncio.sleep(0.01)
            await reader.readexactly(4)
            first = time.monotonic() - began
            await reader.readexactly(4 * 299)
            writer.close()
            return first, time.monotonic() - began
        finally:
            proxy.stop()
            server.close()

    first, last = asyncio.run(talk())
    assert first >= 0.5
    # One after the other they would take 150 seconds.
    assert 3.4 <= last < PATIENCE_SECONDS
