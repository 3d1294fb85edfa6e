"""A way that takes time, as a process: ``python -m benchmarks.aggregator.latency PORT RTT_MS``.

Forwards bytes to 127.0.0.1:PORT, each half a round trip later, in both directions; prints the port
that it listens on.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_READ_BYTES = 1 << 18
_MOST_PIECES = 4096


@contextmanager
def delayed(port: int, rtt_ms: float) -> Iterator[int]:
    """Yields a port by way of which ``port`` is ``rtt_ms`` away; the same port for 0."""
    if not rtt_ms:
        yield port
        return
    command = [sys.executable, "-m", "benchmarks.aggregator.latency", str(port), str(rtt_ms)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait(10)


def main() -> int:
    """Run until killed."""
    asyncio.run(_forward(int(sys.argv[1]), float(sys.argv[2]) / 2000))
    return 0


async def _forward(target: int, delay_seconds: float) -> None:
    async def connected(near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        far, forth = await asyncio.open_connection("127.0.0.1", target)
        for writer in (back, forth):
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(_pump(near, forth, delay_seconds), _pump(far, back, delay_seconds))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _pump(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, delay_seconds: float
) -> None:
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MOST_PIECES)
    clock = asyncio.get_running_loop().time

    async def arrive() -> None:
        while True:
            at_seconds, data = await under_way.get()
            await asyncio.sleep(at_seconds - clock())
            if not data:
                sink.close()
                return
            sink.write(data)
            await sink.drain()

    arriving = asyncio.create_task(arrive())
    while True:
        try:
            data = await source.read(_READ_BYTES)
        except OSError:
            data = b""
        await under_way.put((clock() + delay_seconds, data))
        if not data:
            break
    await arriving


if __name__ == "__main__":
    sys.exit(main())
