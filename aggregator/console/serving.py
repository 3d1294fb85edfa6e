"""The console's process: its socket, its certificate, and how long clients may take."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import threading
import time
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from h11 import IDLE
from uvicorn.protocols.http.h11_impl import H11Protocol

from aggregator.console.app import console_app
from aggregator.console.gate import network_of, own_hosts
from aggregator.console.reader import FleetReader
from aggregator.console.users import ConsoleUsers
from aggregator.console.web import Console
from aggregator.errors import AggregatorError
from aggregator.events import LogEvent
from aggregator.home import AggregatorHome
from aggregator.task.file import ConsoleSettings

_MOST_CONNECTIONS = 400
_MOST_HEADER_BYTES = _TLS_BYTES = 16 << 10
_HEADER_SECONDS, _KEPT_ALIVE_SECONDS, _TAKEN_SECONDS = 10.0, 15, 20.0


class PatientProtocol(H11Protocol):
    """A connection. One that does not say what it wants in ten seconds is ended, and one that does
    not take its answer in twenty."""

    _asked: asyncio.TimerHandle | None = None
    _taken: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._await_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is IDLE:
            self._await_header()
        else:
            self._asked = _cancelled(self._asked)

    def pause_writing(self) -> None:
        """Called where the other end does not take what is written."""
        self.flow.pause_writing()
        if self._taken is None:
            self._taken = self.loop.call_later(_TAKEN_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._taken = _cancelled(self._taken)
        self.flow.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._asked, self._taken = _cancelled(self._asked), _cancelled(self._taken)
        super().connection_lost(exc)

    def _await_header(self) -> None:
        if self._asked is None:
            self._asked = self.loop.call_later(_HEADER_SECONDS, self.transport.abort)


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """What is left of it: nothing."""
    if timer is not None:
        timer.cancel()
    return None


class _Listening(socket.socket):
    """Where there are as many connections as there may be, also such as have not begun to talk, the
    oldest of the network that has most makes room: nobody keeps anybody else out."""

    _held: Sequence[tuple[str, socket.socket]] = ()

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises BlockingIOError to be asked again when what was ended is closed."""
        self._held = [each for each in self._held if each[1].fileno() >= 0]
        if len(self._held) >= _MOST_CONNECTIONS:
            self._make_room()
            raise BlockingIOError
        connection, address = super().accept()
        self._held = [*self._held, (network_of(address[0]), connection)]
        return connection, address

    def _make_room(self) -> None:
        counted = Counter(network for network, _ in self._held)
        most = max(counted.values())
        oldest = next(each for each in self._held if counted[each[0]] == most)
        self._held = [each for each in self._held if each is not oldest]
        with suppress(OSError):
            oldest[1].shutdown(socket.SHUT_RDWR)


_TICKS_OF_CERTIFICATE = 100


class _Tls:
    """Certificate and key. Files that were renewed are used from the next connection on."""

    def __init__(self, certificate: str, key: str) -> None:
        self._files = certificate, key
        self.context = self._loaded()
        self._seen = self._state()

    def look(self) -> None:
        """Whether there are others."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            self._loaded()
        except AggregatorError as error:
            LogEvent.CERTIFICATE_KEPT.log(problem=error)
        else:
            self.context.load_cert_chain(*self._files, password="")

    def _state(self) -> list[tuple[int, int] | None]:
        found: list[tuple[int, int] | None] = []
        for path in self._files:
            try:
                status = Path(path).stat()
            except OSError:
                found.append(None)
            else:
                found.append((status.st_mtime_ns, status.st_ino))
        return found

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for name, path in zip(("certificate", "key"), self._files, strict=True):
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise AggregatorError(
                    f"console.{name} {path} cannot be read: {error.strerror}"
                ) from None
        try:
            context.load_cert_chain(*self._files, password="")
        except (ssl.SSLError, ValueError) as error:
            raise AggregatorError(
                f"console.certificate {self._files[0]} and console.key {self._files[1]} are no "
                f"certificate with its key, both as PEM and without a password ({error})"
            ) from None
        return context


class _Loop(asyncio.SelectorEventLoop):
    """Ends a connection whose TLS handshake takes long, too, and gives none much memory."""

    async def create_server(self, *given: Any, **options: Any) -> asyncio.Server:
        if options.get("ssl"):
            options["ssl_handshake_timeout"] = _HEADER_SECONDS
            # Else each has 256 KiB from its beginning, and until long after its end.
            SSLProtocol.max_size = _TLS_BYTES
        return await super().create_server(*given, **options)


class _Server(uvicorn.Server):
    """``on_start`` is called when browsers can ask; ``tls``: None where they ask by http."""

    def __init__(
        self, config: uvicorn.Config, tls: _Tls | None, on_start: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._tls, self._on_start = tls, on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if self._tls is not None and counter % _TICKS_OF_CERTIFICATE == 0:
            self._tls.look()
        return await super().on_tick(counter)


def serve_console(
    home: AggregatorHome,
    settings: ConsoleSettings,
    tell: Callable[[str], None],
    *,
    until_closed: bool = False,
) -> None:
    """Answer browsers until SIGTERM or SIGINT.

    Args:
        tell: called with the console's URL as soon as it answers.
        until_closed: end too when standard input does: with whoever started this process.

    Raises AggregatorError where it cannot begin.
    """
    if not home.is_made:
        raise AggregatorError(
            f"{home.folder} holds no aggregator: tessera-aggregator init --home {home.folder}"
        )
    hosts = own_hosts(settings)
    tls = None
    if settings.certificate is not None and settings.key is not None:
        tls = _Tls(settings.certificate, settings.key)
    users = ConsoleUsers(home.console_file)
    users.all()
    with _bound(settings) as listening:
        reader = FleetReader(home.folder)
        console = Console(
            home.folder, settings, time.monotonic, time.time, os.urandom, users, reader
        )
        config = uvicorn.Config(
            console_app(console, hosts),
            http=PatientProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
            timeout_keep_alive=_KEPT_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        config.load()
        config.ssl = None if tls is None else tls.context
        host, _ = settings.place
        port = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        url = f"{'http' if tls is None else 'https'}://{shown}:{port}"
        server = _Server(config, tls, lambda: tell(url))
        if until_closed:
            threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
        # Uvicorn hands what ended it on to whoever handled that before.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: None)
        try:
            with asyncio.Runner(loop_factory=_Loop) as runner:
                runner.run(server.serve([listening]))
        finally:
            reader.close()


def _bound(settings: ConsoleSettings) -> socket.socket:
    host, port = settings.place
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return _Listening(fileno=socket.create_server(address, family=family).detach())
    except OSError as error:
        raise AggregatorError(
            f"the console cannot listen at {settings.address}: {error.strerror or error}. Another "
            "program may have the port: name another address under [console] in the task file"
        ) from None


_LONGEST_END_SECONDS = 5.0


def _end_with_input(server: uvicorn.Server) -> None:
    while os.read(0, 1024):
        pass
    server.should_exit = True
    time.sleep(_LONGEST_END_SECONDS)
    os._exit(1)
