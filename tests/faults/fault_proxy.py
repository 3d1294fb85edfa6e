"""A TCP proxy in front of a broker that mistreats packets by a seeded schedule."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter

from tests.faults.packets import CONNECT, Packets, client_id, kind
from tests.faults.wire_faults import FaultRates, Schedule, WireFault

_READ_BYTES = 65_536
_MOST_UNDER_WAY = 1024
_LONGEST_DELAY_SECONDS = 0.4
_HALF_OPEN_SECONDS = 5.0


class _Cut(Exception):
    """This connection ends now."""


class _Late:
    """Gives what a reader gives, each piece ``seconds`` after it came; many are on their way."""

    def __init__(self, reader: asyncio.StreamReader, seconds: float) -> None:
        self._reader = reader
        self._seconds = seconds
        self._under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MOST_UNDER_WAY)
        self._taking = asyncio.ensure_future(self._take()) if seconds else None

    async def read(self) -> bytes:
        """Some bytes; none at the end."""
        if self._taking is None:
            return await self._reader.read(_READ_BYTES)
        due_seconds, data = await self._under_way.get()
        await asyncio.sleep(max(0.0, due_seconds - asyncio.get_running_loop().time()))
        return data

    def stop(self) -> None:
        """What is on its way is lost."""
        if self._taking is not None:
            self._taking.cancel()

    async def _take(self) -> None:
        data = b"?"
        while data:
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError:
                data = b""
            due_seconds = asyncio.get_running_loop().time() + self._seconds
            await self._under_way.put((due_seconds, data))


class FaultProxy:
    """Forwards ``host``:``port`` to ``target_port``; runs on a thread of its own.

    Begins calm; :meth:`rage` turns the faults on, :meth:`calm` off, and cuts all connections so
    that nothing of what was broken stays. ``moments`` has each fault and when it came. With
    ``round_trip_seconds`` everything takes half of it longer in each direction, calm or not.
    """

    def __init__(
        self,
        target_port: int,
        seed: int,
        rates: FaultRates | None = None,
        *,
        round_trip_seconds: float = 0.0,
        host: str = "127.0.0.1",
    ) -> None:
        self._host = host
        self._target_port = target_port
        self._one_way_seconds = round_trip_seconds / 2
        self._seed = seed
        self._rates = rates if rates is not None else FaultRates()
        self._raging = False
        self._connections: Counter[str] = Counter()
        self._open: set[asyncio.Task[None]] = set()
        self.moments: list[tuple[WireFault, float]] = []
        """Unix seconds."""
        self.packets = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    @property
    def url(self) -> str:
        """For clients."""
        return f"mqtt://{self._host}:{self.port}"

    def rage(self) -> None:
        """Inject faults from now on, into connections that are open too."""
        self._raging = True

    def calm(self) -> None:
        """Inject no more, and cut every connection."""
        self._raging = False
        self._loop.call_soon_threadsafe(self._cut_all)

    def stop(self) -> None:
        """Close everything and end the thread."""
        self._loop.call_soon_threadsafe(self._cut_all)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, self._host, 0, limit=4 * _READ_BYTES)
        )
        self.port = int(server.sockets[0].getsockname()[1])
        ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))

    def _cut_all(self) -> None:
        for task in self._open:
            task.cancel()

    async def _serve(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        try:
            far_in, far_out = await asyncio.open_connection("127.0.0.1", self._target_port)
        except (OSError, asyncio.CancelledError):
            near_out.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        near, far = (_Late(reader, self._one_way_seconds) for reader in (near_in, far_in))
        try:
            await self._forward(near, near_out, far, far_out)
        except (OSError, _Cut, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            for reader in (near, far):
                reader.stop()
            for writer in (near_out, far_out):
                writer.close()

    async def _forward(
        self,
        near_in: _Late,
        near_out: asyncio.StreamWriter,
        far_in: _Late,
        far_out: asyncio.StreamWriter,
    ) -> None:
        # The first packet says who it is, which chooses the schedule.
        splitter = Packets()
        first: list[bytes] = []
        while not first:
            data = await near_in.read()
            if not data:
                return
            first = splitter.feed(data)
        who = client_id(first[0]) if kind(first[0]) == CONNECT else "?"
        number = self._connections[who]
        self._connections[who] += 1
        up = Schedule(self._seed, who, number, "up", self._rates)
        down = Schedule(self._seed, who, number, "down", self._rates)
        ways = [
            asyncio.ensure_future(self._one_way(near_in, far_out, splitter, up, first)),
            asyncio.ensure_future(self._one_way(far_in, near_out, Packets(), down, [])),
        ]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in done:
                way.result()
        finally:
            for way in ways:
                way.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*ways, return_exceptions=True)

    async def _one_way(
        self,
        reader: _Late,
        writer: asyncio.StreamWriter,
        splitter: Packets,
        schedule: Schedule,
        packets: list[bytes],
    ) -> None:
        old: list[bytes] = []
        held: list[bytes] = []
        while True:
            for packet in packets:
                if writer.is_closing():
                    raise _Cut
                self.packets += 1
                fault = schedule.next()
                if fault is None or not self._raging:
                    writer.write(packet)
                else:
                    self.moments.append((fault, time.time()))
                    await self._mistreat(fault, packet, writer, schedule, old, held)
                if held and held[0] is not packet:
                    writer.write(held.pop())
                old[:] = [*old[-20:], packet]
            await writer.drain()
            data = await reader.read()
            if not data:
                return
            packets = splitter.feed(data)

    async def _mistreat(
        self,
        fault: WireFault,
        packet: bytes,
        writer: asyncio.StreamWriter,
        schedule: Schedule,
        old: list[bytes],
        held: list[bytes],
    ) -> None:
        rng = schedule.rng
        match fault:
            case WireFault.DELAY:
                await writer.drain()
                await asyncio.sleep(float(rng.uniform(0.0, _LONGEST_DELAY_SECONDS)))
                writer.write(packet)
            case WireFault.CUT:
                raise _Cut
            case WireFault.HALVE:
                writer.write(packet[: int(rng.integers(0, len(packet)))])
                await writer.drain()
                raise _Cut
            case WireFault.DUPLICATE:
                writer.write(packet + packet)
            case WireFault.REPLAY:
                writer.write(packet)
                if old:
                    writer.write(old[int(rng.integers(len(old)))])
            case WireFault.SWALLOW:
                pass
            case WireFault.REORDER:
                if held:
                    writer.write(packet)
                else:
                    held.append(packet)  # goes out behind the next one
            case WireFault.CORRUPT:
                flipped = bytearray(packet)
                flipped[int(rng.integers(len(flipped)))] ^= 1 << int(rng.integers(8))
                writer.write(bytes(flipped))
            case WireFault.HALF_OPEN:
                # Both ends believe in the connection, and nothing gets through.
                await asyncio.sleep(_HALF_OPEN_SECONDS)
                raise _Cut
            case WireFault.DRIBBLE:
                for start in range(0, len(packet), max(1, len(packet) // 4)):
                    writer.write(packet[start : start + max(1, len(packet) // 4)])
                    await writer.drain()
                    await asyncio.sleep(0.002)
